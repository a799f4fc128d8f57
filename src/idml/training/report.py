"""report.html of a run: loss, uncertainty of clean against mixed images, held-out recall, images ranked by ‖u‖."""

import html
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.data.pixel_cache import Pixels
from idml.files import write_whole
from idml.html import page, strip, table
from idml.training.config import TrainConfig


def write_report(run: Path, config: TrainConfig, metrics: dict[str, Any], pixels: Pixels, level: Tensor) -> None:
    """The report of a finished run; ``level`` is ‖u‖ of the test images in ``pixels.usable``'s order."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    figures = [[name, *(f"{value:.1%}" for value in metrics[name].values())] for name in ("selected", "last")]
    order, count = level.argsort(), min(16, len(level))
    usable = pixels.usable
    least, most = usable[order[:count]], usable[order[-count:].flip(0)]
    parts = [
        f"<h1>{html.escape(config.loss)}, {html.escape(config.method)}</h1>",
        f"<p>Trained on {html.escape(config.data)}, {metrics['steps']} steps; the model of step "
        f"{metrics['selected_step']} was selected on held-out training classes.</p>",
        "<h2>Test classes</h2>",
        table(["model", *metrics["selected"]], figures),
        "<h2>Training</h2>",
        _curves(rows),
        "<h2>Most uncertain test images</h2>",
        strip(pixels, most, "the test images with the largest uncertainty level"),
        "<h2>Least uncertain test images</h2>",
        strip(pixels, least, "the test images with the smallest uncertainty level"),
    ]
    write_whole(run / "report.html", page(f"{config.loss}, {config.method}", *parts))


def _curves(rows: list[dict[str, Any]]) -> str:
    """Loss, ‖u‖ of clean and mixed images, and held-out recall against the step, as one SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib.figure import Figure

    steps = [row for row in rows if "loss" in row]
    held_out = [row for row in rows if "held_out_recall@1" in row]
    figure = Figure(figsize=(11, 3.2))  # margins by hand: finding them would take longer than drawing
    loss, level, recall = figure.subplots(1, 3, gridspec_kw={"left": 0.06, "right": 0.99, "bottom": 0.16, "top": 0.9})
    at = [row["step"] for row in steps]
    loss.plot(at, _smooth([row["loss"] for row in steps]))
    loss.set(title="loss", xlabel="step")
    level.plot(at, _smooth([row["level_clean"] for row in steps]), label="clean")
    mixed = [row for row in steps if "level_mixed" in row]
    if mixed:
        level.plot([row["step"] for row in mixed], _smooth([row["level_mixed"] for row in mixed]), label="mixed")
    level.set(title="uncertainty level ‖u‖", xlabel="step")
    level.legend(frameon=False)
    recall.plot([row["step"] for row in held_out], [100 * row["held_out_recall@1"] for row in held_out], marker="o")
    recall.set(title="held-out recall@1, %", xlabel="step")
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return file.getvalue()[file.getvalue().index("<svg") :]


def _smooth(values: list[float], width: int = 9) -> list[float]:
    """A running mean, shorter at the beginning."""
    sums = torch.tensor([0.0, *values], dtype=torch.float64).cumsum(0)
    ends = torch.arange(1, len(values) + 1)
    starts = (ends - width).clamp_min(0)
    smoothed: list[float] = ((sums[ends] - sums[starts]) / (ends - starts)).tolist()
    return smoothed

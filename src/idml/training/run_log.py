"""The log of a run: figures of its uncertainty, log.jsonl, the stop signal, and report.html."""

import html
import io
import json
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.data.pixel_cache import Pixels
from idml.embeddings import Embeddings
from idml.files import write_atomic
from idml.report_html import page, picture, table
from idml.training.config import TrainConfig


@torch.no_grad()
def measure_uncertainty(embeddings: Embeddings, mixed: Tensor) -> dict[str, float]:
    """‖u‖ of clean and of mixed images, and its spread among the clean ones."""
    clean = embeddings[~mixed].detach()
    row = {"level_clean": float(clean.level.mean())}
    if bool(mixed.any()):
        row["level_mixed"] = float(embeddings[mixed].level.mean())
    row["level_spread"] = float(clean.level.std() / clean.level.mean().clamp_min(1e-12)) if len(clean) > 1 else 0.0
    return row


class Log:
    """The rows of a run: log.jsonl, one JSON object a line, and with ``board`` the same figures for TensorBoard.

    Rows after ``step``, the checkpoint that a run continues from, are removed: they will be written again.
    """

    def __init__(self, run: Path, step: int, *, board: bool = True) -> None:
        path = run / "log.jsonl"
        if path.exists():
            rows = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
            write_atomic(path, "".join(f"{line}\n" for line in rows).encode())
        self.file = path.open("a")
        self.board = None
        if board:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Add a row; it is in the file when this returns."""
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        for name, value in row.items():
            if self.board is not None and name not in ("step", "epoch"):
                self.board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Write what is left and close the files."""
        self.file.close()
        if self.board is not None:
            self.board.close()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a torn line


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether SIGTERM has arrived; restore the old handler on exit.

    A signal that arrives and does not end the block is passed on to the old handler.
    """
    arrived: list[int] = []
    pending = False
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    except ValueError:  # not the main thread: it cannot handle signals
        yield lambda: False
        return
    try:
        yield lambda: bool(arrived)
        pending = bool(arrived)  # for example during the last test: the next run of a table must not begin
    finally:
        signal.signal(signal.SIGTERM, before)
    if pending:
        signal.raise_signal(signal.SIGTERM)


# ---- report.html: loss, ‖u‖ of clean and mixed images, held-out recall, images ranked by ‖u‖ ----


def write_report(run: Path, config: TrainConfig, metrics: dict[str, Any], pixels: Pixels, level: Tensor) -> None:
    """Write the report of a finished run; ``level`` is ‖u‖ of the test images in ``pixels.usable``'s order."""
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
        picture(pixels.array[most.numpy()], "the test images with the largest uncertainty level"),
        "<h2>Least uncertain test images</h2>",
        picture(pixels.array[least.numpy()], "the test images with the smallest uncertainty level"),
    ]
    write_atomic(run / "report.html", page(f"{config.loss}, {config.method}", *parts))


def _curves(rows: list[dict[str, Any]]) -> str:
    """Loss, ‖u‖ of clean and mixed images, and held-out recall against the step, as one SVG."""
    from matplotlib.figure import Figure

    steps = [row for row in rows if "loss" in row]
    held_out = [row for row in rows if "held_out_recall@1" in row]
    figure = Figure(figsize=(11, 3.2))  # fixed margins: computing them takes longer than drawing
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

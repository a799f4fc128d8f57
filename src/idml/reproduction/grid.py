"""A table as a grid of training runs: each finished cell is a small JSON file, written at once and never made again."""

import csv
import io
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idml.data.datasets import load_dataset
from idml.data.images import resized_side
from idml.data.pixel_cache import load_pixels
from idml.evaluation.evaluate import measure_ambiguity
from idml.files import write_atomic
from idml.model import load_model
from idml.progress import Note, Progress
from idml.report_html import page, table
from idml.training.config import TrainConfig, from_dict
from idml.training.loop import train

UNTAUGHT: dict[str, Any] = {"introspection": "none", "u_hidden": 0}
"""What a run of a table has unless its options say otherwise; `idml train` teaches the u of plain runs by default."""


@dataclass(frozen=True)
class Cell:
    """One run: where it stands in the table, and its options (all but ``data`` and ``out``)."""

    name: str
    options: dict[str, Any]


def run_cells(
    cells: Iterable[Cell],
    data: str,
    folder: Path,
    *,
    judge: Callable[[TrainConfig, Path], dict[str, Any]],
    report: Progress,
    note: Note,
) -> dict[str, dict[str, Any]]:
    """The results of the cells: the run's own metrics and what ``judge`` finds. Those ``folder`` holds are read.

    A cell is trained in ``folder``/name.run, which a stop leaves to be resumed and which goes when the result is there.
    A result made with other options is refused.
    """
    results = {}
    for cell in cells:
        path, run = folder / f"{cell.name}.json", folder / f"{cell.name}.run"
        if path.exists():
            results[cell.name] = _read(path, cell)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        config = from_dict({**UNTAUGHT, **cell.options, "data": data, "out": str(run)})
        metrics = train(config, resume=True, report=report)
        result = {"options": cell.options, "data": data.partition(":")[0], **metrics, **judge(config, run)}
        result["seconds"] = round(time.perf_counter() - started, 1)
        write_atomic(path, (json.dumps(result, indent=1) + "\n").encode())
        shutil.rmtree(run)
        results[cell.name] = result
        note(f"{cell.name}: recall@1 {result['selected']['recall@1']:.1%} in {result['seconds']:.0f} s")
    return results


def _read(path: Path, cell: Cell) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        made_with = result["options"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result ({error}); delete it to make it again") from None
    if made_with != json.loads(json.dumps(cell.options)):
        raise ValueError(f"{path} was made with other options; delete it to make it again")
    return result


def what_u_tells(config: TrainConfig, run: Path) -> dict[str, Any]:
    """Whether ‖u‖ of the test images tells the ambiguous ones, and its level, spread and weight at the end."""
    model = load_model(run)
    test = load_dataset(config.data, split=config.split).test
    pixels = load_pixels(test, resized_side(model.trunk.image_size))
    told: dict[str, Any] = dict(measure_ambiguity(model, pixels, keep=config.freeze_trunk))
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    last = [row for row in rows if "loss" in row][-20:]
    for key in ("level_clean", "level_mixed", "level_spread", "weight"):
        if key in last[0]:
            told[key] = sum(row[key] for row in last) / len(last)
    return told


def write_table(folder: Path, name: str, header: list[str], rows: list[list[str]]) -> str:
    """Write a table as Markdown, CSV and HTML into ``folder``; returns the Markdown."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([header, *rows])
    write_atomic(folder / f"{name}.csv", file.getvalue().encode())
    markdown = "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])
    write_atomic(folder / f"{name}.md", f"{markdown}\n".encode())
    title = f"{folder.name}, {name}"
    write_atomic(folder / f"{name}.html", page(title, f"<h1>{title}</h1>", table(header, rows)))
    return markdown


def interval_text(values: list[float], digits: int, *, sign: bool = False) -> str:
    """Mean ± half the 95 % interval."""
    mean, half = interval(values)
    return f"{mean:{'+' if sign else ''}.{digits}f}" + (f" ± {half:.{digits}f}" if half == half else "")


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval by Student's t; of one value the width is unknown (NaN)."""
    from scipy.stats import t

    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, float(t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)

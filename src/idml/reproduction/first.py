"""The first table: three losses, plain, with the metric (ism), with Mixup, with both (idml); beside the raw features.

On glyphs the small trunk is trained from scratch; on any other data the pretrained trunk stays frozen (laptop mode).
Expected cost on two cores: glyphs about a minute a run; CUB at 112 px about 3 minutes of features for each seed, then
some 15 seconds a run.
"""

import statistics
from pathlib import Path
from typing import Any

from idml.data.datasets import load_dataset
from idml.data.images import resized_side
from idml.data.pixel_cache import load_pixels
from idml.embeddings import Embeddings
from idml.evaluation import evaluate_retrieval
from idml.model import build_model
from idml.model.feature_cache import view_features
from idml.progress import Note, Progress, silent
from idml.reproduction.grid import Cell, interval_text, run_cells, what_u_tells, write_table

LOSSES = ("contrastive", "multi_similarity", "proxy_anchor")
METHODS = ("plain", "ism", "mixup", "idml")
SCRATCH: dict[str, Any] = {
    "trunk": "conv4", "pretrained": False, "image_size": 28, "embedding_dim": 64, "epochs": 2, "lr": 1e-3,
}  # fmt: skip
FROZEN: dict[str, Any] = {
    "freeze_trunk": True, "crops": 2, "image_size": 112, "embedding_dim": 512, "epochs": 12, "lr": 3e-4,
}  # fmt: skip
COLUMNS = {
    "R@1": lambda r: 100 * r["selected"]["recall@1"],
    "RP": lambda r: 100 * r["selected"]["r_precision"],
    "MAP@R": lambda r: 100 * r["selected"]["map@r"],
    "AUROC mixed": lambda r: r["auroc_mixed"],
    "AUROC twins": lambda r: r.get("auroc_twins"),
    "‖u‖": lambda r: r["level_clean"],
    "spread": lambda r: r["level_spread"],
    "weight": lambda r: r.get("weight"),
    "s": lambda r: r["seconds"],
}


def cells(data: str, seeds: int) -> list[Cell]:
    """Every run of the table, seed by seed, so that an early stop leaves whole columns."""
    settings = SCRATCH if data == "glyphs" else FROZEN
    return [
        Cell(f"{loss}-{method}-{seed}", {**settings, "loss": loss, "method": method, "seed": seed})
        for seed in range(seeds)
        for loss in LOSSES
        for method in METHODS
    ]


def reproduce_first(
    data: str,
    seeds: int,
    out: Path,
    *,
    dry_run: bool = False,
    report: Progress = silent,
    note: Note = silent,
) -> dict[str, Any]:
    """Run what is missing and write table.md, table.csv and table.html beside the results."""
    folder = out / f"first-{data.partition(':')[0]}"
    planned = cells(data, seeds)
    if dry_run:
        missing = [cell.name for cell in planned if not (folder / f"{cell.name}.json").exists()]
        return {"missing": missing, "table": "\n".join([f"{len(missing)} of {len(planned)} runs to do", *missing])}
    results = run_cells(planned, data, folder, judge=what_u_tells, report=report, note=note)
    raw = None if data == "glyphs" else raw_features(data, FROZEN["image_size"])
    header, rows = summary(results, raw)
    markdown = write_table(folder, "table", header, rows)
    return {"results": results, "raw": raw, "table": markdown}


def raw_features(data: str, size: int) -> dict[str, Any]:
    """What the pretrained trunk's own features reach on the test classes."""
    model = build_model(image_size=size)
    pixels = load_pixels(load_dataset(data).test, resized_side(size))
    labels = pixels.images.labels[pixels.usable]
    return dict(evaluate_retrieval(Embeddings.certain(view_features(model, pixels)), labels, recall_at=(1,)))


def summary(results: dict[str, dict[str, Any]], raw: dict[str, Any] | None) -> tuple[list[str], list[list[str]]]:
    """A row for each loss and method: mean ± half the 95 % interval over the seeds; the difference in R@1 to plain."""
    header = ["loss", "method", *COLUMNS, "R@1 − plain"]
    rows = []
    if raw is not None:
        figures = [f"{100 * raw[key]:.1f}" for key in ("recall@1", "r_precision", "map@r")]
        rows.append(["raw features", "–", *figures, *[""] * (len(header) - 5)])
    for loss in LOSSES:
        plain = _seeds(results, loss, "plain")
        for method in METHODS:
            runs = _seeds(results, loss, method)
            row = [loss, method]
            for name, value in COLUMNS.items():
                values = [value(r) for r in runs]
                row.append(_cell(name, values))
            gains = [COLUMNS["R@1"](a) - COLUMNS["R@1"](b) for a, b in zip(runs, plain, strict=True)]
            row.append("" if method == "plain" else interval_text(gains, 1, sign=True))
            rows.append(row)
    return header, rows


def _seeds(results: dict[str, dict[str, Any]], loss: str, method: str) -> list[dict[str, Any]]:
    found = [r for r in results.values() if (r["options"]["loss"], r["options"]["method"]) == (loss, method)]
    return sorted(found, key=lambda r: int(r["options"]["seed"]))


def _cell(name: str, values: list[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return ""
    if name in ("s", "‖u‖", "spread", "weight"):
        return f"{statistics.mean(known):.{0 if name == 's' else 2}f}"
    return interval_text(known, 2 if name.startswith("AUROC") else 1)

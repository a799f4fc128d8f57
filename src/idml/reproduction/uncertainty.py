"""The uncertainty table: what ‖u‖ and every rival are worth on clean and on degraded queries, in laptop mode.

Two losses × plain, ism, idml, pel. Expected cost on two cores: CUB at 112 px about 3 minutes of training features for
each seed and 6 minutes of test features once, then some 40 seconds a run.
"""

from functools import partial
from pathlib import Path
from typing import Any

from idml.data.augment import MIXED
from idml.data.datasets import load_dataset
from idml.evaluation.evaluate import (
    MIDDLE,
    EvaluatedModel,
    MeasuredQueries,
    fit_error_predictor,
    load_model_pixels,
    measure,
)
from idml.evaluation.scores import GALLERY_AWARE, QUERY_ONLY
from idml.evaluation.uncertainty import auroc_between, evaluate_uncertainty, paired_rise
from idml.progress import Note, Progress, image_counter, silent
from idml.reproduction.first import FROZEN
from idml.reproduction.grid import Cell, interval_text, run_cells, write_table
from idml.training.config import TrainConfig

LOSSES = ("multi_similarity", "proxy_anchor")
METHODS = ("plain", "ism", "idml", "pel")


def cells(seeds: int) -> list[Cell]:
    """Every run of the table, seed by seed."""
    return [
        Cell(f"{loss}-{method}-{seed}", {**FROZEN, "loss": loss, "method": method, "seed": seed})
        for seed in range(seeds)
        for loss in LOSSES
        for method in METHODS
    ]


def judge(config: TrainConfig, run: Path) -> dict[str, Any]:
    """The figures of every score in every view."""
    dataset = load_dataset(config.data, split=config.split)
    uncounted = partial(image_counter, silent)
    candidate = EvaluatedModel.load(run, dataset, None, uncounted, silent)
    train = load_model_pixels(candidate.model, dataset.train, uncounted, silent)
    measured = measure(candidate, (MIXED, *MIDDLE), predictor=fit_error_predictor(candidate, train, silent))
    return {"queries": len(measured.rows), "views": {view: _figures(measured, view) for view in measured.views}}


def _figures(measured: MeasuredQueries, view: str) -> dict[str, Any]:
    seen, clean = measured.views[view], measured.views["clean"]
    rows: dict[str, Any] = {"accuracy": float(seen.correct.double().mean())}
    for name, score in seen.scores.items():
        rows[name] = evaluate_uncertainty(score, seen.correct)
        if view != "clean":
            before = clean.scores[name]
            rows[name] |= {"detects": auroc_between(score, before), "rises": paired_rise(before, score)}
    return rows


def reproduce_uncertainty(
    data: str,
    seeds: int,
    out: Path,
    *,
    dry_run: bool = False,
    report: Progress = silent,
    note: Note = silent,
) -> dict[str, Any]:
    """Run what is missing and write the tables beside the results."""
    folder, planned = out / f"uncertainty-{data.partition(':')[0]}", cells(seeds)
    if dry_run:
        missing = [cell.name for cell in planned if not (folder / f"{cell.name}.json").exists()]
        return {"missing": missing, "table": "\n".join([f"{len(missing)} of {len(planned)} runs to do", *missing])}
    results = run_cells(planned, data, folder, judge=judge, report=report, note=note)
    texts = []
    for figure, title in (
        ("r_auroc", "R-AUROC: does the score rank wrong answers above right ones?"),
        ("augrc", "AUGRC × 1000: errors weighted by how certain they were (less is better)"),
        ("detects", "AUROC of the score for telling degraded queries from clean ones"),
        ("rises", "P(score rises) from the clean query to the degraded one"),
    ):
        header, rows = summary(results, figure)
        texts.append(f"{title}\n\n{write_table(folder, figure, header, rows)}")
    return {"results": results, "table": "\n\n".join(texts)}


def summary(results: dict[str, dict[str, Any]], figure: str) -> tuple[list[str], list[list[str]]]:
    """A row for each loss, method and score, a column for each view; means over the seeds with 95 % intervals.

    The best score of its kind (query-only, gallery-aware) in a view is marked by a star.
    """
    views = [v for v in next(iter(results.values()))["views"] if v != "clean" or figure in ("r_auroc", "augrc")]
    sign, factor = (-1, 1000) if figure == "augrc" else (1, 1)
    rows = []
    for loss in LOSSES:
        for method in METHODS:
            runs = [r for r in results.values() if (r["options"]["loss"], r["options"]["method"]) == (loss, method)]
            for kind, names in (("query", QUERY_ONLY), ("gallery", GALLERY_AWARE)):
                found = {
                    name: {
                        v: [factor * x for r in runs if (x := r["views"][v][name][figure]) is not None] for v in views
                    }
                    for name in names
                    if all(name in r["views"]["clean"] for r in runs)
                }
                best = {v: _best({name: sign * sum(values[v]) for name, values in found.items()}) for v in views}
                for name, values in found.items():
                    cells = [interval_text(values[v], 2) if values[v] else "–" for v in views]
                    marked = [cell + (" *" if best[v] == name else "") for v, cell in zip(views, cells, strict=True)]
                    rows.append([loss, method, kind, name, *marked])
    return ["loss", "method", "sees", "score", *views], rows


def _best(values: dict[str, float]) -> str:
    return max(values, key=lambda name: values[name])

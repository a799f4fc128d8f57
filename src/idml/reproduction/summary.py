"""A table as text: a row for each arm, the paper's figures beside ours."""

import csv
import io
import statistics
from typing import Any

from idml.reproduction.arms import LOSSES
from idml.reproduction.claims import DISGUISE, Found, mean_weight
from idml.reproduction.compare import estimate, gain
from idml.reproduction.paper import paper_figure, paper_gain
from idml.reproduction.protocol import Course
from idml.reproduction.table import Table

HEADER = [
    "loss", "arm", "R@1", "paper", "RP", "paper", "MAP@R", "paper", "NMI", "paper", "R@1 gain", "MAP@R gain", "over",
    "paper's R@1 gain", "weight", "spread of ‖u‖", "AUROC mixed", "R-AUROC", "AUROC wrong labels", "held-out",
    "images seen", "lr", "seeds", "s", "remark",
]  # fmt: skip
_FIGURES = {"R@1": "recall@1", "RP": "r_precision", "MAP@R": "map@r"}


def shown_columns(table: Table, found: Found) -> tuple[list[str], list[list[str]]]:
    """Header and rows, without columns that are empty; what is missing or cannot be run is said in the remark."""
    rows = [_raw(found), *(_row(found, found.courses[arm.key]) for arm in table.arms)]
    kept = [i for i in range(len(HEADER)) if HEADER[i] in ("loss", "arm", "remark") or any(row[i] for row in rows)]
    return [HEADER[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _raw(found: Found) -> list[str]:
    figures = [""] * 8
    if found.raw is not None:
        own, selected = {0: found.raw}, found.raw["selected"]
        precision, nmi = f"{100 * selected['r_precision']:.1f}", f"{100 * found.raw['nmi']:.1f}"
        figures[::2] = [estimate(own).text(), precision, estimate(own, "MAP@R").text(), nmi]
    rest = [""] * (len(HEADER) - 11)
    return ["raw features", "", *figures, *rest, "missing" if found.raw is None else ""]


def _row(found: Found, course: Course) -> list[str]:
    arm, runs = course.arm, list(course.runs.values())
    row = [LOSSES.get(arm.loss, arm.loss), arm.name]
    ours = _ours(course) if runs else dict.fromkeys((*_FIGURES, "NMI"), "")
    for figure, text in ours.items():
        paper = paper_figure(found.data, arm.key, figure)
        row += [text, "" if paper is None else f"{paper:.1f}"]
    row += _gains(found, course)
    theirs = paper_gain(found.data, arm.key, (arm.loss, arm.against))
    row.append("" if theirs is None or arm.name == arm.against else f"{theirs:+.1f}")
    weight = mean_weight(course.runs)
    row.append("" if weight is None else f"{weight:.3f}")
    row += [_mean(runs, key, 2) for key in ("level_spread", "auroc_mixed", "r_auroc", "auroc_wrong")]
    row.append(f"{100 * statistics.mean(run['selected_score'] for run in runs):.1f}" if runs else "")
    row.append(f"{statistics.mean(run['images_seen'] for run in runs):,.0f}" if runs else "")
    row += ["" if course.rate is None else f"{course.rate:g}", str(len(runs)), _mean(runs, "seconds", 0)]
    return [*row, _remark(course, weight)]


def _ours(course: Course) -> dict[str, str]:
    runs, tested = course.runs, course.arm.tested
    if tested == "introspective":
        selected = [run["introspective"]["selected"] for run in runs.values()]
        nmi = "not defined"
    else:
        selected = [run["selected"] for run in runs.values()]
        nmi = f"{100 * statistics.mean(run['nmi'] for run in runs.values()):.1f}"
    precision = f"{100 * statistics.mean(each['r_precision'] for each in selected):.1f}"
    r1, map_r = (estimate(runs, figure, tested=tested).text() for figure in ("R@1", "MAP@R"))
    return {"R@1": r1, "RP": precision, "MAP@R": map_r, "NMI": nmi}


def _gains(found: Found, course: Course) -> list[str]:
    """In R@1 and in MAP@R, over the better of the raw features and plain; and which that is, by R@1."""
    arm, texts, names = course.arm, [], []
    if not course.runs or arm.name == arm.against:
        return ["", "", ""]
    for figure in ("R@1", "MAP@R"):
        rival = found.rival(arm.key, figure)
        if rival is None:
            return ["", "", "missing"]
        names.append(rival[0])
        texts.append(gain(course.runs, rival[1], figure, tested=arm.tested).text(sign=True))
    return [*texts, names[0] if names[0] == names[1] else " / ".join(names)]


def _mean(runs: list[dict[str, Any]], key: str, digits: int) -> str:
    values = [run[key] for run in runs if key in run]
    return f"{statistics.mean(values):.{digits}f}" if values else ""


def _remark(course: Course, weight: float | None) -> str:
    if course.refused:
        return f"left out: {course.refused}"
    words = ["plain in disguise"] if weight is not None and weight > DISGUISE else []
    return "; ".join([*words, *([f"{course.left} runs missing"] if course.left else [])])


def per_seed(table: Table, found: Found) -> str:
    """Every run's own figures, as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    last = [f"last {name}" for name in _FIGURES]
    facts = ["weight", "level_clean", "level_mixed", "level_spread", "auroc_mixed", "images_seen", "seconds", "date"]
    writer.writerow(["loss", "arm", "lr", "seed", "selected step", *_FIGURES, *last, "NMI", *facts])
    for arm in table.arms:
        course = found.courses[arm.key]
        for seed, run in sorted(course.runs.items()):
            selected = run["introspective"]["selected"] if arm.tested == "introspective" else run["selected"]
            figures = [f"{100 * part[name]:.2f}" for part in (selected, run["last"]) for name in _FIGURES.values()]
            row = [arm.loss, arm.name, course.rate, seed, run["selected_step"], *figures, f"{100 * run['nmi']:.2f}"]
            writer.writerow([*row, *(run.get(fact, "") for fact in facts)])
    return file.getvalue()

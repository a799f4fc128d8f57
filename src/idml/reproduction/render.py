"""A table as text, from stored rows alone; what is missing is said to be missing."""

import csv
import io
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idml.files import write_atomic
from idml.report_html import drawing, page, table
from idml.reproduction.claims import (
    NOT_INTROSPECTIVE,
    SAME_AS_PLAIN,
    Estimate,
    TableRuns,
    detectable_difference,
    estimate,
    gain,
    mean_weight,
    paper_figure,
    paper_gain,
)
from idml.reproduction.paper_tables import Table
from idml.reproduction.regimes import LOSSES
from idml.reproduction.runner import ArmProgress, Store, read_progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = [
    "loss", "arm", "R@1", "paper", "RP", "paper", "MAP@R", "paper", "NMI", "paper", "R@1 gain", "MAP@R gain", "over",
    "paper's R@1 gain", "weight", "spread of ‖u‖", "AUROC mixed", "R-AUROC", "AUROC wrong labels", "held-out",
    "images seen", "lr", "seeds", "s", "remark",
]  # fmt: skip
RUNNING = "not run yet"
"""The word for a table, study or claim whose runs are not all stored."""
_FIGURES = {"R@1": "recall@1", "RP": "r_precision", "MAP@R": "map@r"}


# -------------------- one table --------------------


def read_table(made: Table, store: Store, seeds: int | None = None) -> TableRuns:
    """Return what is stored of a table; by default for as many seeds as the table or its regime has."""
    count = seeds or made.seeds or store.regime.seeds
    progress = {arm.key: read_progress(store, arm, count) for arm in made.arms}
    return TableRuns(store.data.partition(":")[0], progress, store.raw())


def mostly_stored(made: Table, found: TableRuns) -> bool:
    """Return whether three quarters of the arms have runs: tables share arms, so fewer do not make a table."""
    return 4 * sum(bool(at.runs) for at in found.progress.values()) >= 3 * len(made.arms)


def table_gains(made: Table, found: TableRuns) -> list[Estimate]:
    """Return the gain in R@1 of every arm over the better of raw features and plain."""
    gains = []
    for at in (found.progress[arm.key] for arm in made.arms):
        rival = found.rival(at.arm.key) if at.runs and at.arm.name != at.arm.against else None
        if rival is not None:
            gains.append(gain(at.runs, rival[1], tested=at.arm.tested))
    return gains


def detection_line(made: Table, found: TableRuns) -> str:
    """Say how small a difference the table could have detected."""
    known = detectable_difference(table_gains(made, found))
    if known is None:
        return "No gain can be computed yet."
    runs = [len(at.runs) for at in found.progress.values() if at.runs]
    over = "classes and seeds" if max(runs) > 1 else "classes (one seed)"
    middle, least, most = known
    return (
        f"Smallest difference in R@1 that it could have detected: {middle:.1f} points (half the width of the 95 % "
        f"interval over {over} of a gain: the median of its arms; {least:.1f} to {most:.1f})."
    )


def table_columns(made: Table, found: TableRuns) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, without empty columns; a remark says what is missing or cannot be run."""
    rows = [_raw_row(found), *(_row(found, found.progress[arm.key]) for arm in made.arms)]
    kept = [i for i in range(len(HEADER)) if HEADER[i] in ("loss", "arm", "remark") or any(row[i] for row in rows)]
    return [HEADER[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _raw_row(found: TableRuns) -> list[str]:
    figures = [""] * 8
    if found.raw is not None:
        own, selected = {0: found.raw}, found.raw["selected"]
        precision, nmi = f"{100 * selected['r_precision']:.1f}", f"{100 * found.raw['nmi']:.1f}"
        figures[::2] = [estimate(own).text(), precision, estimate(own, "MAP@R").text(), nmi]
    rest = [""] * (len(HEADER) - 11)
    return ["raw features", "", *figures, *rest, "missing" if found.raw is None else ""]


def _row(found: TableRuns, progress: ArmProgress) -> list[str]:
    arm, runs = progress.arm, list(progress.runs.values())
    row = [LOSSES.get(arm.loss, arm.loss), arm.name]
    ours = _our_figures(progress) if runs else dict.fromkeys((*_FIGURES, "NMI"), "")
    for figure, text in ours.items():
        paper = paper_figure(found.data, arm.key, figure)
        row += [text, "" if paper is None else f"{paper:.1f}"]
    row += _gain_columns(found, progress)
    theirs = paper_gain(found.data, arm.key, (arm.loss, arm.against))
    row.append("" if theirs is None or arm.name == arm.against else f"{theirs:+.1f}")
    weight = mean_weight(progress.runs)
    row.append("" if weight is None else f"{weight:.3f}")
    row += [_mean(runs, key, 2) for key in ("level_spread", "auroc_mixed", "r_auroc", "auroc_wrong")]
    row.append(f"{100 * statistics.mean(run['selected_score'] for run in runs):.1f}" if runs else "")
    row.append(f"{statistics.mean(run['images_seen'] for run in runs):,.0f}" if runs else "")
    row += ["" if progress.rate is None else f"{progress.rate:g}", str(len(runs)), _mean(runs, "seconds", 0)]
    return [*row, remark_of(progress, weight)]


def _our_figures(progress: ArmProgress) -> dict[str, str]:
    runs, tested = progress.runs, progress.arm.tested
    if tested == "introspective":
        selected = [run["introspective"]["selected"] for run in runs.values()]
        nmi = "not defined"
    else:
        selected = [run["selected"] for run in runs.values()]
        nmi = f"{100 * statistics.mean(run['nmi'] for run in runs.values()):.1f}"
    precision = f"{100 * statistics.mean(each['r_precision'] for each in selected):.1f}"
    r1, map_r = (estimate(runs, figure, tested=tested).text() for figure in ("R@1", "MAP@R"))
    return {"R@1": r1, "RP": precision, "MAP@R": map_r, "NMI": nmi}


def _gain_columns(found: TableRuns, progress: ArmProgress) -> list[str]:
    """The gains in R@1 and MAP@R over the better of the raw features and plain; and which that is, by R@1."""
    arm, texts, names = progress.arm, [], []
    if not progress.runs or arm.name == arm.against:
        return ["", "", ""]
    for figure in ("R@1", "MAP@R"):
        rival = found.rival(arm.key, figure)
        if rival is None:
            return ["", "", "missing"]
        names.append(rival[0])
        texts.append(gain(progress.runs, rival[1], figure, tested=arm.tested).text(sign=True))
    return [*texts, names[0] if names[0] == names[1] else " / ".join(names)]


def _mean(runs: list[dict[str, Any]], key: str, digits: int) -> str:
    values = [run[key] for run in runs if key in run]
    return f"{statistics.mean(values):.{digits}f}" if values else ""


def remark_of(progress: ArmProgress, weight: float | None) -> str:
    """Return what a row says about an arm: why it is left out, that its metric is the plain one, what is missing."""
    if progress.refused:
        return f"left out: {progress.refused}"
    words = [NOT_INTROSPECTIVE] if weight is not None and weight > SAME_AS_PLAIN else []
    return "; ".join([*words, *([f"{progress.left} runs missing"] if progress.left else [])])


def per_seed_csv(made: Table, found: TableRuns) -> str:
    """Return the figures of every run, and the commit that made it, as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    last = [f"last {name}" for name in _FIGURES]
    facts = ["weight", "level_clean", "level_mixed", "level_spread", "auroc_mixed", "images_seen", "seconds", "date"]
    writer.writerow(["loss", "arm", "lr", "seed", "selected step", *_FIGURES, *last, "NMI", *facts, "commit"])
    for arm in made.arms:
        progress = found.progress[arm.key]
        for seed, run in sorted(progress.runs.items()):
            selected = run["introspective"]["selected"] if arm.tested == "introspective" else run["selected"]
            figures = [f"{100 * part[name]:.2f}" for part in (selected, run["last"]) for name in _FIGURES.values()]
            row = [arm.loss, arm.name, progress.rate, seed, run["selected_step"], *figures, f"{100 * run['nmi']:.2f}"]
            writer.writerow([*row, *(run.get(fact, "") for fact in (*facts, "commit"))])
    return file.getvalue()


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table as Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def write_table(
    folder: Path, name: str, header: list[str], rows: list[list[str]], figure: "Figure | None" = None
) -> str:
    """Write a table as Markdown, CSV and HTML into ``folder``; return the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([header, *rows])
    write_atomic(folder / f"{name}.csv", file.getvalue().encode())
    markdown = markdown_table(header, rows)
    write_atomic(folder / f"{name}.md", f"{markdown}\n".encode())
    title = f"{folder.name}, {name}"
    drawn = [] if figure is None else [drawing(figure, title)]
    write_atomic(folder / f"{name}.html", page(title, f"<h1>{title}</h1>", *drawn, table(header, rows)))
    return markdown

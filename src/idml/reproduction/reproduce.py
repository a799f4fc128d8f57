"""`idml reproduce WHAT`: make what is missing of a table, study or figure and write it; or estimate the cost."""

from functools import partial
from pathlib import Path
from typing import Any

from idml.data.datasets import load_dataset
from idml.errors import unknown_name
from idml.files import write_atomic
from idml.progress import Note, Progress, silent
from idml.report_html import drawing, page
from idml.reproduction.claims import ROUNDS, TableRuns
from idml.reproduction.figures import STEP, measure_step, metric_figures, step_cell, step_figure, step_sentence
from idml.reproduction.guarantee_study import GUARANTEE
from idml.reproduction.paper_tables import RETIRED, TABLES, Table
from idml.reproduction.regimes import Arms, Regime, regime_for
from idml.reproduction.render import (
    mostly_stored,
    per_seed_csv,
    read_table,
    retired_commits,
    stored_regimes,
    table_columns,
    write_results,
    write_table,
)
from idml.reproduction.runner import (
    ArmProgress,
    Cell,
    Measures,
    Store,
    load_official_dataset,
    missing_cells,
    open_store,
    read_progress,
    run_missing,
)
from idml.reproduction.stored_results import Row, collect_cells
from idml.reproduction.studies import STUDIES, Study
from idml.training.distributed import Processes

_STUDIES: dict[str, Study] = {**STUDIES, "guarantee": GUARANTEE}
_DRAWN = ("gradients", "metrics")
NAMES = (*TABLES, STEP, *_DRAWN, *_STUDIES, "results", "collect")
_OFFICIAL = {"cub": 5864, "cars": 8054, "sop": 59551}  # training images
_STUDY_SEEDS = 3


def reproduce(
    what: str,
    data: str | None = None,
    seeds: int | None = None,
    out: Path = Path("results"),
    *,
    scale: str = "laptop",
    regime: str | None = None,
    dry_run: bool = False,
    report: Progress = silent,
    note: Note = silent,
) -> dict[str, Any]:
    """Make a table, study or figure; "results" writes the page of all, "collect" merges finished cells.

    Args:
        what: one of `NAMES`.
        data: a SPEC as in `idml.data.datasets.load_dataset`; by default glyphs, and in a dry run at the paper's scale
            the paper's three data sets.
        seeds: how many; by default as many as the regime says (studies: 3).
        out: the folder of the stored rows; finished cells go to ``out``/cells, tables to ``out``/tables.
        scale: "laptop" or "paper".
        regime: what is trained on a laptop, see `idml.reproduction.regimes`.
        dry_run: only say which runs are missing, with which settings, and what they are expected to cost.
        report: gets the progress of each run.
        note: gets lines for the user.

    Returns:
        A mapping whose key "table" holds the text to show.
    """
    if what not in NAMES:
        raise ValueError(unknown_name("table", what, NAMES))
    if seeds is not None and seeds < 1:
        raise ValueError(f"a table needs at least one seed, got {seeds}")
    if what in RETIRED:
        return _show_retired(what, data, seeds, out, regime, note)
    if what in TABLES:
        return _reproduce_table(what, data, seeds, out, scale, regime, report, note, dry_run=dry_run)
    if scale != "laptop" or regime is not None:
        raise ValueError(f"{what} has one scale only: leave out --scale and --regime")
    if what == "collect":
        return collect_cells(out, note)
    if what == "results":
        return write_results(out, out.absolute().parent / "docs", note=note)
    data = data or "glyphs"
    if what in _STUDIES:
        return _reproduce_study(what, _STUDIES[what], data, seeds or _STUDY_SEEDS, out, report, note, dry_run=dry_run)
    if what == STEP:
        return _reproduce_step(data, out, report, note, dry_run=dry_run)
    drawn = metric_figures()[what]
    if dry_run:
        return {"table": f"{what}: a few seconds, nothing is trained"}
    text = write_table(out / "tables" / what, "table", drawn.header, drawn.rows, drawn.figure())
    return {"table": text, "header": drawn.header, "rows": drawn.rows}


# -------------------- tables --------------------


def _reproduce_table(
    what: str,
    data: str | None,
    seeds: int | None,
    out: Path,
    scale: str,
    regime: str | None,
    report: Progress,
    note: Note,
    *,
    dry_run: bool,
) -> dict[str, Any]:
    """Run what is missing of a table and write it; a second call only reads."""
    if dry_run and data is None and scale == "paper":
        plans = [_reproduce_table(what, k, seeds, out, scale, None, report, note, dry_run=True) for k in _OFFICIAL]
        jobs, hours = [job for plan in plans for job in plan["jobs"]], sum(plan["hours"] for plan in plans)
        texts = [plan["table"] for plan in plans]
        return {"jobs": jobs, "hours": hours, "table": "\n\n".join([*texts, f"all data sets: {hours:,.0f} hours"])}
    data = data or "glyphs"
    if regime is None and what == "finetune" and scale == "laptop":
        regime = "full"
    chosen = regime_for(data, scale, regime)
    seeds = chosen.seeds if seeds is None else seeds
    table = TABLES[what](Arms(data, chosen))
    if dry_run:
        return _plan_table(what, table, Store(out, data, chosen, note), seeds)
    dataset = load_official_dataset(data, note)
    store = open_store(out, data, chosen, dataset, note)
    arms = [arm for arm in table.arms if not arm.retired]
    for arm in arms:
        if refused := read_progress(store, arm, seeds).refused:
            note(f"{arm}: left out: {refused}")
    run_missing(store, partial(missing_cells, store, arms, seeds), dataset, Measures(), report=report, note=note)
    return _write_table(what, *read_table(table, store, seeds), chosen, out) if Processes().first else {"table": ""}


def _show_retired(
    what: str, data: str | None, seeds: int | None, out: Path, regime: str | None, note: Note
) -> dict[str, Any]:
    """Write a retired table wherever its rows are stored, and say which commits made them."""
    kind = None if data is None else data.partition(":")[0]
    shown = []
    for place, own in stored_regimes(out):
        if kind in (None, place) and regime in (None, own.name):
            made = TABLES[what](Arms(place, own))
            table, found = read_table(made, Store(out, place, own, note), seeds or own.seeds)
            if mostly_stored(made, found):
                note(
                    f"{what} is retired: idml no longer has its options; stored rows of {place}, {own.name}, made by "
                    f"{retired_commits(found)}"
                )
                shown.append(_write_table(what, table, found, own, out))
    if not shown:
        places = f" of {kind or 'any data set'}" + (f", {regime}" if regime else "")
        raise ValueError(f"{what} is retired (idml no longer has its options), and {out} holds no rows{places}")
    return {**shown[0], "table": "\n\n".join(each["table"] for each in shown)}


def _write_table(what: str, table: Table, found: TableRuns, regime: Regime, out: Path) -> dict[str, Any]:
    """Write the files of a table from stored rows, and return what a program may need of them."""
    folder = out / "tables" / f"{what}-{found.data}-{regime.name}"
    header, rows = table_columns(table, found)
    markdown = write_table(folder, "table", header, rows)
    write_atomic(folder / "per_seed.csv", per_seed_csv(table, found).encode())
    verdicts = [(claim.text, claim.decide(found)) for claim in table.claims]
    lines = [f"- {text}: **{verdict.word}** ({verdict.reason})" for text, verdict in verdicts]
    text = "\n".join(
        [table.title, "", markdown, "", f"95 % intervals: {ROUNDS} rounds over classes and seeds.", *lines]
    )
    return {
        "table": text,
        "header": header,
        "rows": rows,
        "claims": {text: [verdict.word, verdict.reason] for text, verdict in verdicts},
        "folder": str(folder),
    }


def _plan_table(what: str, table: Table, store: Store, seeds: int) -> dict[str, Any]:
    """The jobs that are missing, their settings and expected hours."""
    regime, jobs, lines, total = store.regime, list[dict[str, Any]](), list[str](), 0.0
    images = _training_images(store.data)
    done: set[str] = set()
    for arm in table.arms:
        at = read_progress(store, arm, seeds)
        if at.refused:
            lines += [] if arm.retired else [f"{arm}: left out: {at.refused}"]
            continue
        names = [name for name in _job_names(store, at, seeds) if name not in done]
        if not names:
            continue
        done.update(names)
        hours = regime.hours(_expected_images(store, at.missing[0], images))
        total += len(names) * hours
        own = ", ".join(f"{key} {value}" for key, value in arm.options.items())
        lines += [f"{name}: {hours:.2g} h ({own})" for name in names]
        jobs += [{"name": name, "hours": hours, "options": {**arm.options, "loss": arm.loss}} for name in names]
    rates = ", ".join(f"{rate:g}" for rate in regime.rates)
    shared = ", ".join(f"{key} {value}" for key, value in regime.base.items())
    head = [
        f"{what} on {store.data.partition(':')[0]}, {regime.name}: {len(jobs)} runs to do, about {total:.2g} hours on "
        f"{regime.speed.on}",
        f"settings of all runs: {shared}; other options at their defaults (idml train --help)",
        f"learning rates {rates}: the best on held-out training classes with seed 0 serves the seeds 0 … {seeds - 1}",
    ]
    return {"jobs": jobs, "hours": total, "table": "\n".join([*head, *lines])}


def _job_names(store: Store, at: ArmProgress, seeds: int) -> list[str]:
    """The missing cells; those of the other seeds too, whose rate is open before it is chosen."""
    names = [cell.name for cell in at.missing]
    if at.rate is None:
        first = store.cell(at.arm.loss, at.arm.options, store.regime.rates[0], 0).name
        head = first[: first.rindex("-lr=")]
        names += [f"{head}-lr=chosen-seed={seed}" for seed in range(1, seeds)]
    return names


def _expected_images(store: Store, cell: Cell, images: int) -> float:
    """How many images a run sees in training, including mixtures."""
    config = store.config(cell, Path("cell"))
    mixed = 1 + config.added_images / config.batch_size
    return config.epochs * images * (1 - config.holdout) * mixed


def _training_images(data: str) -> int:
    kind = data.partition(":")[0]
    if kind in _OFFICIAL:
        return _OFFICIAL[kind]
    return len(load_dataset(data).train)


# -------------------- studies and the gradient step --------------------


def _reproduce_study(
    what: str, study: Study, data: str, seeds: int, out: Path, report: Progress, note: Note, *, dry_run: bool
) -> dict[str, Any]:
    """Run what is missing of a study and write its tables."""
    store = Store(out, data, regime_for(data), note)
    cells = study.cells(store, seeds)
    if dry_run:
        return _plan_cells(store, cells)
    rows = _run_cells(store, cells, study.measures, report, note)
    if not Processes().first:
        return {"table": ""}
    folder = out / "tables" / f"{what}-{data.partition(':')[0]}"
    texts = [f"{t.title}\n\n{write_table(folder, t.name, t.header, t.rows)}" for t in study.tables(rows)]
    return {"results": {row["name"]: row for row in rows}, "table": "\n\n".join(texts), "folder": str(folder)}


def _reproduce_step(data: str, out: Path, report: Progress, note: Note, *, dry_run: bool) -> dict[str, Any]:
    """Make the figure of one gradient step, or read it, and draw it."""
    store = Store(out, data, regime_for(data), note)
    cell = step_cell(store)
    if dry_run:
        return _plan_cells(store, [cell])
    (found,) = _run_cells(store, [cell], Measures(run=measure_step), report, note)
    folder = out / "tables" / f"{STEP}-{data.partition(':')[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "step.html", page("One step", "<h1>One step</h1>", drawing(step_figure(found), "one step")))
    return {"table": step_sentence(found), **found}


def _run_cells(store: Store, cells: list[Cell], measures: Measures, report: Progress, note: Note) -> list[Row]:
    """Make what is missing; the data set is not needed if nothing is."""
    if any(store.read(cell) is None for cell in cells):
        dataset = load_official_dataset(store.data, note)
        store = open_store(store.out, store.data, store.regime, dataset, note)

        def missing() -> list[Cell]:
            return [cell for cell in cells if store.read(cell) is None]

        run_missing(store, missing, dataset, measures, report=report, note=note)
    return [row for cell in cells if (row := store.read(cell)) is not None]


def _plan_cells(store: Store, cells: list[Cell]) -> dict[str, Any]:
    missing = [cell.name for cell in cells if store.read(cell) is None]
    return {"missing": missing, "table": "\n".join([f"{len(missing)} of {len(cells)} runs to do", *missing])}

"""`idml reproduce WHAT`: make what is missing of a table, study or figure and write it; or estimate the cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from idml.data.datasets import load_dataset
from idml.errors import unknown_name
from idml.files import write_atomic
from idml.methods import find_method
from idml.model.model import PRETRAINED
from idml.progress import Note, Progress, silent
from idml.report_html import drawing, page
from idml.reproduction import comparators as others
from idml.reproduction import regimes
from idml.reproduction.claims import ROUNDS, Key, TableRuns
from idml.reproduction.comparator_costs import NAME as COSTS
from idml.reproduction.comparator_costs import measure_costs, read_costs, relative_times
from idml.reproduction.comparators_page import comparators_columns, describe_comparison
from idml.reproduction.default_form import default_form
from idml.reproduction.figures import STEP, measure_step, metric_figures, step_cell, step_figure, step_sentence
from idml.reproduction.live_u import LIVE_U
from idml.reproduction.paper_tables import FULL, OF_VERSION_1, TABLES, Table
from idml.reproduction.promise_study import study_promises
from idml.reproduction.regimes import Arms, Regime, regime_for
from idml.reproduction.render import detection_line, per_seed_csv, read_table, table_columns, write_table
from idml.reproduction.resnet50_study import RESNET50
from idml.reproduction.results_page import write_results
from idml.reproduction.runner import (
    VERSION,
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

_STUDIES: dict[str, Study] = {**STUDIES, "live-u": LIVE_U, "resnet50": RESNET50}
_DRAWN = ("gradients", "metrics")
FORM, PROMISES = "default-form", "promises"
NAMES = (*TABLES, STEP, *_DRAWN, *_STUDIES, FORM, PROMISES, COSTS, "results", "collect")
_OFFICIAL = {"cub": 5864, "cars": 8054, "sop": 59551}  # training images


def reproduce(
    what: str,
    data: str | None = None,
    seeds: int | None = None,
    out: Path = Path("results"),
    *,
    scale: str = "laptop",
    regime: str | None = None,
    weights: Path | None = None,
    comparators: bool = False,
    model: str | None = None,
    dry_run: bool = False,
    report: Progress = silent,
    note: Note = silent,
) -> dict[str, Any]:
    """Make a table, study or figure; "results" writes the pages of all, "collect" merges finished cells.

    Args:
        what: one of `NAMES`.
        data: a SPEC as in `idml.data.datasets.load_dataset`; by default glyphs, and in a dry run at the paper's scale
            the paper's three data sets.
        seeds: how many; by default as many as the table, the study or the regime says.
        out: the folder of the stored rows; finished cells go to $IDML_RUNS or ``out``/cells, tables to ``out``/tables.
        scale: "laptop" or "paper".
        regime: what is trained on a laptop, see `idml.reproduction.regimes`.
        weights: a safetensors file with the trunk's weights, for the regime `resnet50`.
        comparators: with table1, the other systems of that table instead of the seven losses.
        model: with promises, "pretrained" (by default) or "trained".
        dry_run: check that the data is there, and say which runs are missing, with which settings, and what they are
            expected to cost. A data set without a path (``cub``) is planned without its images.
        report: gets the progress of each run.
        note: gets lines for the user.

    Returns:
        A mapping whose key "table" holds the text to show.
    """
    if what in OF_VERSION_1:
        raise ValueError(
            f"{what} is a table of version 1 of the protocol, and version {VERSION} has none of it: docs/results-v1.md "
            "shows the rows that were stored"
        )
    if what not in NAMES:
        raise ValueError(unknown_name("table", what, NAMES))
    if seeds is not None and seeds < 1:
        raise ValueError(f"a table needs at least one seed, got {seeds}")
    if comparators and what != "table1":
        raise ValueError(f"--comparators goes with table1, not with {what}")
    if model is not None and what != PROMISES:
        raise ValueError(f"--model goes with {PROMISES}, not with {what}")
    work = _Work(out, report, note, weights, dry_run=dry_run)
    if comparators:
        return _reproduce_table(others.NAME, data, seeds, scale, regime, work)
    if what in TABLES:
        return _reproduce_table(what, data, seeds, scale, regime, work)
    if what == COSTS and scale == "laptop":
        return measure_costs(data, regime, out, dry_run=dry_run, note=note)
    if scale != "laptop" or regime is not None:
        raise ValueError(f"{what} has one scale only: leave out --scale and --regime")
    if what == "collect":
        return collect_cells(out, note)
    if what == "results":
        return write_results(out, out.absolute().parent / "docs", note=note)
    if what == FORM:
        return default_form(out, data or "cub", seeds, note)
    if what == PROMISES:
        if dry_run:
            return {"table": "promises: about 15 minutes on two free cores for each data set and model"}
        return study_promises(data, model or PRETRAINED, out, report=report, note=note)
    data = data or "glyphs"
    if what in _STUDIES:
        return _reproduce_study(what, _STUDIES[what], data, seeds, work)
    if what == STEP:
        return _reproduce_step(data, work)
    drawn = metric_figures()[what]
    if dry_run:
        return {"table": f"{what}: a few seconds, nothing is trained"}
    text = write_table(out / "tables" / what, "table", drawn.header, drawn.rows, drawn.figure())
    return {"table": text, "header": drawn.header, "rows": drawn.rows}


@dataclass(frozen=True)
class _Work:
    """What every command needs: where rows are, who is told, and whether only to plan."""

    out: Path
    report: Progress
    note: Note
    weights: Path | None
    dry_run: bool

    def store(self, data: str, regime: Regime) -> Store:
        """Return the store of a data set whose images may be absent; say which rows of it are not used."""
        if self.weights is not None and regime.name != "resnet50":
            raise ValueError(f"--weights is for the regime resnet50, not for {regime.name}")
        if self.weights is not None and not self.weights.is_file():
            raise FileNotFoundError(f"the weights {str(self.weights)!r} are not there")
        store = Store(self.out, data, regime, self.note, weights=self.weights)
        if old := store.count_old_rows():
            self.note(
                f"{store.rows.path.name} holds {old} rows of version 1 of the protocol, which version {VERSION} does "
                "not use (docs/results-v1.md shows them)"
            )
        return store

    def check_data(self, store: Store, plan: dict[str, Any], missing: Sequence[object]) -> dict[str, Any]:
        """Return a plan of a dry run; if runs are missing, their data must be there.

        A data set without a path, such as ``cub``, is planned without its images.
        """
        if missing and ":" in store.data:
            load_official_dataset(store.data, self.note)
        return plan

    def make(self, store: Store, missing: Callable[[Store], list[Cell]], measures: Measures) -> Store:
        """Make all cells that are missing; the data set is not needed if none is."""
        if missing(store) or Processes().count > 1:
            if store.regime.name == "resnet50" and self.weights is None:
                raise ValueError("the regime resnet50 starts from ImageNet weights: name their file with --weights")
            dataset = load_official_dataset(store.data, self.note)
            store = open_store(self.out, store.data, store.regime, dataset, self.note, weights=self.weights)
            run_missing(store, partial(missing, store), dataset, measures, report=self.report, note=self.note)
        return store


# -------------------- tables --------------------


def _reproduce_table(
    what: str, data: str | None, seeds: int | None, scale: str, regime: str | None, work: _Work
) -> dict[str, Any]:
    """Run what is missing of a table and write it; a second call only reads."""
    if work.dry_run and data is None and scale == "paper":
        plans = [_reproduce_table(what, k, seeds, scale, None, work) for k in _OFFICIAL]
        jobs, hours = [job for plan in plans for job in plan["jobs"]], sum(plan["hours"] for plan in plans)
        texts = [plan["table"] for plan in plans]
        return {"jobs": jobs, "hours": hours, "table": "\n\n".join([*texts, f"all data sets: {hours:,.0f} hours"])}
    data = data or "glyphs"
    if regime is None and what in FULL and scale == "laptop":
        regime = "full"
    if what == FULL[1] and regimes.CHOSEN_FORM is None:
        raise ValueError(f"{what} needs the form that `idml reproduce {FORM}` chooses, in regimes.CHOSEN_FORM")
    chosen = regime_for(data, scale, regime)
    build = others.comparators_table if what == others.NAME else TABLES[what]
    table = build(Arms(data, chosen))
    seeds = seeds or table.seeds or chosen.seeds
    store = work.store(data, chosen)
    if work.dry_run:
        times = relative_times(read_costs(work.out, store.data.partition(":")[0], chosen.name))
        plan = _plan_table(what, table, store, seeds, times if what == others.NAME else {})
        return work.check_data(store, plan, plan["jobs"])
    for arm in table.arms:
        if refused := read_progress(store, arm, seeds).refused:
            work.note(f"{arm}: left out: {refused}")
    store = work.make(store, lambda own: missing_cells(own, table.arms, seeds), Measures())
    if not Processes().first:
        return {"table": ""}
    if what == FULL[0] and chosen.name == "full" and regimes.CHOSEN_FORM is None:
        return default_form(work.out, data, seeds, work.note)  # no test figure before the choice
    return _write_table(what, table, read_table(table, store, seeds), chosen, work.out)


def _write_table(what: str, table: Table, found: TableRuns, regime: Regime, out: Path) -> dict[str, Any]:
    """Write the files of a table from stored rows, and return what a program may need of them."""
    folder = out / "tables" / f"{what}-{found.data}-{regime.name}"
    costs = read_costs(out, found.data, regime.name)
    compared = what == others.NAME
    header, rows = comparators_columns(table, found, costs) if compared else table_columns(table, found)
    markdown = write_table(folder, "table", header, rows)
    write_atomic(folder / "per_seed.csv", per_seed_csv(table, found).encode())
    verdicts = [(claim.text, claim.decide(found)) for claim in table.claims]
    lines = [f"- {text}: **{verdict.word}** ({verdict.reason})" for text, verdict in verdicts]
    detection = detection_line(table, found)
    text = "\n".join(
        [
            table.title,
            "",
            markdown,
            "",
            f"95 % intervals: {ROUNDS} rounds over classes and seeds.",
            detection,
            *lines,
            *([describe_comparison([(f"{found.data}, {regime.name}", table, found)])] if compared else []),
            *table.notes,
        ]
    )
    return {
        "table": text,
        "header": header,
        "rows": rows,
        "detectable": detection,
        "claims": {text: [verdict.word, verdict.reason] for text, verdict in verdicts},
        "folder": str(folder),
    }


def _plan_table(what: str, table: Table, store: Store, seeds: int, times: Mapping[Key, float]) -> dict[str, Any]:
    """The jobs that are missing, their settings and expected hours.

    ``times`` are the measured times of a step of arms, in units of that of plain ProxyAnchor.
    """
    regime, jobs, lines = store.regime, list[dict[str, Any]](), list[str]()
    images = _training_images(store.data)
    done: set[str] = set()
    features: set[tuple[Any, ...]] = set()
    for arm in table.arms:
        at = read_progress(store, arm, seeds)
        if at.refused:
            lines.append(f"{arm}: left out: {at.refused}")
            continue
        names = [name for name in _job_names(store, at, seeds) if name not in done]
        if not names:
            continue
        done.update(names)
        seen = _expected_images(store, at.missing[0], images, added=arm.key not in times)
        hours = regime.hours(seen * times.get(arm.key, 1.0))
        for name in names:
            features |= _feature_sets(store, at.missing[0], name.rpartition("-seed=")[2])
        own = ", ".join(f"{key} {value}" for key, value in arm.options.items())
        lines += [f"{name}: {hours:.2g} h ({own})" for name in names]
        jobs += [{"name": name, "hours": hours, "options": {**arm.options, "loss": arm.loss}} for name in names]
    cached = sum(int(key[0]) for key in features) * 0.9 * images / regime.speed.features / 3600
    total = sum(job["hours"] for job in jobs) + cached
    rates = ", ".join(f"{rate:g}" for rate in regime.rates)
    shared = ", ".join(f"{key} {value}" for key, value in regime.base.items())
    head = [
        f"{what} on {store.data.partition(':')[0]}, {regime.name}: {len(jobs)} runs to do, about {total:.2g} hours on "
        f"{regime.speed.on}" + (f", {cached:.2g} of them for the trunk's features" if cached else ""),
        f"settings of all runs: {shared}; other options at their defaults (idml train --help)",
        f"learning rates {rates}: the best on held-out training classes with seed 0 serves the seeds 0 … {seeds - 1}",
    ]
    return {"jobs": jobs, "hours": total, "feature_hours": cached, "table": "\n".join([*head, *lines])}


def _feature_sets(store: Store, cell: Cell, seed: str) -> set[tuple[Any, ...]]:
    """The sets of features that a run reads with a frozen trunk: (epochs of crops, what they depend on)."""
    config = store.config(cell, Path("cell"))
    if config.train != "heads":
        return set()
    if find_method(config.method).plans_batches:  # rows of each image, whatever the batches
        return {(config.crops, seed, config.crop, config.ambiguity)}
    key = (config.crops, seed, config.batch_size, config.per_class, config.crop, config.ambiguity)
    beta = getattr(getattr(config.method_options, "mixtures", None), "mixing", "") == "against-clean"
    return {key, (*key, "mixtures", beta)} if config.added_images else {key}


def _job_names(store: Store, at: ArmProgress, seeds: int) -> list[str]:
    """The missing cells; those of the other seeds too, whose rate is open before it is chosen."""
    names = [cell.name for cell in at.missing]
    if at.rate is None:
        first = store.cell(at.arm.loss, at.arm.options, store.regime.rates[0], 0).name
        head = first[: first.rindex("-lr=")]
        names += [f"{head}-lr=chosen-seed={seed}" for seed in range(1, seeds)]
    return names


def _expected_images(store: Store, cell: Cell, images: int, *, added: bool = True) -> float:
    """How many images a run sees in training; with ``added``, including mixtures and whatever else a method adds."""
    config = store.config(cell, Path("cell"))
    mixed = 1 + config.added_images / config.batch_size * added
    return config.epochs * images * (1 - config.holdout) * mixed


def _training_images(data: str) -> int:
    kind = data.partition(":")[0]
    if kind in _OFFICIAL:
        return _OFFICIAL[kind]
    return len(load_dataset(data).train)


# -------------------- studies and the gradient step --------------------


def _reproduce_study(what: str, study: Study, data: str, seeds: int | None, work: _Work) -> dict[str, Any]:
    """Run what is missing of a study and write its tables."""
    count = seeds or study.seeds
    store = work.store(data, regime_for(data, name=study.regime))
    if work.dry_run:
        return _plan_cells(store, study.cells(store, count), work)
    rows = _run_cells(store, lambda own: study.cells(own, count), study.measures, work)
    if not Processes().first:
        return {"table": ""}
    folder = work.out / "tables" / f"{what}-{data.partition(':')[0]}"
    texts = [f"{t.title}\n\n{write_table(folder, t.name, t.header, t.rows)}" for t in study.tables(rows)]
    return {"results": {row["name"]: row for row in rows}, "table": "\n\n".join(texts), "folder": str(folder)}


def _reproduce_step(data: str, work: _Work) -> dict[str, Any]:
    """Make the figure of one gradient step, or read it, and draw it."""
    store = work.store(data, regime_for(data))
    cell = step_cell(store)
    if work.dry_run:
        return _plan_cells(store, [cell], work)
    (found,) = _run_cells(store, lambda own: [cell], Measures(run=measure_step), work)
    folder = work.out / "tables" / f"{STEP}-{data.partition(':')[0]}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "step.html", page("One step", "<h1>One step</h1>", drawing(step_figure(found), "one step")))
    return {"table": step_sentence(found), **found}


def _run_cells(store: Store, cells: Callable[[Store], list[Cell]], measures: Measures, work: _Work) -> list[Row]:
    """Make what is missing and return all rows; ``cells`` may say more once some of them are there."""

    def missing(own: Store) -> list[Cell]:
        return [cell for cell in cells(own) if own.read(cell) is None]

    store = work.make(store, missing, measures)
    return [row for cell in cells(store) if (row := store.read(cell)) is not None]


def _plan_cells(store: Store, cells: list[Cell], work: _Work) -> dict[str, Any]:
    missing = [cell for cell in cells if store.read(cell) is None]
    lines, total = [f"{len(missing)} of {len(cells)} runs to do"], 0.0
    for cell in missing:
        if "method" in cell.options and (data := store.data.partition(":")[0]) in _OFFICIAL:
            hours = store.regime.hours(_expected_images(store, cell, _OFFICIAL[data]))
            total += hours
            lines.append(f"{cell.name}: {hours:.2g} h")
        else:
            lines.append(cell.name)
    if total:
        lines[0] += f", about {total:.2g} hours on {store.regime.speed.on}"
    plan = {"missing": [cell.name for cell in missing], "hours": total, "table": "\n".join(lines)}
    return work.check_data(store, plan, missing)

"""`idml reproduce TABLE`: make what is missing of a table, and write it; or say what that would cost."""

from pathlib import Path
from typing import Any

from idml.data.datasets import load_dataset
from idml.files import write_atomic
from idml.progress import Note, Progress, silent
from idml.reproduction.arms import Arms
from idml.reproduction.claims import Found
from idml.reproduction.compare import ROUNDS
from idml.reproduction.grid import write_table
from idml.reproduction.protocol import Course, course, official_dataset, run_arms
from idml.reproduction.regimes import regime_for
from idml.reproduction.store import Store, open_store
from idml.reproduction.summary import per_seed, shown_columns
from idml.reproduction.table import Table
from idml.reproduction.tables import TABLES
from idml.training.config import TrainConfig, from_dict
from idml.training.distributed import Processes

_OFFICIAL = {"cub": 5864, "cars": 8054, "sop": 59551}  # training images


def reproduce_table(
    what: str,
    data: str | None,
    seeds: int | None,
    out: Path,
    *,
    scale: str = "laptop",
    regime: str | None = None,
    dry_run: bool = False,
    report: Progress = silent,
    note: Note = silent,
) -> dict[str, Any]:
    """Run what is missing of a table and write it as Markdown, CSV and HTML; a second call only reads.

    Args:
        what: a name in `idml.reproduction.tables.TABLES`.
        data: a SPEC as in `idml.data.datasets.load_dataset`; by default glyphs, and in a dry run at the paper's scale
            the paper's three data sets.
        seeds: how many; by default as many as the regime says.
        out: where the cells and the table go.
        scale: "laptop" or "paper".
        regime: what is trained on a laptop, see `idml.reproduction.regimes`.
        dry_run: only say which runs are missing, with which settings, and what they are expected to cost.
        report: gets the progress of each run.
        note: gets lines for a person.
    """
    if dry_run and data is None and scale == "paper":
        plans = [reproduce_table(what, kind, seeds, out, scale=scale, dry_run=True) for kind in _OFFICIAL]
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
        return _plan(what, table, Store(out, data, chosen, note), seeds)
    dataset = official_dataset(data, note)
    store = open_store(out, data, chosen, dataset, note)
    run_arms(store, table.arms, seeds, dataset, report=report, note=note)
    if not Processes().first:
        return {"table": ""}
    return written(what, table, store, seeds, out)


def found_of(table: Table, store: Store, seeds: int) -> Found:
    """What is stored of a table."""
    courses = {arm.key: course(store, arm, seeds) for arm in table.arms}
    return Found(store.data.partition(":")[0], courses, store.raw())


def written(what: str, table: Table, store: Store, seeds: int, out: Path) -> dict[str, Any]:
    """The table's files, from stored cells, and what a program may want of them."""
    found = found_of(table, store, seeds)
    folder = out / f"{what}-{found.data}-{store.regime.name}"
    folder.mkdir(parents=True, exist_ok=True)
    header, rows = shown_columns(table, found)
    markdown = write_table(folder, "table", header, rows)
    write_atomic(folder / "per_seed.csv", per_seed(table, found).encode())
    verdicts = [(claim.text, claim.judge(found)) for claim in table.claims]
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


def _plan(what: str, table: Table, store: Store, seeds: int) -> dict[str, Any]:
    """The jobs that are missing, their settings and expected hours."""
    regime, jobs, lines, total = store.regime, list[dict[str, Any]](), list[str](), 0.0
    images = _training_images(store.data)
    done: set[str] = set()
    for arm in table.arms:
        at = course(store, arm, seeds)
        if at.refused:
            lines.append(f"{arm}: left out: {at.refused}")
            continue
        names = [name for name in _job_names(store, at, seeds) if name not in done]
        done.update(names)
        config = from_dict({**regime.base, **arm.options, "loss": arm.loss, "data": store.data, "out": "cell"})
        hours = regime.hours(expected_images(config, images))
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


def _job_names(store: Store, at: Course, seeds: int) -> list[str]:
    """The missing cells; before the rate is chosen, the other seeds' ones with the rate open."""
    names = [cell.name for cell in at.missing]
    if at.rate is None:
        first = store.cell(at.arm.loss, at.arm.options, store.regime.rates[0], 0).name
        head = first[: first.rindex("-lr=")]
        names += [f"{head}-lr=chosen-seed={seed}" for seed in range(1, seeds)]
    return names


def expected_images(config: TrainConfig, images: int) -> float:
    """How many images a run sees in training, mixtures among them."""
    mixed = 1 + config.mixed_images / config.batch_size
    return config.epochs * images * (1 - config.holdout) * mixed


def _training_images(data: str) -> int:
    kind = data.partition(":")[0]
    if kind in _OFFICIAL:
        return _OFFICIAL[kind]
    return len(load_dataset(data).train)

"""The protocol that every arm of every table goes through.

With seed 0 an arm is trained at each of its regime's learning rates; the one with the best score on held-out training
classes is chosen, and the other seeds are trained at it. The epoch is chosen on the same held-out classes. Test
classes are looked at when all is chosen.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from idml.data.datasets import Dataset, load_dataset
from idml.progress import Note, Progress
from idml.reproduction.arms import Arm
from idml.reproduction.grid import Cell
from idml.reproduction.store import RAW, Store
from idml.training.distributed import Processes

_PAUSE = 5.0  # seconds between two looks at the cells of other workers


@dataclass(frozen=True)
class Course:
    """Where an arm stands: its runs by seed at the chosen rate, the cells that are missing, or why it cannot be."""

    arm: Arm
    rate: float | None
    runs: dict[int, dict[str, Any]]
    missing: tuple[Cell, ...]
    refused: str = ""
    left: int = 0
    """How many runs are still to do, those whose learning rate is not chosen yet included."""


def course(store: Store, arm: Arm, seeds: int) -> Course:
    """Where an arm stands, from the stored cells alone; options that the config refuses are told, not raised."""
    rates = store.regime.rates
    try:
        tuning = {rate: store.cell(arm.loss, arm.options, rate, 0) for rate in rates}
    except ValueError as error:
        return Course(arm, None, {}, (), str(error))
    tried = {rate: store.read(cell) for rate, cell in tuning.items()}
    missing = [tuning[rate] for rate in rates if tried[rate] is None]
    if missing:
        return Course(arm, None, {}, tuple(missing), left=len(missing) + seeds - 1)
    scores = {rate: found["selected_score"] for rate, found in tried.items() if found and "failed" not in found}
    if not scores:
        return Course(arm, None, {}, (), "training failed at every learning rate")
    rate = max(scores, key=lambda r: (scores[r], -r))
    cells = {seed: store.cell(arm.loss, arm.options, rate, seed) for seed in range(seeds)}
    found = {seed: store.read(cell) for seed, cell in cells.items()}
    runs = {seed: run for seed, run in found.items() if run is not None and "failed" not in run}
    left = tuple(cells[seed] for seed in range(seeds) if found[seed] is None)
    return Course(arm, rate, runs, left, left=len(left))


def missing_cells(store: Store, arms: Iterable[Arm], seeds: int) -> list[Cell]:
    """What can be made now, each cell once: the raw features, then seed by seed: a stop leaves whole columns."""
    cells = {} if store.raw() else {RAW: Cell(RAW, {})}
    courses = [course(store, arm, seeds) for arm in arms]
    for cell in sorted((c for each in courses for c in each.missing), key=lambda c: int(c.options["seed"])):
        cells.setdefault(cell.name, cell)
    return list(cells.values())


def official_dataset(data: str, note: Note) -> Dataset:
    """The data set; refused if it is not what its name says, but for one image in a thousand, which is noted.

    Copies of Cars196 lack 15 of its 16,185 images.
    """
    dataset = load_dataset(data, strict=True, spare=1e-3)
    for line in dataset.notes:
        note(line)
    return replace(dataset, notes=())  # said once, not again by every run


def run_arms(
    store: Store,
    arms: Iterable[Arm],
    seeds: int,
    dataset: Dataset,
    *,
    report: Progress,
    note: Note,
) -> None:
    """Make what is missing. Other workers may do the same at the same time: each takes a cell that is free."""
    arms, processes, waiting = list(arms), Processes(), False
    for arm in arms:
        if refused := course(store, arm, seeds).refused:
            note(f"{arm}: left out: {refused}")
    while True:
        cells = missing_cells(store, arms, seeds)
        if not _agreed(processes, bool(cells)):
            return
        if _make_one(store, cells, processes, dataset, report, note):
            waiting = False
            continue
        if not waiting:
            note(f"waiting for {len(cells)} cells that other workers are making")
            waiting = True
        time.sleep(_PAUSE)


def _make_one(
    store: Store,
    cells: list[Cell],
    processes: Processes,
    dataset: Dataset,
    report: Progress,
    note: Note,
) -> bool:
    """Take the first free cell and make it; of several processes of one run, all of them the same."""
    if not processes.first:
        cell = _agreed(processes, None)
        if cell is not None:
            store.make(cell, dataset, report, first=False)
        return _agreed(processes, None) is not None
    for cell in cells:
        with store.taken(cell) as mine:
            if not mine:
                continue
            if store.read(cell) is None:  # else another worker has just finished it
                _agreed(processes, cell)
                store.make(cell, dataset, report)
                found = store.read(cell) or {}
                score = f"recall@1 {found['selected']['recall@1']:.1%}" if "selected" in found else found["failed"]
                note(f"{cell.name}: {score} in {found['seconds']:.0f} s")
            else:
                _agreed(processes, None)
        _agreed(processes, True)
        return True
    _agreed(processes, None)
    _agreed(processes, None)
    return False


def _agreed(processes: Processes, choice: Any) -> Any:
    """What the first process chose, in all processes."""
    if processes.count == 1:
        return choice
    box = [choice]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]

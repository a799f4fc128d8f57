"""Replies to queries: the answer, and a list of results in which near duplicates are grouped.

The answer depends on the 10 nearest items by the distance of unit vectors, for any number of requested results. The
evidence is built by the same function as in a calibration, `idml.calibration.evidence.build_evidence`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from idml.calibration.evidence import NEIGHBOURS, Evidence, Profile, build_evidence
from idml.calibration.stored import Calibration
from idml.embeddings import Embeddings
from idml.errors import printable
from idml.search.answers import Answer, RiskTargets, answer_queries
from idml.search.engines import DamagedGallery, Engine, Found, Item

DUPLICATE = 0.02  # results whose unit vectors are nearer to each other are near duplicates
_MAX_DEPTH = 4  # times k: how far to search for results that are not duplicates


class GalleryChanged(Exception):
    """The gallery changed during a search: an item that was found is gone or has lost its label. Search again."""


@dataclass(frozen=True)
class Result:
    """An item of a result list."""

    id: str
    path: str
    label: str | None
    distance: float
    """Distance of the unit vectors, 0 … 2."""
    probability: float | None
    """P(the item matches the query); None if the calibration does not give it."""
    level: float
    """Uncertainty ‖u‖ of the item."""
    duplicates: tuple[str, ...]
    """Ids of the near duplicates of this item in the result list."""


@dataclass(frozen=True)
class Reply:
    """The reply to one query."""

    answer: Answer
    results: tuple[Result, ...]
    level: float
    """Uncertainty ‖u‖ of the query."""
    calibrated: bool
    notes: tuple[str, ...]
    """Lines about the gallery that the user should read."""

    def __str__(self) -> str:
        chance = "" if self.answer.probability is None else f", P(right) {self.answer.probability:.2f}"
        lines = [f"{self.answer.state.value.upper()} ({self.answer.reason}{chance})"]
        lines += [f"  {r.distance:.4f}  {r.label or '-'}  {r.path!r}" for r in self.results]
        return "\n".join(printable(line) for line in [*lines, *(f"  note: {note}" for note in self.notes)])


class FoundItem(NamedTuple):
    """An item that was found, with its vectors."""

    item: Item
    level: float
    unit: Tensor
    uncertainty: Tensor


@dataclass(frozen=True)
class AnswerContext:
    """What all answers of a gallery depend on: whether it has labels, its calibration, its profile and notes.

    ``void`` says why the promises of the calibration do not apply; it is empty if they do.
    """

    labelled: bool
    calibration: Calibration | None
    profile: Profile | None
    notes: tuple[str, ...]
    void: str = ""


def check_count(k: object) -> None:
    """Raise ``ValueError`` unless k can be a number of results."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a whole number above 0, got {k!r}")


def build_replies(
    engine: Engine,
    queries: Embeddings,
    k: int,
    targets: RiskTargets,
    context: AnswerContext,
    *,
    without: Sequence[str] | None = None,
) -> list[Reply]:
    """Search the engine and build the reply to each query; raise `GalleryChanged` if the gallery changes.

    ``without`` holds the id of an item for each query, which is left out of the search for it.
    """
    found = _search(engine, queries, max(NEIGHBOURS, k), without)
    if found.distances.shape[1] == 0:
        raise GalleryChanged
    items: dict[str, FoundItem] = {}
    _fetch_items(engine, found, items)
    calibration = context.calibration
    evidence = _build_evidence(queries, found, items, context.labelled)
    answers = answer_queries(evidence, calibration, targets, profile=context.profile, void=context.void)
    notes = context.notes
    if calibration is not None and targets.max_missed is not None:
        why = calibration.find_set_guarantee(targets.max_missed, targets.confidence).reason
        notes += (why,) if why else ()
    lists = [list(zip(ids, d, strict=True)) for ids, d in zip(found.ids, found.distances.tolist(), strict=True)]
    _extend_lists(engine, queries, k, answers, lists, items, without)
    out = []
    for own, listed, level in zip(answers, lists, evidence.level.tolist(), strict=True):
        groups = group_duplicates([items[id] for id, _ in listed])
        final, size = own, k
        if own.results is not None:  # a set of images contains a right one: count the results that show this set
            shown = sum(group[0] < own.results for group in groups)
            final, size = replace(own, results=shown), max(k, shown)
        results = _make_results(groups[:size], listed, items, own.probability, calibration)
        out.append(Reply(final, results, level, own.calibrated, notes))
    return out


def _search(engine: Engine, queries: Embeddings, k: int, without: Sequence[str] | None) -> Found:
    """Search for the k nearest items; for each query, all but the one that is left out."""
    if without is None:
        return engine.search(queries, k)
    found = engine.search(queries, k + 1)
    columns = max(found.distances.shape[1] - 1, 0)
    places = [
        [i for i, id in enumerate(row) if id != own][:columns] for row, own in zip(found.ids, without, strict=True)
    ]
    ids = [[row[i] for i in kept] for row, kept in zip(found.ids, places, strict=True)]
    return Found(ids, found.distances.gather(1, torch.tensor(places, dtype=torch.long).view(len(ids), columns)))


def _fetch_items(engine: Engine, found: Found, items: dict[str, FoundItem]) -> None:
    """Read the found items that are not in ``items`` yet, and add them."""
    ids = [id for id in dict.fromkeys(id for row in found.ids for id in row) if id not in items]
    if not ids:
        return
    stored = engine.get_many(ids)
    try:
        levels, vectors = engine.levels(ids).tolist(), engine.embeddings(ids)
    except DamagedGallery:
        raise
    except ValueError:
        if all(id in engine for id in ids):
            raise
        raise GalleryChanged from None
    for id, item, level, unit, u in zip(ids, stored, levels, vectors.unit, vectors.uncertainty, strict=True):
        if item is None:
            raise GalleryChanged
        items[id] = FoundItem(item, level, unit, u)


def _build_evidence(queries: Embeddings, found: Found, items: dict[str, FoundItem], labelled: bool) -> Evidence:
    """Build the evidence from the first 10 results of each query."""
    classes = None
    if labelled:
        labels = [[items[id].item.label for id in row[:NEIGHBOURS]] for row in found.ids]
        codes = {label: code for code, label in enumerate(dict.fromkeys(x for row in labels for x in row))}
        if None in codes:
            raise GalleryChanged
        classes = torch.tensor([[codes[label] for label in row] for row in labels])
    nearest_uncertainty = torch.stack([items[row[0]].uncertainty for row in found.ids])
    return build_evidence(queries, found.distances[:, :NEIGHBOURS], nearest_uncertainty, classes=classes)


def _extend_lists(
    engine: Engine,
    queries: Embeddings,
    k: int,
    answers: Sequence[Answer],
    lists: list[list[tuple[str, float]]],
    items: dict[str, FoundItem],
    without: Sequence[str] | None,
) -> None:
    """Extend the lists that show fewer than k results, or fewer images than the answer refers to."""
    depth = max(NEIGHBOURS, k)
    sizes = [own.results or 0 for own in answers]
    limit = min(len(engine), max(NEIGHBOURS, _MAX_DEPTH * k, *sizes))
    while depth < limit:
        shown = [len(group_duplicates([items[id] for id, _ in listed])) for listed in lists]
        short = [
            i
            for i, listed in enumerate(lists)
            if len(listed) < sizes[i] or (shown[i] < k and len(listed) < _MAX_DEPTH * k)
        ]
        if not short:
            return
        depth = min(2 * depth, limit)
        found = _search(engine, queries[short], depth, None if without is None else [without[i] for i in short])
        _fetch_items(engine, found, items)
        for i, ids, distances in zip(short, found.ids, found.distances.tolist(), strict=True):
            listed = {id for id, _ in lists[i]}  # earlier results stay first: an engine may be approximate
            lists[i] += [(id, d) for id, d in zip(ids, distances, strict=True) if id not in listed]


def group_duplicates(listed: Sequence[FoundItem]) -> list[list[int]]:
    """Group the positions of near duplicates in a list; the first position of a group represents the others."""
    if not listed:
        return []
    units = torch.stack([x.unit for x in listed]).double()
    close = (torch.cdist(units, units, compute_mode="donot_use_mm_for_euclid_dist") < DUPLICATE).tolist()
    groups: list[list[int]] = []
    for position, own in enumerate(listed):
        for group in groups:
            if close[group[0]][position] or listed[group[0]].item.checksum == own.item.checksum:
                group.append(position)
                break
        else:
            groups.append([position])
    return groups


def _make_results(
    groups: Sequence[Sequence[int]],
    listed: Sequence[tuple[str, float]],
    items: dict[str, FoundItem],
    first: float | None,
    calibration: Calibration | None,
) -> tuple[Result, ...]:
    """Make one result for each group; ``first`` is the probability of the first one."""
    probabilities: list[float | None] = [None] * len(groups)
    if first is not None and calibration is not None and calibration.match_curve is not None:
        distances = torch.tensor([listed[group[0]][1] for group in groups])
        probabilities = [min(first, p) for p in calibration.match_probability(distances).tolist()]
    probabilities[0] = first
    out = []
    for group, probability in zip(groups, probabilities, strict=True):
        id, distance = listed[group[0]]
        item, level, *_ = items[id]
        others = tuple(listed[position][0] for position in group[1:])
        out.append(Result(id, item.path, item.label, distance, probability, level, others))
    return tuple(out)

"""What a gallery replies to queries: the answer and its evidence, and results in which near duplicates are one.

The evidence is what `idml.calibration.evidence.gather_evidence` gives at calibration: that of the 10 nearest items by
the distance of unit vectors, however many results are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from idml.calibration.evidence import Evidence, Profile, evidence_from_lists
from idml.calibration.stored import Calibration
from idml.embeddings import Embeddings
from idml.search.answers import Answer, RiskTargets, answer
from idml.search.engines import DamagedGallery, Engine, Found, Item

LISTED = 10
SEARCHED = f"{LISTED} nearest, euclidean"
DUPLICATE = 0.02  # results whose unit vectors are nearer to each other are near duplicates
_DEEPEST = 4  # times k: how far is searched for results that are no duplicates


class Vanished(Exception):
    """An item that was found is not there any more, or has lost its label: search again."""


@dataclass(frozen=True)
class Result:
    """An item that was found."""

    id: str
    path: str
    label: str | None
    distance: float
    """Between unit vectors, 0 … 2."""
    probability: float | None
    """P(it is what the query shows); None without a calibration that tells."""
    level: float
    """Its uncertainty ‖u‖."""
    duplicates: tuple[str, ...]
    """Further items that were found and are near duplicates of this one."""


@dataclass(frozen=True)
class Reply:
    """What is told about one query."""

    answer: Answer
    results: tuple[Result, ...]
    level: float
    """The query's uncertainty ‖u‖."""
    calibrated: bool
    notes: tuple[str, ...]
    """Lines about the gallery that a person should know."""


class Known(NamedTuple):
    """What is known about an item that was found."""

    item: Item
    level: float
    unit: Tensor
    uncertainty: Tensor


@dataclass(frozen=True)
class Setting:
    """How queries are answered: by which calibration, and what is known about the gallery as a whole."""

    labelled: bool
    calibration: Calibration | None
    profile: Profile | None
    notes: tuple[str, ...]


def reply(engine: Engine, queries: Embeddings, k: int, targets: RiskTargets, setting: Setting) -> list[Reply]:
    """The reply to each query; `Vanished` if the gallery changes meanwhile."""
    found = engine.search(queries, max(LISTED, k))
    if found.distances.shape[1] == 0:
        raise Vanished
    known: dict[str, Known] = {}
    _look_up(engine, found, known)
    calibration = setting.calibration
    evidence = _evidence(queries, found, known, setting.labelled)
    answers = answer(evidence, calibration, targets, profile=setting.profile)
    notes = setting.notes
    if calibration is not None and targets.max_missed is not None:
        why = calibration.find_set_guarantee(targets.max_missed, targets.confidence).reason
        notes += (why,) if why else ()
    lists = [list(zip(ids, d, strict=True)) for ids, d in zip(found.ids, found.distances.tolist(), strict=True)]
    _deepen(engine, queries, k, answers, lists, known)
    out = []
    for own, listed, level in zip(answers, lists, evidence.level.tolist(), strict=True):
        groups = collapse([known[id] for id, _ in listed])
        told, size = own, k
        if own.results is not None:  # so many images hold a right one: the results that show all of them
            shown = sum(group[0] < own.results for group in groups)
            told, size = replace(own, results=shown), max(k, shown)
        results = _results(groups[:size], listed, known, own.probability, calibration)
        out.append(Reply(told, results, level, own.calibrated, notes))
    return out


def _look_up(engine: Engine, found: Found, known: dict[str, Known]) -> None:
    """Add what is not in ``known`` yet."""
    ids = [id for id in dict.fromkeys(id for row in found.ids for id in row) if id not in known]
    if not ids:
        return
    items = engine.get_many(ids)
    try:
        levels, vectors = engine.levels(ids).tolist(), engine.embeddings(ids)
    except DamagedGallery:
        raise
    except ValueError:
        if all(id in engine for id in ids):
            raise
        raise Vanished from None
    for id, item, level, unit, u in zip(ids, items, levels, vectors.unit, vectors.uncertainty, strict=True):
        if item is None:
            raise Vanished
        known[id] = Known(item, level, unit, u)


def _evidence(queries: Embeddings, found: Found, known: dict[str, Known], labelled: bool) -> Evidence:
    """The evidence from the first 10 of each list."""
    classes = None
    if labelled:
        labels = [[known[id].item.label for id in row[:LISTED]] for row in found.ids]
        codes = {label: code for code, label in enumerate(dict.fromkeys(x for row in labels for x in row))}
        if None in codes:
            raise Vanished
        classes = torch.tensor([[codes[label] for label in row] for row in labels])
    u = queries.uncertainty.detach().float()
    first = torch.stack([known[row[0]].uncertainty for row in found.ids])
    both = u + first if u.shape[1] == first.shape[1] else u if first.shape[1] == 0 else first
    return evidence_from_lists(
        found.distances[:, :LISTED],
        queries.detach().level,
        classes=classes,
        pair=torch.linalg.vector_norm(both, dim=1),
        searched=SEARCHED,
    )


def _deepen(
    engine: Engine,
    queries: Embeddings,
    k: int,
    answers: Sequence[Answer],
    lists: list[list[tuple[str, float]]],
    known: dict[str, Known],
) -> None:
    """Make the lists longer that show fewer than k results, or fewer images than the answer speaks of."""
    depth, items = max(LISTED, k), len(engine)
    sizes = [own.results or 0 for own in answers]
    limit = min(items, max(LISTED, _DEEPEST * k, *sizes))
    while depth < limit:
        shown = [len(collapse([known[id] for id, _ in listed])) for listed in lists]
        short = [
            i
            for i, listed in enumerate(lists)
            if len(listed) < sizes[i] or (shown[i] < k and len(listed) < _DEEPEST * k)
        ]
        if not short:
            return
        depth = min(2 * depth, limit)
        found = engine.search(queries[short], depth)
        _look_up(engine, found, known)
        for i, ids, distances in zip(short, found.ids, found.distances.tolist(), strict=True):
            listed = {id for id, _ in lists[i]}  # what was listed stays first: an engine may not be exact
            lists[i] += [(id, d) for id, d in zip(ids, distances, strict=True) if id not in listed]


def collapse(listed: Sequence[Known]) -> list[list[int]]:
    """Places in the list, those of near duplicates together: the first of each group is what the others repeat."""
    if not listed:
        return []
    units = torch.stack([x.unit for x in listed]).double()
    close = (torch.cdist(units, units, compute_mode="donot_use_mm_for_euclid_dist") < DUPLICATE).tolist()
    groups: list[list[int]] = []
    for place, own in enumerate(listed):
        for group in groups:
            if close[group[0]][place] or listed[group[0]].item.checksum == own.item.checksum:
                group.append(place)
                break
        else:
            groups.append([place])
    return groups


def _results(
    groups: Sequence[Sequence[int]],
    listed: Sequence[tuple[str, float]],
    known: dict[str, Known],
    first: float | None,
    calibration: Calibration | None,
) -> tuple[Result, ...]:
    chances: list[float | None] = [None] * len(groups)
    if first is not None and calibration is not None and calibration.match_curve is not None:
        distances = torch.tensor([listed[group[0]][1] for group in groups])
        chances = [min(first, p) for p in calibration.match_probability(distances).tolist()]
    chances[0] = first
    out = []
    for group, chance in zip(groups, chances, strict=True):
        id, distance = listed[group[0]]
        item, level, *_ = known[id]
        others = tuple(listed[place][0] for place in group[1:])
        out.append(Result(id, item.path, item.label, distance, chance, level, others))
    return tuple(out)

"""Answers with a guarantee: what is learned from held-out queries whose right answers are known.

The queries are split at random. One part fits P(right) (`idml.calibration.confidence`) and fixes the thresholds that
may be chosen; the other, which has had no part in this, is counted at these thresholds, and the counts carry every
promise (`idml.calibration.risk_control`):

    match       P ≥ t: at most ε of such answers are wrong, with confidence 1 − δ; an unknown answered is wrong too
    novelty     at most a share a of the known queries (class in the gallery) gets a p-value ≤ a
    sets        at most α of the known queries get a result set without a right image, with confidence 1 − δ

They hold for queries drawn like the calibration's: the same kind of gallery and the same share of unknown ones (with
fewer of them fewer matches are wrong), and each drawn on its own. Queries of one class hang together; for new classes
the promises are estimates. "With confidence 1 − δ" counts all calibrations, also those that end in "cannot promise":
among the others the share of broken promises may be larger where a promise is rare.

Beside them, without a promise: P(a single result is of the query's class) from its distance, `idml.calibration.stored`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from idml.calibration.confidence import ConfidenceModel, Figure, isotonic
from idml.calibration.evidence import Evidence, Profile
from idml.calibration.risk_control import (
    Bin,
    Counts,
    Drift,
    RiskGuarantee,
    conformal_p,
    drift,
    expected_calibration_error,
    reliability,
    set_sizes,
)
from idml.evaluation.uncertainty import auroc
from idml.files import read_record, write_record

# -------------------- alike --------------------
# P(an image found at a distance is of the query's class), from lists of results whose classes are known.


@dataclass(frozen=True)
class MatchCurve:
    """P falls with the distance and is linear between the ``knots``; beyond the last ones it stays as it is there."""

    knots: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.knots, self.knots[1:], strict=False))
        falling = all(a >= b for a, b in zip(self.shares, self.shares[1:], strict=False))
        bounded = all(0 <= share <= 1 for share in self.shares)
        if not self.knots or len(self.knots) != len(self.shares) or not (rising and falling and bounded):
            raise ValueError("the curve of single results does not fall from knot to knot")

    @classmethod
    def fit(cls, distances: Tensor, alike: Tensor) -> "MatchCurve":
        """Isotonic regression over all results listed for some queries.

        Args:
            distances: of the images listed [n, m]; ∞ where a list ends before.
            alike: bool [n, m], this image is of the query's class.

        Where the m nearest are all alike, P is (m + 1)/(m + 2), and 1/(m + 2) where the m farthest are all different
        (Laplace's rule of succession): a few results never make certainty.

        >>> curve = MatchCurve.fit(torch.tensor([[0.1, 0.2, 0.5, 0.9]]), torch.tensor([[True, True, False, False]]))
        >>> curve.probability(torch.tensor([0.0, 0.1, 0.9]))
        tensor([0.7500, 0.7500, 0.2500], dtype=torch.float64)
        """
        if distances.ndim != 2 or alike.shape != distances.shape or alike.dtype != torch.bool:
            raise ValueError(f"need distances [n, m] and a bool mask, got {list(distances.shape)} and {alike.dtype}")
        listed = distances != torch.inf
        d, same = distances[listed].double(), alike[listed]
        n = len(d)
        if n == 0 or not bool(torch.isfinite(d).all()):
            raise ValueError("the lists of results are empty, or hold distances that are no numbers")
        knots, shares = isotonic(d, same)
        sure, hopeless = (n + 1) / (n + 2), 1 / (n + 2)  # where isotonic's own limits hold
        nearest = n if bool(same.all()) else int((d < d[~same].min()).sum())
        farthest = n if not bool(same.any()) else int((d > d[same].max()).sum())
        between = [share for share in shares if hopeless < share < sure]
        top = max([(nearest + 1) / (nearest + 2), *between])
        bottom = min([1 / (farthest + 2), *between])
        return cls(knots, tuple(top if s >= sure else bottom if s <= hopeless else s for s in shares))

    def probability(self, distances: Tensor) -> Tensor:
        """P for distances of any shape, in float64."""
        d = distances.detach().cpu().double()
        if bool(d.isnan().any()):
            raise ValueError(f"{int(d.isnan().sum())} of {d.numel()} distances are NaN")
        return torch.as_tensor(np.interp(d.numpy(), self.knots, self.shares), dtype=torch.float64)


_KIND, _VERSION = "idml calibration", 4
# Thresholds answer 16/128 … 128/128 of the fitting queries, tests start at 1/8, 1/4 and 1/2. In simulations (wished
# errors 5, 10, 20 %, unknown 0, 25, 50 %, 300 to 3000 queries) this answered about as much as 2, 4 or 6 starts or more;
# one start answered more where it was the right one, and next to nothing where it was not. With enough queries they
# begin at 1/32 and 1/16: of hard data (CUB) only the surest few per cent can be promised, and easy data lose nothing.
_STEPS, _STARTS, _EARLY, _ENOUGH = 128, (16, 32, 64), (4, 8), 32
_DOUBTS = (0.0, *(10 ** (-4 + i / 32) for i in range(129)))  # 10⁻⁴ … 1
_REFERENCE = 2000  # known queries kept to compare new ones with
_LIKELY = 0.5  # a first result that is right with this probability is in the gallery with as much


@dataclass(frozen=True)
class Sets:
    """Result sets of adaptive size: h_m (see `set_sizes`), and at each doubt how many held no right image."""

    still_wrong: tuple[float, ...]
    counts: Counts
    mean_size: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """What `fit` learned; see the head of this file."""

    model: str
    searched: str
    labelled: bool
    unknown: float
    """The share of the queries whose class was not in the gallery: promises are for no more than about that."""
    confidence_model: ConfidenceModel
    counts: Counts
    bins: tuple[Bin, ...]
    novelty_score: str
    novelty_reference: tuple[float, ...]
    percentiles: dict[str, tuple[float, ...]]
    sets: Sets | None
    match_curve: MatchCurve | None
    profile: Profile | None

    def __post_init__(self) -> None:
        if not 0 <= self.unknown <= 1:
            raise ValueError(f"the share of unknown queries is a number from 0 to 1, not {self.unknown!r}")

    @classmethod
    def fit(
        cls,
        evidence: Evidence,
        correct: Tensor,
        *,
        labelled: bool = True,
        seed: int = 0,
        groups: Tensor | None = None,
        known: Tensor | None = None,
        places: Tensor | None = None,
        listed: tuple[Tensor, Tensor] | None = None,
        profile: Profile | None = None,
        model: str = "",
        held_out: float = 0.5,
    ) -> "Calibration":
        """Learn from queries whose right answers are known.

        Args:
            evidence: of the queries, `gather_evidence`.
            correct: bool [n], the first result is right; False for unknown queries.
            labelled: False for use with galleries without labels, whose evidence lacks some scores.
            seed: of the split and the folds.
            groups: the queries' classes [n]; folds of the cross-validation keep them whole.
            known: bool [n], the query's class is in the gallery; all are if not given.
            places: `first_right` of ``evidence.indices`` [n], for result sets of adaptive size.
            listed: distances of the images listed [n, m], and whether each is of the query's class, for
                `match_probability`.
            profile: of the gallery, to see later whether it has changed.
            model: the fingerprint of the model.
            held_out: the share of queries that are counted, not fitted.
        """
        n = len(evidence)
        known = torch.ones(n, dtype=torch.bool) if known is None else known
        for name, mask in (("correct", correct), ("known", known)):
            if mask.shape != (n,) or mask.dtype != torch.bool:
                raise ValueError(f"{name} must be a bool mask [{n}], got {mask.dtype} {list(mask.shape)}")
        if labelled and not evidence.labelled:
            raise ValueError("the evidence comes from a gallery without labels; ask for labelled=False")
        if bool((correct & ~known).any()):
            raise ValueError(f"{int((correct & ~known).sum())} unknown queries are marked as answered right")
        held, used = split_queries(n, held_out, seed)
        theirs = None if groups is None else groups[used]
        model_of_p = ConfidenceModel.fit(evidence[used], correct[used], labelled=labelled, groups=theirs, seed=seed)
        p, p_fit = model_of_p.probability(evidence[held]), model_of_p.probability(evidence[used])
        score = _novelty_score(model_of_p, evidence[used], known[used])
        reference = _novelty(model_of_p, score, evidence[held])[known[held]]
        chosen = torch.randperm(len(reference), generator=torch.Generator().manual_seed(seed))[:_REFERENCE]
        sets = None
        if places is not None:
            sets = _sets(evidence, p, p_fit, places, held[known[held]], used[known[used]], known[held])
        return cls(
            model=model,
            searched=evidence.searched,
            labelled=labelled,
            unknown=float((~known).double().mean()),
            confidence_model=model_of_p,
            counts=Counts.of(p, correct[held], *_thresholds(p_fit)),
            bins=tuple(reliability(p, correct[held])) if len(p) else (),
            novelty_score=score,
            novelty_reference=tuple(reference[chosen].sort().values.tolist()),
            percentiles={name: _percentiles(x[used]) for name, x in evidence.scores.items()},
            sets=sets,
            match_curve=None if listed is None else MatchCurve.fit(listed[0][used], listed[1][used]),
            profile=profile,
        )

    @property
    def table(self) -> tuple[Figure, ...]:
        """Every single score and the mixes, with their cross-validated figures."""
        return self.confidence_model.table

    @property
    def ece(self) -> float | None:
        """The expected calibration error on the queries held out."""
        return expected_calibration_error(self.bins) if self.bins else None

    def probability(self, evidence: Evidence) -> Tensor:
        """P(the first result is right) [n]."""
        if evidence.searched != self.searched:
            raise ValueError(f"calibrated for {self.searched!r}, but the evidence comes from {evidence.searched!r}")
        return self.confidence_model.probability(evidence)

    def find_guarantee(self, max_error: float, confidence: float = 0.9) -> RiskGuarantee:
        """The threshold on P that keeps wrong answers at ``max_error`` or below, if there is one."""
        return self.counts.find_guarantee(max_error, confidence)

    def novelty(self, evidence: Evidence) -> Tensor:
        """The p-value of "the query's class is in the gallery" [n]: p ≤ a for at most a share a of known queries."""
        return conformal_p(_novelty(self.confidence_model, self.novelty_score, evidence), self.novelty_reference)

    def absent(self, evidence: Evidence, share: float) -> Tensor:
        """Which queries are not in the collection, as far as can be told [n]; at most ``share`` of the known ones.

        Their p-value is at most the share, and the first result is rather wrong than right: if it were right, the
        query's class would be in the gallery.
        """
        return (self.novelty(evidence) <= share) & (self.probability(evidence) < _LIKELY)

    def find_set_guarantee(self, max_error: float, confidence: float = 0.9) -> RiskGuarantee:
        """The doubt (``threshold``) at which at most ``max_error`` of the known queries' sets miss, if there is one."""
        if self.sets is None:
            raise ValueError("this calibration knows nothing about result sets: it was fitted without places")
        return self.sets.counts.find_guarantee(max_error, confidence, what="result sets without a right image")

    def set_sizes(self, evidence: Evidence, doubt: float) -> Tensor:
        """The size of each query's result set at a doubt that `find_set_guarantee` gave [n]."""
        if self.sets is None:
            raise ValueError("this calibration knows nothing about result sets: it was fitted without places")
        return set_sizes(self.probability(evidence), self.sets.still_wrong, doubt)

    def match_probability(self, distances: Tensor) -> Tensor:
        """P(an image listed at this distance is of the query's class), of the distances' shape; it falls with them."""
        if self.match_curve is None:
            raise ValueError("this calibration knows nothing about single results: it was fitted without their lists")
        return self.match_curve.probability(distances)

    def position(self, name: str, values: Tensor) -> Tensor:
        """The share of the fitting queries whose score ``name`` is smaller [n]: 1 is more extreme than all of them."""
        marks = torch.tensor(self.percentiles[name], dtype=torch.float64)
        return torch.searchsorted(marks, values.detach().cpu().double().contiguous()) / len(marks)

    def drift(self, now: Profile) -> Drift:
        """Whether a gallery has changed much since the calibration."""
        if self.profile is None:
            raise ValueError("this calibration kept no profile of its gallery to compare with")
        return drift(self.profile, now)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        write_record(path, self, kind=_KIND, version=_VERSION)

    @classmethod
    def load(cls, path: Path, *, model: str | None = None) -> "Calibration":
        """Read it; a damaged file, or one that belongs to another model than ``model``, is a ``ValueError``."""
        found = read_record(path, cls, kind=_KIND, version=_VERSION)
        if model is not None and found.model != model:
            raise ValueError(f"{path} belongs to another model ({found.model!r}, not {model!r}): calibrate again")
        return found


def split_queries(n: int, held_out: float = 0.5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Which of n queries `Calibration.fit` counts, and which it fits to: two random parts."""
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be between 0 and 1, got {held_out!r}")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[: int(n * held_out)].sort().values, order[int(n * held_out) :].sort().values


def _thresholds(p: Tensor) -> tuple[list[float], list[int]]:
    """Thresholds that answer more and more of these queries, all at last; and the places of the starts."""
    falling = p.sort(descending=True).values
    starts = [*(start for start in _EARLY if len(p) * start >= _ENOUGH * _STEPS), *_STARTS]
    steps = range(starts[0], _STEPS + 1)
    rows = [max(0, -(-len(p) * step // _STEPS) - 1) for step in steps]
    return [*falling[rows[:-1]].tolist(), 0.0], [steps.index(start) for start in starts]


def _novelty_score(right: ConfidenceModel, evidence: Evidence, known: Tensor) -> str:
    """The score that tells unknown queries best; the nearest distance if there are none to tell."""
    if bool(known.all()) or not bool(known.any()):
        return "nearest"
    return max(("nearest", "kth", "doubt"), key=lambda name: auroc(_novelty(right, name, evidence), ~known))


def _novelty(right: ConfidenceModel, name: str, evidence: Evidence) -> Tensor:
    return right.doubt(evidence) if name == "doubt" else evidence.scores[name].detach().cpu().double()


def _sets(
    evidence: Evidence, p: Tensor, p_fit: Tensor, places: Tensor, held: Tensor, used: Tensor, known: Tensor
) -> Sets:
    if evidence.indices is None or places.shape != (len(evidence),):
        raise ValueError("places need the evidence's indices, and one place per query")
    largest = evidence.indices.shape[1]
    place = torch.where((places < 1) | (places > largest), largest + 1, places)
    late = place[used][place[used] > 1]
    still = [(1 + int((late > m).sum())) / (1 + len(late)) for m in range(1, largest + 1)]
    sizes = [set_sizes(p[known], still, doubt) for doubt in _DOUBTS]
    missed = tuple(int((place[held] > size).sum()) for size in sizes)
    counts = Counts(_DOUBTS, (len(held),) * len(_DOUBTS), missed, len(held), (0,))
    return Sets(tuple(still), counts, tuple(float(s.double().mean()) if len(s) else 0.0 for s in sizes))


def _percentiles(x: Tensor) -> tuple[float, ...]:
    marks: Sequence[float] = x.detach().cpu().double().quantile(torch.linspace(0, 1, 101).double()).tolist()
    return tuple(marks)

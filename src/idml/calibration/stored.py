"""A calibration: what a gallery stores to answer queries with a guarantee.

It is fitted to queries whose right answers are known. They are split at random, by class where queries of a class hang
together. One part fits P(right) (`idml.calibration.confidence`) and fixes the candidate thresholds. The other part is
not used for fitting. Its counts at these thresholds carry every guarantee (`idml.calibration.risk_control`):

    match       P ≥ t: at most ε of such answers are wrong, with confidence 1 − δ; a match of an unknown query is wrong
    novelty     at most a share a of the known queries (class in the gallery) gets a p-value ≤ a
    sets        at most α of the known queries get a result set without a right image, with confidence 1 − δ

The guarantees hold for queries that are drawn like those of the calibration: from the same kind of gallery, with the
same share of unknown ones (with fewer unknown queries, fewer matches are wrong), and each independently. Queries of one
unknown class depend on each other: with `Grouping` the bound on wrong matches knows it
(`idml.calibration.cluster_bound`). "With confidence 1 − δ" counts all calibrations, also those without a possible
threshold: among the others, more than a share δ may fail if a threshold is rarely possible.

P(a single result is of the query's class) comes from its distance (`MatchCurve`) and carries no guarantee.
"""

import hashlib
import json
import math
import types
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from idml.calibration.cluster_bound import BY_CLASS, ClusterMoments
from idml.calibration.confidence import ConfidenceModel, isotonic
from idml.calibration.evidence import Evidence, Profile
from idml.calibration.risk_control import (
    Drift,
    ReliabilityBin,
    RiskGuarantee,
    ThresholdCounts,
    candidate_thresholds,
    choose_set_sizes,
    conformal_p,
    expected_calibration_error,
    measure_drift,
    reliability_bins,
)
from idml.evaluation.bootstrap import draw_classes, interval, resampled_auroc
from idml.evaluation.uncertainty import auroc
from idml.files import write_atomic

T = TypeVar("T")
_KIND, _VERSION = "idml calibration", 6
_DOUBTS = (0.0, *(10 ** (-4 + i / 32) for i in range(129)))  # 10⁻⁴ … 1, the candidate thresholds of result sets
_NOVELTY_SCORES = ("nearest", "kth", "doubt")
_REFERENCE = 2000  # known queries that new ones are compared with
_REJECTED = 0.05  # the share of known queries that may be rejected, unless the user says otherwise
_ROUNDS = 200  # of resampled classes, to see whether ‖u‖ is better than chance
_LIKELY = 0.5  # a query with a higher P(right) is never called absent: then its class is probably in the gallery


@dataclass(frozen=True)
class MatchCurve:
    """P(an image at a distance is of the query's class): falling, linear between the knots, constant beyond them."""

    knots: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.knots, self.knots[1:], strict=False))
        falling = all(a >= b for a, b in zip(self.shares, self.shares[1:], strict=False))
        bounded = all(0 <= share <= 1 for share in self.shares)
        if not self.knots or len(self.knots) != len(self.shares) or not (rising and falling and bounded):
            raise ValueError("the curve of single results does not fall from knot to knot")

    @classmethod
    def fit(cls, distances: Tensor, same_class: Tensor) -> "MatchCurve":
        """Fit isotonic regression to all results listed for some queries.

        Args:
            distances: of the images listed [n, m]; ∞ where a list ends.
            same_class: bool [n, m], this image is of the query's class.

        If the m nearest are all of the query's class, P is (m + 1)/(m + 2) there, and 1/(m + 2) where the m farthest
        are all of other classes (Laplace's rule of succession). So a few results never give certainty.

        >>> curve = MatchCurve.fit(torch.tensor([[0.1, 0.2, 0.5, 0.9]]), torch.tensor([[True, True, False, False]]))
        >>> curve.probability(torch.tensor([0.0, 0.1, 0.9]))
        tensor([0.7500, 0.7500, 0.2500], dtype=torch.float64)
        """
        if distances.ndim != 2 or same_class.shape != distances.shape or same_class.dtype != torch.bool:
            raise ValueError(
                f"need distances [n, m] and a bool mask, got {list(distances.shape)} and {same_class.dtype}"
            )
        listed = distances != torch.inf
        d, same = distances[listed].double(), same_class[listed]
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


@dataclass(frozen=True)
class ResultSets:
    """Result sets of adaptive size: h_m (see `choose_set_sizes`), and at each doubt how many hold no right image."""

    still_wrong: tuple[float, ...]
    counts: ThresholdCounts
    mean_size: tuple[float, ...]

    def __post_init__(self) -> None:
        falling = list(self.still_wrong) == sorted(self.still_wrong, reverse=True)
        if not self.still_wrong or not falling or not all(0 <= share <= 1 for share in self.still_wrong):
            raise ValueError("the table of result sets does not fall from 1")
        if len(self.mean_size) != len(self.counts.thresholds) or min(self.mean_size) < 0:
            raise ValueError("the table of result sets has impossible sizes")


@dataclass(frozen=True, eq=False)
class Grouping:
    """How queries hang together: ``share`` of unknown queries to weight them by, and their clusters.

    Unknown queries are clustered by the groups given to `Calibration.fit`, known ones too unless ``known_by_image``.
    ``classes`` is the number of the gallery's classes, if not all of them are asked.
    """

    share: float
    known_by_image: bool = True
    classes: int | None = None

    @property
    def by_group(self) -> bool:
        """Whether whole groups are split off: not if all queries are known and count by image."""
        return self.share > 0 or not self.known_by_image


@dataclass(frozen=True)
class Calibration:
    """A fitted calibration, see the head of this file."""

    model: str
    searched: str
    labelled: bool
    unknown: float
    """The share of unknown queries in the calibration. Guarantees need about this share or less."""
    confidence_model: ConfidenceModel
    counts: ThresholdCounts
    bins: tuple[ReliabilityBin, ...]
    novelty_score: str
    novelty_reference: tuple[float, ...]
    percentiles: dict[str, tuple[float, ...]]
    sets: ResultSets | None
    match_curve: MatchCurve | None
    profile: Profile | None
    level_speaks: bool
    """Whether ‖u‖ ranks wrong answers better than chance, by the 95 % interval over resampled classes."""
    recognised: float | None
    """The share of unknown queries that are answered *not in the collection*; None if there were none."""
    rejected: float | None
    """The same share of known queries."""
    queries: str
    """What the queries were, in words; empty if nobody said."""

    def __post_init__(self) -> None:
        for name in ("unknown", "recognised", "rejected"):
            share = getattr(self, name)
            if not (share is None or 0 <= share <= 1):
                raise ValueError(f"the share of {name} queries is a number from 0 to 1, not {share!r}")
        if self.novelty_score not in _NOVELTY_SCORES:
            raise ValueError(f"unknown score of novelty {self.novelty_score!r}")
        needed = {"level", "margin" if self.labelled else "gap", *self.confidence_model.features}
        if not needed <= self.percentiles.keys():
            raise ValueError(f"percentiles of {', '.join(sorted(needed - self.percentiles.keys()))} are missing")
        if not all(marks and list(marks) == sorted(marks) for marks in self.percentiles.values()):
            raise ValueError("the percentiles of a score are missing or not in order")

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
        distances: Tensor | None = None,
        same_class: Tensor | None = None,
        profile: Profile | None = None,
        model: str = "",
        held_out: float = 0.5,
        grouping: Grouping | None = None,
        queries: str = "",
    ) -> "Calibration":
        """Fit a calibration to queries whose right answers are known.

        Args:
            evidence: of the queries.
            correct: bool [n], the first result is right; False for unknown queries.
            labelled: False for use with galleries without labels, whose evidence lacks some scores.
            seed: of the split and the folds.
            groups: the queries' classes [n]; the cross-validation does not divide them between folds.
            known: bool [n], the query's class is in the gallery; all are if not given.
            distances: of the images listed for each query [n, m], ∞ where a list ends; for `match_probability`.
            same_class: bool [n, m], this image is of the query's class; for result sets and `match_probability`.
            profile: of the gallery, to see later whether it has changed.
            model: the fingerprint of the model.
            held_out: the share of queries that are counted, not fitted; with a grouping, the share of groups.
            grouping: how queries hang together. Without it each counts once and they are independent.
            queries: what the queries were, in words.
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
        for name, lists in (("distances", distances), ("same_class", same_class)):
            if lists is not None and (lists.ndim != 2 or len(lists) != n):
                raise ValueError(f"{name} must be [{n}, listed], got {list(lists.shape)}")
        share = float((~known).double().mean())
        if grouping is not None:
            share = grouping.share
            if groups is None:
                raise ValueError("queries that hang together need groups")
        by_group = grouping is not None and grouping.by_group
        held, used = split_queries(n, held_out, seed, groups if by_group else None)
        every = torch.arange(n)
        if grouping is not None:
            used, every = (draw_mixture(rows, known, share, seed) for rows in (used, every))
        counted = held[known[held]] if grouping is not None and share == 0 else held  # else they would have no weight
        theirs = None if groups is None else groups[used]
        confidence_model = ConfidenceModel.fit(
            evidence[used], correct[used], labelled=labelled, groups=theirs, seed=seed
        )
        p, p_fit = confidence_model.probability(evidence[counted]), confidence_model.probability(evidence[used])
        thresholds, starts = candidate_thresholds(p_fit)
        moments = pilot = None  # a bound that is exact has no pilot: it holds for each ε by itself
        if grouping is not None and groups is not None:
            moments, pilot = (
                ClusterMoments.of(
                    their_p,
                    correct[rows],
                    thresholds,
                    known=known[rows],
                    share=share,
                    groups=groups[rows],
                    known_by_image=grouping.known_by_image,
                    classes=grouping.classes,
                )
                for their_p, rows in ((p, counted), (p_fit, used))
            )
        score = _choose_novelty_score(confidence_model, evidence[used], known[used])
        reference = _novelty_score(confidence_model, score, evidence[held])[known[held]]
        chosen = torch.randperm(len(reference), generator=torch.Generator().manual_seed(seed))[:_REFERENCE]
        sets = None
        if same_class is not None:
            sets = _fit_sets(p[known[counted]], same_class[held[known[held]]], same_class[used[known[used]]])
        curve = None
        if distances is not None and same_class is not None:
            curve = MatchCurve.fit(distances[used], same_class[used])
        shown = held if grouping is None else draw_mixture(held, known, share, seed)
        p_shown = confidence_model.probability(evidence[shown])
        level_groups = torch.arange(n) if groups is None else groups
        fitted = cls(
            model=model,
            searched=evidence.searched,
            labelled=labelled,
            unknown=share,
            confidence_model=confidence_model,
            counts=ThresholdCounts.of(p, correct[counted], thresholds, starts, moments, pilot if by_group else None),
            bins=tuple(reliability_bins(p_shown, correct[shown])) if len(shown) else (),
            novelty_score=score,
            novelty_reference=tuple(reference[chosen].sort().values.tolist()),
            percentiles={name: _percentiles(x[used]) for name, x in evidence.scores.items()},
            sets=sets,
            match_curve=curve,
            profile=profile,
            level_speaks=_is_better_than_chance(evidence.level[every], ~correct[every], level_groups[every], seed),
            recognised=None,
            rejected=None,
            queries=queries,
        )
        absent = fitted.absent(evidence[held], _REJECTED)
        shares = [_mean_of(absent[mask]) for mask in (~known[held], known[held])]
        return replace(fitted, recognised=shares[0], rejected=shares[1])

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
        """Find the threshold on P that keeps the share of wrong answers at ``max_error`` or below.

        An earlier version did not count unknown classes with a single query each, nor, with more than half of the
        queries unknown, classes as a whole. Its calibrations promise nothing then.
        """
        moments = self.counts.moments
        uncounted = moments is not None and (
            (self.unknown > 0 and moments.clusters == 0) or (self.unknown > BY_CLASS and moments.unknown is None)
        )
        if uncounted:
            reason = (
                f"cannot promise at most {100 * max_error:.3g} % wrong matches here: an earlier version calibrated "
            )
            reason += "this gallery and did not count its unknown classes; calibrate again"
            return RiskGuarantee(max_error, confidence, None, self.counts.total, 0, reason=reason)
        return self.counts.find_guarantee(max_error, confidence)

    def novelty(self, evidence: Evidence) -> Tensor:
        """The p-value of "the query's class is in the gallery" [n]: p ≤ a for at most a share a of known queries."""
        return conformal_p(_novelty_score(self.confidence_model, self.novelty_score, evidence), self.novelty_reference)

    def absent(self, evidence: Evidence, share: float) -> Tensor:
        """Which queries are probably not in the collection [n]; at most ``share`` of the known ones are among them.

        Their p-value is at most the share, and the first result is more likely wrong than right: if it is right, the
        query's class is in the gallery.
        """
        return (self.novelty(evidence) <= share) & (self.probability(evidence) < _LIKELY)

    def find_set_guarantee(self, max_error: float, confidence: float = 0.9) -> RiskGuarantee:
        """Find the doubt at which at most ``max_error`` of the known queries' sets are without a right image."""
        if self.sets is None:
            raise ValueError("this calibration has no result sets: it was fitted without same_class")
        return self.sets.counts.find_guarantee(max_error, confidence, what="result sets without a right image")

    def set_sizes(self, evidence: Evidence, doubt: float) -> Tensor:
        """The size of each query's result set at a doubt that `find_set_guarantee` gave [n]."""
        if self.sets is None:
            raise ValueError("this calibration has no result sets: it was fitted without same_class")
        return choose_set_sizes(self.probability(evidence), self.sets.still_wrong, doubt)

    def match_probability(self, distances: Tensor) -> Tensor:
        """P(an image listed at this distance is of the query's class), of the distances' shape; it falls with them."""
        if self.match_curve is None:
            raise ValueError("this calibration has no curve of single results: it was fitted without their distances")
        return self.match_curve.probability(distances)

    def position(self, name: str, values: Tensor) -> Tensor:
        """The share of the fitting queries whose score ``name`` is smaller [n]; 1 if it is smaller in all of them."""
        marks = torch.tensor(self.percentiles[name], dtype=torch.float64)
        return torch.searchsorted(marks, values.detach().cpu().double().contiguous()) / len(marks)

    def drift(self, now: Profile) -> Drift:
        """Measure how much a gallery has changed since the calibration."""
        if self.profile is None:
            raise ValueError("this calibration has no profile of its gallery to compare with")
        return measure_drift(self.profile, now)

    def save(self, path: Path) -> None:
        """Write the calibration as JSON."""
        write_atomic(path, self.encode())

    @classmethod
    def load(cls, path: Path, *, model: str | None = None) -> "Calibration":
        """Read a calibration. A damaged file, or one that belongs to another model, raises ``ValueError``."""
        return cls.decode(path.read_bytes(), str(path), model=model)

    def encode(self) -> bytes:
        """The calibration as JSON, with a checksum."""
        return encode_record(self, kind=_KIND, version=_VERSION)

    @classmethod
    def decode(cls, data: bytes, place: str, *, model: str | None = None) -> "Calibration":
        """Read what `encode` wrote; ``place`` says in errors where it came from."""
        try:
            found = decode_record(data, place, cls, kind=_KIND, version=_VERSION)
        except ValueError as error:
            raise ValueError(f"{error}: calibrate again") from None
        if model is not None and found.model != model:
            raise ValueError(f"{place} belongs to another model ({found.model!r}, not {model!r}): calibrate again")
        return found


def split_queries(n: int, held_out: float = 0.5, seed: int = 0, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split n queries at random: those that `Calibration.fit` counts, and those that it fits to.

    No group is divided, if groups are given.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be between 0 and 1, got {held_out!r}")
    group = torch.arange(n) if groups is None else groups.unique(return_inverse=True)[1]
    total = int(group.max()) + 1 if n else 0
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    counted = torch.isin(group, order[: int(total * held_out)])
    return counted.nonzero().flatten(), (~counted).nonzero().flatten()


def draw_mixture(rows: Tensor, known: Tensor, share: float, seed: int) -> Tensor:
    """As many of the queries ``rows`` as possible, drawn so that ``share`` of them are unknown, ascending."""
    own, other = rows[known[rows]], rows[~known[rows]]
    if share == 0 or len(other) == 0:
        return own
    if len(own) == 0:
        return other
    generator = torch.Generator().manual_seed(seed)
    unknown = min(len(other), round(len(own) * share / (1 - share)))
    kept = min(len(own), round(len(other) * (1 - share) / share))
    parts = [(own, kept), (other, unknown)]
    chosen = [x[torch.randperm(len(x), generator=generator)[: max(1, size)]] for x, size in parts]
    return torch.cat(chosen).sort().values


def _is_better_than_chance(score: Tensor, wrong: Tensor, groups: Tensor, seed: int) -> bool:
    """Whether a score ranks wrong answers above right ones, by the 95 % interval over resampled groups."""
    if len(score) == 0 or not bool(wrong.any()) or bool(wrong.all()):
        return False
    span = interval(resampled_auroc(score, wrong, draw_classes(groups, rounds=_ROUNDS, seed=seed)))
    return span is not None and span[0] > 0.5


def _mean_of(mask: Tensor) -> float | None:
    return float(mask.double().mean()) if len(mask) else None


def _choose_novelty_score(model: ConfidenceModel, evidence: Evidence, known: Tensor) -> str:
    """The score that separates unknown queries best; the nearest distance if there are no unknown ones."""
    if bool(known.all()) or not bool(known.any()):
        return "nearest"
    return max(_NOVELTY_SCORES, key=lambda name: auroc(_novelty_score(model, name, evidence), ~known))


def _novelty_score(model: ConfidenceModel, name: str, evidence: Evidence) -> Tensor:
    return model.doubt(evidence) if name == "doubt" else evidence.scores[name].detach().cpu().double()


def _fit_sets(p: Tensor, same_class: Tensor, fitted: Tensor) -> ResultSets:
    """Result sets of known queries: P and lists of those that are counted, and the lists of those that are fitted."""
    largest = same_class.shape[1]
    places, fitted_places = (
        torch.where(x.any(dim=1), x.int().argmax(dim=1) + 1, largest + 1) for x in (same_class, fitted)
    )
    late = fitted_places[fitted_places > 1]
    still = [(1 + int((late > m).sum())) / (1 + len(late)) for m in range(1, largest + 1)]
    sizes = [choose_set_sizes(p, still, doubt) for doubt in _DOUBTS]
    missed = tuple(int((places > size).sum()) for size in sizes)
    counts = ThresholdCounts(_DOUBTS, (len(p),) * len(_DOUBTS), missed, len(p), (0,))
    return ResultSets(tuple(still), counts, tuple(float(s.double().mean()) if len(s) else 0.0 for s in sizes))


def _percentiles(x: Tensor) -> tuple[float, ...]:
    marks: list[float] = x.detach().cpu().double().quantile(torch.linspace(0, 1, 101).double()).tolist()
    return tuple(marks)


# -------------------- records: dataclasses in checked JSON files --------------------


def encode_record(record: object, *, kind: str, version: int) -> bytes:
    """Encode ``record``, made of dataclasses, tuples, dicts, numbers and strings, with its kind and a checksum."""
    content = asdict(record)  # type: ignore[call-overload]
    whole = {"format": kind, "version": version, "checksum": _checksum(content), "content": content}
    return (json.dumps(whole, ensure_ascii=False, allow_nan=False) + "\n").encode()


def decode_record(data: bytes, path: str, record: type[T], *, kind: str, version: int) -> T:
    """Read a record; one that is damaged, or of another kind or version, is a ``ValueError`` that names ``path``.

    A field that was ``added`` later (its metadata say so) may be missing: an earlier program wrote the record.
    """
    try:
        whole = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} is damaged, or no file of kind {kind!r}: it is not JSON") from None
    if not isinstance(whole, dict) or whole.get("format") != kind:
        raise ValueError(f"{path} is no file of kind {kind!r}")
    if whole.get("version") != version:
        raise ValueError(f"{path} has version {whole.get('version')!r} of {kind!r}; this program reads {version}")
    if whole.get("checksum") != _checksum(whole.get("content")):
        raise ValueError(f"{path} is damaged: its checksum does not fit its content")
    try:
        value: T = _parse_value(record, whole["content"], "content")
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return value


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parse_value(kind: Any, x: Any, place: str) -> Any:
    """Convert ``x`` to a value of type ``kind``; a ``ValueError`` names the place that does not fit."""
    if is_dataclass(kind):
        names = {f.name for f in fields(kind)}
        needed = {f.name for f in fields(kind) if not f.metadata.get("added")}
        if not isinstance(x, dict) or not needed <= set(x) <= names:
            raise ValueError(f"{place} should hold {', '.join(sorted(names))}")
        hints = get_type_hints(kind)
        values = {name: _parse_value(hints[name], x[name], f"{place}.{name}") for name in x}
        return kind(**values)  # type: ignore[operator]
    origin, inside = get_origin(kind), get_args(kind)
    if origin is types.UnionType:  # only "… | None"
        return None if x is None else _parse_value(inside[0], x, place)
    if origin is tuple and isinstance(x, list) and (inside[-1] is ... or len(inside) == len(x)):
        kinds = [inside[0]] * len(x) if inside[-1] is ... else inside
        return tuple(_parse_value(k, v, place) for k, v in zip(kinds, x, strict=True))
    if origin is dict and isinstance(x, dict):
        return {name: _parse_value(inside[1], v, f"{place}.{name}") for name, v in x.items()}
    if kind is float and type(x) in (int, float) and math.isfinite(x):
        return float(x)
    if kind in (int, str, bool) and type(x) is kind:
        return x
    raise ValueError(f"{place} is not {getattr(kind, '__name__', kind)}")

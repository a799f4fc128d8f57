"""Risk control: guarantees on error rates that hold for a finite sample, and checks whether they still apply.

Of n independent queries k went wrong. The true rate R is then at most (Clopper and Pearson, 1934)

    upper(k, n, δ) = the R with P(Bin(n, R) ≤ k) = δ        R exceeds it with probability δ at most

so the p-value of "R > ε" is P(Bin(n, ε) ≤ k), and upper(k, n, δ) ≤ ε means the same as p ≤ δ.

Choice among thresholds (learn then test: Angelopoulos et al., arXiv 2110.01052). The order of the thresholds does not
depend on the sample's answers. They are tested one after the other. Some of them are starts: each start receives
δ/(number of starts). If a test passes, its level goes on to the next threshold; if it fails, the level is lost. With
one start this is fixed-sequence testing, with more starts the fallback procedure (Wiens, 2003). With probability 1 − δ
no threshold passes whose rate is above ε. So any threshold that passed may be used: the one that answers most. The
queries that P was fitted to are not part of the sample. So they may choose the start for each ε: the threshold at which
their own p-value is the smallest. A single start keeps the whole of δ. A threshold that passed at a smaller error rate
(one of those that reports offer) is used too, so that a larger rate never answers less. The sequence of each of these
rates has its own start and the whole of δ. So for their union it is not shown that no threshold above ε passes with
probability 1 − δ: up to nine sequences could fail in turn. They rest on the same counts and mostly fail together; how
often promises break, unions included, is measured (docs/calibration.md).

ECE = Σ over bins of (queries in the bin / n) · |mean P − share of right answers|        (Naeini et al., 2015)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.calibration.cluster_bound import BY_CLASS, ClusterMoments
from idml.calibration.evidence import ROUNDING, Profile

SMALLEST_RATE = 1e-9  # a smaller error rate would need more calibration queries than anybody has
ERROR_RATES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # those that reports and the search page offer

# Thresholds answer 1/128, 2/128 … 128/128 of the fitting queries, below 1/4 also shares in between, so that each
# answers at most 5 % more than the one before; the first one answers 32. Where nothing chooses the start, tests start
# at 1/8, 1/4 and 1/2, and with enough queries at 1/32 and 1/16. In simulations (target errors 5, 10, 20 %, unknown 0,
# 25, 50 %, 300 to 3000 queries) this answered about as much as 2, 4 or 6 starts or more.
_STEPS, _FINE, _STARTS, _EARLY, _ENOUGH = 128, 1.05, (16, 32, 64), (4, 8), 32

_SHIFT, _CHANCE = 0.1, 0.01  # of drift: Kolmogorov–Smirnov distance, p-value
FEWEST_CLUSTERS, ENOUGH_CLUSTERS = 10, 50  # with fewer clusters there is no promise, or an approximate one
_ROUNDING, _MOST_SPREAD, _MOST_QUERIES = 1e-9, 10.0, 1e12  # bounds of the sums in a stored calibration
GROWTH = 0.2  # a gallery may grow or shrink by this share before its calibration is void
_NOTICED, _CERTAIN = 20, 0.01  # of unknown queries: how many answers to look at, p-value


# -------------------- bounds and tests --------------------


def upper_bound(wrong: int, total: int, level: float) -> float:
    """Clopper–Pearson: the rate that the true rate exceeds with probability ``level`` at most.

    >>> round(upper_bound(0, 45, 0.1), 4), upper_bound(3, 3, 0.1), upper_bound(0, 0, 0.1)
    (0.0499, 1.0, 1.0)
    """
    from scipy.special import betaincinv

    if not 0 <= wrong <= total:
        raise ValueError(f"cannot have counted {wrong} of {total}")
    return 1.0 if wrong == total else float(betaincinv(wrong + 1, total - wrong, 1 - level))


def clopper_pearson(count: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The two-sided interval of a share, (1 − confidence)/2 on each side; (0, 1) if nothing was counted.

    >>> low, high = clopper_pearson(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4439, 0.9748)
    """
    tail = (1 - check_rate("confidence", confidence)) / 2
    return 1 - upper_bound(total - count, total, tail), upper_bound(count, total, tail)


def fewest_queries(max_error: float, level: float) -> int:
    """The smallest n with upper(0, n, level) ≤ max_error, that is (1 − max_error)ⁿ ≤ level.

    >>> fewest_queries(0.05, 0.1)
    45
    """
    return math.ceil(math.log(level) / math.log1p(-max_error))


def p_values(wrong: Sequence[int], total: Sequence[int], max_error: float) -> list[float]:
    """P(Bin(total, max_error) ≤ wrong) for each pair: small if the true rate is below ``max_error``.

    >>> [round(p, 4) for p in p_values([0, 0], [45, 0], 0.05)]
    [0.0994, 1.0]
    """
    from scipy.special import bdtr

    k, n = np.asarray(wrong, dtype=np.float64), np.asarray(total, dtype=np.int64)
    out: list[float] = np.where(n == 0, 1.0, bdtr(k, n, max_error)).tolist()
    return out


def clustered_p_values(moments: ClusterMoments, max_error: float) -> list[float]:
    """The p-values of "more than ``max_error`` of the answers are wrong" for queries that hang together.

    `idml.calibration.cluster_bound` has the formulas. With too few clusters all of them are 1.
    """
    from scipy.special import stdtr

    answered, wrong, n = (np.array(x) for x in (moments.answered, moments.wrong, moments.effective))
    k = np.divide(n * wrong, answered, out=np.zeros(len(n)), where=answered > 0)
    k, n = (np.where(np.abs(x - x.round()) < 1e-9 * (1 + n), x.round(), x) for x in (k, n))  # whole counts stay whole
    by_image = _lower_tail(k, n, max_error)
    if moments.clusters == 0:
        return [float(x) for x in by_image]
    if moments.clusters < FEWEST_CLUSTERS:
        return [1.0] * len(n)
    terms = np.array([1.0, -2 * max_error, max_error**2])
    spread = np.array(moments.variance) @ terms + 2 * np.maximum(0.0, np.array(moments.shared) @ terms)
    z = wrong - max_error * answered
    ratio = np.divide(z, np.sqrt(spread.clip(0)), out=np.where(z < 0, -np.inf, np.inf), where=spread > 1e-30)
    by_class = stdtr(moments.clusters - 1, ratio)
    if (unknown := moments.unknown) is not None:
        theirs = np.array(unknown.answered)
        largest = (max_error * (answered - theirs) - (wrong - theirs)) / ((1 - max_error) * unknown.share)
        whole = _lower_tail(unknown.classes * theirs / unknown.share, unknown.classes, largest.clip(0, 1))
        by_class = np.maximum(by_class, np.where(largest < 1, whole, 0.0))
    return [float(x) for x in np.maximum(by_image, by_class)]


def _lower_tail(
    k: NDArray[np.float64], n: NDArray[np.float64] | float, rate: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """P(Bin(n, rate) ≤ k) for counts that need not be whole, by the beta distribution."""
    from scipy.special import betainc

    out: NDArray[np.float64] = np.where(n > k, betainc(np.maximum(n - k, 1e-300), k + 1, 1 - rate), 1.0)
    return out


def _find_missing_classes(moments: ClusterMoments, max_error: float, level: float) -> str:
    """Say that more unknown classes are needed even if none of them is answered; empty if there are enough."""
    unknown = moments.unknown
    if unknown is None or (largest := max_error * (1 - unknown.share) / ((1 - max_error) * unknown.share)) >= 1:
        return ""
    needed = math.ceil(math.log(level) / math.log1p(-largest) - 1e-9) if largest > 0 else 0
    if unknown.classes >= needed:
        return ""
    return (
        f"the unknown classes count as {unknown.classes:.0f} of equal size, at least {needed:,} are needed with "
        f"{100 * unknown.share:.3g} % unknown queries"
    )


def _are_possible(moments: ClusterMoments, thresholds: int) -> bool:
    """Whether a sample can have these sums: A and E are at most 1, and so is what a cluster adds to V and C."""
    if (unknown := moments.unknown) is not None:
        shares = zip(unknown.answered, moments.wrong, strict=False)
        if not (
            len(unknown.answered) == thresholds
            and BY_CLASS < unknown.share <= 1 <= unknown.classes <= _MOST_QUERIES
            and all(0 <= theirs <= min(wrong, unknown.share) + _ROUNDING for theirs, wrong in shares)
        ):
            return False
    columns = (moments.answered, moments.wrong, moments.effective, moments.variance, moments.shared)
    shares = zip(moments.wrong, moments.answered, strict=False)
    spread = (abs(x) for row in (*moments.variance, *moments.shared) for x in row)
    return (
        all(len(column) == thresholds for column in columns)
        and all(0 <= wrong <= answered + _ROUNDING <= 1 + 2 * _ROUNDING for wrong, answered in shares)
        and all(x <= _MOST_SPREAD for x in spread)
        and all(0 <= n <= _MOST_QUERIES for n in (*moments.effective, moments.clusters))
    )


def sequential_test(p: Sequence[float], level: float, starts: Sequence[int] = (0,)) -> list[bool]:
    """Which of the tests pass, in their order; the probability that any passes wrongly is ``level`` at most.

    >>> sequential_test([0.01, 0.04, 0.2, 0.001], 0.05)
    [True, True, False, False]
    >>> sequential_test([0.01, 0.04, 0.2, 0.001], 0.05, starts=[0, 3])
    [True, False, False, True]
    """
    passed, carried = [], 0.0
    for i, value in enumerate(p):
        carried += level / len(starts) if i in starts else 0.0
        passed.append(value <= carried and carried > 0)
        carried = carried if passed[-1] else 0.0
    return passed


def check_rate(name: str, x: float) -> float:
    """Return a share; a ``ValueError`` names one that is not between 0 and 1, or very small."""
    if not 0 < x < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {x!r}")
    if x < SMALLEST_RATE:
        raise ValueError(f"{name} must be at least {SMALLEST_RATE:g}, got {x!r}")
    return x


# -------------------- guarantees --------------------


@dataclass(frozen=True)
class RiskGuarantee:
    """The lowest threshold that keeps an error rate, or the reason why there is none.

    Answer if P ≥ ``threshold``: with probability ``confidence`` over the calibration queries, at most ``max_error`` of
    such answers are wrong, among all queries like those. ``answered`` of the ``total`` calibration queries have
    P ≥ threshold, ``wrong`` of these have a wrong answer. With fewer than ``needed`` queries there is no threshold,
    even if all answers are right. ``share`` is the share of the queries that are answered, and ``wrong_share`` that of
    wrong ones among them, if queries are weighted. The guarantee is ``approximate`` if it rests on too few classes
    (`idml.calibration.cluster_bound`).
    """

    max_error: float
    confidence: float
    threshold: float | None
    total: int
    needed: int
    answered: int = 0
    wrong: int = 0
    reason: str = ""
    share: float | None = None
    approximate: bool = False
    wrong_share: float | None = None

    @property
    def possible(self) -> bool:
        """Whether there is a threshold."""
        return self.threshold is not None

    @property
    def coverage(self) -> float:
        """The share of the calibration queries that are answered."""
        if self.share is not None:
            return self.share
        return self.answered / self.total if self.total else 0.0

    @property
    def observed(self) -> float:
        """The share of wrong answers among the calibration queries that are answered."""
        if self.wrong_share is not None:
            return self.wrong_share
        return self.wrong / self.answered if self.answered else 0.0


@dataclass(frozen=True)
class ThresholdCounts:
    """How many of ``total`` calibration queries each threshold answers, and how many of these are wrong.

    The strictest threshold comes first. With ``moments`` the queries are weighted and hang together; without, each
    counts once and they are independent. ``pilot`` has the sums of the queries that P was fitted to. It chooses where
    the tests start; without it, they start at ``starts``.
    """

    thresholds: tuple[float, ...]
    answered: tuple[int, ...]
    wrong: tuple[int, ...]
    total: int
    starts: tuple[int, ...]
    moments: ClusterMoments | None = None
    pilot: ClusterMoments | None = None

    def __post_init__(self) -> None:
        n, counted = len(self.thresholds), zip(self.wrong, self.answered, strict=False)
        if n == 0 or len(self.answered) != n or len(self.wrong) != n:
            raise ValueError("the table of thresholds is empty, or its columns have different lengths")
        if not all(0 <= wrong <= answered <= self.total <= _MOST_QUERIES for wrong, answered in counted):
            raise ValueError("the table of thresholds has impossible counts")
        if list(self.answered) != sorted(self.answered):
            raise ValueError("a lower threshold of the table answers fewer queries")
        if not all(0 <= t <= 1 for t in self.thresholds) or list(self.thresholds) not in (
            sorted(self.thresholds),
            sorted(self.thresholds, reverse=True),
        ):
            raise ValueError("the thresholds are not between 0 and 1, or not in order")
        if not self.starts or list(self.starts) != sorted({*self.starts} & {*range(n)}):
            raise ValueError("the table of thresholds has impossible starts")
        if any(x is not None and len(x.answered) != n for x in (self.moments, self.pilot)):
            raise ValueError("the table of thresholds is empty, or its columns have different lengths")
        for moments in (self.moments, self.pilot):
            if moments is not None and not _are_possible(moments, n):
                raise ValueError("the sums over clusters have impossible values")

    @classmethod
    def of(
        cls,
        p: Tensor,
        correct: Tensor,
        thresholds: Sequence[float],
        starts: Sequence[int],
        moments: ClusterMoments | None = None,
        pilot: ClusterMoments | None = None,
    ) -> "ThresholdCounts":
        """Count a sample. The thresholds must have been chosen without looking at it."""
        known, right = p.double().sort().values, p[correct].double().sort().values
        t = torch.tensor(thresholds, dtype=torch.float64)
        answered, sound = (len(x) - torch.searchsorted(x, t) for x in (known, right))
        return cls(
            tuple(thresholds),
            tuple(answered.tolist()),
            tuple((answered - sound).tolist()),
            len(p),
            tuple(starts),
            moments,
            pilot,
        )

    def find_guarantee(self, max_error: float, confidence: float, *, what: str = "wrong matches") -> RiskGuarantee:
        """Find the lowest threshold at which at most ``max_error`` of the answers are wrong, see the head of this file.

        The guarantee holds for each ``max_error`` by itself, if that is chosen without looking at this sample. With a
        ``pilot`` it is that of several sequences of tests, each with the whole of δ: measured, not proved.

        >>> counts = ThresholdCounts((0.9, 0.0), (60, 100), (0, 20), 100, (0,))
        >>> counts.find_guarantee(0.05, 0.9).threshold
        0.9
        >>> counts.find_guarantee(0.01, 0.9).reason
        'cannot promise at most 1 % wrong matches here: there are 100 calibration queries, at least 384 are needed'
        """
        level = 1 - check_rate("confidence", confidence)
        starts = self._choose_starts(check_rate("max_error", max_error))
        fewest = fewest_queries(max_error, level / len(starts))
        shares = [self.answered[i] / self.total for i in starts if self.answered[i]]
        needed = math.ceil(fewest / max(shares, default=1.0) - 1e-9)  # a start sees only the queries that it answers
        passed = self._test_thresholds(max_error, level)
        moments = self.moments
        if not any(passed):
            reason = f"cannot promise at most {100 * max_error:.3g} % {what} here: "
            if moments is not None and 0 < moments.clusters < FEWEST_CLUSTERS:
                reason += (
                    f"{moments.clusters} class{'es were' if moments.clusters > 1 else ' was'} counted, at least "
                    f"{FEWEST_CLUSTERS} are needed to know about queries of unknown classes (without such queries: "
                    "--unknown 0)"
                )
            elif moments is not None and (few := _find_missing_classes(moments, max_error, level)):
                reason += f"{few}; {self._describe_smallest_rate(level)}"
            elif self.total < needed:
                reason += f"there are {self.total} calibration queries, at least {needed} are needed"
            else:
                reason += f"there were too many in the calibration; {self._describe_smallest_rate(level)}"
            return RiskGuarantee(max_error, confidence, None, self.total, needed, reason=reason)
        i = max(j for j, ok in enumerate(passed) if ok)
        return RiskGuarantee(
            max_error,
            confidence,
            self.thresholds[i],
            self.total,
            needed,
            self.answered[i],
            self.wrong[i],
            share=None if moments is None else moments.answered[i],
            approximate=moments is not None and 0 < moments.clusters < ENOUGH_CLUSTERS,
            wrong_share=moments.wrong[i] / moments.answered[i] if moments is not None and moments.answered[i] else None,
        )

    def _test_thresholds(self, max_error: float, level: float) -> list[bool]:
        moments = self.moments
        if moments is None:
            return sequential_test(p_values(self.wrong, self.answered, max_error), level, self.starts)
        rates = [max_error]
        if self.pilot is not None:
            rates += [rate for rate in ERROR_RATES if rate < max_error]
        tests = [sequential_test(clustered_p_values(moments, rate), level, self._choose_starts(rate)) for rate in rates]
        return [any(passed) for passed in zip(*tests, strict=True)]

    def _choose_starts(self, max_error: float) -> tuple[int, ...]:
        """Where the tests start: where the fitting queries are surest, the lowest such threshold; else ``starts``."""
        if self.pilot is None:
            return self.starts
        p = clustered_p_values(self.pilot, max_error)
        least = min(p)
        return (max(i for i, value in enumerate(p) if value == least),) if least < 1 else self.starts

    def _describe_smallest_rate(self, level: float) -> str:
        """Say about which error rate could be guaranteed: the smallest full per cent at which a threshold passes."""
        rates = [i / 100 for i in range(1, 100)]
        low, high = 0, len(rates)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if any(self._test_thresholds(rates[middle], level)) else (middle + 1, high)
        return f"about {low + 1} % could be promised" if low < len(rates) else "nothing can be promised"


def candidate_thresholds(p: Tensor) -> tuple[list[float], list[int]]:
    """Thresholds that answer more and more of the queries with these P, the last one all; and the places of starts."""
    falling = p.sort(descending=True).values
    first = min(_ENOUGH / max(1, len(p)), _STARTS[0] / _STEPS)
    between = [first * _FINE**i for i in range(math.ceil(math.log(0.25 / first, _FINE)))]
    shares = sorted({*between, *(step / _STEPS for step in range(1, _STEPS + 1) if step / _STEPS >= first)})
    starts = [*(start for start in _EARLY if len(p) * start >= _ENOUGH * _STEPS), *_STARTS]
    rows = [max(0, math.ceil(len(p) * share - 1e-9) - 1) for share in shares]
    return [*falling[rows[:-1]].tolist(), 0.0], [shares.index(start / _STEPS) for start in starts]


# -------------------- novelty and result sets --------------------


def conformal_p(scores: Tensor, reference: Tensor | Sequence[float]) -> Tensor:
    """(1 + number of reference scores ≥ score) / (n + 1) [m]: how usual a score is among the n of the reference.

    A score that is exchangeable with the reference has p ≤ a with probability a at most, for every a.

    >>> conformal_p(torch.tensor([0.5, 9.0]), [1.0, 2.0, 3.0])
    tensor([1.0000, 0.2500], dtype=torch.float64)
    """
    ranked = torch.as_tensor(reference, dtype=torch.float64).sort().values
    above = len(ranked) - torch.searchsorted(ranked, scores.detach().cpu().double().contiguous())
    return (1 + above).double() / (len(ranked) + 1)


def choose_set_sizes(p: Tensor, still_wrong: Sequence[float], doubt: float) -> Tensor:
    """The size of each query's result set: the smallest m with (1 − P)·h_m ≤ doubt, or the largest possible m.

    h_m (``still_wrong``, from h₁ = 1 down) is the share of queries with a wrong first result whose first m results are
    all wrong. So (1 − P)·h_m estimates the probability that a set of m results holds no right image.

    >>> choose_set_sizes(torch.tensor([0.99, 0.6, 0.1]), [1.0, 0.5, 0.25], 0.2)
    tensor([1, 2, 3])
    """
    h = torch.tensor(still_wrong, dtype=torch.float64)
    enough = (1 - p.double()).unsqueeze(1) * h <= doubt
    return torch.where(enough.any(dim=1), enough.int().argmax(dim=1) + 1, len(h))


# -------------------- reliability --------------------


@dataclass(frozen=True)
class ReliabilityBin:
    """Queries with low ≤ P < high (≤ in the last bin): how many, their mean P, the share of right answers."""

    low: float
    high: float
    count: int
    probability: float
    accuracy: float
    interval: tuple[float, float]  # of the accuracy: Clopper–Pearson, 95 %

    def __post_init__(self) -> None:
        shares = (self.low, self.high, self.probability, self.accuracy, *self.interval)
        if self.count < 1 or self.low >= self.high or not all(0 <= share <= 1 for share in shares):
            raise ValueError("a bin of the reliability diagram has impossible values")


def reliability_bins(p: Tensor, correct: Tensor, *, bins: int = 10) -> list[ReliabilityBin]:
    """The reliability diagram: equally wide bins, without the empty ones.

    >>> reliability_bins(torch.tensor([0.2, 0.9, 1.0]), torch.tensor([False, True, True]), bins=2)[1].accuracy
    1.0
    """
    p, right = _check_probabilities(p, correct)
    place = (p * bins).long().clamp_max(bins - 1)
    out = []
    for i in place.unique().tolist():
        inside = place == i
        n, k = int(inside.sum()), int(right[inside].sum())
        mean = float(p[inside].mean())
        out.append(ReliabilityBin(i / bins, (i + 1) / bins, n, mean, k / n, clopper_pearson(k, n)))
    return out


def expected_calibration_error(bins: Sequence[ReliabilityBin]) -> float:
    """ECE, see the head of this file.

    >>> expected_calibration_error(reliability_bins(torch.tensor([0.75, 0.75]), torch.tensor([True, False])))
    0.25
    """
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.probability - b.accuracy) for b in bins) / total


def _check_probabilities(p: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in float64 and the mask of right answers [n], checked."""
    if p.ndim != 1 or len(p) == 0 or correct.dtype != torch.bool or correct.shape != p.shape:
        raise ValueError(
            f"need P [n] and a bool mask [n], got {list(p.shape)} and {correct.dtype} {list(correct.shape)}"
        )
    bad = (~((p >= 0) & (p <= 1))).nonzero().flatten()
    if len(bad):
        raise ValueError(f"{len(bad)} of {len(p)} probabilities are not in [0, 1] (first: number {int(bad[0])})")
    return p.detach().cpu().double(), correct.cpu()


# -------------------- drift --------------------


@dataclass(frozen=True)
class Drift:
    """How a gallery differs from that of the calibration. If it has ``changed``, the guarantees no longer apply."""

    changed: bool
    size_ratio: float
    distance: float  # Kolmogorov–Smirnov: the largest difference between the two distributions of d₁
    p_value: float
    reason: str
    """What has changed. For a small change that the guarantees cover, how much the size has changed, or nothing."""


def measure_drift(then: Profile, now: Profile) -> Drift:
    """Compare two profiles of a gallery.

    The guarantees cover a gallery that is up to 20 % larger or smaller. It has changed too much beyond that, or if the
    distribution of d₁ has moved by 0.1 or more (Kolmogorov–Smirnov) and the probability of chance is below 1 %. Large
    galleries make every small move significant, so the size of the move counts too. Distances that are mere rounding
    count as 0.

    >>> measure_drift(Profile(100, (0.1, 0.2)), Profile(300, (0.1, 0.2))).reason
    'the gallery is 200 % larger than at calibration'
    >>> measure_drift(Profile(100, (0.1, 0.2)), Profile(110, (0.1, 0.2))).changed
    False
    """
    from scipy.stats import ks_2samp

    ratio = now.size / then.size
    d_then, d_now = ([d if d >= ROUNDING else 0.0 for d in profile.nearest] for profile in (then, now))
    test = ks_2samp(d_then, d_now, method="asymp")  # the exact test warns if it cannot be computed
    distance, p = float(test.statistic), float(test.pvalue)
    reasons = []
    outgrown = describe_outgrown(then.size, now.size)
    if outgrown:
        reasons.append(outgrown)
    if distance >= _SHIFT and p < _CHANCE:
        mean_then, mean_now = (sum(x.nearest) / len(x.nearest) for x in (then, now))
        side = "farther from" if mean_now > mean_then else "nearer to"
        reasons.append(f"its images lie {side} each other than at calibration")
    if reasons:
        return Drift(True, ratio, distance, p, "; ".join(reasons))
    covered = f"{_describe_size(ratio)}; promises cover {100 * GROWTH:.0f} %" if abs(ratio - 1) >= 0.005 else ""
    return Drift(False, ratio, distance, p, covered)


def describe_outgrown(then: int, now: int) -> str:
    """Say that the number of images has changed by more than the guarantees cover; empty if it has not.

    >>> describe_outgrown(100, 130), describe_outgrown(100, 110)
    ('the gallery is 30 % larger than at calibration', '')
    """
    return _describe_size(now / then) if abs(now / then - 1) > GROWTH + 1e-9 else ""


def _describe_size(ratio: float) -> str:
    return f"the gallery is {100 * abs(ratio - 1):.0f} % {'larger' if ratio > 1 else 'smaller'} than at calibration"


# -------------------- more unknown queries than calibrated --------------------


def notice_unknown(flagged: int, total: int, *, recognised: float, rejected: float, share: float) -> float | None:
    """Estimate the share of unknown queries from answers, if it is clearly above the calibrated ``share``.

    Of the ``total`` latest queries, ``flagged`` were answered with *not in the collection*. In the calibration a share
    ``recognised`` of the unknown queries and ``rejected`` of the known ones were. None if there are fewer than 20
    queries, if unknown queries are rarely recognised, or if so many flagged ones have a probability of 1 % or more.

    >>> notice_unknown(20, 100, recognised=0.6, rejected=0.04, share=0.25)
    >>> round(notice_unknown(48, 100, recognised=0.6, rejected=0.04, share=0.25), 2)
    0.79
    """
    from scipy.stats import binom

    if total < _NOTICED or recognised < 2 * rejected or recognised - rejected < 0.05:
        return None
    expected = share * recognised + (1 - share) * rejected
    if float(binom.sf(flagged - 1, total, expected)) >= _CERTAIN:
        return None
    return min(1.0, (flagged / total - rejected) / (recognised - rejected))

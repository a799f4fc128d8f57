"""Promises that hold for a finite sample: bounds on error rates, and thresholds chosen so that they hold.

Of n independent queries k went wrong. The true rate R is then at most (Clopper and Pearson, 1934)

    upper(k, n, δ) = the R with P(Bin(n, R) ≤ k) = δ        exceeded by R with probability δ at most

so the p-value of "R > ε" is P(Bin(n, ε) ≤ k), and upper(k, n, δ) ≤ ε says the same as p ≤ δ.

To choose among thresholds (learn then test: Angelopoulos et al., arXiv 2110.01052), they are put in an order that does
not depend on the sample's answers, and tested one after the other: at some of them, the starts, δ/(number of starts)
comes in; where a test passes, its level goes on to the next; where it fails, it is lost. With one start this is
fixed-sequence testing, with more the fallback procedure (Wiens, 2003). With probability 1 − δ no threshold passes whose
rate is above ε, so any that passed may be used: the one that answers most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from idml.calibration.evidence import Profile

ERROR_RATES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)  # those that reports and the search page offer


def upper_bound(wrong: int, total: int, level: float) -> float:
    """Clopper–Pearson: the rate that the true one exceeds with probability ``level`` at most.

    >>> round(upper_bound(0, 45, 0.1), 4), upper_bound(3, 3, 0.1), upper_bound(0, 0, 0.1)
    (0.0499, 1.0, 1.0)
    """
    from scipy.special import betaincinv

    _check_counts(wrong, total)
    return 1.0 if wrong == total else float(betaincinv(wrong + 1, total - wrong, 1 - level))


def clopper_pearson(count: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The two-sided interval of a share, (1 − confidence)/2 on each side; (0, 1) if nothing was counted.

    >>> low, high = clopper_pearson(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4439, 0.9748)
    """
    tail = (1 - _rate("confidence", confidence)) / 2
    return 1 - upper_bound(total - count, total, tail), upper_bound(count, total, tail)


def least_queries(max_error: float, level: float) -> int:
    """The smallest n with upper(0, n, level) ≤ max_error, that is (1 − max_error)ⁿ ≤ level.

    >>> least_queries(0.05, 0.1)
    45
    """
    return math.ceil(math.log(level) / math.log1p(-max_error))


def p_values(wrong: Sequence[int], total: Sequence[int], max_error: float) -> list[float]:
    """P(Bin(total, max_error) ≤ wrong) for each pair: small where the true rate is below ``max_error``.

    >>> [round(p, 4) for p in p_values([0, 0], [45, 0], 0.05)]
    [0.0994, 1.0]
    """
    from scipy.special import bdtr

    k, n = np.asarray(wrong, dtype=np.float64), np.asarray(total, dtype=np.int64)
    out: list[float] = np.where(n == 0, 1.0, bdtr(k, n, max_error)).tolist()
    return out


def sequential_test(p: Sequence[float], level: float, starts: Sequence[int] = (0,)) -> list[bool]:
    """Which of the tests pass, in their order; the chance that any passes wrongly is ``level`` at most.

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


@dataclass(frozen=True)
class RiskGuarantee:
    """The lowest threshold that keeps a promise, or the reason why none does.

    Answer where P ≥ ``threshold``: with probability ``confidence`` over the calibration queries, at most ``max_error``
    of such answers are wrong, among all queries like those. ``answered`` of the ``total`` calibration queries have
    P ≥ threshold, ``wrong`` of them with a wrong answer. With fewer than ``needed`` not even answers that are all right
    would do.
    """

    max_error: float
    confidence: float
    threshold: float | None
    total: int
    needed: int
    answered: int = 0
    wrong: int = 0
    reason: str = ""

    @property
    def kept(self) -> bool:
        """Whether it can be promised."""
        return self.threshold is not None

    @property
    def coverage(self) -> float:
        """The share of the calibration queries that are answered."""
        return self.answered / self.total if self.total else 0.0

    @property
    def error(self) -> float | None:
        """The share of wrong answers among those."""
        return self.wrong / self.answered if self.answered else None


@dataclass(frozen=True)
class Counts:
    """What a calibration sample says about thresholds, most careful first: answered and wrong at each, of ``total``."""

    thresholds: tuple[float, ...]
    answered: tuple[int, ...]
    wrong: tuple[int, ...]
    total: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, p: Tensor, correct: Tensor, thresholds: Sequence[float], starts: Sequence[int]) -> "Counts":
        """Count. The thresholds must have been chosen without looking at this sample."""
        known, right = p.double().sort().values, p[correct].double().sort().values
        t = torch.tensor(thresholds, dtype=torch.float64)
        answered, sound = (len(x) - torch.searchsorted(x, t) for x in (known, right))
        return cls(
            tuple(thresholds), tuple(answered.tolist()), tuple((answered - sound).tolist()), len(p), tuple(starts)
        )

    def find_guarantee(self, max_error: float, confidence: float, *, what: str = "wrong answers") -> RiskGuarantee:
        """The lowest threshold at which at most ``max_error`` of the answers are wrong, see the head of this file.

        It holds for each ``max_error`` by itself, if that is chosen without looking at this sample.

        >>> counts = Counts((0.9, 0.0), (60, 100), (0, 20), 100, (0,))
        >>> counts.find_guarantee(0.05, 0.9).threshold
        0.9
        >>> counts.find_guarantee(0.01, 0.9).reason
        'cannot promise at most 1 % wrong answers here: 100 calibration queries, and 384 are needed at best'
        """
        level = 1 - _rate("confidence", confidence)
        least = least_queries(_rate("max_error", max_error), level / len(self.starts))
        shares = [self.answered[i] / self.total for i in self.starts if self.answered[i]]
        needed = math.ceil(least / max(shares, default=1.0) - 1e-9)  # a start sees only those it answers
        passed = self._passed(max_error, level)
        if not any(passed):
            why = f"cannot promise at most {100 * max_error:.3g} % {what} here: "
            if self.total < needed:
                why += f"{self.total} calibration queries, and {needed} are needed at best"
            else:
                why += f"there were too many in the calibration; {self._least(level)}"
            return RiskGuarantee(max_error, confidence, None, self.total, needed, reason=why)
        i = max(j for j, ok in enumerate(passed) if ok)
        return RiskGuarantee(
            max_error, confidence, self.thresholds[i], self.total, needed, self.answered[i], self.wrong[i]
        )

    def _passed(self, max_error: float, level: float) -> list[bool]:
        return sequential_test(p_values(self.wrong, self.answered, max_error), level, self.starts)

    def _least(self, level: float) -> str:
        """About the smallest error rate that could be promised: more is promised as the rate rises."""
        rates = [i / 100 for i in range(1, 100)]
        low, high = 0, len(rates)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if any(self._passed(rates[middle], level)) else (middle + 1, high)
        return f"about {low + 1} % could be promised" if low < len(rates) else "nothing can be promised"


def conformal_p(scores: Tensor, reference: Tensor | Sequence[float]) -> Tensor:
    """(1 + number of reference scores ≥ score) / (n + 1) [m]: how usual a score is among the n of the reference.

    A score that is exchangeable with the reference has p ≤ a with probability a at most, for every a.

    >>> conformal_p(torch.tensor([0.5, 9.0]), [1.0, 2.0, 3.0])
    tensor([1.0000, 0.2500], dtype=torch.float64)
    """
    ranked = torch.as_tensor(reference, dtype=torch.float64).sort().values
    above = len(ranked) - torch.searchsorted(ranked, scores.detach().cpu().double().contiguous())
    return (1 + above).double() / (len(ranked) + 1)


def set_sizes(p: Tensor, still_wrong: Sequence[float], doubt: float) -> Tensor:
    """The size of each query's result set: the smallest m with (1 − P)·h_m ≤ doubt, the largest possible if none.

    h_m (``still_wrong``, from h₁ = 1 down) is the share of queries with a wrong first result whose first m results are
    all wrong; so (1 − P)·h_m estimates the probability that a set of m holds no right image.

    >>> set_sizes(torch.tensor([0.99, 0.6, 0.1]), [1.0, 0.5, 0.25], 0.2)
    tensor([1, 2, 3])
    """
    h = torch.tensor(still_wrong, dtype=torch.float64)
    enough = (1 - p.double()).unsqueeze(1) * h <= doubt
    return torch.where(enough.any(dim=1), enough.int().argmax(dim=1) + 1, len(h))


def _rate(name: str, x: float) -> float:
    if not 0 < x < 1:
        raise ValueError(f"{name} must be between 0 and 1, got {x!r}")
    return x


def _check_counts(count: int, total: int) -> None:
    if not 0 <= count <= total:
        raise ValueError(f"cannot have counted {count} of {total}")


# -------------------- reliability --------------------
# Are probabilities what they say? Bins of the reliability diagram, the calibration error, and drift of a gallery.
#
# ECE = Σ over bins of (queries in the bin / n) · |mean P − share of right answers|        (Naeini et al., 2015)


_SHIFT, _CHANCE, _GROWTH = 0.1, 0.01, 2.0  # what counts as much: Kolmogorov–Smirnov distance, p-value, ratio of sizes


@dataclass(frozen=True)
class Bin:
    """Queries with low ≤ P < high (≤ in the last bin): how many, their mean P, the share of right answers."""

    low: float
    high: float
    count: int
    probability: float
    accuracy: float
    interval: tuple[float, float]  # Clopper–Pearson, 95 %


def reliability(p: Tensor, correct: Tensor, *, bins: int = 10) -> list[Bin]:
    """The reliability diagram: equally wide bins, without those that are empty.

    >>> reliability(torch.tensor([0.2, 0.9, 1.0]), torch.tensor([False, True, True]), bins=2)[1].accuracy
    1.0
    """
    p, right = check_probabilities(p, correct)
    place = (p * bins).long().clamp_max(bins - 1)
    out = []
    for i in place.unique().tolist():
        inside = place == i
        n, k = int(inside.sum()), int(right[inside].sum())
        out.append(Bin(i / bins, (i + 1) / bins, n, float(p[inside].mean()), k / n, clopper_pearson(k, n)))
    return out


def expected_calibration_error(bins: Sequence[Bin]) -> float:
    """ECE, see the head of this file.

    >>> expected_calibration_error(reliability(torch.tensor([0.75, 0.75]), torch.tensor([True, False])))
    0.25
    """
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.probability - b.accuracy) for b in bins) / total


def check_probabilities(p: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in float64 and the mask of right answers [n], or a line on what is wrong with them."""
    if p.ndim != 1 or len(p) == 0 or correct.dtype != torch.bool or correct.shape != p.shape:
        raise ValueError(
            f"need P [n] and a bool mask [n], got {list(p.shape)} and {correct.dtype} {list(correct.shape)}"
        )
    bad = (~((p >= 0) & (p <= 1))).nonzero().flatten()
    if len(bad):
        raise ValueError(f"{len(bad)} of {len(p)} probabilities are not in [0, 1] (first: number {int(bad[0])})")
    return p.detach().cpu().double(), correct.cpu()


@dataclass(frozen=True)
class Drift:
    """How a gallery differs from the one of the calibration: ``changed`` says whether promises still count."""

    changed: bool
    size_ratio: float
    distance: float  # Kolmogorov–Smirnov: the largest difference between the two distributions of d₁
    p_value: float
    reason: str


def drift(then: Profile, now: Profile) -> Drift:
    """Compare two profiles of a gallery.

    Much is: twice or half the size, or distances d₁ whose distribution moved by 0.1 and more (Kolmogorov–Smirnov) with
    less than 1 % probability of chance. Large galleries show every small move, so the move itself has to count too.

    >>> drift(Profile(100, (0.1, 0.2)), Profile(300, (0.1, 0.2))).reason
    'the gallery has 3 times as many images as at calibration'
    """
    from scipy.stats import ks_2samp

    ratio = now.size / then.size
    test = ks_2samp(then.nearest, now.nearest, method="asymp")  # the exact one warns where it cannot be computed
    distance, p = float(test.statistic), float(test.pvalue)
    reasons = []
    if not 1 / _GROWTH < ratio < _GROWTH:
        reasons.append(f"the gallery has {ratio:.3g} times as many images as at calibration")
    if distance >= _SHIFT and p < _CHANCE:
        side = (
            "farther from"
            if sum(now.nearest) / len(now.nearest) > sum(then.nearest) / len(then.nearest)
            else "nearer to"
        )
        reasons.append(f"its images lie {side} each other than at calibration")
    return Drift(bool(reasons), ratio, distance, p, "; ".join(reasons))

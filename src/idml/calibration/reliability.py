"""Are probabilities what they say? Bins of the reliability diagram, the calibration error, and drift of a gallery.

ECE = Σ over bins of (queries in the bin / n) · |mean P − share of right answers|        (Naeini et al., 2015)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from idml.calibration.evidence import Profile
from idml.calibration.risk_control import clopper_pearson

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

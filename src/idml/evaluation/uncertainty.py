"""Quality of an uncertainty score: does it rank wrong answers behind right ones?

A score is larger if the model is less certain. Answer the i most certain of n queries, E(i) of them wrong:

    R-AUROC   P(score of a wrong answer > score of a right one), ties counted half
    AURC      1/n · Σ_{i = 1…n} E(i)/i       mean selective risk: errors among the answered       (Geifman et al., 2019)
    AUGRC     1/n · Σ_{i = 1…n} E(i)/n       mean generalised risk: answered and wrong, among all  (Traub et al., 2024)

Both areas are sums over the n coverages i/n. Traub et al. draw AUGRC by trapezoids from coverage 0, which is smaller
by error rate/(2n); so AUGRC = (1 − R-AUROC)·accuracy·error + error²/2 + error/(2n).

Queries of equal score have no order. Over all orders, a group of m with w wrong ones, after i₀ queries with e₀ wrong
ones, has E(i) = e₀ + w·(i − i₀)/m on average, and all figures are linear in E. So ties are exact, and no figure depends
on the order in which the queries are given.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from idml.records import Record

Values = Tensor | np.ndarray | Sequence[float] | Sequence[bool]


def auroc(scores: Tensor, positive: Tensor) -> float:
    """P(score of a positive > score of a negative), ties counted half: the area under the ROC curve.

    >>> auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
    0.75
    """
    if scores.ndim != 1 or positive.dtype != torch.bool or positive.shape != scores.shape:
        raise ValueError(f"need scores [n] and a bool mask [n], got {list(scores.shape)} and {list(positive.shape)}")
    if not bool(torch.isfinite(scores).all()):
        raise ValueError(f"{int((~torch.isfinite(scores)).sum())} of {len(scores)} scores are NaN or infinite")
    above, below = scores[positive].double(), scores[~positive].double().sort().values
    if len(above) == 0 or len(below) == 0:
        raise ValueError("AUROC needs both positives and negatives")
    less = torch.searchsorted(below, above)
    at_most = torch.searchsorted(below, above, right=True)
    return float((less + at_most).double().mean() / (2 * len(below)))


def auroc_between(high: Tensor, low: Tensor) -> float:
    """P(a value of ``high`` > a value of ``low``), ties counted half.

    >>> auroc_between(torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    both = torch.cat([high, low])
    return auroc(both, torch.arange(len(both)) < len(high))


def evaluate_uncertainty(scores: Values, correct: Values) -> "UncertaintyFigures":
    """Measure R-AUROC, AURC and AUGRC of a score, see the head of this file.

    Args:
        scores: one per query, larger = less certain; any numbers but NaN. Only their order counts.
        correct: a bool mask: the query's (leave-one-out) nearest neighbour has the right class.

    Returns:
        ``r_auroc`` (0.5 is chance, larger is better; None if all answers are right or all are wrong: then it
        is not defined), ``aurc`` and ``augrc`` (smaller is better; compare them at equal accuracy only).

    >>> evaluate_uncertainty([0.1, 0.2, 0.2, 0.9], [True, True, False, False])
    UncertaintyFigures(r_auroc=0.875, aurc=0.2708, augrc=0.2188)
    """
    rank, wrong = _ranked(scores, correct)
    n = len(rank)
    answered, errors = _curve(rank, wrong)
    place = torch.arange(1, n + 1)
    group = rank.sort().values
    size, mistaken = (x.diff(prepend=x.new_zeros(1)) for x in (answered, errors))
    expected = errors[group] - mistaken[group] * (answered[group] - place) / size[group].double()  # E(i)
    defined = 0 < int(errors[-1]) < n
    return UncertaintyFigures(
        r_auroc=auroc(rank.double(), wrong) if defined else None,
        aurc=float((expected / place).mean()),
        augrc=float(expected.mean() / n),
    )


class UncertaintyFigures(Record):
    """How well a score ranks wrong answers before right ones."""

    @property
    def r_auroc(self) -> float | None:
        """P(a wrong answer has a higher score than a right one); None if there is only one kind."""
        found: float | None = self["r_auroc"]
        return found

    @property
    def aurc(self) -> float:
        """Mean error rate over all shares of queries that are answered."""
        return float(self["aurc"])

    @property
    def augrc(self) -> float:
        """Mean share of queries that are answered wrongly."""
        return float(self["augrc"])


def risk_coverage(scores: Values, correct: Values) -> tuple[Tensor, Tensor]:
    """Coverage i/n and selective risk E(i)/i [m] of each threshold: "answer if score ≤ t", t the m distinct scores.

    >>> risk_coverage([0.1, 0.2, 0.2, 0.9], [True, True, False, True])
    (tensor([0.2500, 0.7500, 1.0000], dtype=torch.float64), tensor([0.0000, 0.3333, 0.2500], dtype=torch.float64))
    """
    rank, wrong = _ranked(scores, correct)
    answered, errors = (x.double() for x in _curve(rank, wrong))
    return answered / len(rank), errors / answered


def paired_rise(before: Values, after: Values) -> float:
    """P(an image's score rises), ties counted half: 1/n · Σ [after > before] + ½[after = before].

    >>> paired_rise([1.0, 1.0, 1.0, 1.0], [2.0, 3.0, 1.0, 0.0])
    0.625
    """
    one, two = _scores(before, "scores before"), _scores(after, "scores after")
    if len(one) != len(two):
        raise ValueError(f"{len(one)} scores before but {len(two)} after")
    return int(2 * (two > one).sum() + (two == one).sum()) / (2 * len(one))


def _ranked(scores: Values, correct: Values) -> tuple[Tensor, Tensor]:
    """Which of the distinct scores each query has [n], ascending from 0, and where the answer is wrong [n]."""
    x, right = _scores(scores, "scores"), _tensor(correct, "correct")
    if right.dtype != torch.bool or right.ndim != 1:
        raise ValueError(f"correct must be a bool mask [n], got {right.dtype} {list(right.shape)}")
    if len(x) != len(right):
        raise ValueError(f"{len(x)} scores for {len(right)} answers")
    return x.unique(return_inverse=True)[1], ~right


def _curve(rank: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """Up to and with each distinct score: queries answered and errors made [m]."""
    answered = torch.bincount(rank)
    return answered.cumsum(0), torch.bincount(rank[wrong], minlength=len(answered)).cumsum(0)


def _scores(x: Values, name: str) -> Tensor:
    out = _tensor(x, name)
    if out.ndim != 1:
        raise ValueError(f"{name} must be one per query, got shape {list(out.shape)}")
    if len(out) == 0:
        raise ValueError(f"there are no {name}")
    bad = out.isnan().nonzero().flatten()
    if len(bad):
        raise ValueError(f"{len(bad)} of {len(out)} {name} are NaN (first: number {int(bad[0])})")
    return out


def _tensor(x: Values, name: str) -> Tensor:
    """A tensor on the CPU. Numbers in lists keep their full precision, so that different scores do not tie."""
    if isinstance(x, Tensor):
        return x.detach().cpu()
    array = np.array(x, order="C")
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be numbers or a bool mask, got {array.dtype}")
    return torch.from_numpy(array)

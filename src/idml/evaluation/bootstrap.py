"""Bootstrap intervals of uncertainty figures: whole classes are resampled, all rounds at once.

Images of one class are similar, and a test on unseen classes is about classes. So a round draws as many classes as
there are, with replacement, and every query counts as often as its class was drawn. Scores are compared on the same
rounds. No round sorts anything. With the queries in order of their score, a group of equal scores that holds a answers
with e errors, after A₀ answers with E₀ errors, adds (compare `idml.evaluation.uncertainty`)

    R-AUROC   e·(R₀ + (a − e)/2) / (errors · right answers),    R₀ = A₀ − E₀
    AURC      (E₀ − A₀·e/a)·(H(A₀ + a) − H(A₀)) + e, over N,     H(n) = 1 + 1/2 + … + 1/n
    AUGRC     (a·E₀ + e·(a + 1)/2) / N²
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_CELLS = 1 << 17  # rounds × queries handled together: they stay in the cache


class Rounds(NamedTuple):
    """How often each class was drawn in each round [rounds, classes], and the class of each query [n]."""

    counts: Tensor
    classes: Tensor


def draw_classes(labels: Tensor, *, rounds: int = 1000, seed: int = 0) -> Rounds:
    """Draw rounds for queries with these classes [n].

    >>> drawn = draw_classes(torch.tensor([7, 7, 3]), rounds=2)
    >>> drawn.counts.sum(dim=1), drawn.classes
    (tensor([2., 2.]), tensor([1, 1, 0]))
    """
    names, classes = labels.unique(return_inverse=True)
    chosen = torch.randint(len(names), (rounds, len(names)), generator=torch.Generator().manual_seed(seed))
    counts = torch.zeros(rounds, len(names)).scatter_add_(1, chosen, torch.ones(1, 1).expand(chosen.shape))
    return Rounds(counts, classes)


def resampled_mean(values: Tensor, drawn: Rounds) -> Tensor:
    """The mean of a value of each query, in every round [rounds]."""
    sums = torch.zeros(drawn.counts.shape[1], dtype=torch.float64).index_add_(0, drawn.classes, values.double())
    sizes = torch.bincount(drawn.classes, minlength=len(sums)).double()
    counts = drawn.counts.double()
    return (counts @ sums) / (counts @ sizes)


def resampled_auroc(scores: Tensor, positive: Tensor, drawn: Rounds) -> Tensor:
    """P(score of a positive > score of a negative), ties counted half, in every round; NaN if not defined."""
    return torch.cat([_auroc(part) for part in _curves(scores, positive, drawn)])


def resampled_uncertainty(scores: Tensor, correct: Tensor, drawn: Rounds) -> dict[str, Tensor]:
    """R-AUROC (NaN if not defined), AURC and AUGRC in every round [rounds]."""
    parts = []
    for curve in _curves(scores, ~correct, drawn):
        answered, errors = curve
        total = answered[:, -1]
        a, e = _steps(answered), _steps(errors)
        before, errors_before = answered - a, errors - e
        harmonic = torch.zeros(int(total.max()) + 1, dtype=torch.float64)
        harmonic[1:] = torch.arange(1, len(harmonic)).double().reciprocal().cumsum(0)
        span = harmonic[answered.long()] - harmonic[before.long()]
        aurc = ((errors_before - before * e / a.clamp_min(1)) * span + e).sum(dim=1) / total
        augrc = (a * errors_before + e * (a + 1) / 2).sum(dim=1) / total.square()
        parts.append(torch.stack([_auroc(curve), aurc, augrc]))
    return dict(zip(("r_auroc", "aurc", "augrc"), torch.cat(parts, dim=1), strict=True))


def interval(values: Tensor) -> list[float] | None:
    """The middle 95 % of the rounds in which the figure is defined; None if there are none."""
    known = values[~values.isnan()]
    if len(known) == 0:
        return None
    low, high = known.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return [low, high]


def _curves(scores: Tensor, wrong: Tensor, drawn: Rounds) -> Iterator[tuple[Tensor, Tensor]]:
    """Answers given and errors made up to and with each distinct score [r, m], for some rounds at a time."""
    rank = scores.unique(return_inverse=True)[1]
    order = rank.argsort(stable=True)
    ends = torch.bincount(rank).cumsum(0) - 1
    classes, mistaken = drawn.classes[order], wrong[order].double()
    for counts in drawn.counts.split(max(1, _CELLS // len(order))):
        times = counts[:, classes].double()
        yield times.cumsum(dim=1)[:, ends], (times * mistaken).cumsum(dim=1)[:, ends]


def _auroc(curve: tuple[Tensor, Tensor]) -> Tensor:
    answered, errors = curve
    right = answered - errors
    pairs = (_steps(errors) * (right - _steps(right) / 2)).sum(dim=1)
    return pairs / (errors[:, -1] * right[:, -1])  # 0/0 if all are right or all are wrong


def _steps(x: Tensor) -> Tensor:
    return x.diff(dim=1, prepend=x.new_zeros(len(x), 1))

"""Intervals of an arm's figures and of differences between arms, over test classes and seeds together.

A round draws as many test classes as there are and as many seeds as there are, both with replacement; a figure is then
the mean over the drawn seeds of Σ w_c·sum_c / Σ w_c·queries_c, w_c being how often class c was drawn. Two arms are
compared on the same draws: the same classes, and seed by seed, which gave both the same images in the same order.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idml.evaluation.bootstrap import draw_classes, interval

ROUNDS = 2000
_SUMS = {"R@1": "hits", "MAP@R": "map@r"}
Runs = Mapping[int, Mapping[str, Any]]


class Estimate(NamedTuple):
    """A mean in per cent (of differences: in points) and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def text(self, *, sign: bool = False) -> str:
        """For a table: "+0.4 [−0.1, +0.9]"."""
        form = "+.1f" if sign else ".1f"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def estimate(runs: Runs, figure: str = "R@1", *, tested: str = "euclidean") -> Estimate:
    """The figure of an arm, from its runs by seed."""
    seeds = sorted(runs)
    return _estimate(_resampled([runs[s] for s in seeds], figure, tested, len(seeds)))


def gain(
    runs: Runs, over: Runs, figure: str = "R@1", *, tested: str = "euclidean", over_tested: str = "euclidean"
) -> Estimate:
    """How much an arm is above another on their common seeds; what has no seeds is compared with every seed."""
    if not runs or not over:
        raise ValueError("there is nothing to compare")
    seeds = sorted(runs.keys() & over.keys()) or sorted(runs)
    fixed = next(iter(over.values()))
    a = _resampled([runs[s] for s in seeds], figure, tested, len(seeds))
    b = _resampled([over.get(s, fixed) for s in seeds], figure, over_tested, len(seeds))
    return _estimate(a - b)


def _resampled(runs: list[Mapping[str, Any]], figure: str, tested: str, seeds: int) -> Tensor:
    """The figure, in per cent: as it is, then in every round [1 + rounds]."""
    stored = [run["introspective"]["classes"] if tested == "introspective" else run["classes"] for run in runs]
    sums = torch.tensor([each[_SUMS[figure]] for each in stored], dtype=torch.float64)
    queries = torch.tensor([each["queries"] for each in stored], dtype=torch.float64)
    classes = torch.cat([torch.ones(1, sums.shape[1]), draw_classes(torch.arange(sums.shape[1]), rounds=ROUNDS).counts])
    drawn = torch.cat([torch.ones(1, seeds), draw_classes(torch.arange(seeds), rounds=ROUNDS, seed=1).counts])
    figures = (classes.double() @ sums.T) / (classes.double() @ queries.T).clamp_min(1)
    return 100 * (figures * drawn.double()).sum(dim=1) / seeds


def _estimate(values: Tensor) -> Estimate:
    low, high = interval(values[1:]) or (float("nan"), float("nan"))
    return Estimate(float(values[0]), low, high)

"""What the paper claims, its figures, and the rule that decides each claim from stored runs.

A gain is *confirmed* if its 95 % interval lies above 0. It is *not confirmed* if the interval does not, and ends below
half of the gain that the paper reports (below half a point where it reports none). Otherwise the table *cannot tell at
this scale*. A gain that is claimed for the metric is also not confirmed if the mean weight is above 0.98, because such
a metric is almost the plain one. Unless a claim names its rival, a gain counts over the better of the raw features and
the plain arm.

Intervals are over test classes and seeds together. A round draws as many test classes as there are and as many seeds as
there are, both with replacement. A figure is then the mean over the drawn seeds of Σ w_c·sum_c / Σ w_c·queries_c, where
w_c is how often class c was drawn. Two arms are compared on the same draws: the same classes, and seed by seed, because
a seed gives both arms the same images in the same order.
"""

import csv
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from idml.evaluation.bootstrap import draw_classes, interval
from idml.reproduction.runner import ArmProgress

CONFIRMED, NOT_CONFIRMED, CANNOT_TELL, MISSING = "confirmed", "not confirmed", "cannot tell at this scale", "missing"
SAME_AS_PLAIN = 0.98  # a mean weight above this: the metric is almost the plain one
NOT_INTROSPECTIVE = "not introspective"
_WORTH = 0.5  # points: the smallest gain of interest where the paper gives none
WORDS = (CONFIRMED, NOT_CONFIRMED, CANNOT_TELL, MISSING)
ROUNDS = 2000
_SUMS = {"R@1": "hits", "MAP@R": "map@r"}
Key = tuple[str, str]
Runs = Mapping[int, Mapping[str, Any]]
"""The runs of an arm by seed."""


# -------------------- the paper's figures --------------------


@cache
def paper_numbers() -> dict[tuple[str, str, str], dict[str, float]]:
    """Return the figures of the paper's tables (paper.csv) by data set, loss and arm, in per cent.

    >>> paper_numbers()["cub", "proxy_anchor", "idml"]["R@1"]
    70.7
    """
    text = files("idml.reproduction").joinpath("paper.csv").read_text()
    numbers = {}
    for row in csv.DictReader(text.splitlines()):
        key = (row.pop("data"), row.pop("loss"), row.pop("arm"))
        numbers[key] = {figure: float(value) for figure, value in row.items() if value}
    return numbers


def paper_figure(data: str, arm: Key, figure: str) -> float | None:
    """Return one figure, or None if the paper does not have it.

    >>> paper_figure("glyphs", ("proxy_anchor", "idml"), "R@1")
    """
    return paper_numbers().get((data, *arm), {}).get(figure)


def paper_gain(data: str, arm: Key, over: Key) -> float | None:
    """Return how much an arm is above another in R@1 in the paper, or None if the paper does not have both.

    >>> round(paper_gain("cub", ("proxy_anchor", "idml"), ("proxy_anchor", "plain")), 1)
    1.7
    """
    a, b = (paper_figure(data, key, "R@1") for key in (arm, over))
    return None if a is None or b is None else a - b


# -------------------- intervals --------------------


class Estimate(NamedTuple):
    """A mean in per cent (of differences: in points) and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float

    def text(self, *, sign: bool = False) -> str:
        """Format for a table: "+0.4 [−0.1, +0.9]"."""
        form = "+.1f" if sign else ".1f"
        return f"{self.mean:{form}} [{self.low:{form}}, {self.high:{form}}]"


def estimate(runs: Runs, figure: str = "R@1", *, tested: str = "euclidean") -> Estimate:
    """Estimate a figure of an arm from its runs by seed."""
    seeds = sorted(runs)
    return _estimate(_resample([runs[s] for s in seeds], figure, tested))


def gain(
    runs: Runs, over: Runs, figure: str = "R@1", *, tested: str = "euclidean", over_tested: str = "euclidean"
) -> Estimate:
    """Estimate how much an arm is above another on their common seeds; raw features have none, and serve for all."""
    if not runs or not over:
        raise ValueError("there is nothing to compare")
    seeds = sorted(runs.keys() & over.keys()) or sorted(runs)
    fixed = next(iter(over.values()))
    a = _resample([runs[s] for s in seeds], figure, tested)
    b = _resample([over.get(s, fixed) for s in seeds], figure, over_tested)
    return _estimate(a - b)


def _resample(runs: list[Mapping[str, Any]], figure: str, tested: str) -> Tensor:
    """The figure, in per cent: as it is, then in every round [1 + rounds]."""
    stored = [run["introspective"]["classes"] if tested == "introspective" else run["classes"] for run in runs]
    figures = [_figure_in_rounds(tuple(each[_SUMS[figure]]), tuple(each["queries"])) for each in stored]
    drawn = _draws(len(runs), seed=1)
    return 100 * (torch.stack(figures, dim=1) * drawn).sum(dim=1) / len(runs)


@lru_cache(maxsize=1 << 12)  # tables share arms
def _figure_in_rounds(sums: tuple[float, ...], queries: tuple[float, ...]) -> Tensor:
    drawn = _draws(len(sums), seed=0)
    return (drawn @ torch.tensor(sums, dtype=torch.float64)) / _queries_in_rounds(queries)


@lru_cache(maxsize=64)
def _queries_in_rounds(queries: tuple[float, ...]) -> Tensor:
    return (_draws(len(queries), seed=0) @ torch.tensor(queries, dtype=torch.float64)).clamp_min(1)


@cache
def _draws(count: int, seed: int) -> Tensor:
    """How often each of ``count`` things counts: once, then as drawn in every round [1 + rounds, count]."""
    drawn = draw_classes(torch.arange(count), rounds=ROUNDS, seed=seed).counts
    return torch.cat([torch.ones(1, count), drawn]).double()


def _estimate(values: Tensor) -> Estimate:
    low, high = interval(values[1:]) or (float("nan"), float("nan"))
    return Estimate(float(values[0]), low, high)


def student_interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval by Student's t; NaN for the width of one value."""
    from scipy.stats import t

    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    return mean, float(t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)


def interval_text(values: list[float], digits: int, *, sign: bool = False) -> str:
    """Format mean ± half the 95 % interval."""
    mean, half = student_interval(values)
    return f"{mean:{'+' if sign else ''}.{digits}f}" + (f" ± {half:.{digits}f}" if half == half else "")


def detectable_difference(gains: Iterable[Estimate]) -> tuple[float, float, float] | None:
    """Return the smallest difference that a table could have detected: median, least and largest half width.

    A gain is detected if its 95 % interval does not hold 0, so a true difference as large as half the width of the
    interval is detected in about half of all repetitions of an experiment, and one 1.4 times as large in about 80 %.
    """
    halves = sorted((each.high - each.low) / 2 for each in gains)
    return (statistics.median(halves), halves[0], halves[-1]) if halves else None


# -------------------- verdicts --------------------


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, its reason, and the figure that decided it (None while runs are missing)."""

    word: str
    reason: str
    value: float | None = None


@dataclass(frozen=True)
class TableRuns:
    """The runs of a table's arms, and of the raw features, for a data set."""

    data: str
    progress: dict[Key, ArmProgress]
    raw: dict[str, Any] | None

    def runs(self, key: Key) -> Runs:
        """Return the runs of an arm by seed."""
        return self.progress[key].runs if key in self.progress else {}

    def rival(self, key: Key, figure: str = "R@1") -> tuple[str, Runs] | None:
        """Return the better of the raw features and the arm's plain one, by mean; None while one is missing."""
        plain = self.runs((key[0], self.progress[key].arm.against))
        if self.raw is None or not plain:
            return None
        name = {"R@1": "recall@1", "MAP@R": "map@r"}[figure]
        mean = statistics.mean(run["selected"][name] for run in plain.values())
        if self.raw["selected"][name] > mean:
            return "raw features", dict.fromkeys(plain, self.raw)
        return self.progress[key].arm.against, plain


class Claim(Protocol):
    """A statement that stored runs can decide."""

    @property
    def text(self) -> str:
        """The claim in one line."""

    @property
    def arm(self) -> Key:
        """The arm that the claim is about."""

    def decide(self, found: TableRuns) -> Verdict:
        """Decide the claim from the runs."""


@dataclass(frozen=True)
class Gain:
    """An arm is above another; without ``over``, above the better of raw features and plain."""

    text: str
    arm: Key
    over: Key | None = None
    wanted: bool = True
    """False: the claim is that there is no gain."""
    own: bool = False
    """Whether it is our own question among the paper's claims."""

    def change(self, found: TableRuns) -> tuple[str, Runs, Estimate] | None:
        """Return the rival's name and runs, and the paired difference in R@1; None while runs are missing."""
        runs = found.runs(self.arm)
        rival = None
        if runs:
            rival = found.rival(self.arm) if self.over is None else (self.over[1], found.runs(self.over))
        if rival is None or not rival[1]:
            return None
        tested = [found.progress[k].arm.tested if k else "euclidean" for k in (self.arm, self.over)]
        return *rival, gain(runs, rival[1], tested=tested[0], over_tested=tested[1])

    def decide(self, found: TableRuns) -> Verdict:
        """Decide by the interval of the paired difference in R@1."""
        known = self.change(found)
        if known is None:
            return Verdict(MISSING, _why_missing(found, self.arm, self.over))
        runs, (name, over, change), paper = found.runs(self.arm), known, self.paper(found)
        reason = f"{change.text(sign=True)} over {name}" + ("" if paper is None else f", in the paper {paper:+.1f}")
        if len(runs.keys() & over.keys()) < 2:
            return Verdict(CANNOT_TELL, f"{reason}; one seed", change.mean)
        worth = _WORTH if paper is None or paper <= 0 else paper / 2
        if not self.wanted:
            word = CONFIRMED if change.high < worth else NOT_CONFIRMED if change.low > 0 else CANNOT_TELL
            return Verdict(word, reason, change.mean)
        weight = mean_weight(runs)
        if change.low > 0 and weight is not None and weight > SAME_AS_PLAIN and mean_weight(over) is None:
            reason += f"; but a mean weight of {weight:.3f} is {NOT_INTROSPECTIVE}"
            return Verdict(NOT_CONFIRMED, reason, change.mean)
        word = CONFIRMED if change.low > 0 else NOT_CONFIRMED if change.high < worth else CANNOT_TELL
        return Verdict(word, reason, change.mean)

    def paper(self, found: TableRuns) -> float | None:
        """Return the paper's gain, or None if the paper does not have it."""
        return self.paper_gain(found.data, (self.arm[0], found.progress[self.arm].arm.against))

    def paper_gain(self, data: str, against: Key) -> float | None:
        """Return the paper's gain over the named rival, else over the arm ``against``."""
        return paper_gain(data, self.arm, self.over or against)


@dataclass(frozen=True)
class MixedAbove:
    """‖u‖ of mixed images is above that of clean ones, in the test (by AUROC) or at the end of training (by means).

    A u that nothing teaches is larger for mixed images too, so in the test the AUROC of ``untaught`` is the limit.
    """

    text: str
    arm: Key
    untaught: Key | None = None
    training: bool = False

    def decide(self, found: TableRuns) -> Verdict:
        """Decide by the interval over the seeds."""
        runs = found.runs(self.arm).values()
        if not runs:
            return Verdict(MISSING, _why_missing(found, self.arm))
        if self.training:
            values = [run["level_mixed"] / run["level_clean"] - 1 for run in runs]
            return _above(values, 0.0, "mixed over clean ‖u‖, less 1")
        if self.untaught is None:
            return _above([run["auroc_mixed"] for run in runs], 0.5, "AUROC")
        own, other = found.runs(self.arm), found.runs(self.untaught)
        if not own.keys() & other.keys():
            return Verdict(MISSING, _why_missing(found, self.untaught))
        pairs = [(own[seed]["auroc_mixed"], other[seed]["auroc_mixed"]) for seed in sorted(own.keys() & other.keys())]
        means = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
        what = f"AUROC {means[0]:.2f}, that of a u that nothing teaches {means[1]:.2f}; difference"
        return _above([a - b for a, b in pairs], 0.0, what)


@dataclass(frozen=True)
class ErrorsRanked:
    """‖u‖ of a query alone ranks wrong nearest neighbours of unseen classes above right ones, by R-AUROC."""

    text: str
    arm: Key
    least: float = 0.66
    own: bool = True

    def decide(self, found: TableRuns) -> Verdict:
        """Decide by the interval over the seeds, against what a loss-prediction head reaches from the same features."""
        runs = found.runs(self.arm).values()
        if not runs:
            return Verdict(MISSING, _why_missing(found, self.arm))
        return _above([run["r_auroc"] for run in runs], self.least, f"R-AUROC, wanted {self.least}:")


@dataclass(frozen=True)
class LevelFalls:
    """‖u‖ of clean and of mixed images is smaller in the last epoch than in the first."""

    text: str
    arm: Key

    def decide(self, found: TableRuns) -> Verdict:
        """Decide by the interval over the seeds of the relative fall, of the kind that falls less."""
        runs = found.runs(self.arm).values()
        if not runs:
            return Verdict(MISSING, _why_missing(found, self.arm))
        falls = [
            min(1 - run["trend"][kind][-1] / run["trend"][kind][0] for kind in ("level_clean", "level_mixed"))
            for run in runs
        ]
        return _above(falls, 0.0, "relative fall")


def mean_weight(runs: Runs) -> float | None:
    """Return the mean weight e^(−x) at the end of training, over the seeds; None without the metric."""
    weights = [float(run["weight"]) for run in runs.values() if "weight" in run]
    return statistics.mean(weights) if weights else None


def _above(values: list[float], limit: float, what: str) -> Verdict:
    mean, half = student_interval(values)
    if len(values) < 2:
        return Verdict(CANNOT_TELL, f"{what} {mean:.2f}, one seed", mean)
    reason = f"{what} {mean:.2f} ± {half:.2f}, {len(values)} seeds"
    word = CONFIRMED if mean - half > limit else NOT_CONFIRMED if mean <= limit else CANNOT_TELL
    return Verdict(word, reason, mean)


def _why_missing(found: TableRuns, *keys: Key | None) -> str:
    reasons = []
    for key in keys:
        if key is not None and not found.runs(key):
            state = found.progress.get(key)
            reasons.append(f"{key[1]}: {(state.refused if state else '') or 'not run yet'}")
    return "; ".join(reasons) or "raw features or plain: not run yet"


# -------------------- verdicts as a table --------------------


def count_verdicts(verdicts: Iterable[Verdict]) -> str:
    """Say how many verdicts of each kind there are."""
    words = [verdict.word for verdict in verdicts]
    return ", ".join(f"{words.count(word)} {word}" for word in WORDS if word in words)


def verdict_table(judged: list[tuple[str, str, Verdict]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of (claim, place, verdict): a row a claim, a column for each data set and regime."""
    places = list(dict.fromkeys(place for _, place, _ in judged))
    cells = {(text, place): f"{verdict.word}: {verdict.reason}" for text, place, verdict in judged}
    texts = dict.fromkeys(text for text, *_ in judged)
    return ["claim", *places], [[text, *(cells.get((text, place), "") for place in places)] for text in texts]

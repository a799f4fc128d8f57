"""The paper's claims, and the rule that decides each from stored runs.

A gain is *confirmed* if its 95 % interval lies above 0. It is *not confirmed* if the interval does not, and ends below
half of the gain that the paper reports (below half a point where it reports none). Otherwise the table *cannot tell at
this scale*. A gain that is claimed for the metric is not confirmed either if the metric was plain in disguise: a mean
weight above 0.98. Unless a claim names its rival, a gain counts over the better of the raw features and the plain arm.
"""

import statistics
from dataclasses import dataclass
from typing import Any, Protocol

from idml.reproduction.compare import Runs, gain
from idml.reproduction.grid import interval
from idml.reproduction.paper import paper_gain
from idml.reproduction.protocol import Course

CONFIRMED, NOT_CONFIRMED, CANNOT_TELL, MISSING = "confirmed", "not confirmed", "cannot tell at this scale", "missing"
DISGUISE = 0.98  # a mean weight above this leaves the plain metric
_WORTH = 0.5  # points: the smallest gain worth a name where the paper gives none
Key = tuple[str, str]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim, and why."""

    word: str
    reason: str


@dataclass(frozen=True)
class Found:
    """The runs of a table's arms, and of the raw features, for a data set."""

    data: str
    courses: dict[Key, Course]
    raw: dict[str, Any] | None

    def runs(self, key: Key) -> Runs:
        """The runs of an arm by seed."""
        return self.courses[key].runs if key in self.courses else {}

    def rival(self, key: Key, figure: str = "R@1") -> tuple[str, Runs] | None:
        """The better of the raw features and of the arm's plain one, by their mean; None while one is missing."""
        plain = self.runs((key[0], self.courses[key].arm.against))
        if self.raw is None or not plain:
            return None
        name = {"R@1": "recall@1", "MAP@R": "map@r"}[figure]
        mean = statistics.mean(run["selected"][name] for run in plain.values())
        if self.raw["selected"][name] > mean:
            return "raw features", dict.fromkeys(plain, self.raw)
        return self.courses[key].arm.against, plain


class Claim(Protocol):
    """Something that the paper says and that stored runs can decide."""

    @property
    def text(self) -> str:
        """The claim in one line."""

    def judge(self, found: Found) -> Verdict:
        """What the runs say of it."""


@dataclass(frozen=True)
class Gain:
    """An arm is above another; without ``over``, above the better of raw features and plain."""

    text: str
    arm: Key
    over: Key | None = None
    wanted: bool = True
    """False: the claim is that there is no gain."""
    own: bool = False
    """Whether it is a question of ours among the paper's claims."""

    def judge(self, found: Found) -> Verdict:
        """By the interval of the paired difference in R@1."""
        runs = found.runs(self.arm)
        rival = None
        if runs:
            rival = found.rival(self.arm) if self.over is None else (self.over[1], found.runs(self.over))
        if not runs or rival is None or not rival[1]:
            return Verdict(MISSING, _why_missing(found, self.arm, self.over))
        name, over = rival
        if len(runs.keys() & over.keys()) < 2:
            return Verdict(CANNOT_TELL, "one seed")
        tested = [found.courses[k].arm.tested if k else "euclidean" for k in (self.arm, self.over)]
        change = gain(runs, over, tested=tested[0], over_tested=tested[1])
        paper = self._paper(found)
        reason = f"{change.text(sign=True)} over {name}" + ("" if paper is None else f", in the paper {paper:+.1f}")
        worth = _WORTH if paper is None or paper <= 0 else paper / 2
        if not self.wanted:
            word = CONFIRMED if change.high < worth else NOT_CONFIRMED if change.low > 0 else CANNOT_TELL
            return Verdict(word, reason)
        weight = mean_weight(runs)
        if change.low > 0 and weight is not None and weight > DISGUISE and mean_weight(over) is None:
            return Verdict(NOT_CONFIRMED, f"{reason}; but a mean weight of {weight:.3f} is plain in disguise")
        word = CONFIRMED if change.low > 0 else NOT_CONFIRMED if change.high < worth else CANNOT_TELL
        return Verdict(word, reason)

    def _paper(self, found: Found) -> float | None:
        return paper_gain(found.data, self.arm, self.over or (self.arm[0], found.courses[self.arm].arm.against))


@dataclass(frozen=True)
class MixedAbove:
    """‖u‖ of mixed images is above that of clean ones, in the test (by AUROC) or at the end of training (by means)."""

    text: str
    arm: Key
    training: bool = False

    def judge(self, found: Found) -> Verdict:
        """By the interval over the seeds."""
        runs = found.runs(self.arm).values()
        if not runs:
            return Verdict(MISSING, _why_missing(found, self.arm))
        if self.training:
            values = [run["level_mixed"] / run["level_clean"] - 1 for run in runs]
            return _above(values, 0.0, "mixed over clean ‖u‖, less 1")
        return _above([run["auroc_mixed"] for run in runs], 0.5, "AUROC")


@dataclass(frozen=True)
class ErrorsRanked:
    """‖u‖ of a query alone ranks wrong nearest neighbours of unseen classes above right ones, by R-AUROC."""

    text: str
    arm: Key
    least: float = 0.66
    own: bool = True

    def judge(self, found: Found) -> Verdict:
        """By the interval over the seeds, against what a loss-prediction head reaches from the same features."""
        runs = found.runs(self.arm).values()
        if not runs:
            return Verdict(MISSING, _why_missing(found, self.arm))
        return _above([run["r_auroc"] for run in runs], self.least, f"R-AUROC, wanted {self.least}:")


@dataclass(frozen=True)
class LevelFalls:
    """‖u‖ of clean and of mixed images is smaller in the last epoch than in the first."""

    text: str
    arm: Key

    def judge(self, found: Found) -> Verdict:
        """By the interval of the relative fall over the seeds, of the kind that falls less."""
        runs = found.runs(self.arm).values()
        if not runs:
            return Verdict(MISSING, _why_missing(found, self.arm))
        falls = [
            min(1 - run["trend"][kind][-1] / run["trend"][kind][0] for kind in ("level_clean", "level_mixed"))
            for run in runs
        ]
        return _above(falls, 0.0, "relative fall")


def mean_weight(runs: Runs) -> float | None:
    """The mean weight e^(−x) at the end of training, over the seeds; None without the metric."""
    weights = [float(run["weight"]) for run in runs.values() if "weight" in run]
    return statistics.mean(weights) if weights else None


def _above(values: list[float], limit: float, what: str) -> Verdict:
    mean, half = interval(values)
    if len(values) < 2:
        return Verdict(CANNOT_TELL, f"{what} {mean:.2f}, one seed")
    reason = f"{what} {mean:.2f} ± {half:.2f}, {len(values)} seeds"
    word = CONFIRMED if mean - half > limit else NOT_CONFIRMED if mean <= limit else CANNOT_TELL
    return Verdict(word, reason)


def _why_missing(found: Found, *keys: Key | None) -> str:
    reasons = []
    for key in keys:
        if key is not None and not found.runs(key):
            course = found.courses.get(key)
            reasons.append(f"{key[1]}: {(course.refused if course else '') or 'not run yet'}")
    return "; ".join(reasons) or "raw features or plain: not run yet"

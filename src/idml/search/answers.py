"""Answers: *match*, *unsure* or *not in the collection*, each with a reason.

With a calibration, the rules are checked in this order:

    match                   P ≥ t, where t is the threshold for the requested error rate. No other rule may reject a
                            match, because the guarantee would no longer be the calibrated one
    not in the collection   the novelty p-value is at most the share of known queries that may be rejected, and P < 1/2:
                            if the first result is right, its class is in the collection
    unsure                  otherwise

The reason of an answer is the one that decided: that the rate cannot be promised here comes before anything about the
query. ‖u‖ is a reason only where the calibration found that it ranks wrong answers better than chance. Where promises
are void (the gallery has changed, or more queries than calibrated are unknown), states are the same, and no answer is
``promised``.

Without a calibration nothing is promised and the rules are strict. A match needs k neighbours of one class, the first
at a distance that half of the gallery's images exceed (in a gallery without labels: that 95 % of them exceed). A query
that is farther than 99 % of them is not in the collection.
"""

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from idml.calibration.evidence import ROUNDING, Evidence, Profile
from idml.calibration.risk_control import check_rate, conformal_p
from idml.calibration.stored import Calibration

_BLURRED = 0.9  # call a query blurred or ambiguous if its ‖u‖ exceeds this share of the calibration queries
_TIED = 0.95  # call it a tie if the first image is no nearer than this share of the other one's distance …
_NEARLY_TIED, _DISAGREE = 0.8, 0.4  # … or than this share, if this share of the neighbours has other classes
_LIKELY = 0.5  # a match whose P(right) is smaller is no clear one
_MIXED = 0.5  # call the neighbours mixed if this share of them has other classes than the first one
_USUAL, _COPY, _FAR = 0.5, 0.95, 0.01  # p-values among the gallery's own images, for answers without calibration


class State(StrEnum):
    """The three possible answers."""

    MATCH = "match"
    UNSURE = "unsure"
    NOVEL = "not in the collection"


@dataclass(frozen=True)
class Answer:
    """The answer to one query."""

    state: State
    reason: str
    calibrated: bool
    promised: bool = False
    """Whether the requested error rate is promised: there is a calibration that applies, and it allows the rate."""
    probability: float | None = None
    """P(the first result is right); None without a calibration."""
    novelty: float | None = None
    """The p-value of "its class is in the collection"; None if nothing is known about the gallery."""
    results: int | None = None
    """How many results contain a right image at the requested rate; None if not requested or not possible."""


@dataclass(frozen=True)
class RiskTargets:
    """Limits that the user sets: shares of wrong matches, of rejected known queries, of sets without a right image."""

    max_error: float = 0.05
    confidence: float = 0.9
    max_rejected: float = 0.05
    max_missed: float | None = None

    def __post_init__(self) -> None:
        given = {"max_error": self.max_error, "confidence": self.confidence, "max_rejected": self.max_rejected}
        if self.max_missed is not None:
            given["max_missed"] = self.max_missed
        for name, x in given.items():
            check_rate(name, x)


def answer_queries(
    evidence: Evidence,
    calibration: Calibration | None = None,
    targets: RiskTargets | None = None,
    *,
    profile: Profile | None = None,
    void: str = "",
) -> list[Answer]:
    """Answer each query.

    Args:
        evidence: the evidence of the queries, from a search of the gallery.
        calibration: for this model and this kind of gallery; without it, answers are marked as uncalibrated.
        targets: the limits to keep; the default allows 5 % wrong matches.
        profile: of the gallery; used only without a calibration.
        void: why the promises of the calibration do not apply; empty if they do.

    >>> import torch
    >>> found = Evidence(*(torch.tensor([x]) for x in (0.1, 0.9, 0.9, 1.0, 0.0)))
    >>> answer_queries(found, profile=Profile(100, tuple(i / 200 for i in range(100))))[0].state
    <State.NOVEL: 'not in the collection'>
    """
    targets = targets or RiskTargets()
    if calibration is None:
        return _answer_uncalibrated(evidence, profile)
    probabilities, p_values = calibration.probability(evidence), calibration.novelty(evidence)
    absent = (calibration.absent(evidence, targets.max_rejected) & (evidence.nearest >= ROUNDING)).tolist()
    promise = calibration.find_guarantee(targets.max_error, targets.confidence)
    reasons = _find_doubts(evidence, calibration)
    sizes: list[int | None] = [None] * len(evidence)
    if targets.max_missed is not None:
        sets = calibration.find_set_guarantee(targets.max_missed, targets.confidence)
        if sets.threshold is not None:
            sizes = list(calibration.set_sizes(evidence, sets.threshold).tolist())
    answers = []
    rows = zip(probabilities.tolist(), p_values.tolist(), absent, reasons, sizes, strict=True)
    for probability, novelty, is_absent, doubt, size in rows:
        if promise.threshold is not None and probability >= promise.threshold:
            state, reason = State.MATCH, _describe_match(probability, targets.max_error)
        elif is_absent:
            state, reason = State.NOVEL, "far from everything"
        elif promise.threshold is None:
            state, reason = State.UNSURE, promise.reason
        elif novelty <= targets.max_rejected:
            state, reason = State.UNSURE, "unlike most images of the collection, but the first result is likely right"
        else:
            needed = f"{100 * probability:.0f} % where {100 * promise.threshold:.0f} % is needed"
            state, reason = State.UNSURE, doubt or f"not certain enough: {needed}"
        answers.append(Answer(state, reason, True, promise.possible and not void, probability, novelty, size))
    return answers


def _describe_match(probability: float, max_error: float) -> str:
    """Say why an answer is a match. A large error rate allows one whose first result is likely wrong."""
    if probability >= _LIKELY:
        return "clear match"
    return f"a match only because {100 * max_error:.3g} % wrong matches are accepted: the first result is likely wrong"


def _find_doubts(evidence: Evidence, calibration: Calibration) -> list[str]:
    """Name for each query what makes it doubtful; empty if nothing does."""
    if calibration.labelled and evidence.margin is None:
        raise ValueError("the calibration is for galleries with labels, the evidence is from a gallery without labels")
    level = calibration.position("level", evidence.level).tolist()
    neighbours = _find_ties(evidence, calibration.labelled)
    return [
        words or ("blurred or ambiguous query" if calibration.level_speaks and position >= _BLURRED else "")
        for words, position in zip(neighbours, level, strict=True)
    ]


def _find_ties(evidence: Evidence, labelled: bool) -> list[str]:
    """Say for each query whether two classes (or images) tie, or its neighbours are of many classes; else nothing."""
    if not labelled or evidence.ratio is None or evidence.disagreement is None:
        second = evidence.nearest - evidence.gap
        tied = evidence.nearest >= _TIED * second
        return ["two images tie" if t else "" for t in tied.tolist()]
    out = []
    for ratio, other in zip(evidence.ratio.tolist(), evidence.disagreement.tolist(), strict=True):
        tied = other > 0 and (ratio >= _TIED or (ratio >= _NEARLY_TIED and other >= _DISAGREE))
        out.append("two classes tie" if tied else "neighbours of several classes" if other >= _MIXED else "")
    return out


def _answer_uncalibrated(evidence: Evidence, profile: Profile | None) -> list[Answer]:
    p = None if profile is None else conformal_p(evidence.nearest, profile.nearest)
    return [_answer_one_uncalibrated(i, evidence, p) for i in range(len(evidence))]


def _answer_one_uncalibrated(i: int, evidence: Evidence, p: Tensor | None) -> Answer:
    novelty = None if p is None else float(p[i]) if float(evidence.nearest[i]) >= ROUNDING else 1.0
    agree = evidence.disagreement is not None and float(evidence.disagreement[i]) == 0
    if novelty is not None and novelty <= _FAR:
        return Answer(State.NOVEL, "far from everything (uncalibrated)", False, novelty=novelty)
    if novelty is not None and (novelty >= _COPY or (agree and novelty >= _USUAL)):
        reason = "all neighbours agree" if agree else "nearly the same image"
        return Answer(State.MATCH, f"{reason} (uncalibrated)", False, novelty=novelty)
    doubt = _find_ties(evidence[[i]], True)[0] if evidence.labelled else ""
    return Answer(State.UNSURE, f"{doubt or 'no calibration'} (uncalibrated)", False, novelty=novelty)

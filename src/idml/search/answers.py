"""What a person is told about a query: *match*, *unsure* or *not in the collection*, and why.

With a calibration, in this order:

    match                   P ≥ t, t the threshold that keeps the wished error rate; nothing else may turn it down, or
                            the promise would be another one
    not in the collection   else, if the novelty p-value is at most the share of known queries that may be sent away,
                            and P < 1/2: what the first result is right about is in the collection
    unsure                  else

Without one, nothing is promised and the rules are strict: a match needs k neighbours of one class, the first one as
near as half of the gallery's images are to theirs (in a gallery without labels: nearer than 95 % of them are); what
lies farther than 99 % is not in the collection.
"""

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from idml.calibration.evidence import Evidence, Profile
from idml.calibration.risk_control import RiskGuarantee, conformal_p
from idml.calibration.stored import Calibration

_BLURRED = 0.9  # a query with a higher ‖u‖ than this share of the calibration's is called blurred or ambiguous
_TIED = 0.75  # a query with a smaller margin than this share of them, or with this …
_DISAGREE = 0.4  # … share of neighbours of other classes, is called a tie
_USUAL, _TWIN, _STRANGE = 0.5, 0.95, 0.01  # p-values among the gallery's own images, for answers without calibration


class State(StrEnum):
    """The three answers."""

    MATCH = "match"
    UNSURE = "unsure"
    NOVEL = "not in the collection"


@dataclass(frozen=True)
class Answer:
    """The answer to one query."""

    state: State
    reason: str
    calibrated: bool
    probability: float | None = None
    """P(the first result is right); None without a calibration."""
    novelty: float | None = None
    """The p-value of "its class is in the collection"; None where nothing is known about the gallery."""
    results: int | None = None
    """How many results hold a right image with the asked probability; None if not asked, or it cannot be promised."""


@dataclass(frozen=True)
class RiskTargets:
    """What the user asks for: at most these shares of wrong answers, of known queries sent away, of sets that miss."""

    max_error: float = 0.05
    confidence: float = 0.9
    max_rejected: float = 0.05
    max_missed: float | None = None

    def __post_init__(self) -> None:
        asked = {"max_error": self.max_error, "confidence": self.confidence, "max_rejected": self.max_rejected}
        if self.max_missed is not None:
            asked["max_missed"] = self.max_missed
        for name, x in asked.items():
            if not 0 < x < 1:
                raise ValueError(f"{name} must be between 0 and 1, got {x!r}")


def answer(
    evidence: Evidence,
    calibration: Calibration | None = None,
    targets: RiskTargets | None = None,
    *,
    profile: Profile | None = None,
) -> list[Answer]:
    """The answer to each query.

    Args:
        evidence: of the queries, from the gallery's search.
        calibration: for this model and this kind of gallery; without it answers are marked uncalibrated.
        targets: what is asked for; at most 5 % wrong answers if not given.
        profile: of the gallery; used only without a calibration.

    >>> import torch
    >>> found = Evidence(*(torch.tensor([x]) for x in (0.1, 0.9, 0.9, 1.0, 0.0)))
    >>> answer(found, profile=Profile(100, tuple(i / 200 for i in range(100))))[0].state
    <State.NOVEL: 'not in the collection'>
    """
    targets = targets or RiskTargets()
    if calibration is None:
        return _uncalibrated(evidence, profile)
    p, novelty = calibration.probability(evidence), calibration.novelty(evidence)
    absent = calibration.absent(evidence, targets.max_rejected).tolist()
    promise = calibration.find_guarantee(targets.max_error, targets.confidence)
    reasons = _doubts(evidence, calibration)
    sizes: list[int | None] = [None] * len(evidence)
    if targets.max_missed is not None:
        sets = calibration.find_set_guarantee(targets.max_missed, targets.confidence)
        if sets.threshold is not None:
            sizes = list(calibration.set_sizes(evidence, sets.threshold).tolist())
    out = []
    for chance, usual, away, why, size in zip(p.tolist(), novelty.tolist(), absent, reasons, sizes, strict=True):
        if promise.threshold is not None and chance >= promise.threshold:
            state, reason = State.MATCH, "clear match"
        elif away:
            state, reason = State.NOVEL, "far from everything"
        elif usual <= targets.max_rejected:
            state, reason = State.UNSURE, "unlike most that belongs here, yet the first result is likely right"
        else:
            state, reason = State.UNSURE, why or _too_low(chance, promise)
        out.append(Answer(state, reason, True, chance, usual, size))
    return out


def _doubts(evidence: Evidence, calibration: Calibration) -> list[str]:
    """For each query what makes it doubtful, the most unusual of its scores; empty if none is."""
    level = calibration.position("level", evidence.level)
    varies = (
        calibration.percentiles["level"][0] < calibration.percentiles["level"][-1]
    )  # a model without u says nothing by it
    margin, words = (
        (evidence.gap, "two images tie") if not calibration.labelled else (evidence.margin, "two classes tie")
    )
    if margin is None:
        raise ValueError("the calibration is for galleries with labels, the evidence comes from one without")
    tie = calibration.position("margin" if calibration.labelled else "gap", margin)
    tied = tie >= _TIED
    if calibration.labelled and evidence.disagreement is not None:
        tied |= evidence.disagreement.cpu() >= _DISAGREE
    return [
        "blurred or ambiguous query" if varies and u >= _BLURRED and not (t and m > u) else words if t else ""
        for u, m, t in zip(level.tolist(), tie.tolist(), tied.tolist(), strict=True)
    ]


def _too_low(chance: float, promise: RiskGuarantee) -> str:
    if promise.threshold is None:
        return promise.reason
    return f"not certain enough: {100 * chance:.0f} % where {100 * promise.threshold:.0f} % is needed"


def _uncalibrated(evidence: Evidence, profile: Profile | None) -> list[Answer]:
    p = None if profile is None else conformal_p(evidence.nearest, profile.nearest)
    return [_guess(i, evidence, p) for i in range(len(evidence))]


def _guess(i: int, evidence: Evidence, p: Tensor | None) -> Answer:
    usual = None if p is None else float(p[i])
    agree = evidence.disagreement is not None and float(evidence.disagreement[i]) == 0
    if usual is not None and usual <= _STRANGE:
        return Answer(State.NOVEL, "far from everything (uncalibrated)", False, novelty=usual)
    if usual is not None and (usual >= _TWIN or (agree and usual >= _USUAL)):
        reason = "all neighbours agree" if agree else "nearly the same image"
        return Answer(State.MATCH, f"{reason} (uncalibrated)", False, novelty=usual)
    tied = evidence.disagreement is not None and float(evidence.disagreement[i]) >= _DISAGREE
    return Answer(
        State.UNSURE, f"{'two classes tie' if tied else 'no calibration'} (uncalibrated)", False, novelty=usual
    )

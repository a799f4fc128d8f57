"""Fit a calibration to the queries of a gallery, and say in figures and words what may be promised there.

`idml.search.gallery_calibration` finds the queries: images of the gallery itself, copies of them, or the user's own.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from idml.calibration.evidence import Profile
from idml.calibration.open_set import OpenSetQueries
from idml.calibration.risk_control import ENOUGH_CLUSTERS, ERROR_RATES, GROWTH
from idml.calibration.score_comparison import compare_scores
from idml.calibration.stored import Calibration, Grouping, draw_mixture, split_queries

LISTED = 50  # results listed for each query: the largest result set
UNKNOWN = 0.25  # the share of unknown queries, unless the user says otherwise
LARGEST_UNKNOWN = 0.9

_SHOWN = (0.05, 0.1, 0.2)  # error rates that are described in words
_REJECTED = (0.01, 0.05, 0.1, 0.2)  # shares of known queries that may be rejected, in the report
_ROUNDS = 400  # of resampled classes, for the intervals of the report


@dataclass(frozen=True, eq=False)
class CalibrationQueries:
    """The queries of a calibration: known ones in the gallery as it is, unknown ones without what they show.

    Queries with the same label (a class; for copies of an image, the image) hang together, known ones only if they are
    not counted ``known_by_image``. ``words`` say what the queries are. ``classes`` is the number of the gallery's
    classes, if not all of them are asked.
    """

    queries: OpenSetQueries
    labelled: bool
    words: str
    known_by_image: bool = True
    classes: int | None = None


def check_share(unknown: float) -> float:
    """Check the share of unknown queries.

    >>> check_share(0.95)
    Traceback (most recent call last):
    ...
    ValueError: the share of unknown queries must be from 0 to 0.9, got 0.95
    """
    if isinstance(unknown, bool) or not 0 <= unknown <= LARGEST_UNKNOWN:
        raise ValueError(f"the share of unknown queries must be from 0 to {LARGEST_UNKNOWN}, got {unknown!r}")
    return unknown


def calibrate_queries(
    found: CalibrationQueries, *, unknown: float, profile: Profile, model: str, seed: int = 0
) -> tuple[Calibration, dict[str, Any]]:
    """Fit a calibration for queries of which a share ``unknown`` is unknown; return it and its figures."""
    calibration = fit_queries(found, unknown=unknown, profile=profile, model=model, seed=seed)
    grouping = Grouping(unknown, found.known_by_image)
    return calibration, summarise(calibration, found.queries, grouping=grouping, seed=seed)


def fit_queries(
    found: CalibrationQueries,
    *,
    unknown: float,
    profile: Profile | None = None,
    model: str = "",
    seed: int = 0,
    lists: bool = True,
) -> Calibration:
    """Fit a calibration for queries of which a share ``unknown`` is unknown; without ``lists``, only their matches."""
    queries = found.queries
    return Calibration.fit(
        queries.evidence,
        queries.correct,
        labelled=found.labelled,
        seed=seed,
        groups=queries.labels,
        known=queries.known,
        distances=queries.distances if lists else None,
        same_class=queries.same_class if lists else None,
        profile=profile,
        model=model,
        grouping=Grouping(check_share(unknown), found.known_by_image, found.classes),
        queries=found.words,
    )


# -------------------- figures --------------------


def summarise(
    calibration: Calibration, queries: OpenSetQueries, *, grouping: Grouping | None = None, seed: int = 0
) -> dict[str, Any]:
    """The figures of a calibration, all but ``scores`` from the queries that it was not fitted to."""
    groups = queries.labels if grouping is not None and grouping.by_group else None
    held, compared, rounds = split_queries(len(queries), seed=seed, groups=groups)[0], queries, 1000
    if grouping is not None:
        rows = draw_mixture(torch.arange(len(queries)), queries.known, grouping.share, seed)
        compared, rounds = queries[rows], _ROUNDS
    evidence, known = queries.evidence[held], queries.known[held]
    rejected = {share: calibration.absent(evidence, share) for share in _REJECTED}
    moments = calibration.counts.moments
    return {
        "chosen": calibration.confidence_model.name,
        "fitted": [asdict(quality) for quality in calibration.confidence_model.candidates],
        "counted": sum(b.count for b in calibration.bins),
        "counted_classes": 0 if moments is None else moments.clusters,
        "ece": calibration.ece,
        "bins": [asdict(b) for b in calibration.bins],
        "promises": [_summarise_guarantee(calibration, error) for error in ERROR_RATES],
        "curve": [[error / 100, calibration.find_guarantee(error / 100).coverage] for error in range(1, 51)],
        "sets": [_summarise_sets(calibration, missed) for missed in (0.05, 0.1, 0.2)],
        "novelty": {
            "score": calibration.novelty_score,
            "unknown": int((~known).sum()),
            "recognised": {f"{share:g}": _mean_of(mask[~known]) for share, mask in rejected.items()},
            "rejected": {f"{share:g}": _mean_of(mask[known]) for share, mask in rejected.items()},
        },
        "level_speaks": calibration.level_speaks,
        **compare_scores(compared, labelled=calibration.labelled, seed=seed, rounds=rounds),
    }


def _summarise_guarantee(calibration: Calibration, error: float) -> dict[str, Any]:
    guarantee = calibration.find_guarantee(error)
    return {
        "max_error": error,
        "possible": guarantee.possible,
        "approximate": guarantee.approximate,
        "threshold": guarantee.threshold,
        "coverage": guarantee.coverage,
        "answered": guarantee.answered,
        "wrong": guarantee.wrong,
        "observed": guarantee.observed if guarantee.possible else None,
        "reason": guarantee.reason,
    }


def _summarise_sets(calibration: Calibration, missed: float) -> dict[str, Any]:
    guarantee, size = calibration.find_set_guarantee(missed), None
    if guarantee.threshold is not None and calibration.sets is not None:
        size = calibration.sets.mean_size[calibration.sets.counts.thresholds.index(guarantee.threshold)]
    return {"max_missed": missed, "possible": guarantee.possible, "mean_size": size, "reason": guarantee.reason}


def _mean_of(mask: Tensor) -> float | None:
    return float(mask.double().mean()) if len(mask) else None


# -------------------- words --------------------


def describe_figures(figures: dict[str, Any]) -> list[str]:
    """Say in sentences what is promised, and how many unknown queries are recognised."""
    lines = []
    for promise in figures["promises"]:
        if promise["max_error"] in _SHOWN:
            rate, coverage = promise["max_error"], promise["coverage"]
            mark = " (approximate)" if promise["approximate"] else ""
            possible = f"at most {rate:.0%} wrong matches{mark}: {coverage:.1%} of queries get a match"
            lines.append(possible if promise["possible"] else promise["reason"])
    recognised, rejected = (figures["novelty"][name]["0.05"] for name in ("recognised", "rejected"))
    if recognised is not None:
        known = "" if rejected is None else f"; {rejected:.1%} of known ones are wrongly rejected"
        lines.append(f"{recognised:.1%} of unknown queries are recognised{known}")
    return lines


def describe_calibration(calibration: Calibration, figures: dict[str, Any], what: str) -> list[str]:
    """Describe the calibration of a gallery in one screen; ``what`` says what a wrong match is."""
    unknown = f"of which {calibration.unknown:.0%} or fewer show nothing of the gallery"
    condition = unknown if calibration.unknown > 0 else "that all show something of the gallery"
    lines = [
        f"queries: {calibration.queries}",
        f"a match is wrong if it {what}; what can be promised with 90 % confidence, for queries {condition}:",
        *(f"  {line}" for line in describe_figures(figures)),
    ]
    if any(promise["approximate"] for promise in figures["promises"]):
        kind = "classes" if calibration.labelled else "pictures"
        lines.append(
            f"approximate: {figures['counted_classes']} {kind} were counted (half of them). With fewer than "
            f"{ENOUGH_CLUSTERS} {kind} a promise may be kept by fewer than 9 of 10 calibrations"
        )
    speaks = "ranks wrong answers better than chance" if calibration.level_speaks else "is no better than chance"
    if any(calibration.percentiles["level"]):  # the pretrained trunk has no u
        lines.append(
            f"the uncertainty ‖u‖ {speaks} here, so it is {'' if calibration.level_speaks else 'not '}given as a reason"
        )
    if any(promise["possible"] for promise in figures["promises"]):
        lines.append(f"the promises cover a gallery that grows or shrinks by {GROWTH:.0%}; then calibrate again")
    return lines

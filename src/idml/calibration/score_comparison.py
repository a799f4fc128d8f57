"""How well P(right), the mixes and every single score rank wrong answers, each on classes not used for its fit.

Classes are put into five folds. P (chosen and fitted on the other four folds), the mix of all scores, the mix without u
(‖u‖ and β), and each single score are measured within each fold; the figures are means over the folds. Intervals are
paired: each round draws the same classes of every fold for all of them.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idml.calibration.confidence import (
    MIX,
    MIX_WITHOUT_U,
    P_RIGHT,
    ConfidenceModel,
    assign_folds,
    predict_out_of_fold,
    score_matrix,
)
from idml.calibration.evidence import WITHOUT_LABELS
from idml.calibration.open_set import OpenSetQueries
from idml.evaluation.bootstrap import Rounds, draw_classes, interval, resampled_auroc, resampled_uncertainty
from idml.evaluation.uncertainty import auroc, evaluate_uncertainty

_PENALTY = 1e-2  # of the two mixes; P chooses its own


class ScoreFigures(NamedTuple):
    """The figures of a score, and the same figures in each round of resampled classes."""

    values: dict[str, float | None]
    rounds: dict[str, Tensor]

    @property
    def intervals(self) -> dict[str, list[float] | None]:
        """The 95 % intervals of the figures."""
        return {name: interval(x) for name, x in self.rounds.items()}


def compare_scores(queries: OpenSetQueries, *, labelled: bool, seed: int = 0, rounds: int = 1000) -> dict[str, Any]:
    """Measure how well P(right), the mixes and every single score rank wrong answers.

    Returns:
        ``scores``: by name ``r_auroc``, ``augrc`` (of wrong answers among all), ``unknown`` (AUROC for unknown queries
        against known ones; None if there are none) and ``intervals`` of these; ``best``: the single score of the
        largest R-AUROC; ``gain``: how far P is above it; ``gain_of_u``: how far the mix is above the mix without u,
        each with ``r_auroc``, ``augrc`` (positive if it is smaller, that is better) and ``intervals``.
    """
    if len(queries.labels.unique()) == 1:  # nothing to divide by class
        queries = replace(queries, labels=torch.arange(len(queries)))
    folds = assign_folds(len(queries), queries.labels, seed)
    scores = _cross_fit_scores(queries, labelled, folds, seed)
    drawn = [draw_classes(queries.labels[folds == fold], rounds=rounds, seed=int(fold)) for fold in folds.unique()]
    figures = {name: _measure_score(score, queries, folds, drawn) for name, score in scores.items()}
    singles = [name for name in scores if name not in (P_RIGHT, MIX, MIX_WITHOUT_U)]
    best = max(singles, key=lambda name: figures[name].values["r_auroc"] or 0.0)
    return {
        "scores": {name: {**found.values, "intervals": found.intervals} for name, found in figures.items()},
        "best": best,
        "gain": _subtract(figures[P_RIGHT], figures[best]),
        "gain_of_u": _subtract(figures[MIX], figures[MIX_WITHOUT_U]),
    }


def _cross_fit_scores(queries: OpenSetQueries, labelled: bool, folds: Tensor, seed: int) -> dict[str, Tensor]:
    """1 − P, the mixes and the single scores; what is fitted is fitted on the other folds."""
    evidence, correct = queries.evidence, queries.correct
    singles = {n: x.double() for n, x in evidence.scores.items() if labelled or n in WITHOUT_LABELS}
    doubt = torch.zeros(len(queries), dtype=torch.float64)
    for fold in folds.unique():
        rest, held = (folds != fold).nonzero().flatten(), (folds == fold).nonzero().flatten()
        groups = queries.labels[rest]
        model = ConfidenceModel.fit(evidence[rest], correct[rest], labelled=labelled, groups=groups, seed=seed)
        doubt[held] = 1 - model.probability(evidence[held])
    x = score_matrix(evidence, list(singles))
    z = (x - x.mean(dim=0)) / x.std(dim=0).clamp_min(1e-12)
    without_u = [i for i, name in enumerate(singles) if name not in ("level", "pair")]
    wrong = (~correct).double()
    mixes = {MIX: z, MIX_WITHOUT_U: z[:, without_u]}
    mixed = {name: predict_out_of_fold(part, wrong, folds, _PENALTY) for name, part in mixes.items()}
    return {P_RIGHT: doubt, **mixed, **singles}


def _measure_score(score: Tensor, queries: OpenSetQueries, folds: Tensor, drawn: list[Rounds]) -> ScoreFigures:
    values: dict[str, list[float | None]] = {"r_auroc": [], "augrc": [], "unknown": []}
    rounds: dict[str, list[Tensor]] = {name: [] for name in values}
    for fold, classes in zip(folds.unique(), drawn, strict=True):
        rows = folds == fold
        x, correct, unknown = score[rows], queries.correct[rows], ~queries.known[rows]
        figures, resampled = evaluate_uncertainty(x, correct), resampled_uncertainty(x, correct, classes)
        figures["unknown"] = auroc(x, unknown) if 0 < int(unknown.sum()) < len(x) else None
        resampled["unknown"] = resampled_auroc(x, unknown, classes)
        for name in values:
            values[name].append(figures[name])
            rounds[name].append(resampled[name])
    defined = {name: [v for v in in_folds if v is not None] for name, in_folds in values.items()}
    means = {name: sum(in_folds) / len(in_folds) if in_folds else None for name, in_folds in defined.items()}
    return ScoreFigures(means, {name: torch.stack(in_folds).nanmean(dim=0) for name, in_folds in rounds.items()})


def _subtract(above: ScoreFigures, below: ScoreFigures) -> dict[str, Any]:
    """How much better ``above`` is, with intervals."""
    better = {"r_auroc": 1, "augrc": -1}
    values: dict[str, float | None] = {}
    for name, sign in better.items():
        a, b = above.values[name], below.values[name]
        values[name] = None if a is None or b is None else sign * (a - b)
    rounds = {name: sign * (above.rounds[name] - below.rounds[name]) for name, sign in better.items()}
    return {**values, "intervals": {name: interval(x) for name, x in rounds.items()}}


def describe_comparison(compared: dict[str, Any], level_name: str | None = "‖u‖") -> list[str]:
    """Say in sentences whether P is below the best single score, and what u (or σ of a Gaussian model) adds.

    ``level_name`` is None for a model without u.
    """
    scores, best = compared["scores"], compared["best"]
    if scores[P_RIGHT]["r_auroc"] is None:
        return ["all answers are right, or all are wrong: there is nothing to rank"]
    own = f"P(right), R-AUROC {scores[P_RIGHT]['r_auroc']:.3f},"
    lines = [_describe_gain(compared["gain"], own, f"the best single score, {best}")]
    if level_name is None:
        return lines
    level, chance = scores["level"], "no better than chance"
    span = level["intervals"]["r_auroc"]
    if span is not None and span[0] > 0.5:
        chance = "better than chance"
    elif span is not None and span[1] < 0.5:
        chance = "worse than chance: it is smaller for wrong answers"
    lines.append(f"{level_name} alone, R-AUROC {level['r_auroc']:.3f}{_format_span(span)}, is {chance}")
    lines.append(_describe_gain(compared["gain_of_u"], "the mix with u", "the mix without u"))
    return lines


def _describe_gain(gain: dict[str, Any], name: str, other: str) -> str:
    span = gain["intervals"]["r_auroc"]
    if abs(gain["r_auroc"]) < 0.0005 and (span is None or span[0] <= 0 <= span[1]):
        word = "no different from"
    elif span is None or span[0] <= 0 <= span[1]:
        word = "not clearly above" if gain["r_auroc"] >= 0 else "below, but not clearly,"
    else:
        word = "above" if span[0] > 0 else "BELOW"
    return f"{name} is {word} {other}: {gain['r_auroc']:+.3f}{_format_span(span)}"


def _format_span(span: list[float] | None) -> str:
    return "" if span is None else f" [{span[0]:.3f}, {span[1]:.3f}]"

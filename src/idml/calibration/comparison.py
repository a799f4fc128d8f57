"""P(right) against every single score and the mixes, each on classes that had no part in its fit.

Classes are put into five folds. P (chosen and fitted as ever, on the other four folds), the mix of all scores, the mix
without u (‖u‖ and β), and each score alone are judged within each fold; the figures are means over the folds. Intervals
are paired: each of 1,000 rounds draws the same classes of every fold for all of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from idml.calibration.confidence import RightModel, _folds, _matrix, _out_of_fold
from idml.calibration.evidence import WITHOUT_LABELS
from idml.calibration.open_set import Trial
from idml.evaluation.bootstrap import Rounds, draw_classes, interval, resampled_auroc, resampled_uncertainty
from idml.evaluation.uncertainty import auroc, evaluate_uncertainty

P, MIX, MIX_WITHOUT_U = "P(right)", "mix", "mix without u"
_PENALTY = 1e-2  # of the two mixes; P chooses its own


def compare(trial: Trial, *, labelled: bool, seed: int = 0, rounds: int = 1000) -> dict[str, Any]:
    """What each score is worth.

    Returns:
        ``scores``: by name ``r_auroc``, ``augrc`` (of wrong answers among all), ``unknown`` (AUROC for telling unknown
        queries from known ones; None where there are none) and ``intervals`` of these; ``best``: the single score of
        the largest R-AUROC; ``gain``: how far P is above it, ``gain_of_u``: how far the mix is above the one without u,
        each with ``r_auroc``, ``augrc`` (positive where it is smaller, that is better) and ``intervals``.
    """
    folds = _folds(len(trial), trial.labels, seed)
    scores = _scores(trial, labelled, folds, seed)
    drawn = [draw_classes(trial.labels[folds == fold], rounds=rounds, seed=int(fold)) for fold in folds.unique()]
    figures = {name: _compared_figures(score, trial, folds, drawn) for name, score in scores.items()}
    singles = [name for name in scores if name not in (P, MIX, MIX_WITHOUT_U)]
    best = max(singles, key=lambda name: figures[name][0]["r_auroc"] or 0.0)
    return {
        "scores": {name: {**values, "intervals": _intervals(again)} for name, (values, again) in figures.items()},
        "best": best,
        "gain": _gain(figures[P], figures[best]),
        "gain_of_u": _gain(figures[MIX], figures[MIX_WITHOUT_U]),
    }


Found = tuple[dict[str, float | None], dict[str, Tensor]]  # figures, and the same in every round


def _scores(trial: Trial, labelled: bool, folds: Tensor, seed: int) -> dict[str, Tensor]:
    evidence, correct = trial.evidence, trial.correct
    singles = {n: x.double() for n, x in evidence.scores.items() if labelled or n in WITHOUT_LABELS}
    doubt = torch.zeros(len(trial), dtype=torch.float64)
    for fold in folds.unique():
        rest, held = (folds != fold).nonzero().flatten(), (folds == fold).nonzero().flatten()
        model = RightModel.fit(evidence[rest], correct[rest], labelled=labelled, groups=trial.labels[rest], seed=seed)
        doubt[held] = 1 - model.probability(evidence[held])
    x = _matrix(evidence, list(singles))
    z = (x - x.mean(dim=0)) / x.std(dim=0).clamp_min(1e-12)
    without = [i for i, name in enumerate(singles) if name not in ("level", "pair")]
    wrong = (~correct).double()
    mixes = {MIX: z, MIX_WITHOUT_U: z[:, without]}
    return {P: doubt, **{name: _out_of_fold(part, wrong, folds, _PENALTY) for name, part in mixes.items()}, **singles}


def _compared_figures(score: Tensor, trial: Trial, folds: Tensor, drawn: list[Rounds]) -> Found:
    values: dict[str, list[float | None]] = {"r_auroc": [], "augrc": [], "unknown": []}
    again: dict[str, list[Tensor]] = {name: [] for name in values}
    for fold, times in zip(folds.unique(), drawn, strict=True):
        rows = folds == fold
        x, correct, strange = score[rows], trial.correct[rows], ~trial.known[rows]
        told, resampled = evaluate_uncertainty(x, correct), resampled_uncertainty(x, correct, times)
        told["unknown"] = auroc(x, strange) if 0 < int(strange.sum()) < len(x) else None
        resampled["unknown"] = resampled_auroc(x, strange, times)
        for name in values:
            values[name].append(told[name])
            again[name].append(resampled[name])
    means = {name: _mean([v for v in list_ if v is not None]) for name, list_ in values.items()}
    return means, {name: torch.stack(list_).nanmean(dim=0) for name, list_ in again.items()}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _intervals(again: dict[str, Tensor]) -> dict[str, list[float] | None]:
    return {name: interval(x) for name, x in again.items()}


def _gain(above: Found, below: Found) -> dict[str, Any]:
    signs: dict[str, Callable[[Any, Any], Any]] = {"r_auroc": lambda a, b: a - b, "augrc": lambda a, b: b - a}
    values = {
        name: None if above[0][name] is None or below[0][name] is None else sign(above[0][name], below[0][name])
        for name, sign in signs.items()
    }
    rounds = {name: sign(above[1][name], below[1][name]) for name, sign in signs.items()}
    return {**values, "intervals": _intervals(rounds)}


def verdict(compared: dict[str, Any], level_name: str = "‖u‖") -> list[str]:
    """Plain words: whether P is below the best single score, and what u (or σ of a Gaussian model) is worth."""
    scores, best = compared["scores"], compared["best"]
    if scores[P]["r_auroc"] is None:
        return ["all answers are right, or all are wrong: there is nothing to rank"]
    lines = [
        _against(compared["gain"], f"P(right), R-AUROC {scores[P]['r_auroc']:.3f},", f"the best single score, {best}")
    ]
    level, chance = scores["level"], "no better than chance"
    span = level["intervals"]["r_auroc"]
    if span is not None and span[0] > 0.5:
        chance = "better than chance"
    elif span is not None and span[1] < 0.5:
        chance = "worse than chance: small where answers are wrong"
    lines.append(f"{level_name} alone, R-AUROC {level['r_auroc']:.3f}{_span(span)}, is {chance}")
    lines.append(_against(compared["gain_of_u"], "the mix with u", "the mix without it"))
    return lines


def _against(gain: dict[str, Any], name: str, other: str) -> str:
    span = gain["intervals"]["r_auroc"]
    if span is None or span[0] <= 0 <= span[1]:
        word = "not clearly above" if gain["r_auroc"] >= 0 else "below, though not clearly,"
        word = "no different from" if abs(gain["r_auroc"]) < 0.0005 else word
    else:
        word = "above" if span[0] > 0 else "BELOW"
    return f"{name} is {word} {other}: {gain['r_auroc']:+.3f}{_span(span)}"


def _span(span: list[float] | None) -> str:
    return "" if span is None else f" [{span[0]:.3f}, {span[1]:.3f}]"

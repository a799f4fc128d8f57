"""From the scores of all queries to figures with intervals, and to plain words on which score wins where."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from idml.evaluation.measuring import Measured
from idml.evaluation.resampling import (
    Rounds,
    draw_classes,
    interval,
    resampled_auroc,
    resampled_mean,
    resampled_uncertainty,
)
from idml.evaluation.scores import GALLERY_AWARE, QUERY_ONLY
from idml.evaluation.uncertainty import auroc, evaluate_uncertainty, paired_rise

GROUPS = {"query_only": QUERY_ONLY, "gallery_aware": GALLERY_AWARE}


def figures(measured: Measured, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """``accuracy`` of each view, ``uncertainty`` of each score in each view, ``best`` score of each view and group.

    Every figure stands beside its 95 % interval over resampled classes (None where it is not defined: R-AUROC where
    all answers are right or all wrong, and every interval where the queries are of one class).
    """
    drawn = draw_classes(measured.labels)
    clean = measured.seen["clean"]
    accuracy: dict[str, Any] = {}
    uncertainty: dict[str, dict[str, Any]] = {name: {} for name in clean.scores}
    best: dict[str, Any] = {}
    total, done = len(measured.seen) * len(uncertainty), 0
    for view, seen in measured.seen.items():
        right = seen.correct.double()
        accuracy[view] = {"value": float(right.mean()), "interval": _interval(resampled_mean(right, drawn), drawn)}
        rounds = {}
        for name, score in seen.scores.items():
            again = resampled_uncertainty(score, seen.correct, drawn)
            rounds[name] = again["r_auroc"]
            values = evaluate_uncertainty(score, seen.correct)
            if seen is not clean:
                more, more_again = _against(clean.scores[name], score, drawn)
                values, again = {**values, **more}, {**again, **more_again}
            intervals = {k: None if values[k] is None else _interval(again[k], drawn) for k in values}
            uncertainty[name][view] = {**values, "intervals": intervals}
            progress(done := done + 1, total)
        best[view] = {group: _best(uncertainty, view, rounds, names) for group, names in GROUPS.items()}
    return {"accuracy": accuracy, "uncertainty": uncertainty, "best": best}


def _against(clean: Tensor, score: Tensor, drawn: Rounds) -> tuple[dict[str, float | None], dict[str, Tensor]]:
    """How well a score tells the degraded images from the clean ones, and how often it rises."""
    both, degraded = torch.cat([clean, score]), torch.arange(2 * len(score)) >= len(score)
    rises = (score > clean).double() + (score == clean).double() / 2
    twice = Rounds(drawn.counts, drawn.classes.repeat(2))
    values: dict[str, float | None] = {"detects": auroc(both, degraded), "rises": paired_rise(clean, score)}
    return values, {"detects": resampled_auroc(both, degraded, twice), "rises": resampled_mean(rises, drawn)}


def _best(
    uncertainty: dict[str, dict[str, Any]], view: str, rounds: dict[str, Tensor], names: tuple[str, ...]
) -> dict[str, Any] | None:
    """The score of the largest R-AUROC, and those that it does not beat in 95 % of the same rounds' differences."""
    values = {n: uncertainty[n][view]["r_auroc"] for n in names if n in rounds}
    known = {n: value for n, value in values.items() if value is not None}
    if not known:
        return None
    winner = max(known, key=lambda n: float(known[n]))
    gaps = {n: interval(rounds[winner] - rounds[n]) for n in known if n != winner}
    return {
        "score": winner,
        "r_auroc": known[winner],
        "not_clearly_above": [n for n, gap in gaps.items() if gap is None or gap[0] <= 0],
    }


def _interval(values: Tensor, drawn: Rounds) -> list[float] | None:
    return interval(values) if drawn.counts.shape[1] > 1 else None  # one class, drawn again and again, never varies


def verdicts(result: dict[str, Any]) -> list[str]:
    """Plain words on a result: which score ranks wrong answers best in each view, and what the model's own is worth."""
    own, lines = result["own_score"], []
    places: dict[str, list[str]] = {"best": [], "not clearly below the best": [], "clearly below it": [], "chance": []}
    for view, best in result["best"].items():
        head = f"{view}, {result['accuracy'][view]['value']:.1%} of the answers right: "
        first, with_gallery = best["query_only"], best["gallery_aware"]
        if first is None or with_gallery is None:
            lines.append(f"{head}there is nothing to rank")
            continue
        figure = result["uncertainty"][own][view]
        itself = "" if own == first["score"] else f"; {own} {figure['r_auroc']:.3f}"
        lines.append(f"{head}query alone {_winner(first)}{itself}; with the gallery {_winner(with_gallery)}")
        ties = first["not_clearly_above"]
        place = "best" if own == first["score"] else "not clearly below the best" if own in ties else "clearly below it"
        places[place].append(view)
        if figure["intervals"]["r_auroc"] is None or figure["intervals"]["r_auroc"][0] <= 0.5:
            places["chance"].append(view)
    chance = places.pop("chance")
    told = "; ".join(f"{place} in {', '.join(views)}" for place, views in places.items() if views)
    if told:
        lines.append(f"{own} among the query-only scores: {told}")
        lines.append(f"{own} is not clearly better than chance in: {', '.join(chance) or 'no view'}")
    return lines


def _winner(best: dict[str, Any]) -> str:
    ties = ", ".join(best["not_clearly_above"])
    return f"{best['score']} {best['r_auroc']:.3f}" + (f" (not clearly above {ties})" if ties else "")

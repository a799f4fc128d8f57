"""The page of an evaluation: figures, curves, the most and least certain images, confident mistakes."""

import html
from collections.abc import Callable
from typing import Any

import numpy as np

from idml.evaluation.candidate import Candidate
from idml.evaluation.measuring import MIDDLE, Measured
from idml.evaluation.pictures import histogram, risk_coverage_curves, tsne
from idml.evaluation.scores import QUERY_ONLY
from idml.html import page, picture, strip, table

_SHOWN = ("clean", "mixed", *map(str, MIDDLE))
_STRIP, _MISTAKES, _NEAREST = 16, 8, 4
_RETRIEVAL = ("recall@1", "recall@2", "recall@4", "recall@8", "r_precision", "map@r", "nmi")
_COLUMNS = {
    "r_auroc": "R-AUROC",
    "aurc": "AURC",
    "augrc": "AUGRC",
    "detects": "AUROC against clean",
    "rises": "P(rises)",
}
_MEANING = (
    "Every score is larger where the answer is less certain. R-AUROC: how often a wrong answer has a larger score "
    "than a right one (0.5 is chance). AURC and AUGRC: mean risk over all shares of answered queries (smaller is "
    "better; compare them within a view). AUROC: how well the score tells these images from the clean ones. "
    "P(rises): how often an image's score is larger here than clean. In brackets 95 % intervals over resampled "
    "classes."
)


def build_report(
    result: dict[str, Any], measured: Measured, candidate: Candidate, note: Callable[[str], None]
) -> bytes:
    """The page; ``result`` is what `idml.evaluation.whole.evaluate_run` returns."""
    own = result["own_score"]
    label = "σ (mean)" if own == "sigma" else "‖u‖"
    clean = measured.seen["clean"]
    score = clean.scores[own]
    order, numbers = score.argsort(stable=True), candidate.queries.usable[measured.rows]
    count = min(_STRIP, len(order))
    parts = [
        f"<h1>Evaluation on {html.escape(result['data'])}</h1>",
        f"<p>{html.escape(_subject(result))}</p>",
        _list(result["notes"]),
        "<h2>Retrieval and clustering</h2>",
        table(list(_RETRIEVAL), [[_percent(result[name]) for name in _RETRIEVAL]]),
        f"<p>{result['queries']:,} queries, {result['classes']:,} classes; {result['singletons']:,} images have no "
        "other image of their class to find and are no queries.</p>",
        "<h2>Which score wins where</h2>",
        "<p>Which score puts wrong answers behind right ones, by R-AUROC (0.5 is chance):</p>",
        _list(result["verdict"]),
        "<h2>Risk and coverage, clean queries</h2>",
        "<p>Solid lines know the query alone, dashed lines the labelled gallery too.</p>",
        risk_coverage_curves(clean),
        f"<h2>{label} of clean, mixed and degraded images</h2>",
        histogram({view: measured.seen[view].scores[own] for view in _SHOWN if view in measured.seen}, label),
        "<h2>All scores</h2>",
        f"<p>{_MEANING}</p>",
        *(_scores(result, view) for view in measured.seen),
        f"<h2>Most certain images ({label})</h2>",
        strip(candidate.queries, numbers[order[:count]], f"the test images with the smallest {label}"),
        f"<h2>Least certain images ({label})</h2>",
        strip(candidate.queries, numbers[order[-count:].flip(0)], f"the test images with the largest {label}"),
        "<h2>Confident mistakes</h2>",
        *_mistakes(measured, candidate, own),
        "<h2>The embeddings in the plane (t-SNE)</h2>",
        tsne(measured.embeddings.unit, measured.labels, score, label, note),
    ]
    return page(f"evaluation on {result['data']}", *parts)


def _subject(result: dict[str, Any]) -> str:
    model = result["model"]
    trained = f", trained by {model['method']}" if model["method"] else ""
    metric = result["metric"] + (f" (τ {result['tau']:g}, γ {result['gamma']:g})" if "tau" in result else "")
    voting = f"; {result['ensemble']} more models vote in the ensemble" if result["ensemble"] else ""
    return f"{model['trunk']}, {model['embedding_dim']} dimensions{trained}; metric of the test: {metric}{voting}."


def _scores(result: dict[str, Any], view: str) -> str:
    """The table of one view: query-only scores first, then those that know the gallery."""
    best, accuracy = result["best"][view], result["accuracy"][view]
    names = [name for name in _COLUMNS if name in next(iter(result["uncertainty"].values()))[view]]
    rows = []
    for score, views in result["uncertainty"].items():
        figures = views[view]
        group = "query_only" if score in QUERY_ONLY else "gallery_aware"
        cells = [_value(figures[name], figures["intervals"][name]) for name in names]
        rows.append([score, "query" if group == "query_only" else "gallery", *cells, _place(score, best[group])])
    title = f"<h3>{html.escape(view)}: recall@1 {_value(accuracy['value'], accuracy['interval'])}</h3>"
    return title + table(["score", "knows the", *(_COLUMNS[name] for name in names), "by R-AUROC"], rows)


def _place(score: str, best: dict[str, Any] | None) -> str:
    if best is None:
        return ""
    if score == best["score"]:
        return "best" if best["not_clearly_above"] else "clearly best"
    return "not clearly worse" if score in best["not_clearly_above"] else ""


def _value(value: float | None, interval: list[float] | None) -> str:
    if value is None:
        return "not defined"
    return f"{value:.3f}" + ("" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]")


def _percent(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.1%}"


def _list(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _mistakes(measured: Measured, candidate: Candidate, own: str) -> list[str]:
    """The wrong answers of which the model is surest: the query, then its nearest images."""
    seen = measured.seen["clean"]
    order = seen.scores[own].argsort(stable=True)
    wrong = order[~seen.correct[order]][:_MISTAKES].tolist()
    if not wrong:
        return ["<p>There is no wrong answer.</p>"]
    queries, shelf = candidate.queries, candidate.gallery or candidate.queries
    classes, theirs = queries.images.classes, candidate.gallery_labels
    parts = ["<p>Left the query, then its nearest images; the smallest uncertainty first.</p>"]
    for i in wrong:
        number = int(queries.usable[measured.rows[i]])
        near = measured.found[i][:_NEAREST]
        near = near[near >= 0]
        images = np.concatenate([queries.array[number][None], shelf.array[shelf.usable[near].numpy()]])
        answers = ", ".join(classes[label] for label in theirs[near].tolist())
        name, label = queries.images.sources[number].name, classes[int(measured.labels[i])]
        text = f"{name} ({label}, {float(seen.scores[own][i]):.3f}) → {answers}"
        parts += [picture(images, text), f"<p>{html.escape(text)}</p>"]
    return parts

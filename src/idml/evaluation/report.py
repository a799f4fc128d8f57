"""The report of an evaluation: figures with intervals, sentences on which score is best, and the page.

The page shows curves, the most and least certain images, and confident mistakes.
"""

import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from idml.data.augment import MIDDLE
from idml.data.pixel_cache import Pixels
from idml.data.sampling import random_stream
from idml.evaluation.bootstrap import (
    Rounds,
    draw_classes,
    interval,
    resampled_auroc,
    resampled_mean,
    resampled_uncertainty,
)
from idml.evaluation.scores import GALLERY_AWARE, QUERY_ONLY, MeasuredQueries, ViewScores
from idml.evaluation.uncertainty import auroc, evaluate_uncertainty, paired_rise, risk_coverage
from idml.progress import Count, Note, silent
from idml.report_html import drawing, page, picture, table, tsne_positions

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_SHOWN = ("clean", "mixed", *map(str, MIDDLE))
_STRIP, _MISTAKES, _NEAREST = 16, 8, 4  # images in a row, mistakes shown, images found for each
_RISK_COVERAGE = (
    "risk-coverage curves of all scores on clean queries: from the query alone solid, with the gallery dashed"
)
_POINTS = 300  # of a curve: more than a screen shows
_IMAGES = 1500  # of a t-SNE
_GROUPS = {"query_only": QUERY_ONLY, "gallery_aware": GALLERY_AWARE}
_RETRIEVAL = ("recall@1", "recall@2", "recall@4", "recall@8", "r_precision", "map@r", "nmi")
_COLUMNS = {
    "r_auroc": "R-AUROC",
    "aurc": "AURC",
    "augrc": "AUGRC",
    "detects": "AUROC against clean",
    "rises": "P(rises)",
}
_MEANING = (
    "Every score is larger if the answer is less certain. R-AUROC: how often a wrong answer has a larger score than a "
    "right one (0.5 is chance). AURC and AUGRC: mean risk over all shares of answered queries (smaller is better; "
    "compare them within a view only). AUROC against clean: how well the score separates these images from clean ones. "
    "P(rises): how often an image's score is larger here than clean. Brackets: 95 % intervals over resampled classes."
)


# -------------------- figures and sentences --------------------


def summarise_views(views: Mapping[str, ViewScores], labels: Tensor, count: Count = silent) -> dict[str, Any]:
    """Summarise the scores of queries in all views ("clean" first); ``labels`` are the queries' classes.

    Returns ``accuracy`` of each view, ``uncertainty`` of each score in each view, and the ``best`` score of each view
    and group. Every figure has its 95 % interval over resampled classes. A figure is None if it is not defined: R-AUROC
    if all answers are right or all are wrong, and every interval if the queries are of one class.
    """
    drawn = draw_classes(labels)
    clean = views["clean"]
    accuracy: dict[str, Any] = {}
    uncertainty: dict[str, dict[str, Any]] = {name: {} for name in clean.scores}
    best: dict[str, Any] = {}
    total, done = len(views) * len(uncertainty), 0
    for view, seen in views.items():
        right = seen.correct.double()
        accuracy[view] = {"value": float(right.mean()), "interval": _interval(resampled_mean(right, drawn), drawn)}
        rounds = {}
        for name, score in seen.scores.items():
            again = resampled_uncertainty(score, seen.correct, drawn)
            rounds[name] = again["r_auroc"]
            values: dict[str, Any] = evaluate_uncertainty(score, seen.correct)
            if seen is not clean:
                more, more_again = _compare_with_clean(clean.scores[name], score, drawn)
                values, again = {**values, **more}, {**again, **more_again}
            intervals = {k: None if values[k] is None else _interval(again[k], drawn) for k in values}
            uncertainty[name][view] = {**values, "intervals": intervals}
            count(done := done + 1, total)
        best[view] = {group: _find_best(uncertainty, view, rounds, names) for group, names in _GROUPS.items()}
    return {"accuracy": accuracy, "uncertainty": uncertainty, "best": best}


def _compare_with_clean(
    clean: Tensor, score: Tensor, drawn: Rounds
) -> tuple[dict[str, float | None], dict[str, Tensor]]:
    """How well a score separates degraded images from clean ones, and how often it rises."""
    both, degraded = torch.cat([clean, score]), torch.arange(2 * len(score)) >= len(score)
    rises = (score > clean).double() + (score == clean).double() / 2
    twice = Rounds(drawn.counts, drawn.classes.repeat(2))
    values: dict[str, float | None] = {"detects": auroc(both, degraded), "rises": paired_rise(clean, score)}
    return values, {"detects": resampled_auroc(both, degraded, twice), "rises": resampled_mean(rises, drawn)}


def _find_best(
    uncertainty: dict[str, dict[str, Any]], view: str, rounds: dict[str, Tensor], names: tuple[str, ...]
) -> dict[str, Any] | None:
    """The score of the largest R-AUROC, and those that it does not clearly beat on the same rounds."""
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
    return interval(values) if drawn.counts.shape[1] > 1 else None  # of one class, all rounds are equal


def describe_best_scores(result: dict[str, Any]) -> list[str]:
    """Say in sentences which score ranks wrong answers best in each view, and how good the model's own score is."""
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
        lines.append(f"{head}query alone {_format_best(first)}{itself}; with the gallery {_format_best(with_gallery)}")
        ties = first["not_clearly_above"]
        place = "best" if own == first["score"] else "not clearly below the best" if own in ties else "clearly below it"
        places[place].append(view)
        if figure["intervals"]["r_auroc"] is None or figure["intervals"]["r_auroc"][0] <= 0.5:
            places["chance"].append(view)
    chance = places.pop("chance")
    summary = "; ".join(f"{place} in {', '.join(views)}" for place, views in places.items() if views)
    if summary:
        lines.append(f"{own} among the query-only scores: {summary}")
        lines.append(f"{own} is not clearly better than chance in: {', '.join(chance) or 'no view'}")
    return lines


def _format_best(best: dict[str, Any]) -> str:
    ties = ", ".join(best["not_clearly_above"])
    return f"{best['score']} {best['r_auroc']:.3f}" + (f" (not clearly above {ties})" if ties else "")


# -------------------- the page --------------------


def build_report(
    result: dict[str, Any], measured: MeasuredQueries, queries: Pixels, gallery: Pixels, note: Note
) -> bytes:
    """Build the page from a ``result`` of `idml.evaluation.evaluate.evaluate_run` and the images."""
    own = result["own_score"]
    label = "σ (mean)" if own == "sigma" else "‖u‖"
    clean = measured.views["clean"]
    score = clean.scores[own]
    order, numbers = score.argsort(stable=True), queries.usable[measured.rows]
    count = min(_STRIP, len(order))
    parts = [
        f"<h1>Evaluation on {html.escape(result['data'])}</h1>",
        f"<p>{html.escape(_subject(result))}</p>",
        _list(result["notes"]),
        "<h2>Retrieval and clustering</h2>",
        table(list(_RETRIEVAL), [[_percent(result[name]) for name in _RETRIEVAL]]),
        f"<p>{result['queries']:,} queries, {result['classes']:,} classes; {result['singletons']:,} images have no "
        "other image of their class to find and do not count as queries.</p>",
        "<h2>The best scores</h2>",
        "<p>How well the scores rank wrong answers behind right ones, by R-AUROC (0.5 is chance):</p>",
        _list(result["verdict"]),
        "<h2>Risk and coverage, clean queries</h2>",
        "<p>Solid lines use the query alone, dashed lines also the labelled gallery.</p>",
        drawing(draw_risk_coverage(clean.scores, clean.correct), _RISK_COVERAGE),
        f"<h2>{label} of clean, mixed and degraded images</h2>",
        drawing(
            draw_histogram(
                {view: measured.views[view].scores[own] for view in _SHOWN if view in measured.views}, label
            ),
            f"histogram of {label} for clean, mixed and degraded test images",
        ),
        "<h2>All scores</h2>",
        f"<p>{_MEANING}</p>",
        *(_scores(result, view) for view in measured.views),
        f"<h2>Most certain images ({label})</h2>",
        picture(queries.array[numbers[order[:count]].numpy()], f"the test images with the smallest {label}"),
        f"<h2>Least certain images ({label})</h2>",
        picture(
            queries.array[numbers[order[-count:].flip(0)].numpy()],
            f"the test images with the largest {label}",
        ),
        "<h2>Confident mistakes</h2>",
        *_show_mistakes(measured, queries, gallery, own),
        "<h2>The embeddings in the plane (t-SNE)</h2>",
        _show_tsne(measured.embeddings.unit, measured.labels, score, label, note),
    ]
    return page(f"evaluation on {result['data']}", *parts)


def _subject(result: dict[str, Any]) -> str:
    model = result["model"]
    trained = f", trained by {model['method']}" if model["method"] else ""
    metric = result["metric"] + (f" (τ {result['tau']:g}, γ {result['gamma']:g})" if "tau" in result else "")
    voting = f"; {result['ensemble']} more models vote in the ensemble" if result["ensemble"] else ""
    return f"{model['trunk']}, {model['embedding_dim']} dimensions{trained}; metric of the test: {metric}{voting}."


def _scores(result: dict[str, Any], view: str) -> str:
    """The table of one view: query-only scores first, then gallery-aware ones."""
    best, accuracy = result["best"][view], result["accuracy"][view]
    names = [name for name in _COLUMNS if name in next(iter(result["uncertainty"].values()))[view]]
    rows = []
    for score, views in result["uncertainty"].items():
        figures = views[view]
        group = "query_only" if score in QUERY_ONLY else "gallery_aware"
        cells = [_value(figures[name], figures["intervals"][name]) for name in names]
        rows.append([score, "query" if group == "query_only" else "gallery", *cells, _place(score, best[group])])
    title = f"<h3>{html.escape(view)}: recall@1 {_value(accuracy['value'], accuracy['interval'])}</h3>"
    return title + table(["score", "uses", *(_COLUMNS[name] for name in names), "by R-AUROC"], rows)


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


def _show_mistakes(measured: MeasuredQueries, queries: Pixels, gallery: Pixels, own: str) -> list[str]:
    """The wrong answers with the smallest uncertainty: each query, then its nearest images."""
    seen = measured.views["clean"]
    order = seen.scores[own].argsort(stable=True)
    wrong = order[~seen.correct[order]][:_MISTAKES].tolist()
    if not wrong:
        return ["<p>There are no wrong answers.</p>"]
    classes, gallery_labels = queries.images.classes, gallery.images.labels[gallery.usable]
    parts = ["<p>Each row shows the query, then its nearest images; the smallest uncertainty comes first.</p>"]
    for i in wrong:
        number = int(queries.usable[measured.rows[i]])
        near = measured.neighbours[i][:_NEAREST]
        near = near[near >= 0]
        images = np.concatenate([queries.array[number][None], gallery.array[gallery.usable[near].numpy()]])
        answers = ", ".join(classes[label] for label in gallery_labels[near].tolist())
        name, label = queries.images.sources[number].name, classes[int(measured.labels[i])]
        text = f"{name} ({label}, {float(seen.scores[own][i]):.3f}) → {answers}"
        parts += [picture(images, text), f"<p>{html.escape(text)}</p>"]
    return parts


# -------------------- drawings --------------------


def draw_risk_coverage(scores: Mapping[str, Tensor], correct: Tensor) -> "Figure":
    """Draw the share of errors among answered queries against the share of answered queries, a line for each score.

    ``scores`` [n] are larger for less certain queries; ``correct`` [n] says whose nearest neighbour is right.
    """
    figure = _figure(10, 5)
    axes = figure.subplots()
    for number, (name, score) in enumerate(scores.items()):
        coverage, risk = (x.numpy() for x in risk_coverage(score, correct))
        thinned = np.unique(np.linspace(0, len(coverage) - 1, _POINTS).round().astype(int))
        area = evaluate_uncertainty(score, correct)["aurc"]
        axes.plot(
            100 * coverage[thinned],
            100 * risk[thinned],
            label=f"{name} (AURC {area:.3f})",
            color=f"C{number % 10}",
            linestyle="solid" if name in QUERY_ONLY else "dashed",
            linewidth=2.5 if name in ("level", "sigma") else 1.5,  # the model's own
        )
    error = 100 * float((~correct).double().mean())
    axes.axhline(error, color="0.6", linestyle="dotted", label="no order")
    axes.set(xlabel="queries answered, %", ylabel="wrong among the answered, %", xlim=(0, 100))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right center", frameon=False, fontsize="medium")
    return figure


def draw_histogram(scores: Mapping[str, Tensor], label: str) -> "Figure":
    """Draw the distribution of the uncertainty in each view."""
    figure = _figure(9, 3.6)
    axes = figure.subplots()
    values = torch.cat(list(scores.values())).double()
    low, high = values.quantile(torch.tensor([0.001, 0.999], dtype=torch.float64)).tolist() if len(values) else (0, 1)
    bins = np.linspace(low, high if high > low else low + 1e-6, 60).tolist()
    for number, (view, score) in enumerate(scores.items()):
        filled: dict[str, Any] = {"alpha": 0.35} if view == "clean" else {"histtype": "step", "linewidth": 1.5}
        axes.hist(score.numpy().clip(low, high), bins, density=True, label=view, color=f"C{number % 10}", **filled)
    axes.set(xlabel=label, ylabel="density")
    figure.legend(loc="outside right center", frameon=False)
    return figure


def _show_tsne(points: Tensor, labels: Tensor, score: Tensor, label: str, note: Note) -> str:
    """Draw at most 1,500 embeddings for the page."""
    chosen = torch.randperm(len(points), generator=random_stream("t-SNE"))[:_IMAGES].sort().values
    points, labels, score = points[chosen], labels[chosen], score[chosen]
    if len(points) < 4 or bool((points == points[0]).all()):
        return "<p>There are too few different embeddings for a t-SNE.</p>"
    note(f"t-SNE of {len(points):,} images")
    text = f"t-SNE of the semantic embeddings of {len(points):,} test images, coloured by class and by {label}"
    return drawing(draw_tsne(points, labels, score, label), text, pixels=True)


def draw_tsne(points: Tensor, labels: Tensor, score: Tensor, label: str = "score") -> "Figure":
    """Draw embeddings [n, d] in the plane, coloured by class and by a score such as ‖u‖."""
    x, y = tsne_positions(points.numpy()).T
    figure = _figure(12, 5.6)
    left, right = figure.subplots(1, 2)
    size = max(3.0, min(30.0, 9000 / len(points)))
    hue = (labels.double() * 0.618033988749895) % 1  # neighbouring classes get colours far apart
    left.scatter(x, y, s=size, c=hue.numpy(), cmap="hsv", linewidths=0)
    left.set_title(f"by class ({len(labels.unique()):,})")
    low, high = score.double().quantile(torch.tensor([0.02, 0.98], dtype=torch.float64)).tolist()
    coloured = right.scatter(x, y, s=size, c=score.numpy(), cmap="viridis", vmin=low, vmax=high, linewidths=0)
    right.set_title(f"by {label}")
    figure.colorbar(coloured, ax=right)
    for axes in (left, right):
        axes.set(xticks=[], yticks=[])
    return figure


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")

"""Two studies: what uncertainty scores are worth, and which audit score finds wrong labels.

**uncertainty**: what ‖u‖ and every other score are worth on clean and on degraded queries. Two losses × plain, ism,
idml, pel. Expected cost on two cores: CUB at 112 px about 3 minutes of training features for each seed and 6 minutes of
test features once, then about 40 seconds a run.

**audit**: wrong labels are planted among the test images; which score finds them? The labels of 5 % of the test images
are changed, to any other class ("uniform") or to one of the three classes whose mean features are nearest ("similar").
Every score ranks all images; n is the number of planted labels. The embeddings are the trunk's raw features, and those
of three runs. The data's own mistakes count as false alarms, so no score can be perfect. Where a data set knows its
ambiguous images (glyphs), a second table says which score of ambiguity finds them. Expected cost on two cores: CUB at
112 px about 3 minutes of features for each seed, then a minute a run.

The runs have the options of the regime and one learning rate; nothing is tuned.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from idml.audit.label_errors import SCORES, score_ambiguity, score_labels
from idml.data.augment import MIDDLE, MIXED
from idml.data.datasets import Dataset
from idml.data.images import resized_side
from idml.data.pixel_cache import load_pixels
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings, unit_rows
from idml.evaluation import neighbour_scores
from idml.evaluation.evaluate import EvaluatedModel, fit_error_predictor, load_model_pixels, measure_queries
from idml.evaluation.knn import nearest
from idml.evaluation.scores import GALLERY_AWARE, QUERY_ONLY, MeasuredQueries
from idml.evaluation.uncertainty import auroc, auroc_between, evaluate_uncertainty, paired_rise
from idml.model import build_model, load_model
from idml.model.feature_cache import load_features
from idml.progress import image_counter, silent
from idml.reproduction.claims import interval_text
from idml.reproduction.regimes import method_options
from idml.reproduction.runner import Cell, Measures, Store
from idml.reproduction.stored_results import Row
from idml.training.config import TrainConfig

LOSSES = ("multi_similarity", "proxy_anchor")
METHODS = ("plain", "ism", "idml", "pel")
RUNS = (("multi_similarity", "plain"), ("multi_similarity", "idml"), ("proxy_anchor", "idml"))
SHARE = 0.05
SIMILAR = 3  # classes that an image's class is mistaken for
KINDS = ("uniform", "similar")
BASELINE, RAW_FEATURES = "disagreement", "raw features"
DISCOUNTED = "discriminant ÷ ‖u‖"


class StudyTable(NamedTuple):
    """A table of a study: the name of its file, a title, the header and the rows."""

    name: str
    title: str
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Study:
    """A study: its cells for a number of seeds, what is measured of each, and the tables of their rows.

    ``cells`` may depend on rows that are stored: it is asked again after each run.
    """

    cells: Callable[[Store, int], list[Cell]]
    measures: Measures
    tables: Callable[[list[Row]], list[StudyTable]]
    regime: str | None = None
    """The regime it needs; by default that of the data set."""
    seeds: int = 3


# -------------------- uncertainty --------------------


def uncertainty_cells(store: Store, seeds: int) -> list[Cell]:
    """Return every run of the study, seed by seed."""
    rate = store.regime.study_rate
    return [
        store.cell(loss, method_options(method), rate, seed, study="uncertainty")
        for seed in range(seeds)
        for loss in LOSSES
        for method in METHODS
    ]


def measure_uncertainty(config: TrainConfig, run: Path, dataset: Dataset, _: object, __: object) -> dict[str, Any]:
    """Return the figures of every score in every view."""
    uncounted = partial(image_counter, silent)
    candidate = EvaluatedModel.load(run, dataset, None, uncounted, silent)
    train = load_model_pixels(candidate.model, dataset.train, uncounted, silent)
    measured = measure_queries(candidate, (MIXED, *MIDDLE), predictor=fit_error_predictor(candidate, train, silent))
    return {"queries": len(measured.rows), "views": {view: _figures(measured, view) for view in measured.views}}


def _figures(measured: MeasuredQueries, view: str) -> dict[str, Any]:
    seen, clean = measured.views[view], measured.views["clean"]
    rows: dict[str, Any] = {"accuracy": float(seen.correct.double().mean())}
    for name, score in seen.scores.items():
        rows[name] = evaluate_uncertainty(score, seen.correct)
        if view != "clean":
            before = clean.scores[name]
            rows[name] |= {"detects": auroc_between(score, before), "rises": paired_rise(before, score)}
    return rows


def uncertainty_tables(rows: list[Row]) -> list[StudyTable]:
    """Return a table for each figure of the scores."""
    titles = {
        "r_auroc": "R-AUROC: does the score rank wrong answers above right ones?",
        "augrc": "AUGRC × 1000: errors weighted by how certain they were (less is better)",
        "detects": "AUROC of the score for degraded queries against clean ones",
        "rises": "P(score rises) from the clean query to the degraded one",
    }
    return [StudyTable(figure, title, *score_table(rows, figure)) for figure, title in titles.items()]


def score_table(results: list[Row], figure: str) -> tuple[list[str], list[list[str]]]:
    """Return a row for each loss, method and score, a column for each view; means over the seeds with 95 % intervals.

    The best score of its kind (query-only, gallery-aware) in a view is marked by a star.
    """
    views = [v for v in results[0]["views"] if v != "clean" or figure in ("r_auroc", "augrc")]
    sign, factor = (-1, 1000) if figure == "augrc" else (1, 1)
    rows = []
    for loss in LOSSES:
        for method in METHODS:
            runs = [r for r in results if (r["options"]["loss"], r["options"]["method"]) == (loss, method)]
            for kind, names in (("query", QUERY_ONLY), ("gallery", GALLERY_AWARE)):
                found = {
                    name: {
                        v: [factor * x for r in runs if (x := r["views"][v][name][figure]) is not None] for v in views
                    }
                    for name in names
                    if all(name in r["views"]["clean"] for r in runs)
                }
                best = {v: _best({name: sign * sum(values[v]) for name, values in found.items()}) for v in views}
                for name, values in found.items():
                    cells = [interval_text(values[v], 2) if values[v] else "–" for v in views]
                    marked = [cell + (" *" if best[v] == name else "") for v, cell in zip(views, cells, strict=True)]
                    rows.append([loss, method, kind, name, *marked])
    return ["loss", "method", "sees", "score", *views], rows


def _best(values: dict[str, float]) -> str:
    return max(values, key=lambda name: values[name])


# -------------------- audit --------------------


def audit_cells(store: Store, seeds: int) -> list[Cell]:
    """Return every run of the study, seed by seed; the raw features come first (a random trunk has none)."""
    rate = store.regime.study_rate
    raw = range(seeds) if store.regime.base.get("pretrained", True) else ()
    trained = [
        store.cell(loss, method_options(method), rate, seed, study="audit")
        for seed in range(seeds)
        for loss, method in RUNS
    ]
    return [*(store.raw_cell("audit", seed) for seed in raw), *trained]


def measure_audit(config: TrainConfig, run: Path, dataset: Dataset, _: object, __: object) -> dict[str, Any]:
    """Return how well each score finds what was planted among the test images, as this run embeds them."""
    model = load_model(run)
    pixels = load_pixels(dataset.test, resized_side(model.trunk.image_size))
    features = load_features(model, pixels)
    embeddings, labels = model.embed_features(features), pixels.images.labels[pixels.usable]
    result: dict[str, Any] = {"planted": planted_figures(embeddings, features, labels, config.seed)}
    if pixels.images.ambiguous is not None:
        result["ambiguous"] = ambiguity_figures(embeddings, labels, pixels.images.ambiguous[pixels.usable])
    return result


def measure_raw_audit(config: TrainConfig, dataset: Dataset, seed: int) -> dict[str, Any]:
    """Return the same for the trunk's own features."""
    model = build_model(
        config.trunk, pretrained=config.pretrained, weights=config.weights, image_size=config.image_size
    )
    pixels = load_pixels(dataset.test, resized_side(model.trunk.image_size))
    features, labels = load_features(model, pixels), pixels.images.labels[pixels.usable]
    return {"planted": planted_figures(Embeddings.certain(features), features, labels, seed)}


def planted_figures(embeddings: Embeddings, features: Tensor, labels: Tensor, seed: int) -> dict[str, Any]:
    """Return the figures of every score for both kinds of planted labels."""
    figures: dict[str, Any] = {}
    for kind in KINDS:
        given = plant(labels, seed, features if kind == "similar" else None)
        wrong, rows = given != labels, {}
        for name in SCORES:
            found = score_labels(embeddings, given, score=name)
            right = (found.suggested == labels)[wrong]
            rows[name] = {**ranking_figures(found.score, wrong), "suggested": float(right.double().mean())}
            if name == "discriminant" and embeddings.uncertainty.shape[1]:
                score = found.score / embeddings.level.double().clamp_min(1e-9)
                rows[DISCOUNTED] = {**ranking_figures(score, wrong), "suggested": rows[name]["suggested"]}
        figures[kind] = {"count": int(wrong.sum()), "scores": rows}
    return figures


def plant(labels: Tensor, seed: int, features: Tensor | None = None) -> Tensor:
    """Return the labels with 5 % of them wrong: any other class, or with ``features`` one of the three most similar."""
    count, classes = round(SHARE * len(labels)), int(labels.max()) + 1
    stream = random_stream("wrong labels", seed, int(features is not None))
    rows = torch.randperm(len(labels), generator=stream)[:count]
    given = labels.clone()
    if features is None:
        given[rows] = (labels[rows] + torch.randint(1, classes, (count,), generator=stream)) % classes
        return given
    unit = unit_rows(features)
    means = unit_rows(torch.zeros(classes, unit.shape[1]).index_add_(0, labels, unit))
    near = nearest(means, min(SIMILAR, classes - 1)).indices
    given[rows] = near[labels[rows], torch.randint(near.shape[1], (count,), generator=stream)]
    return given


def ranking_figures(score: Tensor, wanted: Tensor) -> dict[str, float]:
    """Measure how early a ranking by falling score finds the n ``wanted`` images; equal scores come in any order.

    ``at_n``: share of the n found among the first n, which is precision and recall there; ``at_2n``: recall among the
    first 2n; ``ap``: average precision, equal scores taken together.

    >>> ranking_figures(torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([True, True, False, False]))
    {'at_n': 0.75, 'at_2n': 1.0, 'ap': 0.8333333333333333}
    """
    values, order = score.sort(descending=True, stable=True)
    last = torch.cat([values[:-1] != values[1:], torch.tensor([True])])  # of a group of equal scores
    seen = torch.arange(1, len(order) + 1, dtype=torch.float64)[last]
    hits = wanted[order].double().cumsum(0)[last]
    n = float(wanted.sum())
    size, new = (x.diff(prepend=x.new_zeros(1)) for x in (seen, hits))

    def recall(depth: float) -> float:
        taken = ((depth - (seen - size)) / size).clamp(0, 1)
        return float((taken * new).sum() / n)

    return {"at_n": recall(n), "at_2n": recall(2 * n), "ap": float((new * hits / seen).sum() / n)}


def ambiguity_figures(embeddings: Embeddings, labels: Tensor, known: Tensor) -> dict[str, Any]:
    """Measure how well each score finds the images that are known to be ambiguous."""
    scores = {
        "shared surroundings": score_ambiguity(labels, nearest(embeddings, 10)).score,
        "entropy": neighbour_scores(embeddings, labels).scores["entropy"],
        "‖u‖": embeddings.level,
    }
    return {name: {"auroc": auroc(x, known), **ranking_figures(x, known)} for name, x in scores.items()}


def audit_tables(rows: list[Row]) -> list[StudyTable]:
    """Return the table of planted labels and, where the ambiguous images are known, that of ambiguity."""
    tables = [StudyTable("table", "Wrong labels that were planted: which score finds them?", *planted_table(rows))]
    if all("ambiguous" in row for row in rows):
        title = "Ambiguous images: which score finds them?"
        tables.append(StudyTable("ambiguous", title, *ambiguity_table(rows)))
    return tables


def _groups(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows of all seeds for each embedding."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        options = row["options"]
        name = f"{options['loss']} {options['method']}" if "method" in options else RAW_FEATURES
        groups.setdefault(name, []).append(row)
    return groups


def planted_table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return a row for each embedding, kind of mistake and score: means over seeds with 95 % intervals, in %."""
    header = ["embeddings", "planted", "score", "found in n", "found in 2n", "AP", "right suggestion"]
    lines = []
    for embedding, runs in _groups(rows).items():
        for kind in KINDS:
            scores = [run["planted"][kind]["scores"] for run in runs]
            for name in scores[0]:
                values = [[100 * t[name][figure] for t in scores] for figure in ("at_n", "at_2n", "ap", "suggested")]
                gain = [100 * (t[name]["ap"] - t[BASELINE]["ap"]) for t in scores]
                cells = [interval_text(x, 1) for x in values]
                more = "" if name == BASELINE else interval_text(gain, 1, sign=True)
                lines.append([embedding, kind, name, *cells, more])
    return [*header, f"AP − {BASELINE}"], lines


def ambiguity_table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return a row for each embedding and score of ambiguity."""
    lines = []
    for embedding, runs in _groups(rows).items():
        for name in runs[0]["ambiguous"]:
            figures = [[run["ambiguous"][name][figure] for run in runs] for figure in ("auroc", "at_n", "ap")]
            lines.append([embedding, name, *(interval_text(x, 3) for x in figures)])
    return ["embeddings", "score", "AUROC", "found in n", "AP"], lines


STUDIES = {
    "uncertainty": Study(uncertainty_cells, Measures(run=measure_uncertainty), uncertainty_tables),
    "audit": Study(audit_cells, Measures(run=measure_audit, raw=measure_raw_audit), audit_tables),
}

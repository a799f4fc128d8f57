"""`idml evaluate`: measure a run on the test classes of a data set.

`evaluate_run` stores its result under a hash of everything that it depends on, so a second call only reads it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from idml.data.augment import CLEAN, GRADED, MIDDLE, MIXED, View, other_class
from idml.data.datasets import Dataset, ImageSet, load_dataset
from idml.data.images import resized_side
from idml.data.pixel_cache import Pixels, load_pixels
from idml.embeddings import Embeddings
from idml.errors import unknown_name
from idml.evaluation.knn import nearest
from idml.evaluation.report import build_report, describe_best_scores, summarise_views
from idml.evaluation.rerank import RERANKERS, StructuralReranker, linear_head, match_positions
from idml.evaluation.retrieval import RetrievalFigures, evaluate_retrieval
from idml.evaluation.scores import (
    ErrorPredictor,
    MeasuredQueries,
    NeighbourScores,
    ViewScores,
    inverse_norm,
    neighbour_scores,
    random_norm,
    sigma,
    vote_disagreement,
)
from idml.evaluation.uncertainty import auroc, auroc_between
from idml.files import write_atomic
from idml.metric import IntrospectiveMetric
from idml.model import Model, fingerprint, load_model
from idml.model.feature_cache import embed_view, load_features
from idml.progress import Count, Note, Progress, image_counter, silent
from idml.records import format_figures

VERSION = 1  # raise it if the meaning of a figure changes: stored results are then computed again
METRICS = ("euclidean", "introspective")

ImageCounter = Callable[[str], Count]
"""Returns a ``Count`` for what is done to images, for instance "decoded"."""


def evaluate_run(
    run: str | Path,
    data: str,
    *,
    metric: str = "euclidean",
    split: str = "official",
    ensemble: Sequence[str | Path] = (),
    graded: bool = False,
    rerank: str | None = None,
    out: str | Path | None = None,
    progress: Progress = silent,
    note: Note = silent,
) -> "Evaluation":
    """Measure retrieval, clustering and uncertainty of the model in ``run`` on the test classes of ``data``.

    Args:
        run: a run directory.
        data: a SPEC as in `idml.data.datasets.load_dataset`, and ``split`` likewise.
        metric: the distance at test time: "euclidean" on s, or "introspective" with the run's τ and γ.
        split: which classes train and which test.
        ensemble: further runs that vote with this one.
        graded: three strengths of every degradation instead of the middle one.
        rerank: "diml" sorts the first 100 neighbours of each query anew by structural matching, for the figures of
            retrieval. The uncertainty scores are those of the search without it.
        out: where report.html goes; by default ``run``/evaluation.
        progress: called with rows of how many images are done.
        note: called with lines for the user.

    The result is stored in ``run``/evaluation under a hash of the models, the images, the metric and the views. A
    second call reads it. docs/evaluation.md describes it.
    """
    runs = [Path(path) for path in (run, *ensemble)]
    if metric not in METRICS:
        raise ValueError(unknown_name("metric", metric, METRICS))
    if rerank is not None and rerank not in RERANKERS:
        raise ValueError(unknown_name("re-ranker", rerank, RERANKERS))
    models = [fingerprint(path) for path in runs]
    options = [read_run_options(path) for path in runs]
    metrics = [
        _read_metric(path, trained) if metric == "introspective" else None
        for path, trained in zip(runs, options, strict=True)
    ]
    dataset = load_dataset(data, split=split)
    views = GRADED if graded else MIDDLE
    if len(dataset.test.labels.unique()) > 1:  # images of a single class have nothing to be mixed with
        views = (MIXED, *views)
    trained = {name: options[0].get(name) for name in ("method", "teach_u", "rule", "split")}
    trained["teach_u"] = trained["teach_u"] or options[0].get("introspection")  # its name in older runs
    sets = [None if images is None else images.version for images in (dataset.train, dataset.test, dataset.gallery)]
    parts: tuple[Any, ...] = (VERSION, models, sets, split, metrics, trained, views)
    parts = parts if rerank is None else (*parts, rerank)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    folder = runs[0] / "evaluation"
    report_folder = folder if out is None else Path(out)
    result = _read_stored(folder, key)
    if result is None:
        head: dict[str, Any] = {"data": dataset.name, "split": split, "metric": metric, "key": key}
        if metrics[0] is not None:
            head |= {"tau": metrics[0].tau, "gamma": metrics[0].gamma}
        head["model"] = {"fingerprint": models[0], "method": trained["method"]}
        head["notes"] = [*dataset.notes, *_warn(trained, split, metric)]
        if rerank is not None:
            head["rerank"] = rerank
        result, page = _evaluate(runs, dataset, metrics, views, head, progress, note)
        folder.mkdir(exist_ok=True)
        write_atomic(folder / f"{key}.html", page)
        write_atomic(folder / f"{key}.json", (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    else:
        for line in result["notes"]:
            note(line)
    report_folder.mkdir(parents=True, exist_ok=True)
    write_atomic(report_folder / "report.html", (folder / f"{key}.html").read_bytes())
    return Evaluation({**result, "report": str(report_folder / "report.html")})


class Evaluation(RetrievalFigures):
    """What `evaluate_run` measured: figures of retrieval, scores of uncertainty, the verdict and the report."""

    @property
    def report(self) -> str:
        """The file of the report."""
        return str(self["report"])

    @property
    def verdict(self) -> list[str]:
        """Lines that say which score of uncertainty is best."""
        return list(self["verdict"])

    def lines(self) -> list[str]:
        """Return the figures of retrieval and the verdict."""
        names = [name for name in ("recall@1", "r_precision", "map@r", "nmi") if self.get(name) is not None]
        figures = format_figures(self["data"], {name: self[name] for name in names})
        return [figures, "scores of uncertainty, by R-AUROC (0.5 is chance):", *self.verdict]


def _evaluate(
    runs: list[Path],
    dataset: Dataset,
    metrics: list[IntrospectiveMetric | None],
    views: tuple[View, ...],
    head: dict[str, Any],
    progress: Progress,
    note: Note,
) -> tuple[dict[str, Any], bytes]:
    """Compute the result, which begins with ``head``, and its page."""
    notes: list[str] = head["notes"]
    for line in notes:
        note(line)

    def keep(line: str) -> None:
        if line not in notes:  # several models of an ensemble may report the same image
            notes.append(line)
            note(line)

    count_images = partial(image_counter, progress)
    ahead = (1 + len(views)) * len(dataset.test) + len(dataset.train) + len(dataset.gallery or ())
    loaded = [
        EvaluatedModel.load(path, dataset, metric, count_images, keep, ahead)
        for path, metric in zip(runs, metrics, strict=True)
    ]
    candidate, config = loaded[0], loaded[0].model.config
    if "rerank" in head:
        linear_head(candidate.model)  # a model that cannot be re-ranked is refused before anything is embedded
    train = load_model_pixels(candidate.model, dataset.train, count_images, keep)
    measured = measure_queries(candidate, views, loaded[1:], fit_error_predictor(candidate, train, keep))
    if "rerank" in head:
        before = {name: measured.retrieval[name] for name in ("recall@1", "r_precision", "map@r")}
        head["before_rerank"] = before
        shares = ", ".join(f"{name} {value:.1%}" for name, value in before.items() if value is not None)
        keep(f"the figures of retrieval are those of neighbours re-ranked by {head['rerank']}; before: {shares}")
        measured = dataclasses.replace(measured, retrieval={**measured.retrieval, **measure_reranked(candidate)})
    n = len(measured.rows)
    if candidate.metric is not None:
        keep("NMI is not defined with the introspective metric: k-means uses Euclidean distances")
    result: dict[str, Any] = {
        **head,
        "model": {"trunk": config.trunk, "embedding_dim": config.embedding_dim, **head["model"]},
        "ensemble": len(runs) - 1,
        **measured.retrieval,
        "classes": len(measured.labels.unique()),
        "own_score": "sigma" if config.uncertainty == "gaussian" else "level",
        **summarise_views(
            measured.views, measured.labels, lambda done, total: count_images("resampled")(done * n, total * n)
        ),
    }
    result["verdict"] = describe_best_scores(result)
    return result, build_report(result, measured, candidate.queries, candidate.gallery or candidate.queries, note)


def read_run_options(run: Path) -> dict[str, Any]:
    """Read the options that the run was trained with; empty if it has no config.yaml."""
    path = run / "config.yaml"
    try:
        options = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a YAML file ({str(error).splitlines()[0]})") from None
    if not isinstance(options, dict):
        raise ValueError(f"{path} must hold options as 'name: value' lines")
    return options


def _read_metric(run: Path, options: dict[str, Any]) -> IntrospectiveMetric:
    if "tau" not in options or "gamma" not in options or options.get("introspective") is False:
        raise ValueError(
            f"{run / 'config.yaml'} has no tau and gamma, which the introspective metric needs: "
            "methods ism and idml train with them, others with --introspective"
        )
    return IntrospectiveMetric(options["tau"], options["gamma"])


def describe_untaught(trained: dict[str, Any]) -> list[str]:
    """A line that says that nothing taught u in a run with these options; none if something did."""
    method, signal = trained.get("method"), trained.get("teach_u", trained.get("introspection"))
    if method not in ("plain", "mixup") or signal not in (None, "none"):
        return []
    return [f"the run was trained by {method} alone: nothing taught its uncertainty embedding anything"]


def _warn(trained: dict[str, Any], split: str, metric: str) -> list[str]:
    """Lines about what makes the figures of this run less meaningful."""
    lines = describe_untaught(trained)
    if trained["split"] is not None and str(trained["split"]) != split:
        lines.append(
            f"the run was trained with the split {trained['split']!r}: it may have seen the test classes of {split!r}"
        )
    if metric == "introspective" and trained["rule"] not in (None, "similar"):
        lines.append(
            f"the run was trained with the rule {trained['rule']!r}; the test uses 'similar', which can rank images"
        )
    return lines


def _read_stored(folder: Path, key: str) -> dict[str, Any] | None:
    """Read a stored result; None if there is none or it is damaged."""
    try:
        result = json.loads((folder / f"{key}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return result if isinstance(result, dict) and (folder / f"{key}.html").is_file() else None


# -------------------- the model and its test images --------------------


@dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """A model, the test images (queries), and the gallery if the data set has its own.

    Without a gallery, a query is searched among the clean test images and left out of its own result by its id. A mixed
    query leaves out both of its parents, because it is half a copy of each.
    """

    model: Model
    queries: Pixels
    gallery: Pixels | None
    metric: IntrospectiveMetric | None
    count_images: ImageCounter
    ahead: int = 0
    """How many images the trunk will see in all views, if that is known."""

    @classmethod
    def load(
        cls,
        run: Path,
        dataset: Dataset,
        metric: IntrospectiveMetric | None,
        count_images: ImageCounter,
        note: Note,
        ahead: int = 0,
    ) -> "EvaluatedModel":
        """Load the model of a run, and the test images at its size."""
        model = load_model(run)
        if metric is not None and model.config.uncertainty == "gaussian":
            raise ValueError(f"{run}: the introspective metric needs u, but this model has Gaussian embeddings")
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        gallery = None if dataset.gallery is None else load_model_pixels(model, dataset.gallery, count_images, note)
        queries = load_model_pixels(model, dataset.test, count_images, note)
        loaded = cls(model, queries, gallery, metric, count_images, ahead)
        found = loaded.gallery_labels.bincount(minlength=len(dataset.test.classes))[loaded.labels]
        if not bool((found > (1 if gallery is None else 0)).any()):  # checked before anything is embedded
            raise ValueError(
                f"{dataset.test.name}: none of the {len(found)} images has another image of its class to find"
            )
        return loaded

    @property
    def labels(self) -> Tensor:
        """The class of each query."""
        return self.queries.images.labels[self.queries.usable]

    @property
    def gallery_labels(self) -> Tensor:
        """The class of each gallery image."""
        searched = self.gallery or self.queries
        return searched.images.labels[searched.usable]

    @cached_property
    def gallery_embeddings(self) -> Embeddings:
        """The embeddings of the gallery."""
        return self.embed_view(CLEAN, self.gallery)[1]

    def embed_view(self, view: View, pixels: Pixels | None = None) -> tuple[Tensor, Embeddings]:
        """Embed the queries (or other images) in a view; returns their features and embeddings, all finite."""
        pixels = pixels or self.queries
        images = pixels.images
        count = self.count_images(f"of {images.name}, {view}")
        features = load_features(self.model, pixels, view, images=self.ahead, progress=count)
        embeddings = self.model.embed_features(features)
        sound = [x.isfinite().all(dim=1) for x in (features, embeddings.semantic, embeddings.uncertainty)]
        bad = (~torch.stack(sound).all(dim=0)).nonzero().flatten()
        if len(bad):
            first = images.sources[int(pixels.usable[bad[0]])].name
            raise ValueError(
                f"{images.name}, {view}: the embeddings of {len(bad)} of {len(features)} images hold NaN or infinity "
                f"(first: {first!r})"
            )
        return features, embeddings

    def search(self, embeddings: Embeddings, view: View) -> NeighbourScores:
        """Search the queries as embedded in a view. For a mixed query, the class of either parent is right."""
        n, device = len(embeddings), self.model.device
        queries, gallery, labels, gallery_labels = (
            embeddings.to(device),
            self.gallery_embeddings.to(device),
            self.labels,
            self.gallery_labels,
        )
        everyone = torch.arange(n)
        mixed = view.kind == "mixed"
        partner = other_class(labels, view.seed) if mixed else everyone
        parts, groups = [], group_disjoint_pairs(partner) if mixed and self.gallery is None else [everyone]
        for rows in groups:
            ids = everyone.clone()
            ids[partner[rows]] = rows  # the other parent gets the query's id
            parts.append(
                neighbour_scores(
                    queries[rows.to(device)],
                    labels[rows],
                    gallery=gallery,
                    gallery_labels=gallery_labels,
                    metric=self.metric,
                    query_ids=rows if self.gallery is None else None,
                    gallery_ids=ids if self.gallery is None else None,
                )
            )
        back = torch.cat(groups).argsort()
        indices = torch.cat([part.indices.cpu() for part in parts])[back]
        first = gallery_labels[indices[:, 0]]
        return NeighbourScores(
            {name: torch.cat([part.scores[name].cpu() for part in parts])[back] for name in parts[0].scores},
            (first == labels) | (first == labels[partner]),
            torch.cat([part.singleton.cpu() for part in parts])[back],
            indices,
        )


def load_model_pixels(model: Model, images: ImageSet, count_images: ImageCounter, note: Note) -> Pixels:
    """Load images at the model's working size; a note names those that cannot be read."""
    pixels = load_pixels(images, resized_side(model.trunk.image_size), progress=count_images("decoded"))
    if pixels.broken:
        first = next(iter(pixels.broken.values()))
        note(f"{images.name}: {len(pixels.broken)} of {len(images)} images left out (first: {first})")
    return pixels


def group_disjoint_pairs(partner: Tensor) -> list[Tensor]:
    """Put the pairs (i, partner[i]) into groups in which no image is in two pairs; returns the numbers i of each group.

    A gallery image has one id. So within a group, both parents of a mixture can have the same id.

    >>> group_disjoint_pairs(torch.tensor([1, 2, 3, 0]))
    [tensor([0, 2]), tensor([1, 3])]
    """
    groups: list[list[int]] = []
    taken: list[set[int]] = []
    for i, j in enumerate(partner.tolist()):
        place = next((g for g, seen in enumerate(taken) if i not in seen and j not in seen), len(groups))
        if place == len(groups):
            groups.append([])
            taken.append(set())
        groups[place].append(i)
        taken[place] |= {i, j}
    return [torch.tensor(group) for group in groups]


# -------------------- measuring every score in every view --------------------


def measure_queries(
    candidate: EvaluatedModel,
    views: Iterable[View],
    members: Iterable[EvaluatedModel] = (),
    predictor: ErrorPredictor | None = None,
) -> MeasuredQueries:
    """Search the queries of every view and measure their scores.

    ``members`` are models that vote with this one; ``predictor`` predicts errors.
    """
    views = (CLEAN, *views)
    seen: dict[str, ViewScores] = {}
    votes: dict[str, list[Tensor]] = {}
    gallery_labels = candidate.gallery_labels
    for view in views:
        features, embeddings = candidate.embed_view(view)
        if view == CLEAN:
            retrieval = evaluate_retrieval(
                embeddings,
                candidate.labels,
                gallery=None if candidate.gallery is None else candidate.gallery_embeddings,
                gallery_labels=None if candidate.gallery is None else gallery_labels,
                metric=candidate.metric,
                nmi=True,
            )
        answers = candidate.search(embeddings, view)
        if view == CLEAN:
            rows = (~answers.singleton).nonzero().flatten()
            clean, found = embeddings[rows], answers.indices[rows]
        scores = {**query_scores(candidate, features, embeddings, predictor), **answers.scores}
        seen[str(view)] = ViewScores({name: score[rows] for name, score in scores.items()}, answers.correct[rows])
        votes[str(view)] = [gallery_labels[answers.indices[rows, 0]]]
    for member in members:
        if not torch.equal(member.queries.usable, candidate.queries.usable):
            raise ValueError("the models of the ensemble cannot all read the same images")
        for view in views:
            indices = member.search(member.embed_view(view)[1], view).indices
            votes[str(view)].append(member.gallery_labels[indices[rows, 0]])
    for name, given in votes.items():
        if len(given) > 1:
            seen[name].scores["ensemble"] = vote_disagreement(torch.stack(given))
    return MeasuredQueries(retrieval, rows, candidate.labels[rows], seen, clean, found)


def measure_reranked(candidate: EvaluatedModel) -> dict[str, float | int | None]:
    """The figures of retrieval with the first neighbours of each query re-ranked by structural matching."""
    count = candidate.count_images("matched by position")
    embeddings = candidate.embed_view(CLEAN)[1]
    queries = match_positions(candidate.model, candidate.queries, embeddings, count)
    gallery = queries
    if candidate.gallery is not None:
        gallery = match_positions(candidate.model, candidate.gallery, candidate.gallery_embeddings, count)
    return evaluate_retrieval(
        embeddings,
        candidate.labels,
        gallery=None if candidate.gallery is None else candidate.gallery_embeddings,
        gallery_labels=None if candidate.gallery is None else candidate.gallery_labels,
        metric=candidate.metric,
        rerank=StructuralReranker(queries, gallery),
    )


def query_scores(
    candidate: EvaluatedModel, features: Tensor, embeddings: Embeddings, predictor: ErrorPredictor | None
) -> dict[str, Tensor]:
    """The scores of `idml.evaluation.scores.QUERY_ONLY` that this model has."""
    gaussian = candidate.model.config.uncertainty == "gaussian"
    scores = {"sigma": sigma(embeddings)} if gaussian else {"level": embeddings.level}
    scores["semantic_norm"] = inverse_norm(embeddings.semantic)
    scores["feature_norm"] = inverse_norm(features)
    scores["random_norm"] = random_norm(features)
    if predictor is not None:
        scores["predicted_error"] = predictor.scores(features)
    return scores


def fit_error_predictor(candidate: EvaluatedModel, train: Pixels, note: Note) -> ErrorPredictor | None:
    """Fit an error predictor to the training images: is the nearest other image of the same class?

    Training images that are also test images, or alone in their class, are not used. If all answers are right, or all
    are wrong, there is nothing to learn: a note says so, and None is returned.
    """
    features, embeddings = candidate.embed_view(CLEAN, train)
    labels = train.images.labels[train.usable]
    tested = {source.name for source in candidate.queries.images.sources}
    fresh = [train.images.sources[i].name not in tested for i in train.usable.tolist()]
    usable = torch.tensor(fresh) & (labels.bincount()[labels] > 1)
    if not bool(usable.any()):
        note("predicted_error is left out: every training image is alone in its class or a test image")
        return None
    device = candidate.model.device
    first = nearest(embeddings.to(device), 1, metric=candidate.metric).indices[:, 0].cpu()
    wrong = labels[first] != labels
    if bool(wrong[usable].all()) or not bool(wrong[usable].any()):
        kind = "wrong" if bool(wrong[usable].all()) else "right"
        note(f"predicted_error is left out: all {int(usable.sum())} answers among the training images are {kind}")
        return None
    return ErrorPredictor().fit(features[usable], wrong[usable])


# -------------------- ambiguous images --------------------


def measure_ambiguity(model: Model, pixels: Pixels, *, keep: bool = False) -> dict[str, float]:
    """Measure the AUROC of ‖u‖ for mixed images against clean ones, and for images with a twin in another class.

    The second figure needs a data set that knows its twins (glyphs). 0.5 is chance. ``keep`` is `embed_view`'s.
    """
    clean, mixed = (embed_view(model, pixels, view, keep=keep).level for view in (CLEAN, MIXED))
    figures = {"auroc_mixed": auroc_between(mixed, clean)}
    if pixels.images.ambiguous is not None:
        figures["auroc_twins"] = auroc(clean, pixels.images.ambiguous[pixels.usable])
    return figures

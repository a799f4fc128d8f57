"""Every score of every test image, as it is and in the views that make it harder, and whether the answer is right."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from idml.data.augment import GRADED, View
from idml.data.pixel_cache import Pixels
from idml.embeddings import Embeddings
from idml.evaluation.candidate import Candidate
from idml.evaluation.neighbours import nearest
from idml.evaluation.predictor import ErrorPredictor
from idml.evaluation.retrieval import evaluate_retrieval
from idml.evaluation.scores import inverse_norm, random_norm, sigma, vote_disagreement
from idml.model.feature_cache import CLEAN

MIDDLE = GRADED[1::3]  # of the three strengths of each kind


@dataclass(frozen=True, eq=False)
class Seen:
    """The queries in one view: their scores [n], larger where less certain, and whether the answer is right [n]."""

    scores: dict[str, Tensor]
    correct: Tensor


@dataclass(frozen=True, eq=False)
class Measured:
    """What `measure` found. The queries are the test images that have another image of their class to find."""

    retrieval: dict[str, float | int | None]
    rows: Tensor  # which of the usable test images are queries [n]
    labels: Tensor  # their classes [n]
    seen: dict[str, Seen]  # by view, "clean" first
    embeddings: Embeddings  # of the clean queries
    found: Tensor  # their nearest images: rows of the gallery [n, k]


def measure(
    candidate: Candidate,
    views: Iterable[View],
    members: Iterable[Candidate] = (),
    predictor: ErrorPredictor | None = None,
) -> Measured:
    """Search every view's queries; ``members`` are models that vote with this one, ``predictor`` foresees errors."""
    views = (CLEAN, *views)
    seen: dict[str, Seen] = {}
    votes: dict[str, list[Tensor]] = {}
    theirs = candidate.gallery_labels
    for view in views:
        features, embeddings = candidate.look(view)
        if view == CLEAN:
            retrieval = evaluate_retrieval(
                embeddings,
                candidate.labels,
                gallery=None if candidate.gallery is None else candidate.shelf,
                gallery_labels=None if candidate.gallery is None else theirs,
                metric=candidate.metric,
                nmi=True,
            )
        answers = candidate.search(embeddings, view)
        if view == CLEAN:
            rows = (~answers.singleton).nonzero().flatten()
            clean, found = embeddings[rows], answers.indices[rows]
        scores = {**query_scores(candidate, features, embeddings, predictor), **answers.scores}
        seen[str(view)] = Seen({name: score[rows] for name, score in scores.items()}, answers.correct[rows])
        votes[str(view)] = [theirs[answers.indices[rows, 0]]]
    for member in members:
        if not torch.equal(member.queries.usable, candidate.queries.usable):
            raise ValueError("the models of the ensemble cannot all read the same images")
        for view in views:
            indices = member.search(member.look(view)[1], view).indices
            votes[str(view)].append(member.gallery_labels[indices[rows, 0]])
    for name, given in votes.items():
        if len(given) > 1:
            seen[name].scores["ensemble"] = vote_disagreement(torch.stack(given))
    return Measured(retrieval, rows, candidate.labels[rows], seen, clean, found)


def query_scores(
    candidate: Candidate, features: Tensor, embeddings: Embeddings, predictor: ErrorPredictor | None
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


def fit_predictor(candidate: Candidate, train: Pixels, note: Callable[[str], None]) -> ErrorPredictor | None:
    """An error predictor that learned from the training images: is the nearest other one of the same class?

    Training images that are also test images, or alone in their class, are not used. Where all answers are right, or
    all wrong, there is nothing to learn: that is noted, and None returned.
    """
    features, embeddings = candidate.look(CLEAN, train)
    labels = train.images.labels[train.usable]
    tested = {source.name for source in candidate.queries.images.sources}
    fresh = [train.images.sources[i].name not in tested for i in train.usable.tolist()]
    usable = torch.tensor(fresh) & (labels.bincount()[labels] > 1)
    if not bool(usable.any()):
        note(
            "predicted_error is left out: no training image is fit to learn from (alone in its class, or a test image)"
        )
        return None
    device = candidate.model.semantic.weight.device
    first = nearest(embeddings.to(device), 1, metric=candidate.metric).indices[:, 0].cpu()
    wrong = labels[first] != labels
    if bool(wrong[usable].all()) or not bool(wrong[usable].any()):
        kind = "wrong" if bool(wrong[usable].all()) else "right"
        note(f"predicted_error is left out: all {int(usable.sum())} answers among the training images are {kind}")
        return None
    return ErrorPredictor().fit(features[usable], wrong[usable])

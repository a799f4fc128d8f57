"""Uncertainty scores: ‖u‖ and simple alternatives. Each is larger if the answer is less certain.

From the query alone, before any search (`QUERY_ONLY`):

    level            ‖u‖, `Embeddings.level`
    sigma            mean σ of a Gaussian model (PEL)
    semantic_norm    1/‖s‖, s before it is normalised           `inverse_norm`: short vectors are uncertain
    feature_norm     1/‖f‖, f the trunk's pooled features
    random_norm      1/‖Rf‖, R a random matrix: a head that learned nothing
    predicted_error  `ErrorPredictor`: a small network trained to predict wrong answers

From the labelled gallery (`GALLERY_AWARE`), with neighbours 1 … k at distances d₁ ≤ … ≤ d_k, and d_other the distance
of the nearest image of another class than the first neighbour's, at any place in the list:

    nearest_distance  d₁                         entropy       −Σ p·ln p, p the labels' shares among the k
    kth_distance      d_k                        disagreement  1 − share of the k with the first one's label
    margin            −(d_other − d₁)            ensemble      `vote_disagreement` of models of several seeds
    ratio             d₁ / d_other
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from idml.embeddings import Embeddings, full_precision, require_finite
from idml.evaluation.knn import Names, Neighbours, Points, Search
from idml.evaluation.retrieval import count_relevant, prepare_search
from idml.metric import IntrospectiveMetric

QUERY_ONLY = ("level", "sigma", "semantic_norm", "feature_norm", "random_norm", "predicted_error")
GALLERY_AWARE = ("nearest_distance", "kth_distance", "margin", "ratio", "entropy", "disagreement", "ensemble")

_LISTED = 1 << 20  # neighbours handled together
_BLOCK = 4096  # rows measured together


def sigma(embeddings: Embeddings) -> Tensor:
    """1/d · Σ σ_j [n] of a Gaussian model, whose uncertainty part is σ.

    >>> sigma(Embeddings(torch.eye(2), torch.tensor([[0.1, 0.3], [0.5, 0.5]])))
    tensor([0.2000, 0.5000])
    """
    deviations = full_precision(embeddings.uncertainty)
    if deviations.shape[1] == 0 or not bool((deviations > 0).all()):
        raise ValueError("σ must be positive everywhere: these are not the embeddings of a Gaussian model")
    return deviations.mean(dim=1)


def inverse_norm(x: Tensor) -> Tensor:
    """1/max(‖x‖, 1e-12) [n] of unnormalised semantic embeddings, or of features.

    >>> inverse_norm(torch.tensor([[3.0, 4.0], [0.0, 0.5]]))
    tensor([0.2000, 2.0000])
    """
    x = feature_rows(x)
    length: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    return length.clamp_min(1e-12).reciprocal().to(x.dtype)


def random_norm(features: Tensor, *, dimensions: int = 512, seed: int = 0) -> Tensor:
    """1/‖Rf‖ [n], R [dimensions, width] with entries N(0, 1/dimensions), so that E‖Rf‖² = ‖f‖².

    >>> random_norm(torch.eye(3), dimensions=1000).round(decimals=1)
    tensor([1., 1., 1.])
    """
    x = feature_rows(features)
    noise = torch.randn(x.shape[1], dimensions, generator=torch.Generator().manual_seed(seed))
    return inverse_norm(x @ (noise / math.sqrt(dimensions)).to(x))


class NeighbourScores(NamedTuple):
    """The result of `neighbour_scores` for every query [n]; singletons do not count as queries in any figure."""

    scores: dict[str, Tensor]
    correct: Tensor  # the first neighbour has the query's class
    singleton: Tensor  # the gallery holds no other image of the query's class: no answer could be right
    indices: Tensor  # the k neighbours [n, k], as `idml.evaluation.knn.Neighbours` has them


@dataclass(frozen=True, eq=False)
class ViewScores:
    """The queries in one view: their scores [n], larger if less certain, and whether the answer is right [n]."""

    scores: dict[str, Tensor]
    correct: Tensor


@dataclass(frozen=True, eq=False)
class MeasuredQueries:
    """The test images that have another image of their class to find, with their scores in every view."""

    retrieval: dict[str, float | int | None]
    rows: Tensor  # which of the usable test images are queries [n]
    labels: Tensor  # their classes [n]
    views: dict[str, ViewScores]  # by view, "clean" first
    embeddings: Embeddings  # of the clean queries
    neighbours: Tensor  # their nearest images: rows of the gallery [n, k]


def neighbour_scores(
    embeddings: Points,
    labels: Names,
    *,
    gallery: Points | None = None,
    gallery_labels: Names | None = None,
    metric: IntrospectiveMetric | None = None,
    k: int = 10,
    query_ids: Names | None = None,
    gallery_ids: Names | None = None,
) -> NeighbourScores:
    """Compute the scores of `GALLERY_AWARE` but ``ensemble`` in one exact search; arguments as in `evaluate_retrieval`.

    If a query can find fewer than ``k`` images, these are used. A query that finds a single class has no d_other: its
    ratio is 0, and its margin is the largest possible distance, max‖query‖ + max‖gallery image‖ (2 for Embeddings), so
    it is the most certain. If d₁ = d_other = 0, the ratio is 1.

    >>> x = torch.tensor([[0.0], [1.0], [3.0], [9.0]])
    >>> found = neighbour_scores(x, ["cat", "cat", "dog", "dog"], k=2)
    >>> found.scores["margin"], found.scores["disagreement"], found.correct
    (tensor([-2., -1., -4., -2.]), tensor([0.5000, 0.5000, 0.0000, 0.5000]), tensor([ True,  True, False,  True]))
    """
    search, own, theirs = prepare_search(embeddings, labels, gallery, gallery_labels, metric, query_ids, gallery_ids)
    search.require_neighbours()
    found = search.top(k)
    seen, near = found.indices >= 0, theirs[found.indices.clamp_min(0)]
    total, first = seen.sum(dim=1), found.distances[:, 0]
    other = _other_class(search, theirs, found)
    alone = other.isnan()
    scores = {
        "nearest_distance": first,
        "kth_distance": found.distances.gather(1, total.unsqueeze(1) - 1).squeeze(1),
        "margin": (first - other).masked_fill_(alone, -_diameter(search) if bool(alone.any()) else 0.0),
        "ratio": torch.where(other == 0, 1.0, first / other).masked_fill_(alone, 0.0),
        "entropy": label_entropy(near, seen).to(first.dtype),
        "disagreement": ((near != near[:, :1]) & seen).sum(dim=1).to(first.dtype) / total,
    }
    return NeighbourScores(scores, near[:, 0] == own, count_relevant(search, own, theirs) == 0, found.indices)


def vote_disagreement(votes: Tensor) -> Tensor:
    """1 − largest share of models that give one answer [n], from the answers as numbers [models, n].

    >>> vote_disagreement(torch.tensor([[0, 1, 2], [0, 1, 1], [0, 2, 0]]))
    tensor([0.0000, 0.3333, 0.6667])
    """
    return (votes != votes.mode(dim=0).values).sum(dim=0) / len(votes)


def _other_class(search: Search, theirs: Tensor, found: Neighbours) -> Tensor:
    """d_other [n], NaN if a query finds a single class: from the neighbours found, else from 4 times as many, …"""
    first = theirs[found.indices[:, 0]]
    of_class = count_relevant(search, first, theirs)  # one more image than these is enough
    other = _first_other(theirs, first, found)
    todo = (other.isnan() & (of_class < search.gallery - search.count)).nonzero().flatten()
    depth = found.indices.shape[1]
    while len(todo):
        depth = min(4 * depth, int(of_class[todo].max()) + 1)
        for rows in todo.split(max(1, _LISTED // depth)):
            other[rows] = _first_other(theirs, first[rows], search.top(depth, rows))
        todo = todo[other[todo].isnan()]
    return other


def _first_other(theirs: Tensor, first: Tensor, found: Neighbours) -> Tensor:
    differs = (theirs[found.indices.clamp_min(0)] != first.unsqueeze(1)) & (found.indices >= 0)
    distance = found.distances.gather(1, differs.int().argmax(dim=1, keepdim=True)).squeeze(1)
    return distance.masked_fill(~differs.any(dim=1), math.nan)


def label_entropy(near: Tensor, seen: Tensor) -> Tensor:
    """ln m − 1/m · Σ_j ln c_j over the m neighbours seen, c_j how many share the label of neighbour j.

    In float64, rounded to 12 places: lists with equal shares in another order tie.
    """
    line = torch.arange(len(near), device=near.device).unsqueeze(1)
    _, cell, count = (line * (near.max() + 1) + near)[seen].unique(return_inverse=True, return_counts=True)
    logs = torch.zeros(near.shape, dtype=torch.float64, device=near.device)
    logs[seen] = count.double().log()[cell]
    total = seen.sum(dim=1).double()
    return (total.log() - logs.sum(dim=1) / total).round(decimals=12).abs()


def _diameter(search: Search) -> float:
    """max‖query‖ + max‖gallery image‖, which no distance exceeds."""
    scale = search.alpha.scale
    longest = (
        max(float(torch.linalg.vector_norm(part.double() * scale, dim=1).max()) for part in x.split(_BLOCK))
        for x in (search.alpha.a, search.alpha.b)
    )
    return sum(longest) / scale


def feature_rows(x: Tensor) -> Tensor:
    """Check features [n, width] and convert them to floats of full precision."""
    if x.ndim != 2 or not x.is_floating_point() or x.shape[1] == 0:
        raise ValueError(f"features must be floats [images, dimensions], got {x.dtype} {list(x.shape)}")
    require_finite("feature", x)
    return full_precision(x)


# -------------------- a network that predicts wrong answers --------------------


_HIDDEN, _EPOCHS, _BATCH, _RATE = 64, 20, 256, 1e-3


class ErrorPredictor:
    """logit P(first neighbour is wrong) = W₂·relu(W₁·f̂ + b₁) + b₂, f̂ the features standardised over the fit.

    It needs labelled data but no uncertainty embedding: fit it by cross-entropy on some classes, use it on others. In
    training, half of f̂ and of the hidden layer are dropped; otherwise it memorises a few thousand images.

    >>> features = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    >>> predictor = ErrorPredictor(seed=0).fit(features, features[:, 0] > 1)
    >>> bool(predictor.scores(torch.tensor([[2.0, 0, 0, 0]])) > predictor.scores(torch.zeros(1, 4)))
    True
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed, self.network = seed, nn.Sequential()  # empty until fit

    @torch.enable_grad()
    def fit(self, features: Tensor, wrong: Tensor) -> Self:
        """Fit to features [n, width] and a bool mask [n]: the leave-one-out nearest neighbour is wrong."""
        x = feature_rows(features).detach().float()
        if wrong.dtype != torch.bool or wrong.shape != x.shape[:1]:
            raise ValueError(f"wrong must be a bool mask [{len(x)}], got {wrong.dtype} {list(wrong.shape)}")
        if bool(wrong.all()) or not bool(wrong.any()):
            raise ValueError("an error predictor needs both right and wrong answers to learn from")
        self.mean, self.deviation = x.mean(dim=0), x.std(dim=0, correction=0)
        self.deviation[self.deviation <= 1e-6 * self.mean.abs()] = 1.0  # a constant feature has no effect
        x, target = (x - self.mean) / self.deviation, wrong.to(x)
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(self.seed)
            layers = (nn.Dropout(), nn.Linear(x.shape[1], _HIDDEN), nn.ReLU(), nn.Dropout(), nn.Linear(_HIDDEN, 1))
            self.network = nn.Sequential(*layers).to(x.device)
            optimizer = torch.optim.AdamW(self.network.parameters(), lr=_RATE)
            for _ in range(_EPOCHS):
                for rows in torch.randperm(len(x)).split(_BATCH):
                    logits = self.network(x[rows]).squeeze(1)
                    loss = nn.functional.binary_cross_entropy_with_logits(logits, target[rows])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        self.network.eval()
        return self

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """The logit for each row [n]."""
        if len(self.network) == 0:
            raise ValueError("fit the error predictor before asking it for scores")
        x = feature_rows(features).float()
        if x.shape[1] != len(self.mean):
            raise ValueError(f"the error predictor was fit on {len(self.mean)} features, got {x.shape[1]}")
        out: Tensor = self.network((x - self.mean) / self.deviation).squeeze(1)
        return out

"""Scores for wrong labels and for ambiguous images. Each image is judged by all *other* images (leave-one-out).

p_c is the share of class c among the k nearest other images (exact, see `idml.evaluation.knn`), and y is the class of
the image itself. The scores of a wrong label are

    disagreement       1 − p_y, k = 10: the simplest score
    disagreement_100   the same with k = 100
    vote               1 − p_y, k = 200, each weighted by exp(−(d² − d₁²) / (0.2 · d_k²))
    confident          max_{c ≠ y} (p_c − t_c) − (p_y − t_y), p as in vote, t_c the mean p_c of the images labelled c:
                       after confident learning (Northcutt et al., 2021), which has a threshold for each class
    centroid           max_{c ≠ y} cos(s, m_c) − cos(s, m_y), m the classes' means
    discriminant       ln d(s, m_y) − ln min_{c ≠ y} d(s, m_c), d the Mahalanobis distance of linear discriminant
                       analysis: by the covariance within classes, W = 0.7 · S/(n − C) + 0.3 · (its mean variance)

In the last two, the image is left out of the mean of its class, and in the last also out of W. A positive value of
confident, centroid or discriminant means that another class fits better than the image's own.

Memory grows with images × dimensions, dimensions² and dimensions × classes, not with pairs of images.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from idml.embeddings import Embeddings, unit_rows
from idml.errors import unknown_name
from idml.evaluation.knn import Neighbours, nearest

SCORES = ("disagreement", "disagreement_100", "vote", "confident", "centroid", "discriminant")
_NEIGHBOURS = {"disagreement": 10, "disagreement_100": 100, "vote": 200, "confident": 200}
_WIDTH = 0.2  # of a vote's weights
_SHRINKAGE = 0.3
_TINY = 1e-9  # squared distances below this count as equal
_CELLS = 1 << 21  # images × classes processed together: 16 MB
_AROUND = 10  # neighbours that decide whether an image is ambiguous
Rows = tuple[slice, Tensor]


class LabelScores(NamedTuple):
    """For each image [n]: how likely its label is wrong, the class that the other images suggest, whether it is judged.

    An image that is alone in its class cannot be judged. Its score is −∞.
    """

    score: Tensor
    suggested: Tensor
    judged: Tensor


def score_labels(embeddings: Embeddings, labels: Tensor, *, score: str = "discriminant") -> LabelScores:
    """Score every image by how likely its label is wrong.

    Args:
        embeddings: only their unit semantic vectors are used.
        labels: integers [n].
        score: a name from `SCORES`; docs/audit_measured.md says what each of them finds.

    >>> s = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.9, 0.0], [0.0, 1.0], [0.1, 1.0], [0.0, 0.9]])
    >>> found = score_labels(Embeddings.certain(s), torch.tensor([0, 0, 1, 1, 1, 1]))
    >>> int(found.score.argmax()), int(found.suggested[2])
    (2, 0)
    """
    if score not in SCORES:
        raise ValueError(unknown_name("score", score, SCORES))
    if labels.shape != (len(embeddings),) or labels.is_floating_point():
        raise ValueError(f"need one whole number for each of {len(embeddings)} images, got {list(labels.shape)} labels")
    names, own, sizes = labels.unique(return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise ValueError("all images have the same class: there is no other label to suggest")
    judged, unit = sizes[own] > 1, embeddings.unit
    value, best = torch.full((len(own),), -math.inf, dtype=torch.float64), torch.zeros_like(own)
    if not bool(judged.any()):
        return LabelScores(value, labels, judged)
    if score in _NEIGHBOURS:
        parts = _votes(unit, own, sizes, score)
    else:
        parts = (_centroids if score == "centroid" else _discriminants)(unit, own, sizes)
    for rows, support in parts:
        mine = support.gather(1, own[rows].unsqueeze(1)).squeeze(1)
        other = support.scatter(1, own[rows].unsqueeze(1), -math.inf).max(dim=1)
        best[rows] = other.indices
        value[rows] = 1 - mine if score in _NEIGHBOURS and score != "confident" else other.values - mine
    return LabelScores(value.masked_fill(~judged, -math.inf), names[best], judged)


class AmbiguityScores(NamedTuple):
    """For each image [n]: how evenly two classes share its neighbours, 0 … 1, and which two (the same if only one)."""

    score: Tensor
    first: Tensor
    second: Tensor


def score_ambiguity(labels: Tensor, found: Neighbours) -> AmbiguityScores:
    """Compute (p₁ + p₂) · p₂/p₁, where p₁ ≥ p₂ are the largest class shares among the neighbours ``found``.

    The ten nearest neighbours count, weighted as in ``vote``. The label of the image itself does not count, so a clear
    image with a wrong label is not ambiguous. Entropy would rank images first that resemble no class.

    >>> x = torch.tensor([[0.0], [1.0], [-1.0], [5.0], [6.0], [7.0]])
    >>> scores = score_ambiguity(torch.tensor([0, 1, 0, 2, 2, 2]), nearest(x, 2))
    >>> int(scores.score.argmax()), float(scores.score[0]), int(scores.first[0]), int(scores.second[0])
    (0, 1.0, 0, 1)
    """
    names, own = labels.unique(return_inverse=True)
    near = Neighbours(found.indices[:, :_AROUND], found.distances[:, :_AROUND])
    weights = _weights(near)
    score = torch.zeros(len(own), dtype=torch.float64)
    first, second = torch.zeros_like(own), torch.zeros_like(own)
    for rows, shares in _shares(near, weights, own, len(names)):
        if len(names) == 1:
            continue
        (most, next_most), (one, two) = (x.unbind(dim=1) for x in shares.topk(2, dim=1))
        score[rows] = (most + next_most) * next_most / most
        first[rows], second[rows] = one, torch.where(next_most > 0, two, one)
    return AmbiguityScores(score, names[first], names[second])


def _votes(unit: Tensor, own: Tensor, sizes: Tensor, score: str) -> Iterator[Rows]:
    """Compute the class shares p among the nearest other images, minus t for ``confident``."""
    found = nearest(unit, _NEIGHBOURS[score])
    if score in ("vote", "confident"):
        weights = _weights(found)
    else:
        weights = (found.indices >= 0).double() / (found.indices >= 0).sum(dim=1, keepdim=True)
    expected = torch.zeros(len(sizes), dtype=torch.float64)
    if score == "confident":
        mine = (weights * (own[found.indices.clamp_min(0)] == own.unsqueeze(1))).sum(dim=1)
        expected = expected.index_add_(0, own, mine) / sizes
    return ((rows, shares - expected) for rows, shares in _shares(found, weights, own, len(sizes)))


def _weights(found: Neighbours) -> Tensor:
    """Compute the weight of each neighbour; the weights of an image sum to 1."""
    seen, squares = found.indices >= 0, found.distances.double().square()
    width = _WIDTH * squares.masked_fill(~seen, 0.0).amax(dim=1, keepdim=True)
    weights = ((squares[:, :1] - squares) / width.clamp_min(_TINY)).exp().masked_fill(~seen, 0.0)
    return weights / weights.sum(dim=1, keepdim=True)


def _shares(found: Neighbours, weights: Tensor, own: Tensor, classes: int) -> Iterator[Rows]:
    for rows in _slices(len(own), classes):
        near = own[found.indices[rows].clamp_min(0)]
        yield rows, torch.zeros(len(near), classes, dtype=torch.float64).scatter_add_(1, near, weights[rows])


def _centroids(unit: Tensor, own: Tensor, sizes: Tensor) -> Iterator[Rows]:
    """Compute the cosines to the class means."""
    sums = _sums(unit, own, len(sizes))
    means = unit_rows(sums)
    for rows in _slices(len(own), len(sizes)):
        x, y = unit[rows].double(), own[rows]
        mine = (unit_rows(sums[y] - x) * x).sum(dim=1, keepdim=True)
        yield rows, (x @ means.T).scatter_(1, y.unsqueeze(1), mine)


def _discriminants(unit: Tensor, own: Tensor, sizes: Tensor) -> Iterator[Rows]:
    """Compute −ln d to the class means, with the image left out of everything.

    With z = L′s and M = L′m, L·L′ = W⁻¹, an image of a class of N images, ρ = z − M_y, and a = 0.7/(n − C) · N/(N − 1),
    taking it out of W adds a·W⁻¹rr′W⁻¹/(1 − a·ρ²) to the inverse (Sherman and Morrison), and r·N/(N − 1) is its
    distance from the mean of the others:

        d²(m_c) = ‖z − M_c‖² + a·(ρ·(z − M_c))²/(1 − a·ρ²)         d²(m_y) = (N/(N − 1))² · ρ²/(1 − a·ρ²)
    """
    n, classes, width = len(own), len(sizes), unit.shape[1]
    means = _sums(unit, own, classes) / sizes.unsqueeze(1)
    within = torch.zeros(width, width, dtype=torch.float64)
    for rows in _slices(n, width):
        r = unit[rows].double() - means[own[rows]]
        within += r.T @ r
    within *= (1 - _SHRINKAGE) / (n - classes)
    variance = float(within.trace()) / (1 - _SHRINKAGE) / width
    within.diagonal().add_(_SHRINKAGE * variance if variance > 0 else 1.0)  # no variance: plain distances
    factor = torch.linalg.cholesky(torch.linalg.inv(within))
    centres = means @ factor
    squares = centres.square().sum(dim=1)
    for rows in _slices(n, max(classes, width)):
        y, size = own[rows], sizes[own[rows]].double()
        others = size / (size - 1).clamp_min(1)
        z = unit[rows].double() @ factor
        rho = z - centres[y]
        length = rho.square().sum(dim=1)
        a = (1 - _SHRINKAGE) / (n - classes) * others
        left = (1 - a * length).clamp_min(1e-6)
        plain = z.square().sum(dim=1, keepdim=True) - 2 * z @ centres.T + squares
        turn = (rho * z).sum(dim=1, keepdim=True) - rho @ centres.T
        distance = plain + (a / left).unsqueeze(1) * turn.square()
        distance.scatter_(1, y.unsqueeze(1), (others.square() * length / left).unsqueeze(1))
        yield rows, distance.clamp_min_(_TINY).log_().mul_(-0.5)


def _sums(unit: Tensor, own: Tensor, classes: int) -> Tensor:
    """Sum the vectors of each class."""
    sums = torch.zeros(classes, unit.shape[1], dtype=torch.float64)
    for rows in _slices(len(own), unit.shape[1]):
        sums.index_add_(0, own[rows], unit[rows].double())
    return sums


def _slices(n: int, columns: int) -> Iterator[slice]:
    step = max(1, _CELLS // columns)
    return (slice(i, min(i + step, n)) for i in range(0, n, step))

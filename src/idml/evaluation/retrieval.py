"""Retrieval and clustering figures: Recall@K, R-Precision, MAP@R, NMI.

For a query with R other images of its class in the gallery, rel(i) = 1 where its i-th neighbour is one of them:

    Recall@K     1 if any of rel(1 … K) is 1, else 0
    R-Precision  1/R · Σ_{i ≤ R} rel(i)
    MAP@R        1/R · Σ_{i ≤ R} rel(i)·P(i),   P(i) = 1/i · Σ_{j ≤ i} rel(j)       (Musgrave et al., 2020)

each averaged over the queries. Neighbours are exact and ties go to the smaller gallery index, see
`idml.evaluation.knn`.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from idml.embeddings import Embeddings
from idml.evaluation.knn import Names, Points, Search, numbered
from idml.metric import IntrospectiveMetric
from idml.records import Record

_HITS = 1 << 20  # neighbours handled together
_SEED, _ITERATIONS = 0, 20  # of k-means


def evaluate_retrieval(
    embeddings: Points,
    labels: Names,
    *,
    gallery: Points | None = None,
    gallery_labels: Names | None = None,
    metric: IntrospectiveMetric | None = None,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    nmi: bool = False,
    query_ids: Names | None = None,
    gallery_ids: Names | None = None,
    rerank: "Reranker | None" = None,
) -> "RetrievalFigures":
    """Measure how well images find others of their class, as fractions in [0, 1].

    Args:
        embeddings: a plain tensor is compared by Euclidean distance as it is, Embeddings by their unit semantic part.
        labels: the class of each image, whole numbers or strings.
        gallery: where to search; without it, among the images themselves, each left out of its own result.
        gallery_labels: the classes of the gallery's images.
        metric: the metric for Embeddings; rules ``similar`` and ``off``.
        recall_at: the K of Recall@K.
        nmi: also cluster ``embeddings`` (see `cluster_rows`) and report the normalised mutual information with their
            classes, images alone in their class included; None with rule ``similar``, which k-means cannot use.
        query_ids: ids of the images; a gallery image with the query's id is neither its neighbour nor in its R.
        gallery_ids: ids of the gallery's images.
        rerank: sorts the first neighbours of each query anew.

    Returns:
        ``recall@K`` for each K, ``r_precision``, ``map@r``, ``nmi`` if asked for, ``queries``, and ``singletons``:
        images whose class has no other image in the gallery. They are not queries in any figure, but others can find
        them.

    >>> x = torch.tensor([[0.0], [1.0], [1.5], [9.0]])
    >>> figures = evaluate_retrieval(x, ["cat", "cat", "dog", "fox"], recall_at=[1, 2])
    >>> figures["recall@1"], figures["recall@2"], figures["queries"], figures["singletons"]
    (0.5, 1.0, 2, 2)
    """
    recall_at = _check_recalls(recall_at)
    search, own, theirs = prepare_search(embeddings, labels, gallery, gallery_labels, metric, query_ids, gallery_ids)
    relevant = count_relevant(search, own, theirs)
    queries = int((relevant > 0).sum())
    if queries == 0:
        raise ValueError(f"none of the {search.queries} images has another image of its class to find")
    means = _query_figures(search, own, theirs, relevant, recall_at, rerank).sum(dim=0) / queries
    names = [f"recall@{k}" for k in recall_at] + ["r_precision", "map@r"]
    figures: dict[str, float | int | None] = dict(zip(names, means.tolist(), strict=True))
    if nmi and search.metric is not None:
        figures["nmi"] = None
    elif nmi:
        figures["nmi"] = normalized_mutual_information(own, cluster_rows(search.alpha.a, len(own.unique())))
    return RetrievalFigures({**figures, "queries": queries, "singletons": search.queries - queries})


class RetrievalFigures(Record):
    """Figures of retrieval by their names in the field; the most usual ones are attributes too.

    >>> RetrievalFigures({"recall@1": 0.5, "r_precision": 0.25, "map@r": 0.2}).map_at_r
    0.2
    """

    @property
    def recall_at_1(self) -> float:
        """Share of queries whose nearest neighbour has the right class."""
        return float(self["recall@1"])

    @property
    def r_precision(self) -> float:
        """Mean share of right ones among the first R neighbours, R the number of right images."""
        return float(self["r_precision"])

    @property
    def map_at_r(self) -> float:
        """Mean average precision at R."""
        return float(self["map@r"])


class Reranker(Protocol):
    """Sorts the first ``top`` neighbours [m, k] of the queries ``rows`` [m] anew."""

    @property
    def top(self) -> int:
        """How many neighbours of a query may change their places."""

    def __call__(self, rows: Tensor, found: Tensor) -> Tensor:
        """Return the neighbours in their new order."""


@dataclass(frozen=True, eq=False)
class ClassSums:
    """Queries of each class [c], and recall@1, R-Precision and MAP@R summed over them [3, c]."""

    queries: Tensor
    sums: Tensor
    rows: Tensor
    """The images that are queries [n]: those with another image of their class to find."""
    correct: Tensor
    """Whether the first neighbour of each query is of its class [n]."""

    @property
    def figures(self) -> dict[str, float]:
        """The means over all queries."""
        means = (self.sums.sum(dim=1) / self.queries.sum()).tolist()
        return dict(zip(("recall@1", "r_precision", "map@r"), means, strict=True))


def class_sums(
    embeddings: Embeddings,
    labels: Tensor,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Tensor | None = None,
    metric: IntrospectiveMetric | None = None,
) -> ClassSums:
    """Sum the figures of `evaluate_retrieval` over the queries of each class 0 … c − 1.

    Intervals over resampled classes need no more than these sums.

    >>> x = Embeddings.certain(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.8, 0.2], [0.0, 1.0]]))
    >>> found = class_sums(x, torch.tensor([0, 0, 1, 1]))
    >>> found.queries, found.sums[0], found.correct
    (tensor([2, 2]), tensor([2., 1.], dtype=torch.float64), tensor([ True,  True, False,  True]))
    """
    search = Search(embeddings, gallery, metric)
    theirs = labels if gallery_labels is None else gallery_labels
    relevant = count_relevant(search, labels, theirs)
    rows = (relevant > 0).nonzero().flatten()
    values = _query_figures(search, labels, theirs, relevant, (1,))[rows]
    classes = int(torch.maximum(labels.max(), theirs.max())) + 1
    sums = torch.zeros(3, classes, dtype=torch.float64).index_add_(1, labels[rows], values.T.contiguous())
    return ClassSums(torch.bincount(labels[rows], minlength=classes), sums, rows, values[:, 0] > 0)


def prepare_search(
    embeddings: Points,
    labels: Names,
    gallery: Points | None,
    gallery_labels: Names | None,
    metric: IntrospectiveMetric | None,
    query_ids: Names | None,
    gallery_ids: Names | None,
) -> tuple[Search, Tensor, Tensor]:
    """Make a search ready: the search, and the classes of the queries and of the gallery as numbers."""
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("a gallery needs gallery_labels, and gallery_labels need a gallery")
    search = Search(embeddings, gallery, metric, query_ids, gallery_ids)
    codes = numbered("labels", labels, *(() if gallery_labels is None else (gallery_labels,)))
    own, theirs = (x.to(search.first.device) for x in (codes[0], codes[-1]))
    for side, given, images in (("", own, search.queries), ("gallery ", theirs, search.gallery)):
        if len(given) != images:
            raise ValueError(f"{len(given)} {side}labels for {images} {side}images")
    return search, own, theirs


def count_relevant(search: Search, own: Tensor, theirs: Tensor) -> Tensor:
    """R of each query: gallery images of its class, those with its id not counted."""
    classes = int(torch.maximum(own.max(), theirs.max())) + 1
    relevant = torch.bincount(theirs, minlength=classes)[own]
    line, column = search.excluded(torch.arange(search.queries, device=own.device))
    return relevant - torch.bincount(line[own[line] == theirs[column]], minlength=search.queries)


def _query_figures(
    search: Search,
    own: Tensor,
    theirs: Tensor,
    relevant: Tensor,
    recall_at: Sequence[int],
    rerank: "Reranker | None" = None,
) -> Tensor:
    """Recall@K for each K, R-Precision and MAP@R of each query [n, figures] in float64; 0 where R is 0."""
    figures = torch.zeros(search.queries, len(recall_at) + 2, dtype=torch.float64, device=own.device)
    order = relevant.argsort(stable=True)
    order = order[relevant[order] > 0]  # queries of similar R go together, so that no list is much longer than needed
    start = 0
    while start < len(order):
        shortest = max(int(relevant[order[start]]), max(recall_at, default=1))
        rows = order[start : start + max(1, _HITS // (2 * shortest))]
        rows = rows[relevant[rows] <= 2 * shortest]
        start += len(rows)
        r = relevant[rows].unsqueeze(1)
        found = search.ranked(max(int(r.max()), *recall_at, 1, 0 if rerank is None else rerank.top), rows)
        if rerank is not None:
            found = rerank(rows, found)
        hits = (theirs[found.clamp_min(0)] == own[rows].unsqueeze(1)) & (found >= 0)
        recalls = [hits[:, :k].any(dim=1).double() for k in recall_at]
        place = torch.arange(1, found.shape[1] + 1, device=own.device)
        hits &= place <= r
        precision = hits.cumsum(dim=1).double() / place  # P(i)
        r_precision = hits.sum(dim=1) / r.squeeze(1).double()
        map_r = (precision * hits).sum(dim=1) / r.squeeze(1)
        figures[rows] = torch.stack([*recalls, r_precision, map_r], dim=1)
    return figures


def cluster_rows(x: Tensor, count: int) -> Tensor:
    """k-means from ``count`` random rows, 20 iterations, seed 0: by faiss if it is installed, else by scikit-learn."""
    rows = x.detach().float().cpu().contiguous().numpy()
    try:
        faiss = import_module("faiss")
    except ImportError:
        try:
            means = import_module("sklearn.cluster").KMeans(
                count, init="random", n_init=1, max_iter=_ITERATIONS, tol=0.0, random_state=_SEED
            )
        except ImportError:
            raise ValueError("NMI needs faiss or scikit-learn: pip install faiss-cpu") from None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that 20 iterations do not converge, that equal rows share a cluster
            return torch.as_tensor(means.fit_predict(rows), dtype=torch.long, device=x.device)
    means = faiss.Kmeans(
        rows.shape[1],
        count,
        niter=_ITERATIONS,
        seed=_SEED,
        min_points_per_centroid=1,
        max_points_per_centroid=len(rows),
    )
    means.train(rows)
    return torch.as_tensor(means.index.search(rows, 1)[1].ravel(), dtype=torch.long, device=x.device)


def normalized_mutual_information(classes: Tensor, found: Tensor) -> float:
    """NMI = 2·I(classes; found) / (H(classes) + H(found)), 1 if both are one single group.

    >>> normalized_mutual_information(torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 3, 3]))
    1.0
    """
    rows, columns = (x.unique(return_inverse=True)[1] for x in (classes, found))
    width = int(columns.max()) + 1
    cells, both = (rows * width + columns).unique(return_counts=True)  # the non-empty cells of the contingency table
    total = len(rows)
    a, b = torch.bincount(rows).double(), torch.bincount(columns).double()
    entropies = sum(float(-(p * p.log()).sum()) for p in (a / total, b / total))
    if len(a) == len(b) == 1:
        return 1.0
    p = both.double() / total
    independent = (a[cells // width] / total) * (b[cells % width] / total)
    return min(1.0, max(0.0, 2.0 * float((p * (p / independent).log()).sum()) / entropies))


def _check_recalls(recall_at: Sequence[int]) -> tuple[int, ...]:
    if isinstance(recall_at, str) or not isinstance(recall_at, Iterable):
        raise ValueError(f"recall_at takes a list of whole numbers, got {recall_at!r}")
    for k in recall_at:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"recall_at takes whole numbers above 0, got {k!r}")
    return tuple(recall_at)

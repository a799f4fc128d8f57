"""Open-set queries: queries of known and of unknown classes against a gallery of the known ones.

Calibrations are fitted and tested on them. `QueryPool` searches all queries once in the whole gallery, deeper than
needed. To search a gallery without some classes, or without the query's own class, it removes their images from the
lists, and searches again only for queries whose list became too short. The result equals a search in the smaller
gallery. Many such searches cost one. A query never finds itself, nor an image with the same bytes.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from idml.calibration.evidence import NEIGHBOURS, Evidence, build_evidence
from idml.embeddings import Embeddings, Index, as_rows
from idml.evaluation.knn import Neighbours, nearest

_DEPTH = 256  # neighbours kept of the search in the whole gallery


@dataclass(frozen=True, eq=False)
class OpenSetQueries:
    """Queries and what a search found for them, as `idml.calibration.stored.Calibration.fit` takes it.

    ``known`` says whether another image of the query's class is in the gallery. So the only image of a class is an
    unknown query too. ``distances`` and ``same_class`` [n, listed] belong to the images listed; ∞ and False where a
    list ends.
    """

    evidence: Evidence
    labels: Tensor
    known: Tensor
    distances: Tensor
    same_class: Tensor
    gallery: Tensor  # bool, the images of the whole gallery that were searched by all queries

    @property
    def correct(self) -> Tensor:
        """Whether the first result is of the query's class [n]."""
        return self.same_class[:, 0]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Index) -> "OpenSetQueries":
        rows = as_rows(index, len(self))
        names = ("evidence", "labels", "known", "distances", "same_class")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    @classmethod
    def cat(cls, parts: "Sequence[OpenSetQueries]") -> "OpenSetQueries":
        """Join queries whose lists have the same length."""
        names = ("labels", "known", "distances", "same_class")
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return cls(Evidence.cat([part.evidence for part in parts]), **joined, gallery=parts[0].gallery)


class QueryPool:
    """Queries, their classes [n], and a gallery; without a gallery, each query is searched among the others.

    ``rows`` [n] are the places of the queries in the gallery, −1 for a query that is not in it. Images of the gallery
    with the same number in ``copies`` [gallery] are the same picture; without it, each is another one. A query never
    finds itself or a copy of itself. ``neighbours`` are the lists of a search that was made before, nearest first; −1
    where there is no image.
    """

    def __init__(
        self,
        queries: Embeddings,
        labels: Tensor,
        gallery: Embeddings | None = None,
        gallery_labels: Tensor | None = None,
        *,
        rows: Tensor | None = None,
        copies: Tensor | None = None,
        depth: int = _DEPTH,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.queries, self.labels = queries, labels
        self.gallery = queries if gallery is None else gallery
        self.gallery_labels = labels if gallery_labels is None else gallery_labels
        if rows is None:
            rows = torch.arange(len(labels)) if gallery is None else torch.full((len(labels),), -1)
        self.pictures = torch.arange(len(self.gallery_labels)) if copies is None else copies
        self.own = torch.where(rows >= 0, self.pictures[rows.clamp_min(0)], -1)  # the picture of each query
        if neighbours is not None:
            self.neighbours = neighbours
        elif gallery is None and copies is None:
            self.neighbours = nearest(queries, depth)
        else:
            self.neighbours = nearest(
                queries, depth, gallery=self.gallery, query_ids=self.own, gallery_ids=self.pictures
            )

    def __getitem__(self, index: Index) -> "QueryPool":
        """Some of the queries, with the same gallery."""
        rows, part = as_rows(index, len(self.labels)), copy.copy(self)
        part.queries, part.labels, part.own = self.queries[rows], self.labels[rows], self.own[rows]
        part.neighbours = Neighbours(*(x[rows] for x in self.neighbours))
        return part

    @property
    def visible(self) -> Tensor:
        """How many images each query may find [n]: those of another picture."""
        return len(self.pictures) - self._count_copies(torch.ones_like(self.pictures, dtype=torch.bool))[0]

    @property
    def visible_without_own(self) -> Tensor:
        """How many images of other classes than its own each query may find [n]."""
        copies, own_copies = self._count_copies(torch.ones_like(self.pictures, dtype=torch.bool))
        return len(self.pictures) - self._count_class(self.gallery_labels) - (copies - own_copies)

    def search(self, *, without: Tensor | None = None, listed: int = NEIGHBOURS) -> OpenSetQueries:
        """Search all queries in the gallery without the classes ``without``; ``listed`` images of each list are kept.

        >>> pool = QueryPool(Embeddings.certain(torch.eye(3)[[0, 0, 1, 1, 2]]), torch.tensor([0, 0, 1, 1, 2]))
        >>> found = pool.search(without=torch.tensor([1]))
        >>> found.known, found.correct
        (tensor([ True,  True, False, False, False]), tensor([ True,  True, False, False, False]))
        """
        absent = self.gallery_labels.new_empty(0) if without is None else without
        present = ~torch.isin(self.gallery_labels, absent)
        k = max(NEIGHBOURS, listed)
        inside = present[self.neighbours.indices.clamp_min(0)]
        copies, own_copies = self._count_copies(present)
        neighbours = self._list_nearest(inside, int(present.sum()) - copies, k, lambda rows: [(rows, present)])
        known = self._count_class(self.gallery_labels[present]) > own_copies
        return self._describe(neighbours, known, listed, present)

    def search_without_own(self, *, listed: int = NEIGHBOURS) -> OpenSetQueries:
        """Search each query in the gallery without its own class: all of them are unknown.

        >>> pool = QueryPool(Embeddings.certain(torch.eye(3)[[0, 0, 1, 1]]), torch.tensor([0, 0, 1, 1]))
        >>> pool.search_without_own().distances[:, 0]
        tensor([1.4142, 1.4142, 1.4142, 1.4142])
        """
        other = self.gallery_labels[self.neighbours.indices.clamp_min(0)] != self.labels.unsqueeze(1)

        def split_by_class(rows: Tensor) -> list[tuple[Tensor, Tensor]]:
            labels = self.labels[rows]
            return [(rows[labels == label], self.gallery_labels != label) for label in labels.unique()]

        neighbours = self._list_nearest(other, self.visible_without_own, max(NEIGHBOURS, listed), split_by_class)
        nothing, everything = torch.zeros_like(self.labels).bool(), torch.ones_like(self.gallery_labels).bool()
        return self._describe(neighbours, nothing, listed, everything)

    def _describe(self, neighbours: Neighbours, known: Tensor, listed: int, present: Tensor) -> OpenSetQueries:
        indices, distances = neighbours
        classes = self.gallery_labels[indices.clamp_min(0)]
        nearest_uncertainty = self.gallery.uncertainty[indices[:, 0]]
        evidence = build_evidence(self.queries, distances, nearest_uncertainty, classes=classes)
        same_class = (classes == self.labels.unsqueeze(1)) & (indices >= 0)
        return OpenSetQueries(evidence, self.labels, known, distances[:, :listed], same_class[:, :listed], present)

    def _count_class(self, labels: Tensor) -> Tensor:
        """How many of these labels are the query's [n]."""
        return labels.bincount(minlength=int(self.labels.max()) + 1)[self.labels]

    def _count_copies(self, present: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the images ``present`` are the query's own picture [n], and how many of these its class [n]."""
        classes = int(torch.cat([self.labels, self.gallery_labels]).max()) + 1
        pictures, own = self.pictures[present], self.own
        of_class = pictures * classes + self.gallery_labels[present]
        return _count_equal(pictures, own), _count_equal(of_class, own * classes + self.labels)

    def _list_nearest(
        self, inside: Tensor, visible: Tensor, k: int, split: Callable[[Tensor], list[tuple[Tensor, Tensor]]]
    ) -> Neighbours:
        """The k nearest of each query among the images that it may see; −1 and ∞ where there are fewer.

        ``inside`` [n, depth]: whether a query may see this image of its deep list; ``visible`` [n]: how many images it
        may see at all; ``split``: queries that have to be searched again, as parts with the images they may see.
        """
        found, n = self.neighbours, len(self.labels)
        inside = inside & (found.indices >= 0)
        place = inside.cumsum(dim=1)
        line, column = (inside & (place <= k)).nonzero().unbind(1)
        indices = torch.full((n, k), -1)
        distances = found.distances.new_full((n, k), torch.inf)
        to = place[line, column] - 1
        indices[line, to], distances[line, to] = found.indices[line, column], found.distances[line, column]
        short = (place[:, -1] < visible.clamp_max(k)).nonzero().flatten()
        for queries, present in split(short) if len(short) else ():
            rows = present.nonzero().flatten()
            again = nearest(
                self.queries[queries],
                k,
                gallery=self.gallery[rows],
                query_ids=self.own[queries],
                gallery_ids=self.pictures[rows],
            )
            width = again.indices.shape[1]
            indices[queries, :width] = torch.where(again.indices < 0, -1, rows[again.indices.clamp_min(0)])
            distances[queries, :width] = again.distances
        return Neighbours(indices, distances)


def _count_equal(numbers: Tensor, asked: Tensor) -> Tensor:
    """How often each number that is asked for is among the numbers, of the shape of ``asked``."""
    ordered = numbers.sort().values
    return torch.searchsorted(ordered, asked, right=True) - torch.searchsorted(ordered, asked)


def draw_unknown(labels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Draw classes at random that hold about ``share`` of the queries: at least one unless it is 0; two classes stay.

    >>> draw_unknown(torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), 0.25, torch.Generator().manual_seed(0))
    tensor([0])
    """
    if not 0 <= share < 1:
        raise ValueError(f"the share of unknown queries must be at least 0 and below 1, got {share!r}")
    classes, counts = labels.unique(return_counts=True)
    order = torch.randperm(len(classes), generator=generator)
    held = counts[order].cumsum(0) / len(labels)
    number = max(1, min(int((held - share).abs().argmin()) + 1, len(classes) - 2)) if share else 0
    drawn: Tensor = classes[order[:number]]
    return drawn

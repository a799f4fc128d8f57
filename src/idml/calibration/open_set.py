"""Queries of known and of unknown classes against a gallery of the known ones: what answers are fitted and tested on.

All queries are searched once in the whole gallery, deeper than needed. A gallery without some classes then gives what
is left of the lists; only queries whose list became too short are searched again. So a trial holds what a search in
the smaller gallery finds, and many trials cost one search.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.calibration.evidence import Evidence, evidence_from_lists
from idml.data.datasets import Dataset, hold_out, load_dataset
from idml.embeddings import Embeddings, full_precision
from idml.evaluation.knn import Neighbours, nearest

SEEN = 10  # neighbours that evidence comes from
_DEPTH = 256  # neighbours kept of the search in the whole gallery


@dataclass(frozen=True, eq=False)
class OpenSetQueries:
    """Queries and what was found for them, as `idml.calibration.stored.Calibration.fit` takes it.

    ``known`` says whether another image of the query's class is in the gallery: the only image of a class is an unknown
    query too. ``distances`` and ``same_class`` [n, listed] are those of the images listed, ∞ and False where lists end.
    """

    evidence: Evidence
    labels: Tensor
    known: Tensor
    distances: Tensor
    same_class: Tensor
    gallery: Tensor  # bool, the images of the whole gallery that were searched

    @property
    def correct(self) -> Tensor:
        """Whether the first result is of the query's class [n]."""
        return self.same_class[:, 0]

    @property
    def places(self) -> Tensor:
        """The place of the first right image in each list [n], from 1; 0 where there is none."""
        return torch.where(self.same_class.any(dim=1), self.same_class.int().argmax(dim=1) + 1, 0)

    def __len__(self) -> int:
        return len(self.labels)


class QueryPool:
    """Queries, their classes [n], and a gallery; without one, each query is searched among the others."""

    def __init__(
        self,
        queries: Embeddings,
        labels: Tensor,
        gallery: Embeddings | None = None,
        gallery_labels: Tensor | None = None,
        *,
        depth: int = _DEPTH,
    ) -> None:
        self.queries, self.labels, self.alone = queries, labels, gallery is None
        self.gallery = queries if gallery is None else gallery
        self.gallery_labels = labels if gallery_labels is None else gallery_labels
        self.found = nearest(queries, depth, gallery=gallery)

    def search(self, *, without: Tensor | None = None, listed: int = SEEN) -> OpenSetQueries:
        """Search all queries in the gallery without the classes ``without``; ``listed`` images of each list are kept.

        >>> pool = QueryPool(Embeddings.certain(torch.eye(3)[[0, 0, 1, 1, 2]]), torch.tensor([0, 0, 1, 1, 2]))
        >>> trial = pool.search(without=torch.tensor([1]))
        >>> trial.known, trial.correct
        (tensor([ True,  True, False, False, False]), tensor([ True,  True, False, False, False]))
        """
        absent = self.gallery_labels.new_empty(0) if without is None else without
        there = ~torch.isin(self.gallery_labels, absent)
        indices, distances = self._within(there, max(SEEN, listed))
        near = self.gallery_labels[indices.clamp_min(0)]
        counts = self.gallery_labels[there].bincount(minlength=int(self.labels.max()) + 1)[self.labels]
        u, v = (full_precision(e.uncertainty.detach()) for e in (self.queries, self.gallery))
        evidence = evidence_from_lists(
            distances[:, :SEEN],
            self.queries.detach().level,
            classes=near[:, :SEEN],
            pair=torch.linalg.vector_norm(u + v[indices[:, 0]], dim=1),
            indices=indices[:, :listed],
            searched=f"{SEEN} nearest, euclidean",
        )
        same_class = (near == self.labels.unsqueeze(1)) & (indices >= 0)
        known = counts - there.long() > 0 if self.alone else counts > 0
        return OpenSetQueries(evidence, self.labels, known, distances[:, :listed], same_class[:, :listed], there)

    def _within(self, there: Tensor, k: int) -> Neighbours:
        """The k nearest of each query among the gallery images that are ``there``; −1 and ∞ where there are fewer."""
        found, n = self.found, len(self.labels)
        inside = there[found.indices.clamp_min(0)] & (found.indices >= 0)
        place = inside.cumsum(dim=1)
        line, column = (inside & (place <= k)).nonzero().unbind(1)
        indices = torch.full((n, k), -1)
        distances = found.distances.new_full((n, k), torch.inf)
        to = place[line, column] - 1
        indices[line, to], distances[line, to] = found.indices[line, column], found.distances[line, column]
        visible = int(there.sum()) - (there.long() if self.alone else torch.zeros(n, dtype=torch.long))
        short = (place[:, -1] < visible.clamp_max(k)).nonzero().flatten()
        if len(short):
            numbers = there.nonzero().flatten()
            again = nearest(
                self.queries[short],
                k,
                gallery=self.gallery[numbers],
                query_ids=short if self.alone else None,
                gallery_ids=numbers if self.alone else None,
            )
            width = again.indices.shape[1]
            indices[short, :width] = torch.where(again.indices < 0, -1, numbers[again.indices.clamp_min(0)])
            distances[short, :width] = again.distances
        return Neighbours(indices, distances)


def draw_unknown(labels: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Classes drawn at random that hold about ``share`` of the queries, one at least unless it is 0; two classes stay.

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


# -------------------- unseen --------------------
# The images of a data set that a run was not trained on.


_OWN_IMAGES = ("folder", "csv")  # what these name lies at a path; every other word names one data set wherever it is


def load_unseen(data: str, split: str | None, trained: dict[str, Any]) -> tuple[Dataset, str]:
    """The test images of ``data`` whose classes a run has not seen, and the split they come from.

    ``trained`` are the run's own options. If it was trained on ``data``, ``split`` is by default the run's own, and
    every class that it learned from is left out: of a run on all classes ("all") those remain that it held out for
    validation. Of other data, or of a run that does not say what it was trained on, nothing is left out, and a line in
    ``notes`` says so.
    """
    theirs, their_split = str(trained.get("data", "")), str(trained.get("split", "official"))
    same = _same(data, theirs)
    chosen = split if split is not None else their_split if same else "official"
    dataset = load_dataset(data, split=chosen)
    notes = list(dataset.notes)
    if not same:
        what = f"was trained on {theirs.partition(':')[0]}" if theirs else "does not say what it was trained on"
        notes.append(f"the run {what}: that it has not seen the classes of {data.partition(':')[0]} is taken on trust")
        return Dataset(dataset.name, dataset.train, dataset.test, dataset.gallery, tuple(notes)), chosen
    train = dataset.train if chosen == their_split else load_dataset(data, split=their_split).train
    learned = {*hold_out(train, _holdout(trained))[0].classes}
    classes = dataset.test.classes
    kept = [number for number, name in enumerate(classes) if name not in learned]
    if not kept:
        raise ValueError(
            f"the run was trained on every class of {data}: calibrate it with images of other classes, or train with "
            "--split 0.8 or --holdout 0.1"
        )
    test, gallery = dataset.test, dataset.gallery
    if len(kept) < len(classes):
        notes.append(f"{len(classes) - len(kept):,} of {len(classes):,} classes left out: the run was trained on them")
        test, gallery = test.of_classes(kept), None if gallery is None else gallery.of_classes(kept)
    return Dataset(dataset.name, train, test, gallery, tuple(notes)), chosen


def _same(data: str, other: str) -> bool:
    (kind, _, path), (their_kind, _, their_path) = data.partition(":"), other.partition(":")
    if kind != their_kind:
        return False
    return kind not in _OWN_IMAGES or Path(path).expanduser().resolve() == Path(their_path).expanduser().resolve()


def _holdout(trained: dict[str, Any]) -> float:
    share = trained.get("holdout", 0.0)
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ValueError(f"the run's config.yaml says holdout: {share!r}, which is no share of its classes")
    return share

"""Open-set queries: queries of known and of unknown classes against a gallery of the known ones.

Calibrations are fitted and tested on them. `QueryPool` searches all queries once in the whole gallery, deeper than
needed. To search a gallery without some classes, it removes their images from the lists, and searches again only for
queries whose list became too short. The result equals a search in the smaller gallery. Many such searches cost one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.calibration.evidence import NEIGHBOURS, Evidence, build_evidence
from idml.data.datasets import Dataset, hold_out, load_dataset
from idml.embeddings import Embeddings
from idml.evaluation.knn import Neighbours, nearest

_DEPTH = 256  # neighbours kept of the search in the whole gallery
_PATH_KINDS = ("folder", "csv")  # data sets of these kinds are told apart by their path, all others by their kind


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
    gallery: Tensor  # bool, the images of the whole gallery that were searched

    @property
    def correct(self) -> Tensor:
        """Whether the first result is of the query's class [n]."""
        return self.same_class[:, 0]

    def __len__(self) -> int:
        return len(self.labels)


class QueryPool:
    """Queries, their classes [n], and a gallery; without a gallery, each query is searched among the others."""

    def __init__(
        self,
        queries: Embeddings,
        labels: Tensor,
        gallery: Embeddings | None = None,
        gallery_labels: Tensor | None = None,
        *,
        depth: int = _DEPTH,
    ) -> None:
        self.queries, self.labels, self.leave_one_out = queries, labels, gallery is None
        self.gallery = queries if gallery is None else gallery
        self.gallery_labels = labels if gallery_labels is None else gallery_labels
        self.neighbours = nearest(queries, depth, gallery=gallery)

    def search(self, *, without: Tensor | None = None, listed: int = NEIGHBOURS) -> OpenSetQueries:
        """Search all queries in the gallery without the classes ``without``; ``listed`` images of each list are kept.

        >>> pool = QueryPool(Embeddings.certain(torch.eye(3)[[0, 0, 1, 1, 2]]), torch.tensor([0, 0, 1, 1, 2]))
        >>> found = pool.search(without=torch.tensor([1]))
        >>> found.known, found.correct
        (tensor([ True,  True, False, False, False]), tensor([ True,  True, False, False, False]))
        """
        absent = self.gallery_labels.new_empty(0) if without is None else without
        present = ~torch.isin(self.gallery_labels, absent)
        indices, distances = self._search_present(present, max(NEIGHBOURS, listed))
        classes = self.gallery_labels[indices.clamp_min(0)]
        nearest_uncertainty = self.gallery.uncertainty[indices[:, 0]]
        evidence = build_evidence(self.queries, distances, nearest_uncertainty, classes=classes)
        counts = self.gallery_labels[present].bincount(minlength=int(self.labels.max()) + 1)[self.labels]
        known = counts - present.long() > 0 if self.leave_one_out else counts > 0
        same_class = (classes == self.labels.unsqueeze(1)) & (indices >= 0)
        return OpenSetQueries(evidence, self.labels, known, distances[:, :listed], same_class[:, :listed], present)

    def _search_present(self, present: Tensor, k: int) -> Neighbours:
        """The k nearest of each query among the gallery images ``present``; −1 and ∞ where there are fewer."""
        found, n = self.neighbours, len(self.labels)
        inside = present[found.indices.clamp_min(0)] & (found.indices >= 0)
        place = inside.cumsum(dim=1)
        line, column = (inside & (place <= k)).nonzero().unbind(1)
        indices = torch.full((n, k), -1)
        distances = found.distances.new_full((n, k), torch.inf)
        to = place[line, column] - 1
        indices[line, to], distances[line, to] = found.indices[line, column], found.distances[line, column]
        own = present.long() if self.leave_one_out else torch.zeros(n, dtype=torch.long)
        visible = int(present.sum()) - own
        short = (place[:, -1] < visible.clamp_max(k)).nonzero().flatten()
        if len(short):
            rows = present.nonzero().flatten()
            again = nearest(
                self.queries[short],
                k,
                gallery=self.gallery[rows],
                query_ids=short if self.leave_one_out else None,
                gallery_ids=rows if self.leave_one_out else None,
            )
            width = again.indices.shape[1]
            indices[short, :width] = torch.where(again.indices < 0, -1, rows[again.indices.clamp_min(0)])
            distances[short, :width] = again.distances
        return Neighbours(indices, distances)


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


def load_unseen(data: str, split: str | None, trained: dict[str, Any]) -> tuple[Dataset, str]:
    """Load the test images of ``data`` whose classes a run was not trained on; returns them and their split.

    ``trained`` are the options of the run. If it was trained on ``data``, the default of ``split`` is the run's own
    split, and every class that it learned from is left out. Of a run on all classes ("all"), the classes remain that it
    held out for validation. If the run was trained on other data, or does not say on which, nothing is left out, and a
    line in ``notes`` says so.
    """
    own_data, own_split = str(trained.get("data", "")), str(trained.get("split", "official"))
    same = _is_same_data(data, own_data)
    chosen = split if split is not None else own_split if same else "official"
    dataset = load_dataset(data, split=chosen)
    notes = list(dataset.notes)
    if not same:
        what = f"was trained on {own_data.partition(':')[0]}" if own_data else "does not say what it was trained on"
        name = data.partition(":")[0]
        notes.append(f"the run {what}: it is assumed, not checked, that it has not seen the classes of {name}")
        return Dataset(dataset.name, dataset.train, dataset.test, dataset.gallery, tuple(notes)), chosen
    train = dataset.train if chosen == own_split else load_dataset(data, split=own_split).train
    learned = {*hold_out(train, _holdout_share(trained))[0].classes}
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


def _is_same_data(data: str, other: str) -> bool:
    (kind, _, path), (other_kind, _, other_path) = data.partition(":"), other.partition(":")
    if kind != other_kind:
        return False
    return kind not in _PATH_KINDS or Path(path).expanduser().resolve() == Path(other_path).expanduser().resolve()


def _holdout_share(trained: dict[str, Any]) -> float:
    share = trained.get("holdout", 0.0)
    if not isinstance(share, int | float) or not 0 <= share < 1:
        raise ValueError(f"the run's config.yaml says holdout: {share!r}; it must be a number from 0 to below 1")
    return share

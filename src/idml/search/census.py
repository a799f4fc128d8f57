"""What a gallery holds as a whole: how many items of which label, and its profile."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from idml.calibration.evidence import Profile
from idml.search.engines import Engine, Item

_SAMPLE = 1000  # images that stand for a gallery, as in `Profile.of`
_STALE = 0.01  # a profile serves until more than this share of the items has come, gone or changed


class Counts(NamedTuple):
    """How many items there are, how many of them have a label, and how many labels there are."""

    items: int
    labelled: int
    classes: int


class Census:
    """Counted once by reading all items, then kept up to date through the changes it watches, under ``mutex``.

    The profile is that of `Profile.of`, asked of the engine, which need not hand out all vectors for it.
    """

    def __init__(self, engine: Engine, mutex: threading.RLock) -> None:
        self._engine, self._mutex = engine, mutex
        self.forget()

    def forget(self) -> None:
        """Count anew: the gallery is in a state that was not watched."""
        with self._mutex:
            self._labels: Counter[str | None] | None = None
            self._counts: Counts | None = None
            self._profile: Profile | None = None
            self._ids: list[str] | None = None  # in their order, until something changes
            self._changes = 0

    @property
    def counts(self) -> Counts:
        """The numbers now."""
        known = self._counts
        if known is not None:
            return known
        with self._mutex:
            if self._labels is None:
                items = [(item.id, item.label) for item in self._engine.items()]
                self._ids, self._labels = [id for id, _ in items], Counter(label for _, label in items)
            return self._count(self._labels)

    def _count(self, labels: "Counter[str | None]") -> Counts:
        items, bare = labels.total(), labels[None]
        self._counts = Counts(items, items - bare, len(labels) - (bare > 0))
        return self._counts

    @contextmanager
    def watching(self, ids: Iterable[str]) -> Iterator[None]:
        """Watch the items with these ids while they are changed."""
        ids = list(dict.fromkeys(ids))
        with self._mutex:
            before = self._items(ids)
            try:
                yield
            finally:
                self._changed(before, self._items(ids))

    def _items(self, ids: list[str]) -> list[Item | None]:
        return [] if self._labels is None else self._engine.get_many(ids)

    def _changed(self, before: list[Item | None], after: list[Item | None]) -> None:
        if self._labels is None:
            return
        self._ids = None
        for old, new in zip(before, after, strict=True):
            if old is not None:
                self._labels[old.label] -= 1
            if new is not None:
                self._labels[new.label] += 1
            self._changes += old is None or new is None or old.checksum != new.checksum
        self._labels = +self._labels  # without those that nobody has any more
        self._count(self._labels)

    @property
    def profile(self) -> Profile | None:
        """The gallery from within; None if it holds fewer than two items."""
        with self._mutex:
            items = self.counts.items
            if items < 2:
                return None
            if self._profile is None or self._changes > _STALE * items:
                ids = self._ids or [item.id for item in self._engine.items()]
                self._profile, self._ids, self._changes = _profile(self._engine, ids), None, 0
            return self._profile


def _profile(engine: Engine, everyone: Sequence[str]) -> Profile:
    """Distances from up to 1000 items to their nearest, themselves left out by their ids."""
    rows = torch.randperm(len(everyone), generator=torch.Generator().manual_seed(0))[:_SAMPLE].sort().values
    ids = [everyone[row] for row in rows.tolist()]
    found = engine.search(engine.embeddings(ids), 2)
    # an item with two twins may not find itself: any of them is then its nearest
    nearest = [
        float(d[1] if row[0] == own else d[0]) for own, row, d in zip(ids, found.ids, found.distances, strict=True)
    ]
    return Profile(len(everyone), tuple(sorted(nearest)))

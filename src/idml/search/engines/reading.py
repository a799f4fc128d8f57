"""Reading an embedded gallery: one consistent state of it, and going on to the next."""

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import torch
from torch import Tensor

from idml.embeddings import Embeddings
from idml.metric import IntrospectiveMetric
from idml.search.engines import Found, Item, Problem, Properties
from idml.search.engines.duplicates import duplicate_rows
from idml.search.engines.exact import ExactSearch, Side
from idml.search.engines.generations import Current, open_current, read_current
from idml.search.engines.intake import query_rows, ranking
from idml.search.engines.store import LOG, Store


class Reading:
    """What an embedded gallery answers without being changed."""

    def __init__(self, path: Path, current: Current, store: Store, lock: IO[bytes] | None) -> None:
        self.path = path
        self._current, self._lock = current, lock
        self._store: Store | None = store
        self._side: Side | None = None  # what is searched, until something changes
        self._mutex = threading.RLock()

    @property
    def properties(self) -> Properties:
        """What was fixed when the gallery was made."""
        return self._current.properties

    def get(self, id: str) -> Item | None:
        """The item with this id, if there is one."""
        return self.get_many([id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Item | None]:
        """The item with each of these ids, None where there is none."""
        with self._mutex:
            table = self._opened().table
            rows = [table.row.get(id) for id in ids]
            return [None if row is None else table.item(row) for row in rows]

    def items(self) -> Iterator[Item]:
        """All items in the order in which they were added, as they are now."""
        with self._mutex:
            table = self._opened().table
            rows, labels = table.live(), list(table.labels)
        return (replace(table.item(row), label=labels[row]) for row in rows)

    def thumbnail(self, id: str) -> bytes:
        """The item's thumbnail, empty if it has none."""
        with self._mutex:
            return self._opened().thumbnail(self._row(id))

    def embeddings(self, ids: Sequence[str] | None = None) -> Embeddings:
        """The vectors of some items, or of all; without uncertainty vectors where the gallery keeps none."""
        with self._mutex:
            store, rows = self._opened(), self._rows(ids)
            store.check(rows)
            s, *u = (torch.from_numpy(x[rows]) for x in store.rows())
        return Embeddings(s, u[0]) if u else Embeddings.certain(s)

    def levels(self, ids: Sequence[str] | None = None) -> Tensor:
        """The uncertainty levels ‖u‖ of some items, or of all."""
        with self._mutex:
            levels = self._opened().table.levels
            return torch.tensor([levels[row] for row in self._rows(ids)], dtype=torch.float32)

    def search(self, queries: Embeddings, k: int, metric: IntrospectiveMetric | None = None) -> Found:
        """The k nearest items of every query, exactly: by the distance of unit vectors, or by the metric.

        Equal distances come in the order in which the items were added. The first search reads and checks all vectors;
        those that are about to be returned are checked again. Damage raises `DamagedGallery`, which names the item:
        removing it, or adding it again, makes the gallery sound.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be a whole number above 0, got {k!r}")
        metric = ranking(metric)
        side = query_rows(queries, self.properties, metric)
        store, items = self._searched()
        rows, distances = ExactSearch(side, items, metric).top(k)
        store.check(rows.unique().tolist(), [items.s, items.u])
        return Found([[store.table.ids[row] for row in line] for line in rows.tolist()], distances)

    def duplicates(self, threshold: float) -> list[list[str]]:
        """Groups of items with equal checksums, or linked by distances of unit vectors below the threshold.

        A chain of links makes one group, so its ends may lie further apart.
        """
        if not 0 <= threshold < math.inf:
            raise ValueError(f"the threshold must be a distance of 0 or more, got {threshold!r}")
        store, items = self._searched()
        return [
            [store.table.ids[row] for row in rows] for rows in duplicate_rows(items, store.table.checksums, threshold)
        ]

    def verify(self) -> list[Problem]:
        """Read everything again and compare checksums; empty if all is sound."""
        with self._mutex:
            return list(self._opened().verify())

    def refresh(self) -> bool:
        """Go on to the newest state; whether there was one. A writer is always there."""
        with self._mutex:
            store = self._opened()
            if self._lock is not None:
                return False
            current = read_current(self.path)
            if current.properties != self.properties:
                raise ValueError(f"the gallery {self.path} was made anew with other properties; open it again")
            self._side = None
            if store.log.is_at(current.folder(self.path) / LOG):
                return store.read()
            self._current, self._store = open_current(self.path, write=False, salvage=store.salvage)
            store.close()
            return True

    def close(self) -> None:
        """Let go of the files and the lock."""
        with self._mutex:
            if self._store is not None:
                self._store.close()
            if self._lock is not None:
                self._lock.close()
            self._store = self._side = None

    def __len__(self) -> int:
        return len(self._opened().table.row)

    def __contains__(self, id: object) -> bool:
        return id in self._opened().table.row

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"EmbeddedEngine({str(self.path)!r}, {self.properties})"

    def _opened(self) -> Store:
        if self._store is None:
            raise ValueError(f"the gallery {self.path} is closed")
        return self._store

    def _row(self, id: str) -> int:
        row = self._opened().table.row.get(id)
        if row is None:
            raise ValueError(f"there is no item {id!r} in the gallery {self.path}")
        return row

    def _rows(self, ids: Sequence[str] | None) -> list[int]:
        return self._opened().table.live() if ids is None else [self._row(id) for id in ids]

    def _searched(self) -> tuple[Store, Side]:
        """What is searched now: it stays as it is, whatever changes afterwards."""
        with self._mutex:
            store = self._opened()
            if self._side is None:
                squares, rows = store.squares(), store.rows()
                alive = np.frombuffer(bytes(store.table.alive), np.bool_)
                u = (rows[1], squares[1]) if self.properties.uncertainty else (rows[0][:, :0], np.zeros(len(alive)))
                self._side = Side(rows[0], np.where(alive, squares[0], math.inf), *u)
            return store, self._side

"""Reading a gallery in Milvus."""

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from idml.embeddings import Embeddings
from idml.metric import IntrospectiveMetric
from idml.search.engines import Found, Item, Problem, Properties
from idml.search.engines.base import FLOAT, query_rows, ranking
from idml.search.engines.milvus_place import Connection, Place
from idml.search.engines.milvus_rows import (
    MOST,
    Row,
    fault,
    fields,
    key_of,
    page_rows,
    read_item,
    semantic,
    thumbnail,
    uncertainty,
)
from idml.search.engines.milvus_search import MilvusSearch, largest_level

_KEYS = 1000  # keys named in one request
_SKEW = 5 * 10**9  # nanoseconds that clocks of different machines may be apart


class MilvusReading:
    """What a gallery in Milvus answers without being changed."""

    def __init__(self, connection: Connection, properties: Properties, index: str, *, write: bool) -> None:
        self.place: Place = connection.place
        self.index = index
        """FLAT (searches are exact), HNSW or IVF_FLAT (they are not)."""
        self._properties, self._write = properties, write
        self._connection: Connection | None = connection
        self._mutex = threading.RLock()
        self._largest: tuple[int, float] | None = None  # at which look it was found, and ‖u‖
        self._found: tuple[int, dict[str, Item]] = (0, {})  # at which look, and what the last search found
        connection.look()
        self._looked, self._items = time.time_ns(), connection.count()
        self._stamps = self._written()  # of the latest changes that we know of

    @property
    def properties(self) -> Properties:
        """What was fixed when the gallery was made."""
        return self._properties

    def get(self, id: str) -> Item | None:
        """The item with this id, if there is one."""
        return self.get_many([id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Item | None]:
        """The item with each of these ids, None where there is none."""
        state, found = self._found
        known = found if state == self._opened().looks else {}  # whoever searches asks for what was found
        rows = self._fetch([id for id in ids if id not in known], ["item"])
        return [known[id] if id in known else read_item(rows[id]) if id in rows else None for id in ids]

    def items(self) -> Iterator[Item]:
        """All items in the order in which they were added, as they are now."""
        return iter([read_item(row) for row in self._all(["item"])])

    def thumbnail(self, id: str) -> bytes:
        """The item's thumbnail, empty if it has none."""
        return thumbnail(self._some([id], ["thumbnail"])[0])

    def embeddings(self, ids: Sequence[str] | None = None) -> Embeddings:
        """The vectors of some items, or of all; without uncertainty vectors where the gallery keeps none."""
        names = ["semantic", "uncertainty"] if self.properties.uncertainty else ["semantic"]
        rows = self._all(names) if ids is None else self._some(ids, names)
        return Embeddings(*(torch.from_numpy(of(rows, self.properties)) for of in (semantic, uncertainty)))

    def levels(self, ids: Sequence[str] | None = None) -> Tensor:
        """The uncertainty levels ‖u‖ of some items, or of all."""
        rows = self._all(["level"]) if ids is None else self._some(ids, ["level"])
        return torch.tensor([row["level"] for row in rows], dtype=torch.float32)

    def search(self, queries: Embeddings, k: int, metric: IntrospectiveMetric | None = None) -> Found:
        """The k nearest items of every query: by the distance of unit vectors, or by the metric.

        With the index FLAT the result is exact; see `milvus_search` for how, and for the other indexes. Equal distances
        come in the order in which the items were added.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be a whole number above 0, got {k!r}")
        metric = ranking(metric)
        side = query_rows(queries, self.properties, metric)
        connection = self._opened()
        largest = 0.0 if metric is None or self.index != "FLAT" else self._largest_level(connection)
        state, search = connection.looks, MilvusSearch(connection, self.properties, self.index, side, metric, largest)
        found = search.top(k)
        self._found = state, search.items
        return found

    def verify(self) -> list[Problem]:
        """Read everything again and compare checksums, dimensions and counts; empty if all is sound."""
        problems, seen = [], 0
        with self._mutex:
            for page in self._pages(fields(self.properties)):
                seen += len(page)
                for row in page:
                    if reason := fault(row, self.properties):
                        problems.append(Problem(str(self.place), _id(row), reason))
            if seen != (count := len(self)):
                problems.append(Problem(str(self.place), None, f"{seen} items could be read, but {count} are counted"))
        return problems

    def refresh(self) -> bool:
        """Go on to the newest state; whether there may be one.

        It is told by the count and by the times at which rows were written: a change by a machine whose clock is more
        than five seconds behind is not noticed, unless the count is another one.
        """
        with self._mutex:
            self._opened().look()
            before, known = self._items, self._stamps
            self._items = len(self)
            return bool(self._written() - known) or self._items != before

    def _written(self) -> set[int]:
        """The times of changes since the last look, and of those shortly before it."""
        since, self._looked = self._looked - _SKEW, time.time_ns()
        rows = self._opened().read("query", filter=f"changed > {since}", output_fields=["changed"], limit=MOST)
        self._stamps = {row["changed"] for row in rows}
        return self._stamps

    def close(self) -> None:
        """Let go of the connection."""
        with self._mutex:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def __len__(self) -> int:
        return self._opened().count()

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and id in self._fetch([id], ["level"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MilvusEngine({str(self.place)!r}, {self.properties}, index={self.index!r})"

    def _opened(self) -> Connection:
        if self._connection is None:
            raise ValueError(f"the gallery {self.place} is closed")
        return self._connection

    def _largest_level(self, connection: Connection) -> float:
        with self._mutex:
            if self._largest is None or self._largest[0] != connection.looks:
                self._largest = (connection.looks, largest_level(connection))
            return self._largest[1]

    def _fetch(self, ids: Sequence[str], names: Sequence[str]) -> dict[str, Row]:
        """Rows of those of these items that are there, by id."""
        keys = {key: id for id in dict.fromkeys(ids) if (key := _key(id))}
        step, found = min(_KEYS, page_rows(self.properties, names)), {}
        for part in (list(keys)[i : i + step] for i in range(0, len(keys), step)):
            for row in self._query(f"key in {json.dumps(part)}", names):
                found[keys[row["key"]]] = row
        return found

    def _some(self, ids: Sequence[str], names: Sequence[str]) -> list[Row]:
        """Rows of these items; one that is not there is an error."""
        found = self._fetch(ids, names)
        for id in ids:
            if id not in found:
                raise ValueError(f"there is no item {id!r} in the gallery {self.place}")
        return [found[id] for id in ids]

    def _pages(self, names: Sequence[str]) -> Iterator[list[Row]]:
        """All rows, range of keys by range of keys."""
        parts = max(1, math.ceil(len(self) / page_rows(self.properties, names)))
        edges = [f'key >= "{i * 2**32 // parts:08x}"' for i in range(1, parts)]
        for low, high in pairwise(['key >= ""', *edges, ""]):
            yield self._query(f"{low} and not ({high})" if high else low, names)

    def _all(self, names: Sequence[str]) -> list[Row]:
        """All rows in the order of their items; our own changes wait, those of others may come in between."""
        with self._mutex:
            rows = {row["key"]: row for page in self._pages([*names, "added"]) for row in page}
        return sorted(rows.values(), key=lambda row: (row["added"], row["key"]))

    def _query(self, condition: str, names: Sequence[str]) -> list[Row]:
        rows: list[Row] = list(self._opened().read("query", filter=condition, output_fields=["key", *names]))
        for row in rows if "semantic" in names else ():
            row["semantic"] = np.array(row["semantic"], FLOAT)  # an eighth of a list of numbers
        return rows


def _key(id: object) -> str:
    """The key of an item, empty for what can be none's."""
    try:
        return key_of(id) if isinstance(id, str) else ""
    except UnicodeEncodeError:
        return ""


def _id(row: Row) -> str:
    try:
        return read_item(row).id
    except ValueError:
        return str(row["key"])

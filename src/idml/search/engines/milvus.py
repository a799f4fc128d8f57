"""The Milvus engine: a gallery in a collection of a Milvus server or cluster, for more items than one machine searches.

`milvus_search` searches it; `milvus_schema` says what a row holds.
"""

import base64
import json
import math
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from idml.embeddings import Embeddings
from idml.metric import IntrospectiveMetric
from idml.search.engines import milvus_schema
from idml.search.engines.base import (
    FLOAT,
    Added,
    DamagedGallery,
    Engine,
    Found,
    Item,
    Problem,
    Properties,
    check_batch,
    item_rows,
    query_rows,
    ranking,
)
from idml.search.engines.milvus_connection import LONG, WRITING, Connection, Place
from idml.search.engines.milvus_schema import (
    LONGEST,
    MOST,
    Row,
    Text,
    described,
    fault,
    fields,
    item_text,
    key_of,
    make_row,
    page_rows,
    read_item,
    read_text,
    row_bytes,
    schema,
    semantic,
    thumbnail,
    uncertainty,
)
from idml.search.engines.milvus_search import MilvusSearch, largest_level

_DIMENSIONS = range(2, 32769)
_UNCERTAINTY = LONGEST // 4 * 3 // 4  # numbers that fit into a text
_METADATA = "idml."  # before the names of what is stored in the properties of a collection
_LONGEST_METADATA = 1 << 20  # Milvus keeps its properties in etcd, which takes 1.5 MB in a request
_POLL = 0.2  # seconds between two looks at a compaction
_KEYS = 1000  # keys named in one request
_SKEW = 5 * 10**9  # nanoseconds that clocks of different machines may be apart
BUILD: dict[str, dict[str, int]] = {"FLAT": {}, "HNSW": {"M": 16, "efConstruction": 200}, "IVF_FLAT": {"nlist": 1024}}


class MilvusEngine(Engine):
    """A gallery in Milvus; `create` and `open` make one. Threads may share an object.

    What differs from the embedded engine: others' changes are seen when Milvus shows them, at the latest after
    `refresh`; there is no lock, so two writers of one item overwrite each other; large changes are sent in parts.
    """

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
        self._last = 0  # the latest time given to a row of ours
        self._stamps = self._written()  # of the latest changes that we know of

    @classmethod
    def create(
        cls, place: str, properties: Properties, *, index: Literal["FLAT", "HNSW", "IVF_FLAT"] = "FLAT"
    ) -> "MilvusEngine":
        """Make an empty gallery, open for writing. A collection that is there is refused.

        Args:
            place: ``milvus://host:port/collection``, or ``milvuss://`` for TLS.
            properties: what is fixed.
            index: FLAT searches exactly; HNSW and IVF_FLAT are for large galleries, and approximate.
        """
        where = Place.parse(place)
        if index not in BUILD:
            raise ValueError(f"unknown index {index!r}; known: {', '.join(BUILD)}")
        if properties.dimensions not in _DIMENSIONS or properties.uncertainty > _UNCERTAINTY:
            raise ValueError(
                f"Milvus takes {_DIMENSIONS[0]} to {_DIMENSIONS[-1]} dimensions and {_UNCERTAINTY} of the uncertainty, "
                f"got {properties.dimensions} and {properties.uncertainty}"
            )
        connection = Connection(where)
        try:
            if connection.do("has_collection"):
                raise ValueError(f"there is a collection at {where} already")
            connection.do("create_collection", schema=schema(properties), consistency_level="Strong")
            connection.do("create_index", index_params=index_parameters(index), sync=False)
            connection.do("load_collection", seconds=LONG)
            return cls(connection, properties, index, write=True)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def open(cls, place: str, *, model: str | None = None, write: bool = False) -> "MilvusEngine":
        """Open a gallery, for reading or writing.

        Args:
            place: ``milvus://host:port/collection``, or ``milvuss://`` for TLS.
            model: the fingerprint of the model that is going to be used; another one than the gallery's is refused.
            write: open for writing.
        """
        where = Place.parse(place)
        connection = Connection(where)
        try:
            if not connection.do("has_collection"):
                raise FileNotFoundError(f"there is no gallery at {where}")
            properties = described(connection.do("describe_collection"))
            if properties is None:
                raise ValueError(f"the collection {where} is no gallery of idml, or of another version")
            if model is not None and model != properties.model:
                raise ValueError(f"the gallery {where} was made with another model ({properties.model}, not {model})")
            if not connection.do("list_indexes"):
                raise ValueError(f"the collection {where} has no index: its making was cut short; drop it")
            index = connection.do("describe_index", index_name="semantic")["index_type"]
            if connection.do("get_load_state")["state"].name != "Loaded":  # who may only read must not load it
                connection.do("load_collection", seconds=LONG)
            return cls(connection, properties, index, write=write)
        except BaseException:
            connection.close()
            raise

    @property
    def properties(self) -> Properties:
        """What was fixed when the gallery was made."""
        return self._properties

    def add(self, items: Sequence[Item], embeddings: Embeddings, thumbnails: Sequence[bytes] | None = None) -> Added:
        """Add items: a known id with the same content is left alone, with other content it is replaced.

        Of equal ids the last counts. More than 24 MB are sent in parts, each of which is written or not.
        """
        images = check_batch(items, embeddings, thumbnails)
        if not items:
            return Added(0, 0, 0)
        vectors, levels = item_rows(embeddings, self.properties)
        with self._changing() as connection:
            stamp = self._stamp(len(items))
            last = sorted({item.id: n for n, item in enumerate(items)}.values())
            rows = [
                make_row(items[n], [x[n] for x in vectors], levels[n], images[n], added=stamp + n, changed=stamp)
                for n in last
            ]
            known = self._fetch([items[n].id for n in last], ["item"])
            texts = {row["key"]: row["item"] for row in known.values()}
            todo = [row for row in rows if texts.get(row["key"]) != row["item"]]
            self._write_rows(connection, todo)
            replaced = sum(row["key"] in texts for row in todo)
            self._items += len(todo) - replaced
        return Added(len(todo) - replaced, replaced, len(last) - len(todo))

    def remove(self, ids: Iterable[str]) -> int:
        """Remove items; how many there were. Ids that are not there are passed over."""
        if isinstance(ids, str):
            raise ValueError(f"ids must be a list of ids, got the string {ids!r}")
        with self._changing() as connection:
            keys = [row["key"] for row in self._fetch(list(ids), ["level"]).values()]
            for part in (keys[i : i + 1000] for i in range(0, len(keys), 1000)):
                connection.do("delete", ids=part)
            self._items -= len(keys)
        return len(keys)

    def relabel(self, labels: Mapping[str, str | None]) -> int:
        """Give items other labels; how many changed. An unknown id is an error, and then nothing changes."""
        with self._changing() as connection:
            texts = {}
            for (id, label), row in zip(labels.items(), self._some(list(labels), ["item"]), strict=True):
                item, digest = read_text(row)
                if item.label != label:
                    texts[id] = item_text(replace(item, label=label), digest)
            stamp, ids, step = self._stamp(1), list(texts), page_rows(self.properties, fields(self.properties))
            for part in (ids[i : i + step] for i in range(0, len(ids), step)):
                whole = zip(part, self._some(part, fields(self.properties)), strict=True)
                self._write_rows(connection, [row | {"item": texts[id], "changed": stamp} for id, row in whole])
        return len(texts)

    def free_log(self) -> None:
        """Do nothing: the server has the log."""

    def compact(self) -> int:
        """Give back the room of removed and replaced items; how many Milvus let go of. It may take a minute."""
        with self._changing() as connection:
            connection.do("flush", seconds=LONG)
            before = _stored(connection)
            if before > connection.count():
                job = connection.do("compact")
                while connection.compaction(job) != "Completed":
                    time.sleep(_POLL)
            return before - _stored(connection)

    def backup(self, file: str | Path) -> None:
        """Refuse: a Milvus server has its own tools for this."""
        raise ValueError(f"{self.place} is in Milvus; back it up with Milvus's own tool (milvus-backup)")

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

        With the index FLAT the result is exact; `milvus_search` explains how, and what the other indexes do.
        Equal distances come in the order in which the items were added.
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

    def read_metadata(self, name: str) -> bytes | None:
        """A text that was stored with the collection; None if there is none."""
        text = self._opened().do("describe_collection").get("properties", {}).get(f"{_METADATA}{name}")
        if text is None:
            return None
        try:
            return zlib.decompress(base64.b64decode(text, validate=True))
        except (ValueError, zlib.error):
            raise DamagedGallery(f"the {name} in the metadata of {self.place} is damaged") from None

    def write_metadata(self, name: str, data: bytes) -> None:
        """Store a text in the collection's properties, compressed; every client reads it from there."""
        text = base64.b64encode(zlib.compress(data, 9)).decode("ascii")
        if len(text) > _LONGEST_METADATA:
            raise ValueError(f"the {name} has {len(text):,} characters; Milvus keeps {_LONGEST_METADATA:,} of them")
        with self._mutex:
            self._opened().do("alter_collection_properties", properties={f"{_METADATA}{name}": text})

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

    def __repr__(self) -> str:
        return f"MilvusEngine({str(self.place)!r}, {self.properties}, index={self.index!r})"

    def _write_rows(self, connection: Connection, rows: list[Row]) -> None:
        part: list[Row] = []
        size = 0
        for row in rows:
            if part and size + row_bytes(row) > milvus_schema.PAGE:
                connection.do("upsert", data=part)
                part, size = [], 0
            part.append({name: Text(value) if isinstance(value, str) else value for name, value in row.items()})
            size += row_bytes(row)
        if part:
            connection.do("upsert", data=part)

    def _stamp(self, count: int) -> int:
        """A time later than those of our earlier changes, the ``count`` - 1 nanoseconds after it being ours too."""
        stamp = max(time.time_ns(), self._last + 1)
        self._last = stamp + count - 1
        self._stamps.add(stamp)
        return stamp

    @contextmanager
    def _changing(self) -> Iterator[Connection]:
        with self._mutex:
            connection = self._opened()
            if not self._write:
                raise ValueError(f"the gallery {self.place} is open for reading only")
            usual, connection.patience = connection.patience, WRITING
            try:
                yield connection
            finally:
                try:
                    connection.look()
                finally:
                    connection.patience = usual

    def _written(self) -> set[int]:
        """The times of changes since the last look, and of those shortly before it."""
        since, self._looked = self._looked - _SKEW, time.time_ns()
        rows = self._opened().read("query", filter=f"changed > {since}", output_fields=["changed"], limit=MOST)
        self._stamps = {row["changed"] for row in rows}
        return self._stamps

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


def _stored(connection: Connection) -> int:
    return int(connection.do("get_collection_stats")["row_count"])


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


def index_parameters(index: str) -> Any:
    """What an index is made with, as pymilvus takes it."""
    from pymilvus import MilvusClient  # type: ignore[import-untyped,unused-ignore]

    parameters = MilvusClient.prepare_index_params()
    parameters.add_index("semantic", index_name="semantic", index_type=index, metric_type="L2", params=BUILD[index])
    return parameters

"""The Milvus engine: a gallery in a collection of a Milvus server or cluster, for more items than one machine searches.

What a row holds is said in `milvus_rows`, how it is searched in `milvus_search`.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from idml.embeddings import Embeddings
from idml.search.engines import Added, Engine, Item, Properties, milvus_rows
from idml.search.engines.base import check_batch, item_rows
from idml.search.engines.milvus_place import LONG, WRITING, Connection, Place
from idml.search.engines.milvus_reading import MilvusReading
from idml.search.engines.milvus_rows import (
    LONGEST,
    Row,
    Text,
    described,
    fields,
    item_text,
    make_row,
    page_rows,
    read_text,
    row_bytes,
    schema,
)
from idml.search.engines.milvus_search import BUILD, index_parameters

_DIMENSIONS = range(2, 32769)
_UNCERTAINTY = LONGEST // 4 * 3 // 4  # numbers that fit into a text
_POLL = 0.2  # seconds between two looks at a compaction


class MilvusEngine(MilvusReading, Engine):
    """A gallery in Milvus; `create` and `open` make one. Threads may share an object.

    What differs from the embedded engine: others' changes are seen when Milvus shows them, at the latest after
    `refresh`; there is no lock, so two writers of one item overwrite each other; large changes are sent in parts.
    """

    _last = 0  # the latest time given to a row of ours

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

    def _write_rows(self, connection: Connection, rows: list[Row]) -> None:
        part: list[Row] = []
        size = 0
        for row in rows:
            if part and size + row_bytes(row) > milvus_rows.PAGE:
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


def _stored(connection: Connection) -> int:
    return int(connection.do("get_collection_stats")["row_count"])

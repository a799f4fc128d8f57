"""The embedded engine: a gallery in a folder, stored in one SQLite database and searched exactly in memory.

    gallery.sqlite              the database, the only truth; -wal and -shm beside it are SQLite's while it is in use
    vectors-1.semantic, …       a disposable copy of the vectors that makes opening fast (see `vector_cache`)

The tables:

    properties   one JSON object, stored twice: model, dimensions, uncertainty
    state        one row, stored twice: the number of the last change, of items, the next position, a digest of all rows
    items        by position, which is the order of items: id, path, label, checksum, level ‖u‖, the CRC-32 of s, u and
                 the thumbnail, and a digest of the whole row
    vectors      by position: id, s, u (float32, little-endian)
    thumbnails   by position: the image, for items that have one
    changes      by the number of the change: the positions that were added, changed or removed

Positions are never used twice (compaction numbers them again and moves on to another *generation*), so the vectors of
a position never change. The id is stored twice, so that an item can be named when one of its rows is damaged. The sum
of all digests and the number of items reveal rows that were lost.

The ids, levels and checksums of all items are held in memory; a process reads what others have changed from `changes`.
"""

import json
import os
import re
import sqlite3
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.embeddings import Embeddings
from idml.files import sync_folder
from idml.metric import IntrospectiveMetric
from idml.search.engines.base import (
    FLOAT,
    Added,
    DamagedGallery,
    Engine,
    Found,
    Item,
    Problem,
    Properties,
    Rows,
    check_batch,
    check_text,
    item_rows,
    query_rows,
    ranking,
)
from idml.search.engines.exact import ExactSearch, Side, squares
from idml.search.engines.vector_cache import VectorCache, checksums_of, write_rows

DATABASE = "gallery.sqlite"
FORMAT = 2
WAIT = 60.0  # seconds until a database that another process has locked is an error
_APPLICATION = 0x49444D4C  # "IDML", in the header of the database
_OLD = "current.json"  # of galleries before SQLite
_PAGE = 16384
_LOG = 32 << 20  # bytes in the write-ahead log, after which SQLite moves them into the database
_CACHE = 16 << 20  # bytes of pages that SQLite keeps in memory
_LONGEST = 1 << 28  # bytes of the longest value: a damaged length must not take all memory
_BLOCK = 1024  # rows read at a time
_VECTORS = re.compile(r"vectors-(\d+)\.(semantic|uncertainty)")
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_FORMAT}
_SCHEMA = """
CREATE TABLE properties (copy INTEGER PRIMARY KEY, content BLOB, crc INTEGER);
CREATE TABLE state (copy INTEGER PRIMARY KEY, change INTEGER, oldest INTEGER, generation INTEGER, next INTEGER,
                    items INTEGER, digest INTEGER, crc INTEGER);
CREATE TABLE items (position INTEGER PRIMARY KEY, id BLOB, path BLOB, label BLOB, checksum BLOB, level REAL,
                    semantic INTEGER, uncertainty INTEGER, thumbnail INTEGER, digest INTEGER);
CREATE TABLE vectors (position INTEGER PRIMARY KEY, id BLOB, semantic BLOB, uncertainty BLOB);
CREATE TABLE thumbnails (position INTEGER PRIMARY KEY, image BLOB);
CREATE TABLE changes (change INTEGER PRIMARY KEY, first INTEGER, last INTEGER);
"""
_FACTORS = [int.from_bytes(zlib.crc32(b"%d" % n).to_bytes(4) * 2) | 1 for n in range(9)]  # odd: no change is lost

Row = tuple[Any, ...]
"""A row of the table items."""
Numbers = NDArray[np.int64]


def is_gallery(path: str | Path) -> bool:
    """Whether there is a gallery in this folder, of this or of an older format."""
    return (Path(path) / DATABASE).exists() or (Path(path) / _OLD).exists()


class State(NamedTuple):
    """What changes with every write."""

    change: int
    """The number of the last change."""
    oldest: int
    """Changes before this one are no longer listed."""
    generation: int
    """How often positions were numbered."""
    next: int
    """The position of the next item."""
    items: int
    digest: int
    """The sum of the digests of all rows of items, modulo 2⁶⁴, as a signed number."""

    def crc(self) -> int:
        """A checksum of all fields."""
        return zlib.crc32(struct.pack("<6q", *self))


class SqliteEngine(Engine):
    """A gallery in a folder. `create` and `open` make one; several processes may read and write it at once.

    A method reads the newest state. Threads may share an object, and a forked child may go on using it: connections
    are closed before a fork and opened again when they are needed.
    """

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path, self.file, self._write = path, path / DATABASE, write
        self._mutex = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self._version = -1  # SQLite's data_version when the state was last read
        self._table: Table | None = None
        self._semantic: Matrix | None = None
        self._uncertainty: Matrix | None = None
        self._foreign = False  # whether changes of others were read since the last refresh
        with self._reading() as connection:
            self._properties = _read_properties(connection, self.file)
            self._identity = self._stat()
        _engines.add(self)

    @classmethod
    def create(cls, path: str | Path, properties: Properties) -> "SqliteEngine":
        """Make an empty gallery, open for writing. An existing gallery is refused; other files are left alone."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        if is_gallery(path):
            raise ValueError(f"there is a gallery at {path} already")
        temporary = path / f".{DATABASE}.{os.getpid()}-{threading.get_ident()}"
        try:
            with _explained(path):
                _make(temporary, properties, path)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            try:
                os.link(temporary, path / DATABASE)  # unlike a rename it never replaces a gallery
            except FileExistsError:
                raise ValueError(f"there is a gallery at {path} already") from None
        except OSError as error:
            if str(path) in str(error.args[0]):
                raise
            raise OSError(f"cannot write to the gallery {path} ({error.strerror or error})") from error
        finally:
            for suffix in ("", "-wal", "-shm", "-journal"):
                Path(f"{temporary}{suffix}").unlink(missing_ok=True)
        with suppress(OSError):  # a parent folder that may not be read
            sync_folder(path)
            sync_folder(path.parent)
        return cls(path, write=True)

    @classmethod
    def open(cls, path: str | Path, *, model: str | None = None, write: bool = False) -> "SqliteEngine":
        """Open a gallery.

        Args:
            path: the gallery's folder.
            model: the fingerprint of the model that is going to be used; another one than the gallery's is refused.
            write: open for writing too.
        """
        path = Path(path)
        if not (path / DATABASE).is_file():
            if (path / _OLD).is_file():
                raise ValueError(
                    f"the gallery {path} has the format of an older version of idml: delete it and index again"
                )
            raise FileNotFoundError(f"there is no gallery at {path}")
        if write:
            for place in (path, path / DATABASE):
                if not os.access(place, os.W_OK):
                    raise PermissionError(f"cannot write to the gallery {path} ({place} is read-only)")
        engine = cls(path, write=write)
        if model is not None and model != engine.properties.model:
            engine.close()
            raise ValueError(
                f"the gallery {path} was made with another model ({engine.properties.model}, not {model})"
            )
        return engine

    @property
    def properties(self) -> Properties:
        """The properties fixed when the gallery was made."""
        return self._properties

    # ------------------------------------------------------------------ changes

    def add(self, items: Sequence[Item], embeddings: Embeddings, thumbnails: Sequence[bytes] | None = None) -> Added:
        """Add items, all or none: a known id with the same content is left alone, with other content it is replaced.

        Of equal ids the last counts. An item whose stored bytes are damaged counts as one with other content.
        """
        images = check_batch(items, embeddings, thumbnails)
        vectors, levels = item_rows(embeddings, self.properties)
        with self._writing() as (connection, table):
            last = sorted({item.id: n for n, item in enumerate(items)}.values())
            known = [n for n in last if items[n].id in table.rows]
            stored = self._stored(connection, table, [table.rows[items[n].id] for n in known])
            same = {
                n
                for n, old in zip(known, stored, strict=True)
                if old == (items[n], *(x[n].tobytes() for x in vectors), levels[n], images[n])
            }
            todo = [n for n in last if n not in same]
            old = [position for n in todo if (position := table.find(items[n].id)) is not None]
            if todo:
                self._delete(connection, old)
                self._insert(connection, table, todo, items, vectors, levels, images)
                self._record(connection, table, [*old, *range(table.state.next, table.state.next + len(todo))])
        return Added(len(todo) - len(old), len(old), len(same))

    def _insert(
        self,
        connection: sqlite3.Connection,
        table: "Table",
        todo: Sequence[int],
        items: Sequence[Item],
        vectors: Sequence[Rows],
        levels: Sequence[float],
        images: Sequence[bytes],
    ) -> None:
        first = table.state.next
        rows = [np.ascontiguousarray(x[todo]) for x in vectors]
        crcs = [checksums_of(x).tolist() for x in rows]
        if len(rows) == 1:
            crcs.append([0] * len(todo))
        content = [
            (first + n, *_encoded(items[m]), levels[m], crcs[0][n], crcs[1][n], zlib.crc32(images[m]))
            for n, m in enumerate(todo)
        ]
        signed = _digests(content).view(np.int64).tolist()
        connection.executemany(
            f"INSERT INTO items VALUES ({', '.join('?' * 10)})",
            ((*row, digest) for row, digest in zip(content, signed, strict=True)),
        )
        blobs = [[x[n].tobytes() for x in rows] for n in range(len(todo))]
        connection.executemany(
            "INSERT INTO vectors VALUES (?, ?, ?, ?)",
            ((row[0], row[1], *(own if len(own) == 2 else (own[0], None))) for row, own in zip(content, blobs, strict=True)),
        )
        connection.executemany(
            "INSERT INTO thumbnails VALUES (?, ?)", ((first + n, images[m]) for n, m in enumerate(todo) if images[m])
        )
        for kind, own in zip(("semantic", "uncertainty"), rows, strict=False):
            write_rows(self._vectors_file(kind, table.state.generation), first, own)

    def remove(self, ids: Iterable[str]) -> int:
        """Remove items and return how many there were. Unknown ids are ignored."""
        if isinstance(ids, str):
            raise ValueError(f"ids must be a list of ids, got the string {ids!r}")
        with self._writing() as (connection, table):
            positions = [position for id in dict.fromkeys(ids) if (position := table.find(id)) is not None]
            if positions:
                self._delete(connection, positions)
                self._record(connection, table, positions)
        return len(positions)

    def _delete(self, connection: sqlite3.Connection, positions: Sequence[int]) -> None:
        for name in ("items", "vectors", "thumbnails"):
            connection.executemany(f"DELETE FROM {name} WHERE position = ?", ((position,) for position in positions))

    def relabel(self, labels: Mapping[str, str | None]) -> int:
        """Change labels and return how many changed. An unknown id is an error, and then nothing changes."""
        with self._writing() as (connection, table):
            positions = [self._position(table, id) for id in labels]
            for label in labels.values():
                if label is not None:
                    check_text("label", label)
            rows = []
            for row, label in zip(self._rows(connection, table, positions), labels.values(), strict=True):
                changed = (*row[:3], None if label is None else _bytes(label), *row[4:9])
                if changed[3] != row[3]:
                    rows.append(changed)
            if rows:
                signed = _digests(rows).view(np.int64).tolist()
                connection.executemany(
                    "UPDATE items SET label = ?, digest = ? WHERE position = ?",
                    ((row[3], digest, row[0]) for row, digest in zip(rows, signed, strict=True)),
                )
                self._record(connection, table, [row[0] for row in rows])
        return len(rows)

    def _record(self, connection: sqlite3.Connection, table: "Table", positions: Sequence[int]) -> None:
        """Write which positions change in this transaction, read them into the table, and write the state."""
        state, items, digest = table.state, len(table), table.digest
        change = state.change
        for first, last in _ranges(sorted(positions)):
            change += 1
            connection.execute("INSERT INTO changes VALUES (?, ?, ?)", (change, first, last))
            table.read(connection, first, last)
        if table.damaged:  # their digests are part of the sum, but unknown
            digest = _signed(state.digest + table.digest - digest)
        else:
            digest = table.digest
        items, after = state.items + len(table) - items, max(state.next, max(positions) + 1)
        self._write_state(connection, table, state._replace(change=change, next=after, items=items, digest=digest))

    def _write_state(self, connection: sqlite3.Connection, table: "Table", state: State) -> None:
        table.state = state
        connection.executemany(
            f"INSERT OR REPLACE INTO state VALUES ({', '.join('?' * 8)})",
            ((copy, *state, state.crc()) for copy in (1, 2)),
        )

    def compact(self) -> int:
        """Free the space of removed and replaced items and return how many there were.

        Positions are numbered again, and SQLite rewrites the database (VACUUM). Others may read and write meanwhile.
        """
        with self._writing() as (connection, table):
            for problem in table.problems(str(self.file)):
                raise DamagedGallery(str(problem))
            before = np.fromiter(table.rows.values(), np.int64)
            freed = table.state.next - len(before)
            if freed:
                self._renumber(connection, table, before)
        with self._mutex, _explained(self.path):
            connection = self._connected()
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._sweep()
        return freed

    def _renumber(self, connection: sqlite3.Connection, table: "Table", before: Numbers) -> None:
        """Number the positions of all items from 0 on, under another generation."""
        after = np.arange(len(before))
        moved = np.flatnonzero(before != after)
        step = (after - before).astype(np.uint64) * np.uint64(_FACTORS[0])  # a digest is linear in the position
        digests = (table.digests[before] + step).view(np.int64)
        numbers = [(int(after[n]), int(before[n])) for n in moved]
        connection.executemany(
            "UPDATE items SET position = ?, digest = ? WHERE position = ?",
            ((new, int(digests[new]), old) for new, old in numbers),
        )
        for name in ("vectors", "thumbnails"):
            connection.executemany(f"UPDATE {name} SET position = ? WHERE position = ?", numbers)
        connection.execute("DELETE FROM changes")
        state, total = table.state, int(digests.view(np.uint64).sum(dtype=np.uint64).view(np.int64))
        fresh = State(state.change + 1, state.change + 1, state.generation + 1, len(before), len(before), total)
        self._write_state(connection, table, fresh)
        self._table = None  # read again when it is needed

    def _sweep(self) -> None:
        """Delete the vector files of earlier generations."""
        with self._reading():
            generation = self._current().state.generation
            for file in self.path.iterdir():
                if (match := _VECTORS.fullmatch(file.name)) and int(match[1]) < generation:
                    file.unlink(missing_ok=True)

    def backup(self, file: str | Path) -> None:
        """Write a copy of the database as it is now to ``file``, which is replaced; on return it is on the disk."""
        file = Path(file)
        if file.resolve() == self.file.resolve():
            raise ValueError(f"{file} is the gallery's own database; name another file for the backup")
        temporary = file.with_name(f".{file.name}.part")
        try:
            with self._reading() as connection, _explained(self.path):
                target = sqlite3.connect(temporary, isolation_level=None)
                try:
                    connection.backup(target)
                finally:
                    target.close()
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.replace(file)
            sync_folder(file.parent)
        except (OSError, sqlite3.Error) as error:
            raise OSError(f"cannot write the backup {file} ({error})") from error
        finally:
            for suffix in ("", "-wal", "-shm", "-journal"):
                Path(f"{temporary}{suffix}").unlink(missing_ok=True)

    # ------------------------------------------------------------------ reading

    def get(self, id: str) -> Item | None:
        """The item with this id, if there is one."""
        return self.get_many([id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Item | None]:
        """The item with each of these ids, None where there is none."""
        with self._reading() as connection:
            table = self._current()
            known = {id: self._position(table, id) for id in ids if table.find(id) is not None}
            rows = self._rows(connection, table, list(known.values()))
            found = {id: _item(row) for id, row in zip(known, rows, strict=True)}
        return [found.get(id) for id in ids]

    def items(self) -> Iterator[Item]:
        """All items in the order in which they were added, as they are now."""
        with self._reading() as connection:
            table = self._current()
            for problem in table.problems(str(self.file)):
                raise DamagedGallery(str(problem))
            rows = [row for block in _blocks(connection, "items", _ITEM, 0, table.state.next) for row in block]
            if not np.array_equal(_digests([row[:9] for row in rows]), table.digests[list(table.rows.values())]):
                self._table = None
                raise DamagedGallery(f"{self.file}: rows of the table items are damaged; idml gallery verify names them")
        return map(_item, rows)

    def thumbnail(self, id: str) -> bytes:
        """The item's thumbnail, empty if it has none."""
        with self._reading() as connection:
            table = self._current()
            position = self._position(table, id)
            (row,) = self._rows(connection, table, [position])
            image = _one(connection, "SELECT image FROM thumbnails WHERE position = ?", position)
            if not _matches(image or b"", row[8]):
                raise DamagedGallery(str(Problem(str(self.file), id, "the thumbnail is damaged")))
            return image or b""

    def embeddings(self, ids: Sequence[str] | None = None) -> Embeddings:
        """The vectors of some items, or of all, without u if the gallery does not store it."""
        if ids is None:
            parts = self._all_vectors()
        else:
            with self._reading() as connection:
                table = self._current()
                parts = self._read_vectors(connection, table, [self._position(table, id) for id in ids])
        s, *u = map(torch.from_numpy, parts)
        return Embeddings(s, u[0]) if u else Embeddings.certain(s)

    def levels(self, ids: Sequence[str] | None = None) -> Tensor:
        """The uncertainty levels ‖u‖ of some items, or of all."""
        with self._reading():
            table = self._current()
            rows = list(table.rows.values()) if ids is None else [self._position(table, id) for id in ids]
            return torch.from_numpy(table.levels[rows])

    def search(self, queries: Embeddings, k: int, metric: IntrospectiveMetric | None = None) -> Found:
        """The k nearest items of every query, exactly: by the distance of unit vectors, or by the metric.

        Equal distances come in the order in which the items were added. The first search reads and checks all vectors;
        those that are about to be returned are checked again. Damage raises `DamagedGallery`, which names the item:
        removing it, or adding it again, repairs the gallery.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be a whole number above 0, got {k!r}")
        metric = ranking(metric)
        side = query_rows(queries, self.properties, metric)
        while True:
            with self._reading():
                table, items = self._searched(metric is not None)
            rows, distances = ExactSearch(side, items, metric).top(k)
            if self._intact(table, items, rows.unique().numpy()):
                return Found([[table.ids[row] for row in line] for line in rows.tolist()], distances)

    def verify(self) -> list[Problem]:
        """Read everything, compare checksums, and let SQLite check its own structure. Empty if all is intact."""
        with self._reading() as connection:
            return list(dict.fromkeys(self._problems(connection)))

    def _problems(self, connection: sqlite3.Connection) -> Iterator[Problem]:
        file = str(self.file)
        try:
            for (line,) in connection.execute("PRAGMA integrity_check"):
                if line != "ok":
                    yield Problem(file, None, f"SQLite finds: {' '.join(str(line).split())}")
        except sqlite3.DatabaseError as error:
            yield Problem(file, None, f"SQLite cannot check it ({error})")
        for name, sound in (("properties", _sound_properties), ("state", _sound_state)):
            rows = connection.execute(f"SELECT * FROM {name} ORDER BY copy").fetchall()
            for copy in (1, 2):
                if sum(row[0] == copy and sound(row) is not None for row in rows) != 1 or len(rows) != 2:
                    yield Problem(file, None, f"copy {copy} of the {name} is damaged; the next change writes it again")
        table = Table(connection, _read_state(connection, self.file))
        yield from table.problems(file)
        kinds, end = [(kind, table.crcs(kind)) for kind in self._kinds()], table.state.next
        positions = np.fromiter(table.rows.values(), np.int64)
        seen: dict[str, set[int]] = {"vectors": set(), "thumbnails": set()}
        for rows in _blocks(connection, "vectors", "position, id, semantic, uncertainty", 0, end):
            for position, id, *content in rows:
                seen["vectors"].add(position)
                own = table.ids[position] if table.live[position] else None
                if own is None:
                    if position not in table.damaged:
                        yield Problem(file, None, f"the vectors of position {position} belong to no item")
                    continue
                if id != _bytes(own) or not all(
                    _matches(data, int(expected[position]))
                    for (_, expected), data in zip(kinds, content, strict=False)
                ):
                    yield Problem(file, own, "the vector is damaged")
        crcs = {}
        for rows in _blocks(connection, "items", "position, thumbnail", 0, table.state.next):
            crcs.update(rows)
        for rows in _blocks(connection, "thumbnails", "position, image", 0, end):
            for position, image in rows:
                seen["thumbnails"].add(position)
                own = table.ids[position] if table.live[position] else None
                if own is not None and not _matches(image, crcs.get(position)):
                    yield Problem(file, own, "the thumbnail is damaged")
                elif own is None and position not in table.damaged:
                    yield Problem(file, None, f"the thumbnail of position {position} belongs to no item")
        for position in positions.tolist():
            if position not in seen["vectors"]:
                yield Problem(file, table.ids[position], "the vector is missing")
            if crcs.get(position) and position not in seen["thumbnails"]:
                yield Problem(file, table.ids[position], "the thumbnail is missing")
        for kind, expected in kinds:  # the copies are mended in passing
            cache = VectorCache(self._vectors_file(kind, table.state.generation), self._width(kind), table.state.next)
            cache.check(positions, expected[positions], self._reader(connection, kind))

    def refresh(self) -> bool:
        """Read the newest state. True if another writer has changed the gallery since the last call."""
        with self._mutex:
            self._require_open()
            if self._moved():
                self._disconnect()
                self._table = self._semantic = self._uncertainty = None
                with self._reading() as connection:
                    if _read_properties(connection, self.file) != self.properties:
                        self._disconnect()
                        raise ValueError(f"the gallery {self.path} was made again with other properties; open it again")
                    self._identity = self._stat()
                self._foreign = True
            with self._reading():
                self._current()
            foreign, self._foreign = self._foreign, False
            return foreign

    def close(self) -> None:
        """Close the database and the vectors."""
        with self._mutex:
            self._disconnect()
            self._table = self._semantic = self._uncertainty = None
            self._closed = True

    def __len__(self) -> int:
        with self._reading():
            return self._current().state.items

    def __contains__(self, id: object) -> bool:
        with self._reading():
            return isinstance(id, str) and self._current().find(id) is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SqliteEngine({str(self.path)!r}, {self.properties})"

    # ------------------------------------------------------------------ state

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A transaction that reads one state, the newest."""
        with self._mutex, _explained(self.path):
            connection = self._connected()
            if connection.in_transaction:
                yield connection
                return
            connection.execute("BEGIN")
            try:
                self._sync(connection)
                yield connection
            finally:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")

    @contextmanager
    def _writing(self) -> Iterator[tuple[sqlite3.Connection, "Table"]]:
        """A transaction that changes the newest state; other writers wait."""
        with self._mutex, _explained(self.path):
            self._require_open()
            if not self._write:
                raise ValueError(f"the gallery {self.path} is open for reading only")
            if self._moved():
                self.refresh()
            connection = self._connected()
            connection.execute("BEGIN IMMEDIATE")
            before = connection.total_changes
            try:
                self._sync(connection)
                yield connection, self._current()
                connection.execute("COMMIT")
            except BaseException:
                if connection.total_changes != before:
                    self._table = None  # it may hold what is not going to be
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def _sync(self, connection: sqlite3.Connection) -> None:
        """Bring the table in memory up to date with the database."""
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if self._table is not None and version == self._version:
            return
        state, table = _read_state(connection, self.file), self._table
        if table is not None and state != table.state:
            self._foreign = True
            if not table.follow(connection, state):
                table = None
        if table is None:
            self._table = self._semantic = self._uncertainty = None
            self._table = Table(connection, state)
        self._version = version

    def _current(self) -> "Table":
        assert self._table is not None
        return self._table

    def _connected(self) -> sqlite3.Connection:
        self._require_open()
        if self._connection is None:
            self._connection, self._version = _connect(self.file, write=self._write), -1
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(f"the gallery {self.path} is closed")

    def _stat(self) -> tuple[int, int]:
        try:
            found = os.stat(self.file)
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(f"there is no gallery at {self.path}") from None
        return found.st_dev, found.st_ino

    def _moved(self) -> bool:
        """Whether another database has taken the place of ours."""
        return self._stat() != self._identity

    # ------------------------------------------------------------------ rows

    def _position(self, table: "Table", id: str) -> int:
        position = table.find(id)
        if position is None:
            raise ValueError(f"there is no item {id!r} in the gallery {self.path}")
        if position in table.damaged:
            raise DamagedGallery(str(table.problem(str(self.file), position)))
        return position

    def _rows(self, connection: sqlite3.Connection, table: "Table", positions: Sequence[int]) -> list[Row]:
        """Rows of the table items; `DamagedGallery` if one is not what was written."""
        found = _fetch(connection, "items", _ITEM, positions)
        for position in positions:
            row = found.get(position)
            if row is None or _digest(row) != table.digests[position]:
                raise DamagedGallery(str(Problem(str(self.file), table.ids[position], _MENDED.format("row"))))
        return [found[position] for position in positions]

    def _read_vectors(self, connection: sqlite3.Connection, table: "Table", positions: Sequence[int]) -> list[Rows]:
        """s, and u if it is stored; `DamagedGallery` if one is not what was written."""
        found, out = _fetch(connection, "vectors", "position, semantic, uncertainty", positions), []
        for n, kind in enumerate(self._kinds()):
            rows = np.empty((len(positions), self._width(kind)), FLOAT)
            for to, position in zip(rows, positions, strict=True):
                data = found.get(position, (position, None, None))[1 + n]
                if not _matches(data, int(table.crcs(kind)[position])) or len(data) != to.nbytes:
                    raise DamagedGallery(str(Problem(str(self.file), table.ids[position], _MENDED.format("vector"))))
                to[:] = np.frombuffer(data, FLOAT)
            out.append(rows)
        return out

    def _stored(self, connection: sqlite3.Connection, table: "Table", positions: Sequence[int]) -> list[object]:
        """All that is stored at each position, None where something is damaged."""
        out: list[object] = []
        images = _fetch(connection, "thumbnails", "position, image", positions)
        rows = _fetch(connection, "items", _ITEM, positions)
        for position in positions:
            try:
                row, image = rows[position], images.get(position, (position, b""))[1]
                if _digest(row) != table.digests[position] or not _matches(image, row[8]):
                    raise DamagedGallery
                vectors = [x[0].tobytes() for x in self._read_vectors(connection, table, [position])]
                out.append((_item(row), *vectors, row[5], image))
            except (DamagedGallery, KeyError):
                out.append(None)
        return out

    def _kinds(self) -> tuple[str, ...]:
        return ("semantic", "uncertainty") if self.properties.uncertainty else ("semantic",)

    def _width(self, kind: str) -> int:
        return self.properties.dimensions if kind == "semantic" else self.properties.uncertainty

    def _vectors_file(self, kind: str, generation: int) -> Path:
        return self.path / f"vectors-{generation}.{kind}"

    def _reader(self, connection: sqlite3.Connection, kind: str) -> Callable[[Sequence[int]], list[tuple[int, bytes]]]:
        def read(positions: Sequence[int]) -> list[tuple[int, bytes]]:
            found = _fetch(connection, "vectors", f"position, {kind}", positions)
            return [(position, data) for position, data in found.values() if isinstance(data, bytes)]

        return read

    # ------------------------------------------------------------------ searching

    def _searched(self, metric: bool) -> tuple["Table", Side]:
        """The vectors that are searched now; they stay as they are when something changes."""
        connection, table = self._connected(), self._current()
        matrices = []
        for kind in ("semantic", "uncertainty") if metric else ("semantic",):
            matrix: Matrix | None = getattr(self, f"_{kind}")
            if matrix is None or matrix.cache.capacity < table.state.next:
                file = self._vectors_file(kind, table.state.generation)
                matrix = Matrix(VectorCache(file, self._width(kind), table.state.next))
                setattr(self, f"_{kind}", matrix)
            matrix.follow(table, table.crcs(kind), self._reader(connection, kind))
            matrices.append(matrix)
        for matrix in matrices:
            for position in matrix.damaged:
                raise DamagedGallery(str(Problem(str(self.file), table.ids[position], _MENDED.format("vector"))))
        for problem in table.problems(str(self.file)):
            raise DamagedGallery(str(problem))
        s = matrices[0]
        if s.side is None or s.side[0] != (table.state.change, metric):
            n, live = table.state.next, table.live[: table.state.next]
            u = (matrices[1].cache.rows[:n], matrices[1].squares[:n]) if metric else (s.cache.rows[:n, :0], s.squares[:n])
            side = Side(s.cache.rows[:n], np.where(live, s.squares[:n], np.inf), *u)
            s.side = (table.state.change, metric), side
        return table, s.side[1]

    def _all_vectors(self) -> list[Rows]:
        """s of all items, and u if it is stored."""
        while True:
            with self._reading():
                table, side = self._searched(bool(self.properties.uncertainty))
                rows = np.fromiter(table.rows.values(), np.int64)
            out = [side.s[rows], *([side.u[rows]] if self.properties.uncertainty else [])]
            if self._intact(table, side, rows):
                return out

    def _intact(self, table: "Table", side: Side, rows: Numbers) -> bool:
        """Whether the vectors in memory of these rows are what was written; if not, all are going to be read again."""
        kinds = [(side.s, table.semantic)]
        if side.u.shape[1]:
            kinds.append((side.u, table.uncertainty))
        if all(np.array_equal(checksums_of(x[row] for row in rows), crcs[rows]) for x, crcs in kinds):
            return True
        with self._mutex:
            self._semantic = self._uncertainty = None
        return False


class Matrix:
    """The vectors of one kind in memory, with their squared lengths by position."""

    def __init__(self, cache: VectorCache) -> None:
        self.cache = cache
        self.squares = np.zeros(cache.capacity)
        self.end = 0  # positions below it were checked
        self.damaged: list[int] = []
        self.side: tuple[tuple[int, bool], Side] | None = None  # for which change, with u or without

    def follow(
        self,
        table: "Table",
        crcs: NDArray[np.uint32],
        read: Callable[[Sequence[int]], list[tuple[int, bytes]]],
    ) -> None:
        """Check the vectors of items that came since the last call."""
        fresh = self.end + np.flatnonzero(table.live[self.end : table.state.next])
        lost = self.cache.check(fresh, crcs[fresh], read)
        self.damaged = [position for position in self.damaged if table.live[position]] + lost
        for first in range(self.end, table.state.next, 4 * _BLOCK):
            rows = slice(first, min(first + 4 * _BLOCK, table.state.next))
            self.squares[rows] = squares(self.cache.rows[rows])
        self.end = table.state.next


class Table:
    """What is held in memory of all items, by position."""

    def __init__(self, connection: sqlite3.Connection, state: State) -> None:
        self.state = state
        self.ids: list[str] = []
        self.rows: dict[str, int] = {}
        """The positions of intact items by id, in ascending order."""
        self.damaged: dict[int, str | None] = {}
        """Positions of rows that are not what was written, with their ids where these are known; −1: rows are lost."""
        self.live = np.zeros(0, np.bool_)
        self.digests = np.zeros(0, np.uint64)
        self.semantic, self.uncertainty = np.zeros(0, np.uint32), np.zeros(0, np.uint32)
        self.levels = np.zeros(0, np.float32)
        self._total = 0
        self._read(connection, 0, state.next)
        if not self.agrees():
            self._name_damage(connection)

    def __len__(self) -> int:
        """The number of items, damaged ones too."""
        return len(self.rows) + sum(position >= 0 for position in self.damaged)

    @property
    def digest(self) -> int:
        """The sum of the digests of intact rows, modulo 2⁶⁴, as a signed number."""
        return _signed(self._total)

    def agrees(self) -> bool:
        """Whether the rows are those that the state speaks of."""
        return not self.damaged and len(self.rows) == self.state.items and self.digest == self.state.digest

    def crcs(self, kind: str) -> NDArray[np.uint32]:
        """The CRC-32 of the vectors s or u."""
        return self.semantic if kind == "semantic" else self.uncertainty

    def find(self, id: str) -> int | None:
        """The position of an item, also of a damaged one; an error if it may be one whose id is unknown."""
        position = self.rows.get(id)
        if position is None and self.damaged:
            position = next((place for place, own in self.damaged.items() if own == id), None)
            if position is None and None in self.damaged.values():
                raise DamagedGallery(_LOST)
        return position

    def problem(self, file: str, position: int) -> Problem:
        """What is wrong with a position."""
        id = self.damaged[position]
        return Problem(file, id, _LOST if id is None else _MENDED.format("row"))

    def problems(self, file: str) -> list[Problem]:
        """What is wrong with all positions."""
        return list(dict.fromkeys(self.problem(file, position) for position in sorted(self.damaged)))

    def follow(self, connection: sqlite3.Connection, state: State) -> bool:
        """Read what has changed; whether that was possible and adds up to the state."""
        mine = self.state
        if state.generation != mine.generation or not state.oldest - 1 <= mine.change <= state.change:
            return False
        ranges = connection.execute("SELECT first, last FROM changes WHERE change > ?", (mine.change,)).fetchall()
        for first, last in ranges:
            if not (isinstance(first, int) and isinstance(last, int) and 0 <= first <= last < state.next):
                return False
            self.read(connection, first, last)
        self.state = state
        return self.agrees()

    def read(self, connection: sqlite3.Connection, first: int, last: int) -> None:
        """Read the rows of some positions again: they were added, changed or removed."""
        before = first + np.flatnonzero(self.live[first : last + 1])
        self.live[before] = False
        self._total -= int(self.digests[before].sum(dtype=np.uint64))
        for position in [position for position in self.damaged if first <= position <= last]:
            del self.damaged[position]
        self._read(connection, first, last + 1)
        for position in before[~self.live[before]].tolist():
            if self.rows.get(self.ids[position]) == position:
                del self.rows[self.ids[position]]

    def _read(self, connection: sqlite3.Connection, first: int, end: int) -> None:
        self._grow(end)
        for block in _blocks(connection, "items", f"{_ITEM}, digest", first, end):
            found = np.array([row[9] if isinstance(row[9], int) else 0 for row in block], np.int64).view(np.uint64)
            intact = _digests_of_any([row[:9] for row in block]) == found
            if intact.all():
                self._put(block, found)
                continue
            self._put([row for row, ok in zip(block, intact, strict=True) if ok], found[intact])
            for row in (row for row, ok in zip(block, intact, strict=True) if not ok):
                self.damaged[row[0]] = _only(connection, "SELECT id FROM vectors WHERE position = ?", row[0])

    def _put(self, block: Sequence[Row], digests: NDArray[np.uint64]) -> None:
        if not block:
            return
        at, ids, _, _, _, levels, semantic, uncertainty, _, _ = zip(*block, strict=True)
        places, names = np.array(at), [id.decode("utf-8", "surrogateescape") for id in ids]
        if at[0] == len(self.ids) and places[-1] - places[0] == len(at) - 1:
            self.ids += names
        else:
            self.ids += [""] * (at[-1] + 1 - len(self.ids))
            for position, name in zip(at, names, strict=True):
                self.ids[position] = name
        for position, name in zip(at, names, strict=True):
            if self.rows.setdefault(name, position) != position and self.live[self.rows[name]]:
                self.damaged[self.rows[name]] = None  # two rows of one id: one of them is not what was written
            self.rows[name] = position
        self.live[places], self.levels[places] = True, levels
        self.semantic[places], self.uncertainty[places] = semantic, uncertainty
        self.digests[places] = digests
        self._total += int(digests.sum(dtype=np.uint64))

    def _grow(self, end: int) -> None:
        if end > len(self.live):
            more = end + end // 4 + _BLOCK - len(self.live)
            for name in ("live", "digests", "semantic", "uncertainty", "levels"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))

    def _name_damage(self, connection: sqlite3.Connection) -> None:
        """Find out which items are damaged or lost, by the ids beside their vectors."""
        for block in _blocks(connection, "vectors", "position, id", 0, self.state.next):
            for position, id in block:
                if not self.live[position]:
                    self.damaged[position] = _text(id)
        for position, id in self.damaged.items():
            if id in self.rows:
                self.damaged[position] = None
        if len(self) != self.state.items or (not self.damaged and self.digest != self.state.digest):
            self.damaged[-1] = None


# ---------------------------------------------------------------------- the database

_ITEM = "position, id, path, label, checksum, level, semantic, uncertainty, thumbnail"
_MENDED = "the {} is damaged; remove the item or add it again"
_LOST = "rows are damaged or lost whose ids cannot be read; restore a backup, or delete the gallery and index again"


def _make(file: Path, properties: Properties, path: Path) -> None:
    """Write an empty database."""
    connection = sqlite3.connect(file, isolation_level=None)
    try:
        connection.execute(f"PRAGMA page_size = {_PAGE}")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN")
        for statement in _SCHEMA.split(";"):
            connection.execute(statement)
        content = json.dumps(asdict(properties), sort_keys=True).encode("ascii")
        state = State(0, 1, 1, 0, 0, 0)
        for copy in (1, 2):
            connection.execute("INSERT INTO properties VALUES (?, ?, ?)", (copy, content, zlib.crc32(content)))
            connection.execute(f"INSERT INTO state VALUES ({', '.join('?' * 8)})", (copy, *state, state.crc()))
        connection.execute(f"PRAGMA application_id = {_APPLICATION}")
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
        _require_log(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0], path)
    finally:
        connection.close()


def _connect(file: Path, *, write: bool) -> sqlite3.Connection:
    """A connection to the database of a gallery; anything else is refused."""
    try:
        return _open(file, "mode=rw", write=write)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
        if os.access(file.parent, os.W_OK) or write:
            _require_log("none", file.parent)
        log = Path(f"{file}-wal")
        if log.exists() and log.stat().st_size:
            raise OSError(
                f"cannot read the gallery {file.parent}: {log.name} holds changes, and its folder is read-only"
            ) from None
    return _open(file, "mode=ro&immutable=1", write=False)  # nobody can change it here


def _open(file: Path, options: str, *, write: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{file.absolute().as_uri()}?{options}", uri=True, timeout=WAIT, isolation_level=None, check_same_thread=False
    )
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
        for setting in (
            f"cache_size = {-_CACHE // 1024}", f"wal_autocheckpoint = {_LOG // _PAGE}", f"journal_size_limit = {2 * _LOG}",
            "synchronous = FULL", "cell_size_check = ON", "trusted_schema = OFF", f"query_only = {int(not write)}",
        ):  # fmt: skip
            connection.execute(f"PRAGMA {setting}").fetchall()
        application, version = (_one(connection, f"PRAGMA {name}") for name in ("application_id", "user_version"))
        if application != _APPLICATION:
            raise ValueError(f"{file} is not the database of a gallery")
        if version != FORMAT:
            raise ValueError(
                f"the gallery {file.parent} has format {version}, this version of idml reads {FORMAT}: index again"
            )
        if "immutable" not in options:
            _require_log(_one(connection, "PRAGMA journal_mode"), file.parent)
        connection.execute("SELECT copy FROM state").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _require_log(mode: object, path: Path) -> None:
    if mode != "wal":
        raise OSError(
            f"SQLite's write-ahead log does not work in {path} (is it on a network drive?): put the gallery on a "
            "local disk"
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of SQLite as errors of one line that say what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise TimeoutError(
                f"the gallery {path} was locked by another process for {WAIT:g} seconds; try again later"
            ) from error
        if code in _DAMAGE:
            raise DamagedGallery(
                f"{path / DATABASE} is damaged, or not a database ({error}); restore a backup, or delete the gallery "
                "and index again"
            ) from error
        raise OSError(f"cannot write to the gallery {path} ({error})") from error


def _sound_properties(row: Row) -> Properties | None:
    """A copy of the properties, None if it is damaged."""
    with suppress(TypeError, ValueError):
        if zlib.crc32(row[1]) == row[2]:
            return Properties(**json.loads(row[1]))
    return None


def _sound_state(row: Row) -> State | None:
    """A copy of the state, None if it is damaged."""
    with suppress(TypeError, struct.error):
        state = State(*row[1:7])
        if state.crc() == row[7]:
            return state
    return None


def _read_properties(connection: sqlite3.Connection, file: Path) -> Properties:
    for row in connection.execute("SELECT * FROM properties ORDER BY copy").fetchall():
        if (properties := _sound_properties(row)) is not None:
            return properties
    raise DamagedGallery(f"{file}: both copies of the properties are damaged; restore a backup or index again")


def _read_state(connection: sqlite3.Connection, file: Path) -> State:
    for row in connection.execute("SELECT * FROM state ORDER BY copy").fetchall():
        if (state := _sound_state(row)) is not None:
            return state
    raise DamagedGallery(f"{file}: both copies of the state are damaged; restore a backup or index again")


def _one(connection: sqlite3.Connection, query: str, *values: object) -> Any:
    """The first column of the first row, None if there is no row."""
    row = connection.execute(query, values).fetchone()
    return None if row is None else row[0]


def _only(connection: sqlite3.Connection, query: str, position: int) -> str | None:
    """A text, None if there is none or it is damaged."""
    try:
        return _text(_one(connection, query, position))
    except sqlite3.DatabaseError as error:
        _require_damage(error)
        return None


def _blocks(connection: sqlite3.Connection, table: str, columns: str, first: int, end: int) -> Iterator[list[Row]]:
    """Rows of positions from ``first`` to ``end`` − 1 in blocks. What SQLite cannot read is left out."""
    todo = [(first, end)]
    while todo:
        first, end = todo.pop()
        try:
            cursor = connection.execute(
                f"SELECT {columns} FROM {table} WHERE position >= ? AND position < ? ORDER BY position", (first, end)
            )
            while rows := cursor.fetchmany(_BLOCK):
                yield rows
                first = max(first, rows[-1][0]) + 1
        except sqlite3.DatabaseError as error:
            _require_damage(error)
            if end - first > 1:
                middle = (first + end) // 2
                todo += [(middle, end), (first, middle)]


def _fetch(connection: sqlite3.Connection, table: str, columns: str, positions: Sequence[int]) -> dict[int, Row]:
    """Rows by position; those that are not there, or that SQLite cannot read, are left out."""
    if not positions:
        return {}
    first, end = min(positions), max(positions) + 1
    if end - first <= 2 * len(positions):
        return {row[0]: row for rows in _blocks(connection, table, columns, first, end) for row in rows}
    found = {}
    for position in positions:
        try:
            row = connection.execute(f"SELECT {columns} FROM {table} WHERE position = ?", (position,)).fetchone()
        except sqlite3.DatabaseError as error:
            _require_damage(error)
            continue
        if row is not None:
            found[position] = row
    return found


def _require_damage(error: sqlite3.DatabaseError) -> None:
    """Raise an error again unless it says that the database is damaged."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _DAMAGE:
        raise error


def _digests(rows: Sequence[Row]) -> NDArray[np.uint64]:
    """A digest of each row of items: odd factors times the CRC-32 of texts, and the numbers, summed modulo 2⁶⁴."""
    total = np.zeros(len(rows), np.uint64)
    if not rows:
        return total
    position, id, path, label, checksum, level, *crcs = zip(*rows, strict=True)
    texts = [map(zlib.crc32, id), map(zlib.crc32, path), _labels(label), map(zlib.crc32, checksum)]
    numbers = [position, *texts, np.array(level, np.float32).view(np.uint32), *crcs]
    for factor, column in zip(_FACTORS, numbers, strict=True):
        total += np.array(list(column), np.int64).view(np.uint64) * np.uint64(factor)
    return total


def _labels(labels: Iterable[bytes | None]) -> Iterator[int]:
    return (0 if label is None else zlib.crc32(label) + 1 for label in labels)


def _digests_of_any(rows: Sequence[Row]) -> NDArray[np.uint64]:
    """The same of rows that may hold anything; one that cannot be a row gets a digest that it does not have."""
    try:
        return _digests(rows)
    except (TypeError, ValueError, OverflowError):
        return np.concatenate([_digest(row) for row in rows])


def _digest(row: Row) -> NDArray[np.uint64]:
    try:
        return _digests([row])
    except (TypeError, ValueError, OverflowError):
        return np.array([0], np.uint64)


def _matches(data: object, crc: object) -> bool:
    return isinstance(data, bytes) and zlib.crc32(data) == crc


def _encoded(item: Item) -> Row:
    """id, path, label and checksum as they are stored: names may hold bytes that are not UTF-8."""
    label = None if item.label is None else _bytes(item.label)
    return _bytes(item.id), _bytes(item.path), label, bytes.fromhex(item.checksum)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(data: object) -> str | None:
    return data.decode("utf-8", "surrogateescape") if isinstance(data, bytes) else None


def _item(row: Row) -> Item:
    return Item(id=_text(row[1]) or "", path=_text(row[2]) or "", label=_text(row[3]), checksum=row[4].hex())


def _signed(number: int) -> int:
    """A number modulo 2⁶⁴, between −2⁶³ and 2⁶³."""
    return (number + 2**63) % 2**64 - 2**63


def _ranges(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The first and last of each run of neighbours in ascending numbers."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


# ---------------------------------------------------------------------- forks

_engines: "weakref.WeakSet[SqliteEngine]" = weakref.WeakSet()
_waiting: list[SqliteEngine] = []


def _before_fork() -> None:
    """Close all connections: SQLite's must not be carried into another process."""
    for engine in list(_engines):
        engine._mutex.acquire()
        _waiting.append(engine)
        engine._disconnect()


def _after_fork() -> None:
    while _waiting:
        _waiting.pop()._mutex.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)

"""The embedded engine: a gallery in a folder, stored in one SQLite database and searched exactly in memory.

    gallery.sqlite              the database, the only truth; -wal and -shm beside it are SQLite's while it is in use
    vectors-1.semantic, …       a disposable copy of the vectors that makes opening fast (see `VectorCache`)

The ids, levels and checksums of all items are held in memory; a process reads what others have changed from `changes`.
"""

import os
import re
import sqlite3
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from idml.embeddings import Embeddings
from idml.evaluation.distance_bounds import ExactSearch, Rows, RowVectors
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
    check_batch,
    check_text,
    item_rows,
    query_rows,
    ranking,
)
from idml.search.engines.sqlite_storage import (
    DATABASE,
    FACTORS,
    ITEM_COLUMNS,
    REPAIRABLE,
    ItemTable,
    Matrix,
    Numbers,
    Row,
    State,
    VectorCache,
    checksums_of,
    connect,
    digest_of,
    digests_of,
    encode_names,
    explain_errors,
    fetch_rows,
    first_value,
    is_gallery,
    make_database,
    matches,
    parse_properties,
    parse_state,
    ranges_of,
    read_blocks,
    read_properties,
    read_state,
    require_gallery,
    to_bytes,
    to_item,
    to_signed,
    write_rows,
)

_VECTORS = re.compile(r"vectors-(\d+)\.(semantic|uncertainty)")


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
        self._table: ItemTable | None = None
        self._semantic: Matrix | None = None
        self._uncertainty: Matrix | None = None
        self._foreign = False  # whether changes of others were read since the last refresh
        with self._reading() as connection:
            self._properties = read_properties(connection, self.file)
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
            with explain_errors(path):
                make_database(temporary, properties, path)
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
        require_gallery(path)
        if write:
            for place in (path, path / DATABASE):
                if not os.access(place, os.W_OK):
                    raise PermissionError(f"cannot write to the gallery {path} ({place} is read-only)")
        engine = cls(path, write=write)
        if model is not None and model != engine.properties.model:
            engine.close()
            raise ValueError(f"the gallery {path} was made with another model ({engine.properties.model}, not {model})")
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
        table: ItemTable,
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
            (first + n, *encode_names(items[m]), levels[m], crcs[0][n], crcs[1][n], zlib.crc32(images[m]))
            for n, m in enumerate(todo)
        ]
        signed = digests_of(content).view(np.int64).tolist()
        connection.executemany(
            f"INSERT INTO items VALUES ({', '.join('?' * 10)})",
            ((*row, digest) for row, digest in zip(content, signed, strict=True)),
        )
        blobs = [[x[n].tobytes() for x in rows] for n in range(len(todo))]
        connection.executemany(
            "INSERT INTO vectors VALUES (?, ?, ?, ?)",
            (
                (row[0], row[1], *(own if len(own) == 2 else (own[0], None)))
                for row, own in zip(content, blobs, strict=True)
            ),
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
                changed = (*row[:3], None if label is None else to_bytes(label), *row[4:9])
                if changed[3] != row[3]:
                    rows.append(changed)
            if rows:
                signed = digests_of(rows).view(np.int64).tolist()
                connection.executemany(
                    "UPDATE items SET label = ?, digest = ? WHERE position = ?",
                    ((row[3], digest, row[0]) for row, digest in zip(rows, signed, strict=True)),
                )
                self._record(connection, table, [row[0] for row in rows])
        return len(rows)

    def _record(self, connection: sqlite3.Connection, table: ItemTable, positions: Sequence[int]) -> None:
        """Write which positions change in this transaction, read them into the table, and write the state."""
        state, items, digest = table.state, len(table), table.digest
        change = state.change
        for first, last in ranges_of(sorted(positions)):
            change += 1
            connection.execute("INSERT INTO changes VALUES (?, ?, ?)", (change, first, last))
            table.read(connection, first, last)
        # the digests of damaged rows are part of the sum, but unknown
        digest = to_signed(state.digest + table.digest - digest) if table.damaged else table.digest
        items, after = state.items + len(table) - items, max(state.next, max(positions) + 1)
        self._write_state(connection, table, state._replace(change=change, next=after, items=items, digest=digest))

    def _write_state(self, connection: sqlite3.Connection, table: ItemTable, state: State) -> None:
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
        with self._mutex, explain_errors(self.path):
            connection = self._connected()
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._sweep()
        return freed

    def _renumber(self, connection: sqlite3.Connection, table: ItemTable, before: Numbers) -> None:
        """Number the positions of all items from 0 on, under another generation."""
        after = np.arange(len(before))
        moved = np.flatnonzero(before != after)
        step = (after - before).astype(np.uint64) * np.uint64(FACTORS[0])  # a digest is linear in the position
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
            with self._reading() as connection, explain_errors(self.path):
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
            found = {id: to_item(row) for id, row in zip(known, rows, strict=True)}
        return [found.get(id) for id in ids]

    def items(self) -> Iterator[Item]:
        """All items in the order in which they were added, as they are now."""
        with self._reading() as connection:
            table = self._current()
            for problem in table.problems(str(self.file)):
                raise DamagedGallery(str(problem))
            rows = [
                row for block in read_blocks(connection, "items", ITEM_COLUMNS, 0, table.state.next) for row in block
            ]
            if not np.array_equal(digests_of([row[:9] for row in rows]), table.digests[list(table.rows.values())]):
                self._table = None
                raise DamagedGallery(f"{self.file}: rows of items are damaged; idml gallery verify names them")
        return map(to_item, rows)

    def thumbnail(self, id: str) -> bytes:
        """The item's thumbnail, empty if it has none."""
        with self._reading() as connection:
            table = self._current()
            position = self._position(table, id)
            (row,) = self._rows(connection, table, [position])
            image = first_value(connection, "SELECT image FROM thumbnails WHERE position = ?", position)
            if not matches(image or b"", row[8]):
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
        for name, sound in (("properties", parse_properties), ("state", parse_state)):
            rows = connection.execute(f"SELECT * FROM {name} ORDER BY copy").fetchall()
            for copy in (1, 2):
                if sum(row[0] == copy and sound(row) is not None for row in rows) != 1 or len(rows) != 2:
                    yield Problem(file, None, f"copy {copy} of the {name} is damaged; the next change writes it again")
        table = ItemTable(connection, read_state(connection, self.file))
        yield from table.problems(file)
        kinds, end = [(kind, table.crcs(kind)) for kind in self._kinds()], table.state.next
        positions = np.fromiter(table.rows.values(), np.int64)
        seen: dict[str, set[int]] = {"vectors": set(), "thumbnails": set()}
        for rows in read_blocks(connection, "vectors", "position, id, semantic, uncertainty", 0, end):
            for position, id, *content in rows:
                seen["vectors"].add(position)
                own = table.ids[position] if table.live[position] else None
                if own is None:
                    if position not in table.damaged:
                        yield Problem(file, None, f"the vectors of position {position} belong to no item")
                    continue
                if id != to_bytes(own) or not all(
                    matches(data, int(expected[position])) for (_, expected), data in zip(kinds, content, strict=False)
                ):
                    yield Problem(file, own, "the vector is damaged")
        crcs: dict[int, Any] = {}
        for rows in read_blocks(connection, "items", "position, thumbnail", 0, table.state.next):
            crcs.update(rows)
        for rows in read_blocks(connection, "thumbnails", "position, image", 0, end):
            for position, image in rows:
                seen["thumbnails"].add(position)
                own = table.ids[position] if table.live[position] else None
                if own is not None and not matches(image, crcs.get(position)):
                    yield Problem(file, own, "the thumbnail is damaged")
                elif own is None and position not in table.damaged:
                    yield Problem(file, None, f"the thumbnail of position {position} belongs to no item")
        for position in positions.tolist():
            if position not in seen["vectors"]:
                yield Problem(file, table.ids[position], "the vector is missing")
            if crcs.get(position) and position not in seen["thumbnails"]:
                yield Problem(file, table.ids[position], "the thumbnail is missing")
        for kind, expected in kinds:  # repair the copies too
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
                    if read_properties(connection, self.file) != self.properties:
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

    def __repr__(self) -> str:
        return f"SqliteEngine({str(self.path)!r}, {self.properties})"

    # ------------------------------------------------------------------ state

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A transaction that reads one state, the newest."""
        with self._mutex, explain_errors(self.path):
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
    def _writing(self) -> Iterator[tuple[sqlite3.Connection, ItemTable]]:
        """A transaction that changes the newest state; other writers wait."""
        with self._mutex, explain_errors(self.path):
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
        state, table = read_state(connection, self.file), self._table
        if table is not None and state != table.state:
            self._foreign = True
            if not table.follow(connection, state):
                table = None
        if table is None:
            self._table = self._semantic = self._uncertainty = None
            self._table = ItemTable(connection, state)
        self._version = version

    def _current(self) -> ItemTable:
        assert self._table is not None
        return self._table

    def _connected(self) -> sqlite3.Connection:
        self._require_open()
        if self._connection is None:
            self._connection, self._version = connect(self.file, write=self._write), -1
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

    def _position(self, table: ItemTable, id: str) -> int:
        position = table.find(id)
        if position is None:
            raise ValueError(f"there is no item {id!r} in the gallery {self.path}")
        if position in table.damaged:
            raise DamagedGallery(str(table.problem(str(self.file), position)))
        return position

    def _rows(self, connection: sqlite3.Connection, table: ItemTable, positions: Sequence[int]) -> list[Row]:
        """Rows of the table items; `DamagedGallery` if one is not what was written."""
        found = fetch_rows(connection, "items", ITEM_COLUMNS, positions)
        for position in positions:
            row = found.get(position)
            if row is None or digest_of(row) != table.digests[position]:
                raise DamagedGallery(str(Problem(str(self.file), table.ids[position], REPAIRABLE.format("row"))))
        return [found[position] for position in positions]

    def _read_vectors(self, connection: sqlite3.Connection, table: ItemTable, positions: Sequence[int]) -> list[Rows]:
        """s, and u if it is stored; `DamagedGallery` if one is not what was written."""
        found, out = fetch_rows(connection, "vectors", "position, semantic, uncertainty", positions), []
        for n, kind in enumerate(self._kinds()):
            rows = np.empty((len(positions), self._width(kind)), FLOAT)
            for to, position in zip(rows, positions, strict=True):
                data = found.get(position, (position, None, None))[1 + n]
                if not matches(data, int(table.crcs(kind)[position])) or len(data) != to.nbytes:
                    raise DamagedGallery(str(Problem(str(self.file), table.ids[position], REPAIRABLE.format("vector"))))
                to[:] = np.frombuffer(data, FLOAT)
            out.append(rows)
        return out

    def _stored(self, connection: sqlite3.Connection, table: ItemTable, positions: Sequence[int]) -> list[object]:
        """All that is stored at each position, None where something is damaged."""
        out: list[object] = []
        images = fetch_rows(connection, "thumbnails", "position, image", positions)
        rows = fetch_rows(connection, "items", ITEM_COLUMNS, positions)
        for position in positions:
            try:
                row, image = rows[position], images.get(position, (position, b""))[1]
                if digest_of(row) != table.digests[position] or not matches(image, row[8]):
                    raise DamagedGallery
                vectors = [x[0].tobytes() for x in self._read_vectors(connection, table, [position])]
                out.append((to_item(row), *vectors, row[5], image))
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
            found = fetch_rows(connection, "vectors", f"position, {kind}", positions)
            return [(position, data) for position, data in found.values() if isinstance(data, bytes)]

        return read

    # ------------------------------------------------------------------ searching

    def _searched(self, metric: bool) -> tuple[ItemTable, RowVectors]:
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
                raise DamagedGallery(str(Problem(str(self.file), table.ids[position], REPAIRABLE.format("vector"))))
        for problem in table.problems(str(self.file)):
            raise DamagedGallery(str(problem))
        s = matrices[0]
        if s.side is None or s.side[0] != (table.state.change, metric):
            n, live = table.state.next, table.live[: table.state.next]
            u = (
                (matrices[1].cache.rows[:n], matrices[1].squares[:n])
                if metric
                else (s.cache.rows[:n, :0], s.squares[:n])
            )
            side = RowVectors(s.cache.rows[:n], np.where(live, s.squares[:n], np.inf), *u)
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

    def _intact(self, table: ItemTable, side: RowVectors, rows: Numbers) -> bool:
        """Whether the vectors in memory of these rows are what was written; if not, all are going to be read again."""
        kinds = [(side.s, table.semantic)]
        if side.u.shape[1]:
            kinds.append((side.u, table.uncertainty))
        if all(np.array_equal(checksums_of(x[row] for row in rows), crcs[rows]) for x, crcs in kinds):
            return True
        with self._mutex:
            self._semantic = self._uncertainty = None
        return False


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

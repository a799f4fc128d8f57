"""The embedded engine: a gallery in a folder, stored in one SQLite database and searched exactly in memory.

    gallery.sqlite              the database, the only truth; -wal and -shm beside it are SQLite's while it is in use
    vectors-1.semantic, …       a disposable copy of the vectors that makes opening fast (see `sqlite_vectors`)

The ids, levels and checksums of all items are held in memory (`ItemTable`); a process reads what others have changed
from the table `changes`. This file holds what callers use, the transactions, and how the newest state is followed.
"""

import os
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from idml.embeddings import Embeddings
from idml.evaluation.distance_bounds import ExactSearch, Rows, RowVectors
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
from idml.search.engines.sqlite_changes import (
    back_up,
    create_database,
    delete_items,
    insert_items,
    record_change,
    renumber,
    update_labels,
)
from idml.search.engines.sqlite_integrity import find_problems
from idml.search.engines.sqlite_storage import (
    DATABASE,
    ITEM_COLUMNS,
    WAIT,
    Connection,
    ItemTable,
    Numbers,
    Row,
    connect,
    digests_of,
    explain_errors,
    fetch_rows,
    first_value,
    is_intact,
    matches,
    read_blocks,
    read_properties,
    read_state,
    require_gallery,
    to_bytes,
    to_item,
)
from idml.search.engines.sqlite_vectors import Vectors

SCARCE = 256 << 20  # bytes: with less free space on the disk …
SHORT_LOG = 1 << 20  # … a log of this size is emptied


class SqliteEngine(Engine):
    """A gallery in a folder. `create` and `open` make one; several processes may read and write it at once.

    A method reads the newest state. Threads may share an object, and a forked child may go on using it: connections
    are closed before a fork and opened again when they are needed.
    """

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path, self.file, self._write = path, path / DATABASE, write
        self._mutex = threading.RLock()
        self._connection: Connection | None = None
        self._closed = False
        self._version = -1  # SQLite's data_version when the state was last read
        self._table: ItemTable | None = None
        self._foreign = False  # whether changes of others were read since the last refresh
        with explain_errors(path):
            self._properties = read_properties(self._connected(), self.file)
            self._identity = self._stat()
        self._vectors = Vectors(path, self._properties)
        with self._reading():  # reads all items
            pass
        _engines.add(self)

    @classmethod
    def create(cls, path: str | Path, properties: Properties) -> "SqliteEngine":
        """Make an empty gallery, open for writing. An existing gallery is refused; other files are left alone."""
        create_database(Path(path), properties)
        return cls(Path(path), write=True)

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
                state, rows = table.state, [np.ascontiguousarray(x[todo]) for x in vectors]
                delete_items(connection, old)
                insert_items(connection, state.next, [(items[n], levels[n], images[n]) for n in todo], rows)
                self._vectors.write(state.generation, state.next, rows)
                record_change(connection, table, [*old, *range(state.next, state.next + len(todo))])
        return Added(len(todo) - len(old), len(old), len(same))

    def remove(self, ids: Iterable[str]) -> int:
        """Remove items and return how many there were. Unknown ids are ignored."""
        if isinstance(ids, str):
            raise ValueError(f"ids must be a list of ids, got the string {ids!r}")
        with self._writing() as (connection, table):
            positions = [position for id in dict.fromkeys(ids) if (position := table.find(id)) is not None]
            if positions:
                delete_items(connection, positions)
                record_change(connection, table, positions)
        return len(positions)

    def relabel(self, labels: Mapping[str, str | None]) -> int:
        """Change labels and return how many changed. An unknown id is an error, and then nothing changes."""
        with self._writing() as (connection, table):
            positions = [self._position(table, id) for id in labels]
            for label in labels.values():
                if label is not None:
                    check_text("label", label)
            texts = [None if label is None else to_bytes(label) for label in labels.values()]
            before = zip(self._rows(connection, table, positions), texts, strict=True)
            rows = [(*row[:3], text, *row[4:9]) for row, text in before if text != row[3]]
            if rows:
                update_labels(connection, rows)
                record_change(connection, table, [row[0] for row in rows])
        return len(rows)

    def compact(self) -> int:
        """Free the space of removed and replaced items and return how many there were.

        Positions are numbered again, and SQLite rewrites the database (VACUUM). Others may read and write meanwhile.
        """
        with self._writing() as (connection, table):
            table.require_intact()
            freed = table.state.next - len(table.rows)
            if freed:
                renumber(connection, table)
                self._table = None  # read again when it is needed
        with self._mutex, explain_errors(self.path):
            connection = self._connected()
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        with self._reading() as (_, table):
            self._vectors.sweep(table.state.generation)
        return freed

    def free_log(self) -> None:
        """Move the log into the database and empty it: a log that has filled the disk frees its space.

        If that is not possible now, everything stays as it is.
        """
        with self._mutex, suppress(sqlite3.Error):
            connection = self._connected()
            connection.execute("PRAGMA busy_timeout = 0").fetchall()  # somebody reads: the next time will do
            try:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                connection.execute(f"PRAGMA busy_timeout = {int(WAIT * 1000)}").fetchall()

    def backup(self, file: str | Path) -> None:
        """Write a copy of the database as it is now to ``file``, which is replaced; on return it is on the disk."""
        file = Path(file)
        if file.resolve() == self.file.resolve():
            raise ValueError(f"{file} is the gallery's own database; name another file for the backup")
        if not file.parent.is_dir():
            raise FileNotFoundError(f"cannot write the backup {file}: there is no folder {file.parent}")
        try:
            with self._reading() as (connection, _):
                back_up(connection, file)
        except OSError as error:
            raise OSError(f"cannot write the backup {file} ({error})") from error

    # ------------------------------------------------------------------ reading

    def get(self, id: str) -> Item | None:
        """The item with this id, if there is one."""
        return self.get_many([id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Item | None]:
        """The item with each of these ids, None where there is none."""
        with self._reading() as (connection, table):
            known = {id: self._position(table, id) for id in ids if table.find(id) is not None}
            rows = self._rows(connection, table, list(known.values()))
            found = {id: to_item(row) for id, row in zip(known, rows, strict=True)}
        return [found.get(id) for id in ids]

    def items(self) -> Iterator[Item]:
        """All items in the order in which they were added, as they are now."""
        with self._reading() as (connection, table):
            table.require_intact()
            rows = [
                row for block in read_blocks(connection, "items", ITEM_COLUMNS, 0, table.state.next) for row in block
            ]
            if not np.array_equal(digests_of([row[:9] for row in rows]), table.digests[list(table.rows.values())]):
                self._table = None
                raise DamagedGallery(f"{self.file}: rows of items are damaged; idml gallery verify names them")
        return map(to_item, rows)

    def thumbnail(self, id: str) -> bytes:
        """The item's thumbnail, empty if it has none."""
        with self._reading() as (connection, table):
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
            with self._reading() as (connection, table):
                parts = self._read_vectors(connection, table, [self._position(table, id) for id in ids])
        s, *u = map(torch.from_numpy, parts)
        return Embeddings(s, u[0]) if u else Embeddings.certain(s)

    def levels(self, ids: Sequence[str] | None = None) -> Tensor:
        """The uncertainty levels ‖u‖ of some items, or of all."""
        with self._reading() as (_, table):
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
            with self._reading() as (connection, table):
                items = self._vectors.searched(connection, table, metric is not None)
            rows, distances = ExactSearch(side, items, metric).top(k)
            if self._intact(table, items, np.unique(rows.numpy())):
                return Found([[table.ids[row] for row in line] for line in rows.tolist()], distances)

    def verify(self) -> list[Problem]:
        """Read everything, compare checksums, and let SQLite check its own structure. Empty if all is intact."""
        with self._reading() as (connection, _):
            return list(dict.fromkeys(find_problems(connection, self.file, self._vectors)))

    def refresh(self) -> bool:
        """Read the newest state. True if another writer has changed the gallery since the last call."""
        with self._mutex:
            self._require_open()
            if self._moved():
                self._disconnect()
                self._forget()
                with self._reading() as (connection, _):
                    if read_properties(connection, self.file) != self.properties:
                        self._disconnect()
                        raise ValueError(f"the gallery {self.path} was made again with other properties; open it again")
                    self._identity = self._stat()
                self._foreign = True
            with self._reading():
                pass
            foreign, self._foreign = self._foreign, False
            return foreign

    def close(self) -> None:
        """Close the database and the vectors."""
        with self._mutex:
            self._disconnect()
            self._forget()
            self._closed = True

    def __len__(self) -> int:
        with self._reading() as (_, table):
            return table.state.items

    def __contains__(self, id: object) -> bool:
        with self._reading() as (_, table):
            return isinstance(id, str) and table.find(id) is not None

    def __repr__(self) -> str:
        return f"SqliteEngine({str(self.path)!r}, {self.properties})"

    # ------------------------------------------------------------------ state

    @contextmanager
    def _reading(self) -> Iterator[tuple[sqlite3.Connection, ItemTable]]:
        """A transaction that reads one state, the newest."""
        with self._mutex, explain_errors(self.path):
            connection = self._connected()
            if connection.in_transaction:
                yield connection, self._sync(connection)
                return
            connection.execute("BEGIN")
            try:
                yield connection, self._sync(connection)
            except (DamagedGallery, sqlite3.DatabaseError):
                if connection.is_outdated(self.file):
                    raise OSError(f"the gallery {self.path} changed while it was read; try again") from None
                raise
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
            self._spare_disk()
            connection = self._connected()
            connection.execute("BEGIN IMMEDIATE")
            before = connection.total_changes
            try:
                yield connection, self._sync(connection)
                connection.execute("COMMIT")
            except BaseException as error:
                if connection.total_changes != before:
                    self._table = None  # it may hold what is not going to be
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
                    self.free_log()  # there may be space for the next change
                raise

    def _spare_disk(self) -> None:
        """Empty the log early if the disk has little space left: emptying it needs some itself."""
        with suppress(OSError):
            disk = os.statvfs(self.path)
            if disk.f_bavail * disk.f_frsize < SCARCE and os.stat(f"{self.file}-wal").st_size > SHORT_LOG:
                self.free_log()

    def _sync(self, connection: sqlite3.Connection) -> ItemTable:
        """Bring the table in memory up to date with the database, and return it."""
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if self._table is not None and version == self._version:
            return self._table
        state, table = read_state(connection, self.file), self._table
        if table is not None and state != table.state:
            self._foreign = True
            if not table.follow(connection, state):
                table = None
        if table is None:
            self._forget()
            self._table = table = ItemTable(connection, state, str(self.file))
        self._version = version
        return table

    def _forget(self) -> None:
        self._table = None
        self._vectors.forget()

    def _connected(self) -> Connection:
        self._require_open()
        connection = self._connection
        if connection is not None and not connection.in_transaction and connection.is_outdated(self.file):
            self._disconnect()
            if self._table is not None and not self._table.agrees():
                self._forget()  # it may have been read while the file changed
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
            raise DamagedGallery(str(table.problem(position)))
        return position

    def _rows(self, connection: sqlite3.Connection, table: ItemTable, positions: Sequence[int]) -> list[Row]:
        """Rows of the table items; `DamagedGallery` if one is not what was written."""
        found = fetch_rows(connection, "items", ITEM_COLUMNS, positions)
        for position in positions:
            row = found.get(position)
            if row is None or not is_intact(row, table.stored_digest(position)):
                raise table.damage(position, "row")
        return [found[position] for position in positions]

    def _read_vectors(self, connection: sqlite3.Connection, table: ItemTable, positions: Sequence[int]) -> list[Rows]:
        """s, and u if it is stored; `DamagedGallery` if one is not what was written."""
        found, out = fetch_rows(connection, "vectors", "position, semantic, uncertainty", positions), []
        for n, (kind, width) in enumerate(self._vectors.widths.items()):
            rows = np.empty((len(positions), width), FLOAT)
            for to, position in zip(rows, positions, strict=True):
                data = found.get(position, (position, None, None))[1 + n]
                if not matches(data, int(table.crcs(kind)[position])) or len(data) != to.nbytes:
                    raise table.damage(position, "vector")
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
                if not is_intact(row, table.stored_digest(position)) or not matches(image, row[8]):
                    raise DamagedGallery
                vectors = [x[0].tobytes() for x in self._read_vectors(connection, table, [position])]
                out.append((to_item(row), *vectors, row[5], image))
            except (DamagedGallery, KeyError):
                out.append(None)
        return out

    def _all_vectors(self) -> list[Rows]:
        """s of all items, and u if it is stored."""
        while True:
            with self._reading() as (connection, table):
                searched = self._vectors.searched(connection, table, bool(self.properties.uncertainty))
                rows = np.fromiter(table.rows.values(), np.int64)
            out = [searched.s[rows], *([searched.u[rows]] if self.properties.uncertainty else [])]
            if self._intact(table, searched, rows):
                return out

    def _intact(self, table: ItemTable, searched: RowVectors, rows: Numbers) -> bool:
        """Whether the vectors in memory of these rows are what was written; if not, all are going to be read again."""
        if self._vectors.intact(table, searched, rows):
            return True
        with self._mutex:
            self._vectors.forget()
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

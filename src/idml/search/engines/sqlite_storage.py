"""The database of a gallery in a folder: how it is opened and read, and the `ItemTable` of all items in memory.

`sqlite_changes` writes it. The tables of the database:

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

SQLite has no checksums of its own, so each row is compared with its digest when it is read. A part that SQLite cannot
read is left out and the rest is read.
"""

import json
import os
import sqlite3
import struct
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idml.search.engines.base import DamagedGallery, Item, Problem, Properties

DATABASE = "gallery.sqlite"
FORMAT = 2
SYNCHRONOUS = "FULL"  # every acknowledged change is on the disk
WAIT = 60.0  # seconds until a database that another process has locked is an error
APPLICATION = 0x49444D4C  # "IDML", in the header of the database
_OLD = "current.json"  # of galleries before SQLite
PAGE = 16384
_LOG = 32 << 20  # bytes in the write-ahead log, after which SQLite moves them into the database
_CACHE = 2 << 20  # bytes of pages that SQLite keeps in memory
_LONGEST = 1 << 28  # bytes of the longest value: a damaged length must not take all memory
_BLOCK = 1024  # rows read at a time
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_FORMAT}
SCHEMA = """
CREATE TABLE properties (copy INTEGER PRIMARY KEY, content BLOB, crc INTEGER);
CREATE TABLE state (copy INTEGER PRIMARY KEY, change INTEGER, oldest INTEGER, generation INTEGER, next INTEGER,
                    items INTEGER, digest INTEGER, crc INTEGER);
CREATE TABLE items (position INTEGER PRIMARY KEY, id BLOB, path BLOB, label BLOB, checksum BLOB, level REAL,
                    semantic INTEGER, uncertainty INTEGER, thumbnail INTEGER, digest INTEGER);
CREATE TABLE vectors (position INTEGER PRIMARY KEY, id BLOB, semantic BLOB, uncertainty BLOB);
CREATE TABLE thumbnails (position INTEGER PRIMARY KEY, image BLOB);
CREATE TABLE changes (change INTEGER PRIMARY KEY, first INTEGER, last INTEGER);
"""
FACTORS = [int.from_bytes(zlib.crc32(b"%d" % n).to_bytes(4) * 2) | 1 for n in range(9)]  # odd: no change is lost

Row = tuple[Any, ...]
"""A row of the table items."""
Numbers = NDArray[np.int64]
ITEM_COLUMNS = "position, id, path, label, checksum, level, semantic, uncertainty, thumbnail"
REPAIRABLE = "the {} is damaged; remove the item or add it again"
LOST_ROWS = "rows are damaged or lost whose ids cannot be read; restore a backup, or delete the gallery and index again"


def is_gallery(path: str | Path) -> bool:
    """Whether there is a gallery in this folder, of this or of an older format."""
    return (Path(path) / DATABASE).exists() or (Path(path) / _OLD).exists()


def require_gallery(path: Path) -> None:
    """Raise an error unless the folder holds the database of a gallery."""
    if (path / DATABASE).is_file():
        return
    if (path / _OLD).is_file():
        raise ValueError(f"the gallery {path} has the format of an older version of idml: delete it and index again")
    raise FileNotFoundError(f"there is no gallery at {path}")


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


class Connection(sqlite3.Connection):
    """A connection; if SQLite takes the file for one that never changes, it remembers how it found the file."""

    found: tuple[int, ...] | None = None

    def is_outdated(self, file: Path) -> bool:
        """Whether the owner has changed the file all the same; another file in its place does not count."""
        if self.found is None:
            return False
        with suppress(FileNotFoundError):
            now = _describe(file)
            return now[0] == self.found[0] and now != self.found
        return False


def _describe(file: Path) -> tuple[int, ...]:
    stat = os.stat(file)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, Path(f"{file}-wal").exists()


def connect(file: Path, *, write: bool) -> Connection:
    """A connection to the database of a gallery; anything else is refused."""
    try:
        return _open(file, "mode=rw", write=write)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
        if os.access(file.parent, os.W_OK) or write:
            require_log("none", file.parent)
        log = Path(f"{file}-wal")
        if log.exists() and log.stat().st_size:
            raise OSError(
                f"cannot read the gallery {file.parent}: {log.name} holds changes, and its folder is read-only"
            ) from None
    return connect_immutable(file)


def connect_immutable(file: Path) -> Connection:
    """A connection for a folder that cannot be written: there SQLite reads only what it takes for unchangeable."""
    found = _describe(file)  # before it is opened: a change at that moment is noticed
    connection = _open(file, "mode=ro&immutable=1", write=False)
    connection.found = found
    return connection


def _open(file: Path, options: str, *, write: bool) -> Connection:
    connection = sqlite3.connect(
        f"{file.absolute().as_uri()}?{options}", uri=True, timeout=WAIT, isolation_level=None, check_same_thread=False,
        factory=Connection,
    )  # fmt: skip
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
        for setting in (
            f"cache_size = {-_CACHE // 1024}", f"wal_autocheckpoint = {_LOG // PAGE}",
            f"journal_size_limit = {2 * _LOG}", f"synchronous = {SYNCHRONOUS}", "cell_size_check = ON",
            "trusted_schema = OFF", f"query_only = {int(not write)}",
        ):  # fmt: skip
            connection.execute(f"PRAGMA {setting}").fetchall()
        application, version = (
            first_value(connection, f"PRAGMA {name}") for name in ("application_id", "user_version")
        )
        if application != APPLICATION:
            raise ValueError(f"{file} is not the database of a gallery")
        if version != FORMAT:
            raise ValueError(
                f"the gallery {file.parent} has format {version}, this version of idml reads {FORMAT}: index again"
            )
        if "immutable" not in options:
            require_log(first_value(connection, "PRAGMA journal_mode"), file.parent)
        connection.execute("SELECT copy FROM state").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def require_log(mode: object, path: Path) -> None:
    """Raise an error unless the journal mode of a database is that of the write-ahead log."""
    if mode != "wal":
        raise OSError(
            f"SQLite's write-ahead log does not work in {path} (is it on a network drive?): put the gallery on a "
            "local disk"
        )


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Errors of SQLite as errors of one line that say what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code, said = getattr(error, "sqlite_errorcode", 0) & 0xFF, textwrap.shorten(str(error), 120, placeholder=" …")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise TimeoutError(
                f"the gallery {path} was locked by another process for {WAIT:g} seconds; try again later"
            ) from error
        if code in _DAMAGE:
            raise DamagedGallery(
                f"{path / DATABASE} is damaged, or not a database ({said}); restore a backup, or delete the gallery "
                "and index again"
            ) from error
        raise OSError(f"cannot write to the gallery {path} ({said})") from error


def parse_properties(row: Row) -> Properties | None:
    """A copy of the properties, None if it is damaged."""
    with suppress(TypeError, IndexError, ValueError):
        if zlib.crc32(row[1]) == row[2]:
            return Properties(**json.loads(row[1]))
    return None


def parse_state(row: Row) -> State | None:
    """A copy of the state, None if it is damaged."""
    with suppress(TypeError, IndexError, struct.error):
        state = State(*row[1:7])
        if state.crc() == row[7]:
            return state
    return None


def read_properties(connection: sqlite3.Connection, file: Path) -> Properties:
    """The properties, from the first intact copy."""
    for row in connection.execute("SELECT * FROM properties ORDER BY copy").fetchall():
        if (properties := parse_properties(row)) is not None:
            return properties
    raise DamagedGallery(f"{file}: both copies of the properties are damaged; restore a backup or index again")


def read_state(connection: sqlite3.Connection, file: Path) -> State:
    """The state, from the first intact copy."""
    for row in connection.execute("SELECT * FROM state ORDER BY copy").fetchall():
        if (state := parse_state(row)) is not None:
            return state
    raise DamagedGallery(f"{file}: both copies of the state are damaged; restore a backup or index again")


def first_value(connection: sqlite3.Connection, query: str, *values: object) -> Any:
    """The first column of the first row, None if there is no row."""
    row = connection.execute(query, values).fetchone()
    return None if row is None else row[0]


def first_text(connection: sqlite3.Connection, query: str, position: int) -> str | None:
    """A text, None if there is none or it is damaged."""
    try:
        return to_text(first_value(connection, query, position))
    except sqlite3.DatabaseError as error:
        _require_damage(error)
        return None


def read_blocks(connection: sqlite3.Connection, table: str, columns: str, first: int, end: int) -> Iterator[list[Row]]:
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


def fetch_rows(connection: sqlite3.Connection, table: str, columns: str, positions: Sequence[int]) -> dict[int, Row]:
    """Rows by position; those that are not there, or that SQLite cannot read, are left out."""
    if not positions:
        return {}
    first, end = min(positions), max(positions) + 1
    if end - first <= 2 * len(positions):
        return {row[0]: row for rows in read_blocks(connection, table, columns, first, end) for row in rows}
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


def digests_of(rows: Sequence[Row]) -> NDArray[np.uint64]:
    """A digest of each row of items: odd factors times the CRC-32 of texts, and the numbers, summed modulo 2⁶⁴."""
    return digests_of_columns(list(zip(*rows, strict=True))) if rows else np.zeros(0, np.uint64)


def digests_of_columns(columns: Sequence[Sequence[Any]]) -> NDArray[np.uint64]:
    """The same of rows that are given as columns."""
    position, id, path, label, checksum, level, *crcs = columns
    total = np.zeros(len(position), np.uint64)
    texts = [map(zlib.crc32, id), map(zlib.crc32, path), _labels(label), map(zlib.crc32, checksum)]
    with np.errstate(over="ignore"):  # a damaged level may be of any size
        levels = np.array(level, np.float32).view(np.uint32)
    numbers = [position, *texts, levels, *crcs]
    for factor, column in zip(FACTORS, numbers, strict=True):
        total += np.array(list(column), np.int64).view(np.uint64) * np.uint64(factor)
    return total


def _labels(labels: Iterable[bytes | None]) -> Iterator[int]:
    return (0 if label is None else zlib.crc32(label) + 1 for label in labels)


def is_intact(row: Row, digest: object) -> bool:
    """Whether a row of items, which may hold anything, has the digest that was stored with it."""
    try:
        return isinstance(digest, int) and to_signed(int(digests_of([row])[0])) == digest
    except (TypeError, ValueError, OverflowError):
        return False


def matches(data: object, crc: object) -> bool:
    """Whether these are bytes with this CRC-32."""
    return isinstance(data, bytes) and zlib.crc32(data) == crc


def encode_names(item: Item) -> Row:
    """id, path, label and checksum as they are stored: names may hold bytes that are not UTF-8."""
    label = None if item.label is None else to_bytes(item.label)
    return to_bytes(item.id), to_bytes(item.path), label, bytes.fromhex(item.checksum)


def to_bytes(text: str) -> bytes:
    """A text as it is stored."""
    return text.encode("utf-8", "surrogateescape")


def to_text(data: object) -> str | None:
    """A stored text, None if it is none."""
    return data.decode("utf-8", "surrogateescape") if isinstance(data, bytes) else None


def to_item(row: Row) -> Item:
    """The item of a row of items."""
    return Item(id=to_text(row[1]) or "", path=to_text(row[2]) or "", label=to_text(row[3]), checksum=row[4].hex())


def to_signed(number: int) -> int:
    """A number modulo 2⁶⁴, between −2⁶³ and 2⁶³."""
    return (number + 2**63) % 2**64 - 2**63


def ranges_of(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The first and last of each run of neighbours in ascending numbers."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]


# -------------------- items in memory --------------------


_MORE = 1024  # positions more than are needed


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class ItemTable:
    """All items in memory, by position, without paths and labels; it follows the changes of other processes."""

    def __init__(self, connection: sqlite3.Connection, state: State, file: str) -> None:
        self.state, self.file = state, file
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
        return to_signed(self._total)

    def stored_digest(self, position: int) -> int:
        """The digest of an intact row as the database holds it."""
        return to_signed(int(self.digests[position]))

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
                raise DamagedGallery(LOST_ROWS)
        return position

    def problem(self, position: int) -> Problem:
        """What is wrong with a position."""
        id = self.damaged[position]
        return Problem(self.file, id, LOST_ROWS if id is None else REPAIRABLE.format("row"))

    def problems(self) -> list[Problem]:
        """What is wrong with all positions."""
        return list(dict.fromkeys(self.problem(position) for position in sorted(self.damaged)))

    def require_intact(self) -> None:
        """Raise an error if a row is damaged."""
        for problem in self.problems():
            raise DamagedGallery(str(problem))

    def damage(self, position: int, what: str) -> DamagedGallery:
        """The error that the row or the vector of an item is damaged."""
        return DamagedGallery(str(Problem(self.file, self.ids[position], REPAIRABLE.format(what))))

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
        for block in read_blocks(connection, "items", f"{ITEM_COLUMNS}, digest", first, end):
            *columns, digests = zip(*block, strict=True)
            with suppress(TypeError, ValueError, OverflowError):
                found = np.array(digests, np.int64).view(np.uint64)
                if np.array_equal(digests_of_columns(columns), found):
                    self._put(block, found)
                    continue
            intact = [row for row in block if is_intact(row[:9], row[9])]
            self._put(intact, np.array([row[9] for row in intact], np.int64).view(np.uint64))
            for position in {row[0] for row in block} - {row[0] for row in intact}:
                self.damaged[position] = first_text(connection, "SELECT id FROM vectors WHERE position = ?", position)

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
        fresh = self.rows.keys().isdisjoint(names) and len(set(names)) == len(names)
        if fresh:
            self.rows.update(zip(names, at, strict=True))
        for position, name in zip(at, names, strict=True) if not fresh else ():
            if (old := self.rows.get(name)) is not None and old != position:
                if self.live[old]:
                    self.damaged[old] = None  # two rows of one id: one of them is not what was written
                del self.rows[name]  # it comes last now
            self.rows[name] = position
        self.live[places], self.levels[places] = True, levels
        self.semantic[places], self.uncertainty[places] = semantic, uncertainty
        self.digests[places] = digests
        self._total += int(digests.sum(dtype=np.uint64))

    def _grow(self, end: int) -> None:
        if end > len(self.live):
            more = end + end // 4 + _MORE - len(self.live)
            columns = {name: getattr(self, name) for name in ("live", "digests", "semantic", "uncertainty", "levels")}
            if sum(column.itemsize for column in columns.values()) * end > _physical_memory():
                raise DamagedGallery(
                    f"{self.file} claims {end:,} positions, more than fit into memory here; restore a backup"
                )
            for name, column in columns.items():
                setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))

    def _name_damage(self, connection: sqlite3.Connection) -> None:
        """Find out which items are damaged or lost, by the ids beside their vectors."""
        for block in read_blocks(connection, "vectors", "position, id", 0, self.state.next):
            for position, id in block:
                if not self.live[position]:
                    self.damaged[position] = to_text(id)
        for position, id in self.damaged.items():
            if id in self.rows:
                self.damaged[position] = None
        if len(self) != self.state.items or (not self.damaged and self.digest != self.state.digest):
            self.damaged[-1] = None

"""The database of a gallery: its tables, how it is opened, and how rows are read and checked.

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

SQLite has no checksums of its own, so each row is compared with its digest when it is read. A part that SQLite cannot
read is left out and the rest is read.
"""

import json
import os
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from idml.search.engines.base import DamagedGallery, Item, Properties

DATABASE = "gallery.sqlite"
FORMAT = 2
SYNCHRONOUS = "FULL"  # every acknowledged change is on the disk
WAIT = 60.0  # seconds until a database that another process has locked is an error
_APPLICATION = 0x49444D4C  # "IDML", in the header of the database
_OLD = "current.json"  # of galleries before SQLite
_PAGE = 16384
_LOG = 32 << 20  # bytes in the write-ahead log, after which SQLite moves them into the database
_CACHE = 4 << 20  # bytes of pages that SQLite keeps in memory
_LONGEST = 1 << 28  # bytes of the longest value: a damaged length must not take all memory
_BLOCK = 1024  # rows read at a time
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


def make_database(file: Path, properties: Properties, path: Path) -> None:
    """Write an empty database."""
    connection = sqlite3.connect(file, isolation_level=None)
    try:
        connection.execute(f"PRAGMA page_size = {_PAGE}")
        connection.execute(f"PRAGMA synchronous = {SYNCHRONOUS}")
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


def connect(file: Path, *, write: bool) -> sqlite3.Connection:
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
            f"cache_size = {-_CACHE // 1024}", f"wal_autocheckpoint = {_LOG // _PAGE}",
            f"journal_size_limit = {2 * _LOG}", f"synchronous = {SYNCHRONOUS}", "cell_size_check = ON",
            "trusted_schema = OFF", f"query_only = {int(not write)}",
        ):  # fmt: skip
            connection.execute(f"PRAGMA {setting}").fetchall()
        application, version = (
            first_value(connection, f"PRAGMA {name}") for name in ("application_id", "user_version")
        )
        if application != _APPLICATION:
            raise ValueError(f"{file} is not the database of a gallery")
        if version != FORMAT:
            raise ValueError(
                f"the gallery {file.parent} has format {version}, this version of idml reads {FORMAT}: index again"
            )
        if "immutable" not in options:
            _require_log(first_value(connection, "PRAGMA journal_mode"), file.parent)
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
def explain_errors(path: Path) -> Iterator[None]:
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


def parse_properties(row: Row) -> Properties | None:
    """A copy of the properties, None if it is damaged."""
    with suppress(TypeError, ValueError):
        if zlib.crc32(row[1]) == row[2]:
            return Properties(**json.loads(row[1]))
    return None


def parse_state(row: Row) -> State | None:
    """A copy of the state, None if it is damaged."""
    with suppress(TypeError, struct.error):
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
    numbers = [position, *texts, np.array(level, np.float32).view(np.uint32), *crcs]
    for factor, column in zip(FACTORS, numbers, strict=True):
        total += np.array(list(column), np.int64).view(np.uint64) * np.uint64(factor)
    return total


def _labels(labels: Iterable[bytes | None]) -> Iterator[int]:
    return (0 if label is None else zlib.crc32(label) + 1 for label in labels)


def digests_of_any(rows: Sequence[Row]) -> NDArray[np.uint64]:
    """The same of rows that may hold anything; one that cannot be a row gets a digest that it does not have."""
    try:
        return digests_of(rows)
    except (TypeError, ValueError, OverflowError):
        return np.concatenate([digest_of(row) for row in rows])


def digest_of(row: Row) -> NDArray[np.uint64]:
    """The digest of one row of items that may hold anything."""
    try:
        return digests_of([row])
    except (TypeError, ValueError, OverflowError):
        return np.array([0], np.uint64)


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

"""How the database of a gallery is written: created, changed within a transaction, numbered again, and backed up."""

import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from idml.evaluation.distance_bounds import Rows
from idml.files import sync_folder
from idml.search.engines import sqlite_storage
from idml.search.engines.base import Item, Properties
from idml.search.engines.sqlite_storage import (
    APPLICATION,
    DATABASE,
    FACTORS,
    FORMAT,
    SCHEMA,
    ItemTable,
    Numbers,
    Row,
    State,
    digests_of,
    encode_names,
    explain_errors,
    is_gallery,
    ranges_of,
    require_log,
    to_signed,
)
from idml.search.engines.sqlite_vectors import checksums_of


def create_database(folder: Path, properties: Properties) -> None:
    """Write the database of an empty gallery into a folder. An existing gallery is refused; other files stay."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_gallery(folder):
        raise ValueError(f"there is a gallery at {folder} already")
    temporary = folder / f".{DATABASE}.{os.getpid()}-{threading.get_ident()}"
    try:
        with _remove_afterwards(temporary):
            with explain_errors(folder):
                _write_empty(temporary, properties, folder)
            _sync_file(temporary)
            try:
                os.link(temporary, folder / DATABASE)  # unlike a rename it never replaces a gallery
            except FileExistsError:
                raise ValueError(f"there is a gallery at {folder} already") from None
    except OSError as error:
        if str(folder) in str(error.args[0]):
            raise
        raise OSError(f"cannot write to the gallery {folder} ({error.strerror or error})") from error
    with suppress(OSError):  # a parent folder that may not be read
        sync_folder(folder)
        sync_folder(folder.parent)


def _write_empty(file: Path, properties: Properties, path: Path) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    try:
        connection.execute(f"PRAGMA page_size = {sqlite_storage.PAGE}")
        connection.execute(f"PRAGMA synchronous = {sqlite_storage.SYNCHRONOUS}")
        connection.execute("BEGIN")
        for statement in SCHEMA.split(";"):
            connection.execute(statement)
        content = json.dumps(asdict(properties), sort_keys=True).encode("ascii")
        state = State(0, 1, 1, 0, 0, 0)
        for copy in (1, 2):
            connection.execute("INSERT INTO properties VALUES (?, ?, ?)", (copy, content, zlib.crc32(content)))
            connection.execute(f"INSERT INTO state VALUES ({', '.join('?' * 8)})", (copy, *state, state.crc()))
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
        require_log(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0], path)
    finally:
        connection.close()


def back_up(connection: sqlite3.Connection, file: Path) -> None:
    """Write a copy of the database to ``file``, which is replaced; on return it is on the disk."""
    temporary = file.with_name(f".{file.name}.part")
    with _remove_afterwards(temporary):
        target = sqlite3.connect(temporary, isolation_level=None)
        try:
            connection.backup(target)
        finally:
            target.close()
        _sync_file(temporary)
        temporary.replace(file)
        sync_folder(file.parent)


@contextmanager
def _remove_afterwards(database: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(f"{database}{suffix}").unlink(missing_ok=True)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# -------------------- within a transaction --------------------


def insert_items(
    connection: sqlite3.Connection,
    first: int,
    items: Sequence[tuple[Item, float, bytes]],
    vectors: Sequence[Rows],
) -> None:
    """Write items with levels and thumbnails, and vectors [s] or [s, u], at the positions from ``first`` on."""
    crcs = [checksums_of(rows).tolist() for rows in vectors]
    blobs: list[list[bytes | None]] = [[row.tobytes() for row in rows] for rows in vectors]
    if len(vectors) == 1:
        crcs.append([0] * len(items))
        blobs.append([None] * len(items))
    content: list[Row] = [
        (position, *encode_names(item), level, s, u, zlib.crc32(image))
        for position, ((item, level, image), s, u) in enumerate(zip(items, *crcs, strict=True), first)
    ]
    connection.executemany(
        f"INSERT INTO items VALUES ({', '.join('?' * 10)})",
        ((*row, digest) for row, digest in zip(content, _signed_digests(content), strict=True)),
    )
    connection.executemany(
        "INSERT INTO vectors VALUES (?, ?, ?, ?)",
        ((*row[:2], s, u) for row, s, u in zip(content, *blobs, strict=True)),
    )
    connection.executemany(
        "INSERT INTO thumbnails VALUES (?, ?)",
        ((position, image) for position, (_, _, image) in enumerate(items, first) if image),
    )


def delete_items(connection: sqlite3.Connection, positions: Sequence[int]) -> None:
    """Delete the rows of some positions."""
    for name in ("items", "vectors", "thumbnails"):
        connection.executemany(f"DELETE FROM {name} WHERE position = ?", ((position,) for position in positions))


def update_labels(connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """Write the labels of rows of items, which are given as they are going to be."""
    connection.executemany(
        "UPDATE items SET label = ?, digest = ? WHERE position = ?",
        ((row[3], digest, row[0]) for row, digest in zip(rows, _signed_digests(rows), strict=True)),
    )


def _signed_digests(rows: Sequence[Row]) -> list[int]:
    digests: list[int] = digests_of(rows).view(np.int64).tolist()
    return digests


def record_change(connection: sqlite3.Connection, table: ItemTable, positions: Sequence[int]) -> None:
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
    table.state = state._replace(change=change, next=after, items=items, digest=digest)
    _write_state(connection, table.state)


def renumber(connection: sqlite3.Connection, table: ItemTable) -> None:
    """Number the positions of all items from 0 on, under another generation. The table is not true any more."""
    before: Numbers = np.fromiter(table.rows.values(), np.int64)
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
    change = state.change + 1
    _write_state(connection, State(change, change, state.generation + 1, len(before), len(before), total))


def _write_state(connection: sqlite3.Connection, state: State) -> None:
    connection.executemany(
        f"INSERT OR REPLACE INTO state VALUES ({', '.join('?' * 8)})",
        ((copy, *state, state.crc()) for copy in (1, 2)),
    )

"""The check of a whole gallery in a folder: what `idml gallery verify` reads, compares and reports."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from idml.search.engines.base import Problem
from idml.search.engines.sqlite_storage import (
    ItemTable,
    matches,
    parse_properties,
    parse_state,
    read_blocks,
    read_state,
    to_bytes,
)
from idml.search.engines.sqlite_vectors import Vectors


def find_problems(connection: sqlite3.Connection, path: Path, vectors: Vectors) -> Iterator[Problem]:
    """Read everything, compare checksums, and let SQLite check its own structure; repair the copy of the vectors."""
    file = str(path)
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
    table = ItemTable(connection, read_state(connection, path), file)
    yield from table.problems()
    yield from _check_vectors(connection, table, vectors)
    yield from _check_thumbnails(connection, table)
    vectors.repair(connection, table)


def _check_vectors(connection: sqlite3.Connection, table: ItemTable, vectors: Vectors) -> Iterator[Problem]:
    crcs, seen = [table.crcs(kind) for kind in vectors.widths], set()
    for rows in read_blocks(connection, "vectors", "position, id, semantic, uncertainty", 0, table.state.next):
        for position, id, *content in rows:
            seen.add(position)
            if table.live[position]:
                own = table.ids[position]
                sound = (matches(data, int(crc[position])) for crc, data in zip(crcs, content, strict=False))
                if id != to_bytes(own) or not all(sound):
                    yield Problem(table.file, own, "the vector is damaged")
            elif position not in table.damaged:
                yield Problem(table.file, None, f"the vectors of position {position} belong to no item")
    for id, position in table.rows.items():
        if position not in seen:
            yield Problem(table.file, id, "the vector is missing")


def _check_thumbnails(connection: sqlite3.Connection, table: ItemTable) -> Iterator[Problem]:
    end, seen = table.state.next, set()
    crcs: dict[int, Any] = {}
    for rows in read_blocks(connection, "items", "position, thumbnail", 0, end):
        crcs.update(rows)
    for rows in read_blocks(connection, "thumbnails", "position, image", 0, end):
        for position, image in rows:
            seen.add(position)
            if table.live[position]:
                if not matches(image, crcs.get(position)):
                    yield Problem(table.file, table.ids[position], "the thumbnail is damaged")
            elif position not in table.damaged:
                yield Problem(table.file, None, f"the thumbnail of position {position} belongs to no item")
    for id, position in table.rows.items():
        if crcs.get(position) and position not in seen:
            yield Problem(table.file, id, "the thumbnail is missing")

"""The vectors of a gallery in memory: a disposable, memory-mapped copy that makes a large gallery open quickly.

There is one file for each kind of vector, s and u. It holds float32 rows; the row of the item at position p begins at
byte p · dimensions · 4. It has no header and needs no lock: the vectors of a position never change, so every process
writes the same bytes. Each row is compared with its CRC-32 in the database before it is used. A row that differs (not
written yet, cut short by a kill, damaged) is read from the database and written again. The file may be deleted at any
time.
"""

import mmap
import os
import re
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from idml.evaluation.distance_bounds import Rows, RowVectors, squares
from idml.search.engines.base import FLOAT, Properties
from idml.search.engines.sqlite_storage import ItemTable, Numbers, fetch_rows

_FILE = re.compile(r"vectors-(\d+)\.(semantic|uncertainty)")
_CHECKED = 4096  # rows checked at a time
_ROOM = 8192  # rows mapped beyond those that are there, and a quarter more

Reader = Callable[[Sequence[int]], Iterable[tuple[int, bytes]]]
"""Reads the vectors of some positions from the database."""


class Vectors:
    """The vectors of a gallery in a folder; those of a kind are mapped when they are first searched."""

    def __init__(self, folder: Path, properties: Properties) -> None:
        self._folder = folder
        self.widths = {"semantic": properties.dimensions}
        """The dimensions of each kind that is stored."""
        if properties.uncertainty:
            self.widths["uncertainty"] = properties.uncertainty
        self.forget()

    def forget(self) -> None:
        """Map and check everything again when it is next needed."""
        self._matrices: dict[str, _Matrix] = {}
        self._searched: tuple[tuple[int, bool], RowVectors] | None = None  # for which change, with u or without

    def write(self, generation: int, first: int, vectors: Sequence[Rows]) -> None:
        """Write s, and u if it is stored, of the positions ``first``, ``first`` + 1, …"""
        for kind, rows in zip(self.widths, vectors, strict=True):
            write_rows(self._file(kind, generation), first, rows)

    def searched(self, connection: sqlite3.Connection, table: ItemTable, metric: bool) -> RowVectors:
        """What is searched now, with u for a metric; it stays as it is when something changes."""
        kinds = ("semantic", "uncertainty") if metric else ("semantic",)
        matrices = [self._matrix(connection, table, kind) for kind in kinds]
        for matrix in matrices:
            for position in matrix.damaged:
                raise table.damage(position, "vector")
        table.require_intact()
        if self._searched is None or self._searched[0] != (table.state.change, metric):
            n, s, u = table.state.next, matrices[0], matrices[-1]
            lengths = np.where(table.live[:n], s.squares[:n], np.inf)
            uncertainty = u.cache.rows[:n] if metric else u.cache.rows[:n, :0]
            rows = RowVectors(s.cache.rows[:n], lengths, uncertainty, u.squares[:n])
            self._searched = (table.state.change, metric), rows
        return self._searched[1]

    def intact(self, table: ItemTable, searched: RowVectors, positions: Numbers) -> bool:
        """Whether the rows of these positions are what was written."""
        kinds = [(searched.s, table.semantic)]
        if searched.u.shape[1]:
            kinds.append((searched.u, table.uncertainty))
        return all(np.array_equal(checksums_of(x[row] for row in positions), crcs[positions]) for x, crcs in kinds)

    def repair(self, connection: sqlite3.Connection, table: ItemTable) -> None:
        """Compare the files with the checksums and write again what differs."""
        positions = np.fromiter(table.rows.values(), np.int64)
        for kind in self.widths:
            self._map(table, kind).check(positions, table.crcs(kind)[positions], _reader(connection, kind))

    def sweep(self, generation: int) -> None:
        """Delete the files of earlier generations."""
        for file in self._folder.iterdir():
            if (match := _FILE.fullmatch(file.name)) and int(match[1]) < generation:
                file.unlink(missing_ok=True)

    def _matrix(self, connection: sqlite3.Connection, table: ItemTable, kind: str) -> "_Matrix":
        matrix = self._matrices.get(kind)
        if matrix is None or matrix.cache.capacity < table.state.next:
            matrix = self._matrices[kind] = _Matrix(self._map(table, kind))
        matrix.follow(table, table.crcs(kind), _reader(connection, kind))
        return matrix

    def _map(self, table: ItemTable, kind: str) -> "VectorCache":
        return VectorCache(self._file(kind, table.state.generation), self.widths[kind], table.state.next)

    def _file(self, kind: str, generation: int) -> Path:
        return self._folder / f"vectors-{generation}.{kind}"


def _reader(connection: sqlite3.Connection, kind: str) -> Reader:
    def read(positions: Sequence[int]) -> Iterable[tuple[int, bytes]]:
        found = fetch_rows(connection, "vectors", f"position, {kind}", positions)
        return ((position, data) for position, data in found.values() if isinstance(data, bytes))

    return read


class _Matrix:
    """The vectors of one kind, with their squared lengths by position."""

    def __init__(self, cache: "VectorCache") -> None:
        self.cache = cache
        self.squares = np.zeros(cache.capacity)
        self.end = 0  # positions below it were checked
        self.damaged: list[int] = []

    def follow(self, table: ItemTable, crcs: NDArray[np.uint32], read: Reader) -> None:
        """Check the vectors of items that came since the last call."""
        fresh = self.end + np.flatnonzero(table.live[self.end : table.state.next])
        lost = self.cache.check(fresh, crcs[fresh], read)
        self.damaged = [position for position in self.damaged if table.live[position]] + lost
        for first in range(self.end, table.state.next, _CHECKED):
            rows = slice(first, min(first + _CHECKED, table.state.next))
            self.squares[rows] = squares(self.cache.rows[rows])
        self.end = table.state.next


class VectorCache:
    """The mapped rows of a file. ``rows[p]`` is valid for the positions that `check` was called with.

    Pages are private copies on write: a row that cannot be written to the file is held in memory.
    """

    def __init__(self, path: Path, dimensions: int, count: int) -> None:
        self.path, self.dimensions = path, dimensions
        self.capacity = count + count // 4 + _ROOM
        self.rows: Rows = self._map()

    def _map(self) -> Rows:
        shape, size = (self.capacity, self.dimensions), self.capacity * self.dimensions * FLOAT.itemsize
        with suppress(OSError):
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(file, size - 1, 1)  # makes it longer, never shorter, and writes nothing else
                content = mmap.mmap(file, size, access=mmap.ACCESS_COPY)
            finally:
                os.close(file)
            return np.frombuffer(content, FLOAT).reshape(shape)
        return np.zeros(shape, FLOAT)  # a folder that cannot be written: in memory alone

    def check(self, positions: Numbers, checksums: NDArray[np.uint32], read: Reader) -> list[int]:
        """Make the rows of these positions valid; ``read`` gives vectors from the database.

        Returns the positions whose vectors are damaged in the database too.
        """
        damaged: list[int] = []
        for first in range(0, len(positions), _CHECKED):
            some, expected = positions[first : first + _CHECKED], checksums[first : first + _CHECKED]
            stale = some[self._differing(some, expected)]
            if not len(stale):
                continue
            wanted, found = dict(zip(some.tolist(), expected.tolist(), strict=True)), {}
            for position, data in read(stale.tolist()):
                if len(data) == self.dimensions * FLOAT.itemsize and zlib.crc32(data) == wanted.get(position):
                    found[position] = np.frombuffer(data, FLOAT)
            damaged += [position for position in stale.tolist() if position not in found]
            self._replace(found)
        return damaged

    def _differing(self, positions: Numbers, checksums: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which of these rows are not what was written."""
        if len(positions) and positions[-1] - positions[0] == len(positions) - 1:
            found = checksums_of(self.rows[positions[0] : positions[-1] + 1])
        else:
            found = checksums_of(self.rows[position] for position in positions.tolist())
        different: NDArray[np.bool_] = found != checksums
        return different

    def _replace(self, found: dict[int, Rows]) -> None:
        """Write vectors by position, neighbours together."""
        for _, run in groupby(enumerate(sorted(found)), lambda pair: pair[1] - pair[0]):
            positions = [position for _, position in run]
            rows = np.stack([found[position] for position in positions])
            write_rows(self.path, positions[0], rows)
            mapped = self.rows[positions[0] : positions[-1] + 1]
            if mapped.tobytes() != rows.tobytes():
                mapped[:] = rows


def write_rows(path: Path, first: int, rows: Rows) -> None:
    """Write the vectors of positions ``first``, ``first`` + 1, … to the file; if that fails, they are just missing."""
    with suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            data, place = np.ascontiguousarray(rows, FLOAT).data.cast("B"), first * rows.shape[1] * FLOAT.itemsize
            while len(data):
                written = os.pwrite(file, data, place)
                data, place = data[written:], place + written
        finally:
            os.close(file)


def checksums_of(rows: Iterable[Rows]) -> NDArray[np.uint32]:
    """The CRC-32 of each row."""
    return np.fromiter((zlib.crc32(row.data) for row in rows), np.uint32)

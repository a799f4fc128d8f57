"""A disposable copy of a gallery's vectors, memory-mapped, so that a large gallery opens quickly.

The file holds float32 rows; the row of the item at position p begins at byte p · dimensions · 4. It has no header and
needs no lock: the vectors of a position never change, so every process writes the same bytes, and each row is compared
with its CRC-32 in the database before it is used. A row that differs (not written yet, cut short by a kill, damaged)
is read from the database and written again. The file may be deleted at any time.
"""

import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from idml.evaluation.distance_bounds import Rows, RowVectors, squares
from idml.search.engines.base import FLOAT
from idml.search.engines.item_table import ItemTable

_BLOCK = 4096  # rows checked at a time
_ROOM = 8192  # rows mapped beyond those that are there, and a quarter more


def write_rows(path: Path, first: int, rows: Rows) -> None:
    """Write the vectors of positions ``first``, ``first`` + 1, … to the file; if that fails, they are just missing."""
    with suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _write(file, rows, first * rows.shape[1] * FLOAT.itemsize)
        finally:
            os.close(file)


def checksums_of(rows: Iterable[Rows]) -> NDArray[np.uint32]:
    """The CRC-32 of each row."""
    return np.fromiter((zlib.crc32(row.data) for row in rows), np.uint32)


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

    def check(
        self,
        positions: NDArray[np.int64],
        checksums: NDArray[np.uint32],
        read: Callable[[Sequence[int]], Iterable[tuple[int, bytes]]],
    ) -> list[int]:
        """Make the rows of these positions valid; ``read`` gives vectors from the database.

        Returns the positions whose vectors are damaged in the database too.
        """
        damaged: list[int] = []
        for first in range(0, len(positions), _BLOCK):
            some, expected = positions[first : first + _BLOCK], checksums[first : first + _BLOCK]
            stale = some[self.differing(some, expected)]
            if not len(stale):
                continue
            wanted, found = dict(zip(some.tolist(), expected.tolist(), strict=True)), {}
            for position, data in read(stale.tolist()):
                if len(data) == self.dimensions * FLOAT.itemsize and zlib.crc32(data) == wanted.get(position):
                    found[position] = np.frombuffer(data, FLOAT)
            damaged += [position for position in stale.tolist() if position not in found]
            self._replace(found)
        return damaged

    def differing(self, positions: NDArray[np.int64], checksums: NDArray[np.uint32]) -> NDArray[np.bool_]:
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


def _write(file: int, rows: Rows, place: int) -> None:
    data = np.ascontiguousarray(rows, FLOAT).data.cast("B")
    while len(data):
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written


class Matrix:
    """The vectors of one kind in memory, with their squared lengths by position."""

    def __init__(self, cache: VectorCache) -> None:
        self.cache = cache
        self.squares = np.zeros(cache.capacity)
        self.end = 0  # positions below it were checked
        self.damaged: list[int] = []
        self.side: tuple[tuple[int, bool], RowVectors] | None = None  # for which change, with u or without

    def follow(
        self,
        table: ItemTable,
        crcs: NDArray[np.uint32],
        read: Callable[[Sequence[int]], list[tuple[int, bytes]]],
    ) -> None:
        """Check the vectors of items that came since the last call."""
        fresh = self.end + np.flatnonzero(table.live[self.end : table.state.next])
        lost = self.cache.check(fresh, crcs[fresh], read)
        self.damaged = [position for position in self.damaged if table.live[position]] + lost
        for first in range(self.end, table.state.next, _BLOCK):
            rows = slice(first, min(first + _BLOCK, table.state.next))
            self.squares[rows] = squares(self.cache.rows[rows])
        self.end = table.state.next

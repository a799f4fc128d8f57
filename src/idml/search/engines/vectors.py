"""A file of vectors: float32, little-endian, row i at byte i · dimensions · 4; appended to, read through memory."""

import mmap
import os
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from idml.search.engines.log import write_at

FLOAT = np.dtype("<f4")
Rows = NDArray[np.float32]


class Vectors:
    """An open file of vectors. It knows no number of rows: which of them count is said elsewhere.

    Rows that were handed out are read when they are used. They are never changed or cut off by us; who cuts the file
    himself, or takes the disk away, ends the process that reads (SIGBUS).
    """

    def __init__(self, path: Path, dimensions: int, *, write: bool) -> None:
        self.path, self.dimensions, self.stride = path, dimensions, dimensions * FLOAT.itemsize
        self.file = os.open(path, os.O_RDWR if write else os.O_RDONLY)
        self._mapped: Rows = np.empty((0, dimensions), FLOAT)

    def stored(self) -> int:
        """How many whole rows the file holds."""
        return os.fstat(self.file).st_size // self.stride

    def rows(self, count: int) -> Rows:
        """The first ``count`` rows, memory-mapped; they stay readable after the file is closed or deleted."""
        if len(self._mapped) < count:
            content = mmap.mmap(self.file, count * self.stride, prot=mmap.PROT_READ)
            self._mapped = np.frombuffer(content, FLOAT).reshape(count, self.dimensions)
        return self._mapped[:count]

    def write(self, rows: Rows, first: int) -> list[int]:
        """Write rows from ``first`` on; the CRC-32 of each, once they are on the disk."""
        if rows.shape[1:] != (self.dimensions,) or not len(rows):
            raise ValueError(f"{list(rows.shape)} are no rows of {self.dimensions} numbers")
        data = np.ascontiguousarray(rows, FLOAT).data.cast("B")
        write_at(self.file, data, first * self.stride)
        os.fsync(self.file)
        return [zlib.crc32(data[i : i + self.stride]) for i in range(0, len(data), self.stride)]

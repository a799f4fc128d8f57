"""One generation of a gallery: a folder of files that are only ever appended to.

    items.log         what there is (see `table` for its records and `log` for their frame)
    semantic.f32      the unit vectors (see `vectors`)
    uncertainty.f32   the vectors u, if the gallery keeps them
    thumbnails.bin    thumbnails, one after another

Vectors and thumbnails are written and forced to disk before the record that speaks of them: a row without a record
belongs to nobody, and the next item takes its place. Every row and thumbnail has its CRC-32 in the record.
"""

import os
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from idml.files import sync_folder
from idml.search.engines import DamagedGallery, Item, Problem, Properties
from idml.search.engines.exact import squares
from idml.search.engines.log import LONGEST, Log, read_at, write_at
from idml.search.engines.table import Table, Thumbnail, add_record
from idml.search.engines.vectors import Rows, Vectors

LOG, SEMANTIC, UNCERTAINTY, THUMBNAILS = "items.log", "semantic.f32", "uncertainty.f32", "thumbnails.bin"
_BLOCK = 4096  # rows checked at a time


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


class Store:
    """An open generation. ``table`` is what was read of its log so far.

    With ``salvage``, damage that would be an error is passed over and kept in ``problems``.
    """

    def __init__(self, folder: Path, properties: Properties, *, write: bool, salvage: bool = False) -> None:
        self.folder, self.salvage = folder, salvage
        self.table = Table(properties.uncertainty > 0)
        self.problems: list[Problem] = []
        self._unsure = False  # whether a write was cut short, so that file and table may differ
        self._squares: list[NDArray[np.float64]] = []
        self._files: list[int] = []
        self._closing = weakref.finalize(self, _close, self._files)
        try:
            self.log = Log(folder / LOG, write=write)
            self._files.append(self.log.file)
            self.vectors = [self._vectors(SEMANTIC, properties.dimensions, write)]
            if properties.uncertainty:
                self.vectors.append(self._vectors(UNCERTAINTY, properties.uncertainty, write))
            self._thumbnails = os.open(folder / THUMBNAILS, os.O_RDWR if write else os.O_RDONLY)
            self._files.append(self._thumbnails)
            self.read()
            if write:
                self.log.cut()
        except BaseException:
            self.close()
            raise

    def _vectors(self, name: str, dimensions: int, write: bool) -> Vectors:
        vectors = Vectors(self.folder / name, dimensions, write=write)
        self._files.append(vectors.file)
        return vectors

    @classmethod
    def create(cls, folder: Path, properties: Properties) -> "Store":
        """Make an empty generation in a new folder and open it for writing."""
        folder.mkdir()
        for name in (SEMANTIC, THUMBNAILS, *((UNCERTAINTY,) if properties.uncertainty else ())):
            (folder / name).touch(exist_ok=False)
        Log.create(folder / LOG)
        sync_folder(folder)
        sync_folder(folder.parent)
        return cls(folder, properties, write=True)

    def close(self) -> None:
        """Close the files; vectors that were handed out stay readable."""
        self._closing()

    def read(self) -> bool:
        """Read what came to the log since the last time; whether there was anything."""
        before = self.log.end
        for payload in self.log.read(salvage=self.salvage):
            try:
                self.table.apply(payload, self._stored())
            except DamagedGallery as error:
                self._pass_over(Problem(str(self.log.path), None, str(error)))
        for vectors in self.vectors:
            if (stored := vectors.stored()) < len(self.table):
                reason = f"the file ends after {stored} of {len(self.table)} vectors"
                lost: list[str | None] = [*self.table.live_ids(stored)]
                for id in lost or [None]:
                    self._pass_over(Problem(str(vectors.path), id, reason))
                self.table.cut(stored)
        return self.log.end > before

    def _pass_over(self, problem: Problem) -> None:
        if not self.salvage:
            raise DamagedGallery(str(problem))
        self.problems.append(problem)

    def _stored(self) -> int:
        return min(vectors.stored() for vectors in self.vectors)

    def append(
        self, items: Sequence[Item], rows: Sequence[Rows], levels: Sequence[float], thumbnails: Sequence[bytes]
    ) -> None:
        """Add items, with their rows of each vector file, ‖u‖ and thumbnails; on return they are on the disk."""
        self._require_sure()
        first, end = len(self.table), self.table.thumbnails_end
        checksums = [vectors.write(own, first) for vectors, own in zip(self.vectors, rows, strict=True)]
        places = []
        for image in thumbnails:
            places.append(Thumbnail(end, len(image), zlib.crc32(image)))
            end += len(image)
        if end > self.table.thumbnails_end:
            write_at(self._thumbnails, b"".join(thumbnails), self.table.thumbnails_end)
            os.fsync(self._thumbnails)
        self.record(add_record(first, items, levels, checksums[0], [*checksums, []][1], places))

    def record(self, payload: bytes) -> None:
        """Write a record and bring the table up to date with it; on return it is on the disk."""
        self._require_sure()
        if len(payload) > LONGEST:
            raise ValueError(f"{len(payload):,} bytes are too many for one record; give fewer items at a time")
        self._unsure = True
        try:
            length = self.log.write(payload)
        except OSError:
            self.log.cut()
            self._unsure = False
            raise
        self.log.commit(length)  # if the disk refuses now, nobody knows what it holds
        self.table.apply(payload, self._stored())
        self._unsure = False

    def _require_sure(self) -> None:
        if self.salvage:
            raise ValueError(f"the gallery in {self.folder} is damaged: compact it before it is changed")
        if self._unsure:
            raise OSError(f"an earlier write to {self.folder} was cut short; open the gallery again")

    def rows(self) -> list[Rows]:
        """The rows of each vector file, memory-mapped."""
        return [vectors.rows(len(self.table)) for vectors in self.vectors]

    def squares(self) -> list[NDArray[np.float64]]:
        """Squared lengths of all rows of each vector file. Rows seen for the first time are checked, unless dead."""
        files, known = self.rows(), len(self._squares[0]) if self._squares else 0
        parts: list[list[NDArray[np.float64]]] = [[squares] for squares in self._squares] or [[] for _ in files]
        for first in range(known, len(self.table), _BLOCK):
            self.check(row for row in range(first, min(first + _BLOCK, len(self.table))) if self.table.alive[row])
            for part, rows in zip(parts, files, strict=True):
                part.append(squares(rows[first : first + _BLOCK]))
        self._squares = [np.concatenate(part) if part else np.empty(0) for part in parts]
        return self._squares

    def damage(self, rows: Iterable[int], vectors: Sequence[Rows] | None = None) -> Iterator[Problem]:
        """Which of these rows are not what was written, in ``vectors`` handed out before or as they are now."""
        checksums = (self.table.semantic, self.table.uncertainty)
        files = list(zip(self.vectors, vectors or self.rows(), checksums, strict=False))
        for row in rows:
            for file, content, expected in files:
                if zlib.crc32(content[row]) != expected[row]:
                    yield Problem(str(file.path), self.table.ids[row], "the vector is damaged")

    def check(self, rows: Iterable[int], vectors: Sequence[Rows] | None = None) -> None:
        """Raise `DamagedGallery` if one of these rows is not what was written."""
        for problem in self.damage(rows, vectors):
            raise DamagedGallery(str(problem))

    def thumbnail(self, row: int) -> bytes:
        """The thumbnail of a row; `DamagedGallery` if it is not what was written."""
        begin, length, checksum = self.table.thumbnail(row)
        whole = begin + length <= os.fstat(self._thumbnails).st_size
        image = read_at(self._thumbnails, length, begin) if whole else b""
        if len(image) != length or zlib.crc32(image) != checksum:
            where = Problem(str(self.folder / THUMBNAILS), self.table.ids[row], "the thumbnail is damaged")
            raise DamagedGallery(str(where))
        return image

    def verify(self) -> Iterator[Problem]:
        """Read everything that belongs to an item again."""
        for begin, end in self.log.damage():
            yield Problem(str(self.log.path), None, f"bytes {begin} to {end} are damaged")
        yield from self.problems
        yield from self.damage(live := self.table.live())
        for row in live:
            try:
                self.thumbnail(row)
            except DamagedGallery:
                yield Problem(str(self.folder / THUMBNAILS), self.table.ids[row], "the thumbnail is damaged")

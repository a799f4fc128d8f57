"""A gallery's folder: which generation counts, and who may write.

    current.json          first line JSON: format, model, dimensions, uncertainty, generation; second line its CRC-32
    generation-000001/    the files of the current generation (see `store`)
    .lock                 held (flock) by the one writer

Compaction writes the next generation beside the current one and then replaces current.json by a rename: a kill leaves
the one or the other, and the next writer deletes what does not count. A reader that holds the files of a deleted
generation open reads on undisturbed.
"""

import fcntl
import json
import os
import re
import shutil
import weakref
import zlib
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, NamedTuple

from idml.files import write_atomic
from idml.search.engines import DamagedGallery, Properties
from idml.search.engines.store import Store

FORMAT = 1
CURRENT, LOCK = "current.json", ".lock"
_COPY = 4096  # items copied at a time
_GENERATION = re.compile(r"generation-\d{6,}")

_held: "weakref.WeakSet[IO[bytes]]" = weakref.WeakSet()  # locks of this process


class Current(NamedTuple):
    """What current.json says."""

    properties: Properties
    generation: int

    def folder(self, path: Path) -> Path:
        """Where the files are."""
        return path / f"generation-{self.generation:06d}"


def read_current(path: Path) -> Current:
    """Which generation of the gallery counts; raises `FileNotFoundError` if there is no gallery."""
    file = path / CURRENT
    try:
        line, checksum = file.read_bytes().split(b"\n")[:2]
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no gallery at {path}") from None
    except ValueError:
        raise DamagedGallery(f"{file} is damaged") from None
    if checksum != b"%08x" % zlib.crc32(line):
        raise DamagedGallery(f"{file} is damaged")
    try:
        content = json.loads(line)
        if content["format"] != FORMAT:
            raise ValueError(f"{path} has format {content['format']!r}, this version of idml reads {FORMAT}")
        properties = Properties(content["model"], content["dimensions"], content["uncertainty"])
        return Current(properties, int(content["generation"]))
    except (KeyError, TypeError) as error:
        raise DamagedGallery(f"{file} lacks {error}") from None


def write_current(path: Path, current: Current) -> None:
    """Make a generation the one that counts; on return that is on the disk."""
    p = current.properties
    content = {"format": FORMAT, "model": p.model, "dimensions": p.dimensions, "uncertainty": p.uncertainty}
    line = json.dumps({**content, "generation": current.generation}).encode("ascii")
    write_atomic(path / CURRENT, line + b"\n%08x\n" % zlib.crc32(line))


def open_current(path: Path, *, write: bool, salvage: bool = False) -> tuple[Current, Store]:
    """Open the generation that counts, even if compaction replaces it at this moment."""
    current = read_current(path)
    while True:
        try:
            return current, Store(current.folder(path), current.properties, write=write, salvage=salvage)
        except FileNotFoundError as error:
            before, current = current, read_current(path)
            if current == before:
                raise DamagedGallery(f"{error.filename} is missing") from None


def next_generation(path: Path, current: Current, old: Store) -> tuple[Current, Store]:
    """Write the next generation, with the live items of the ``old`` one; it does not count yet.

    Of a store that is being salvaged, what is sound is kept: items without their damaged thumbnails.
    """
    sweep(path, current)
    current, before = Current(current.properties, current.generation + 1), current
    fresh = None
    try:
        fresh = Store.create(current.folder(path), current.properties)
        live = old.table.live()
        for first in range(0, len(live), _COPY):
            _copy(live[first : first + _COPY], old, fresh)
    except BaseException:
        if fresh is not None:
            fresh.close()
        sweep(path, before)
        raise
    return current, fresh


def _copy(rows: list[int], old: Store, fresh: Store) -> None:
    table = old.table
    if old.salvage:
        lost = {problem.item for problem in old.damage(rows)}
        rows = [row for row in rows if table.ids[row] not in lost]
    old.check(rows)
    images = [b""] * len(rows)
    for n, row in enumerate(rows):
        with suppress(DamagedGallery) if old.salvage else nullcontext():
            images[n] = old.thumbnail(row)
    if rows:
        levels = [table.levels[row] for row in rows]
        fresh.append([table.item(row) for row in rows], [x[rows] for x in old.rows()], levels, images)


def lock_writer(path: Path) -> IO[bytes]:
    """Be the gallery's one writer until the returned file is closed; a second writer is refused."""
    try:
        file = (path / LOCK).open("wb")
    except OSError as error:
        raise OSError(f"cannot write to the gallery {path} ({error.strerror})") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"the gallery {path} is being written to by another process; try again later") from None
    _held.add(file)
    return file


def _let_go() -> None:
    """A forked child must not hold the lock beyond its parent's death."""
    for file in list(_held):
        file.close()


os.register_at_fork(after_in_child=_let_go)


def sweep(path: Path, current: Current | None) -> None:
    """Delete the generations that do not count: what a compaction or a kill left."""
    kept = None if current is None else current.folder(path)
    for folder in path.iterdir():
        if _GENERATION.fullmatch(folder.name) and folder != kept and folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)

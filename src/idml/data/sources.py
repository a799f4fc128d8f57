"""Where images come from: a file, a member of a tar, an array; and the folder or archive that holds them."""

import hashlib
import io
import os
import posixpath
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from idml.data.images import MIN_SIDE, decode_image


class Source(Protocol):
    """One image: its name, the same on every machine, and its pixels."""

    @property
    def name(self) -> str:
        """The image's name within its data set, such as ``images/001.Albatross/0001.jpg``."""

    @property
    def stamp(self) -> str:
        """A text that changes when the image's bytes change: a cached copy with another stamp is out of date."""

    @property
    def checksum(self) -> str:
        """SHA-256 of the image's bytes (of its pixels, if it has no file), empty if they cannot be read."""

    def decode(self, *, min_side: int = MIN_SIDE) -> Image.Image:
        """Decode the image as RGB; if it cannot be read, a ``ValueError`` or ``FileNotFoundError`` names it."""


@dataclass(frozen=True)
class FileSource:
    """An image file below a root folder."""

    root: Path
    name: str

    @property
    def stamp(self) -> str:
        """Size, and times of the last change."""
        return _stamp(self.root / self.name)

    @property
    def checksum(self) -> str:
        """SHA-256 of the file."""
        return _checksum(self.root / self.name)

    def decode(self, *, min_side: int = MIN_SIDE) -> Image.Image:
        """Decode the image as RGB."""
        return decode_image(self.root / self.name, self.name, min_side=min_side)


@dataclass(frozen=True)
class TarSource:
    """A member of an uncompressed tar, read in place: nothing is unpacked."""

    archive: Path
    name: str
    offset: int
    size: int

    @property
    def stamp(self) -> str:
        """Size of the archive, times of its last change, and the place in it."""
        return f"{_stamp(self.archive)}:{self.offset}:{self.size}"

    @property
    def checksum(self) -> str:
        """SHA-256 of the member's bytes."""
        return _checksum(self.archive, self.offset, self.size)

    def decode(self, *, min_side: int = MIN_SIDE) -> Image.Image:
        """Decode the image as RGB."""
        try:
            with self.archive.open("rb") as file:
                file.seek(self.offset)
                data = file.read(self.size)
        except OSError as error:
            raise ValueError(f"cannot read {self.name!r} from {str(self.archive)!r}: {error.strerror}") from None
        return decode_image(io.BytesIO(data), self.name, min_side=min_side)


@dataclass(frozen=True, eq=False)
class ArraySource:
    """A grey or RGB image held in memory as uint8 [h, w] or [h, w, 3]."""

    name: str
    pixels: NDArray[np.uint8]

    @property
    def stamp(self) -> str:
        """A hash of the pixels."""
        return hashlib.blake2b(np.ascontiguousarray(self.pixels).data, digest_size=8).hexdigest()

    @property
    def checksum(self) -> str:
        """SHA-256 of the pixels."""
        return hashlib.sha256(np.ascontiguousarray(self.pixels).data).hexdigest()

    def decode(self, *, min_side: int = MIN_SIDE) -> Image.Image:
        """Decode the image as RGB."""
        return Image.fromarray(self.pixels).convert("RGB")


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "absent"
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _checksum(path: Path, start: int = 0, size: int = -1) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(size)).hexdigest()
    except OSError:
        return ""


# -------------------- folders and archives --------------------

_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


@dataclass(frozen=True)
class Folder:
    """The files in a folder and its sub-folders.

    Links to files are followed. Links to folders are followed on the way to a file that a list names. They are not
    followed when looking for files, because they may loop, lead outside or repeat images; they are counted instead.
    """

    path: Path

    def below(self, prefix: str) -> "Folder":
        """Return the tree of a sub-folder; its names start there."""
        return Folder(self.path / prefix)

    def homes(self, marks: tuple[str, ...]) -> list[str]:
        """Return the folders that contain one of the files ``marks``: this one, or those directly in it."""
        folders = ["", *sorted(f"{name}/" for name in os.listdir(self.path) if not name.startswith("."))]
        return [home for home in folders if any(os.path.isfile(self.path / home / mark) for mark in marks)]

    def files(self) -> tuple[list[str], int]:
        """Return the names of all files except hidden ones, and how many links to folders were skipped."""
        names, links, open_folders = [], 0, [""]
        while open_folders:
            prefix = open_folders.pop()
            with os.scandir(self.path / prefix) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        open_folders.append(f"{prefix}{entry.name}/")
                    elif os.path.isfile(entry):
                        names.append(prefix + entry.name)
                    elif os.path.isdir(entry):
                        links += 1
        return names, links

    def has(self, name: str) -> bool:
        """Return whether there is such a file inside the folder."""
        inside = not name.startswith("/") and ".." not in name.split("/")
        return inside and os.path.isfile(self.path / name)

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        if not self.has(name):
            raise FileNotFoundError(f"there is no {name!r} in {str(self.path)!r}")
        return (self.path / name).read_bytes()

    def source(self, name: str) -> Source:
        """Return the image of that name."""
        return FileSource(self.path, name)


@dataclass(frozen=True)
class Tar:
    """The members of an uncompressed tar: name → where its bytes start, and how many there are."""

    path: Path
    members: Mapping[str, tuple[int, int]]

    def below(self, prefix: str) -> "Tar":
        """Return the tree of a sub-folder; its names start there."""
        inside = {name.removeprefix(prefix): place for name, place in self.members.items() if name.startswith(prefix)}
        return Tar(self.path, inside)

    def homes(self, marks: tuple[str, ...]) -> list[str]:
        """Return the folders that contain one of the files ``marks``; of several, those of least depth."""
        found = {name.removesuffix(m) for m in marks for name in self.members if f"/{name}".endswith(f"/{m}")}
        return sorted(home for home in found if home.count("/") == min(other.count("/") for other in found))

    def files(self) -> tuple[list[str], int]:
        """Return the names of all files except hidden ones, and how many links to folders were skipped (none)."""
        return [name for name in self.members if not f"/{name}".count("/.")], 0

    def has(self, name: str) -> bool:
        """Return whether there is such a file."""
        return name in self.members

    def read(self, name: str) -> bytes:
        """Return the bytes of a file."""
        if name not in self.members:
            raise FileNotFoundError(f"there is no {name!r} in {str(self.path)!r}")
        offset, size = self.members[name]
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def source(self, name: str) -> Source:
        """Return the image of that name."""
        return TarSource(self.path, name, *self.members[name])


Tree = Folder | Tar


def open_tree(path: Path) -> Tree:
    """Open a folder or an uncompressed tar; a tar's members are listed once and read in place."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no {str(path)!r}")
    if os.path.isdir(path):
        return Folder(path)
    if not os.path.isfile(path):
        raise ValueError(f"{str(path)!r} is neither a folder nor a .tar file")
    with path.open("rb") as file:
        start = file.read(8)
        packed = next((kind for magic, kind in _PACKED.items() if start.startswith(magic)), None)
        if packed:
            raise ValueError(f"{str(path)!r} is compressed ({packed}): unpack it, or make a plain .tar of it")
        file.seek(0)
        try:
            members = _members(file)
        except Exception as error:  # a damaged header can raise any exception
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"cannot read {str(path)!r} as a tar: {reason}") from None
    return Tar(path, members)


def _members(file: io.BufferedReader) -> dict[str, tuple[int, int]]:
    members: dict[str, tuple[int, int]] = {}
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.size < 0:  # would send the reader back without end
                raise ValueError(f"damaged header at byte {member.offset:,}")
            name = _plain(member.name)
            if member.islnk() and _plain(member.linkname) in members:  # how tar stores a file's second name
                members[name] = members[_plain(member.linkname)]
            elif member.isreg() and not member.issparse():
                members[name] = (member.offset_data, member.size)
        end = archive.offset
    file.seek(end)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # the reader stops silently at a damaged header
        raise ValueError(f"truncated or damaged at byte {end:,}")
    return members


def _plain(name: str) -> str:
    return posixpath.normpath(name).lstrip("/")

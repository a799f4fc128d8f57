"""A folder and an uncompressed tar behind one face: names of files, their bytes, and images as sources."""

import io
import os
import posixpath
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from idml.data.sources import FileSource, Source, TarSource

_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip"}


@dataclass(frozen=True)
class Folder:
    """Files below a folder.

    Links to files are followed. Links to folders are followed on the way to a file that a list names, and never when
    looking for files: whether they loop, lead outside or show the same images again, they are counted and passed over.
    """

    path: Path

    def below(self, prefix: str) -> "Folder":
        """The tree of a sub-folder; its names start there."""
        return Folder(self.path / prefix)

    def homes(self, marks: tuple[str, ...]) -> list[str]:
        """The folders that hold one of the marks: this one, or those directly in it."""
        folders = ["", *sorted(f"{name}/" for name in os.listdir(self.path) if not name.startswith("."))]
        return [home for home in folders if any(os.path.isfile(self.path / home / mark) for mark in marks)]

    def files(self) -> tuple[list[str], int]:
        """The names of all files but hidden ones, and how many links to folders were passed over."""
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
        """Whether there is such a file; a name that leads out of the folder is none."""
        inside = not name.startswith("/") and ".." not in name.split("/")
        return inside and os.path.isfile(self.path / name)

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        if not self.has(name):
            raise FileNotFoundError(f"there is no {name!r} in {str(self.path)!r}")
        return (self.path / name).read_bytes()

    def source(self, name: str) -> Source:
        """The image of that name."""
        return FileSource(self.path, name)


@dataclass(frozen=True)
class Tar:
    """Members of an uncompressed tar: name → where its bytes start and how many they are."""

    path: Path
    members: Mapping[str, tuple[int, int]]

    def below(self, prefix: str) -> "Tar":
        """The tree of a sub-folder; its names start there."""
        inside = {name.removeprefix(prefix): place for name, place in self.members.items() if name.startswith(prefix)}
        return Tar(self.path, inside)

    def homes(self, marks: tuple[str, ...]) -> list[str]:
        """The folders that hold one of the marks, if several then the ones of least depth."""
        found = {name.removesuffix(m) for m in marks for name in self.members if f"/{name}".endswith(f"/{m}")}
        return sorted(home for home in found if home.count("/") == min(other.count("/") for other in found))

    def files(self) -> tuple[list[str], int]:
        """The names of all files but hidden ones, and how many links to folders were passed over (none)."""
        return [name for name in self.members if not f"/{name}".count("/.")], 0

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return name in self.members

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        if name not in self.members:
            raise FileNotFoundError(f"there is no {name!r} in {str(self.path)!r}")
        offset, size = self.members[name]
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def source(self, name: str) -> Source:
        """The image of that name."""
        return TarSource(self.path, name, *self.members[name])


Tree = Folder | Tar


def open_tree(path: Path) -> Tree:
    """The files of a folder or of an uncompressed tar, whose members are found once and read in place."""
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
        except Exception as error:  # damaged headers raise whatever they like
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"cannot read {str(path)!r} as a tar: {reason}") from None
    return Tar(path, members)


def _members(file: io.BufferedReader) -> dict[str, tuple[int, int]]:
    members: dict[str, tuple[int, int]] = {}
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.size < 0:  # would send the reader back, for ever
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

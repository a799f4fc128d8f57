"""A set of labelled images, and where each image's bytes are: a file, a member of a tar, a row of an array."""

import hashlib
import io
import os
import posixpath
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from idml.data.images import MIN_SIDE, decode_image
from idml.embeddings import Index, as_rows


class Source(Protocol):
    """One image: a name that is stable across machines, and its pixels."""

    @property
    def name(self) -> str:
        """The image's name within its data set, such as ``images/001.Albatross/0001.jpg``."""

    @property
    def stamp(self) -> str:
        """What changes when the image's bytes do: it tells a decoded copy from a stale one."""

    def decode(self, *, min_side: int = MIN_SIDE) -> Image.Image:
        """The image as RGB; ``ValueError`` or ``FileNotFoundError`` with its name if it cannot be read."""


@dataclass(frozen=True)
class FileSource:
    """An image file below a root folder."""

    root: Path
    name: str

    @property
    def stamp(self) -> str:
        """Size and times of change."""
        return _stamp(self.root / self.name)

    def decode(self, *, min_side: int = MIN_SIDE) -> Image.Image:
        """The image as RGB."""
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
        """Size and times of change of the archive, and the place in it."""
        return f"{_stamp(self.archive)}:{self.offset}:{self.size}"

    def decode(self, *, min_side: int = MIN_SIDE) -> Image.Image:
        """The image as RGB."""
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

    def decode(self, *, min_side: int = MIN_SIDE) -> Image.Image:
        """The image as RGB."""
        return Image.fromarray(self.pixels).convert("RGB")


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with one label each, 0 … number of classes − 1.

    ``ambiguous`` marks, where a data set knows it, the images that have an identical twin in another class.
    """

    name: str
    sources: Sequence[Source]
    labels: Tensor
    classes: tuple[str, ...]
    ambiguous: Tensor | None = field(default=None)

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.labels):
            raise ValueError(f"{self.name}: {len(self.sources)} images but {len(self.labels)} labels")
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise ValueError(f"{self.name}: labels must lie in 0 … {len(self.classes) - 1}")

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: Index) -> "ImageSet":
        """The chosen images; the classes stay as they are."""
        numbers = torch.arange(len(self))[as_rows(index, len(self))]
        ambiguous = None if self.ambiguous is None else self.ambiguous[numbers]
        sources = [self.sources[i] for i in numbers.tolist()]
        return ImageSet(self.name, sources, self.labels[numbers], self.classes, ambiguous)

    def of_classes(self, classes: Sequence[int]) -> "ImageSet":
        """The images of some classes, which are numbered anew in the given order."""
        new = torch.full((len(self.classes),), -1)
        new[torch.tensor(list(classes), dtype=torch.long)] = torch.arange(len(classes))
        chosen = self[new[self.labels] >= 0]
        names = tuple(self.classes[c] for c in classes)
        return ImageSet(self.name, chosen.sources, new[chosen.labels], names, chosen.ambiguous)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of the names and labels: two sets with the same one hold the same images."""
        digest = hashlib.sha256()
        for source, label in zip(self.sources, self.labels.tolist(), strict=True):
            digest.update(
                f"{len(source.name)}:{source.name}\n{len(self.classes[label])}:{self.classes[label]}\n".encode(
                    "utf-8", "surrogateescape"
                )
            )
        return digest.hexdigest()[:16]

    @cached_property
    def version(self) -> str:
        """A short hash of the fingerprint and every image's stamp: the key of whatever is made from the pixels."""
        digest = hashlib.sha256(self.fingerprint.encode())
        for source in self.sources:
            digest.update(f"{source.stamp}\n".encode())
        return digest.hexdigest()[:16]


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "absent"
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


@dataclass(frozen=True)
class Dataset:
    """What a SPEC names: images to train on, images of other classes to test on.

    Where a data set has its own query and gallery images (In-Shop), ``test`` holds the queries and ``gallery`` the
    images they are searched in, with the same classes; otherwise ``gallery`` is None and testing leaves one out.
    ``notes`` are lines to show the user: what is missing, what was passed over.
    """

    name: str
    train: ImageSet
    test: ImageSet
    gallery: ImageSet | None = None
    notes: tuple[str, ...] = ()


# -------------------- trees --------------------
# A folder and an uncompressed tar behind one face: names of files, their bytes, and images as sources.


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

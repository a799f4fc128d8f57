"""A set of labelled images, and where each image's bytes are: a file, a member of a tar, a row of an array."""

import hashlib
import io
from collections.abc import Sequence
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

"""All images of a data set in one row, whatever part they are in, as an audit numbers them."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from idml.data.sources import ArraySource, Dataset, FileSource, ImageSet, Source, TarSource


@dataclass(frozen=True, eq=False)
class AuditImages:
    """The parts of a data set one after another; an image's number counts through all of them.

    Classes of the same name are one class, in whatever part they are.
    """

    name: str
    parts: tuple[tuple[str, ImageSet], ...]

    @classmethod
    def of(cls, dataset: Dataset) -> "AuditImages":
        """Train, test and, where there is one, gallery; a set that serves as both is there once, as "all"."""
        if dataset.train is dataset.test:
            return cls(dataset.name, (("all", dataset.train),))
        gallery = () if dataset.gallery is None else (("gallery", dataset.gallery),)
        return cls(dataset.name, (("train", dataset.train), ("test", dataset.test), *gallery))

    @cached_property
    def sources(self) -> list[Source]:
        """Where each image is."""
        return [source for _, images in self.parts for source in images.sources]

    @cached_property
    def splits(self) -> list[str]:
        """The part of each image."""
        return [part for part, images in self.parts for _ in range(len(images))]

    @cached_property
    def classes(self) -> list[str]:
        """The names of all classes, in the order of the parts."""
        return list(dict.fromkeys(name for _, images in self.parts for name in images.classes))

    @cached_property
    def labels(self) -> Tensor:
        """The class of each image [n], a place in ``classes``."""
        place = {name: number for number, name in enumerate(self.classes)}
        return torch.cat([torch.tensor([place[c] for c in images.classes])[images.labels] for _, images in self.parts])

    @property
    def version(self) -> str:
        """A short hash of every image's name, label, part and stamp."""
        told = repr([(part, images.version) for part, images in self.parts])
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.sources)

    def label(self, number: int) -> str:
        """The name of an image's class."""
        return self.classes[int(self.labels[number])]


def checksum(source: Source) -> str:
    """16 hexadecimal digits that change when the image's bytes do, and not when it is only copied or touched."""
    digest = hashlib.sha256()
    try:
        if isinstance(source, FileSource):
            with (source.root / source.name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
        elif isinstance(source, TarSource):
            with source.archive.open("rb") as file:
                file.seek(source.offset)
                digest.update(file.read(source.size))
        elif isinstance(source, ArraySource):
            digest.update(repr(source.pixels.shape).encode() + np.ascontiguousarray(source.pixels).tobytes())
        else:
            digest.update(source.stamp.encode())
    except OSError:
        digest.update(b"absent")
    return digest.hexdigest()[:16]

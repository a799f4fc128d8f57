"""The contract of storage engines: the methods of an `Engine`, the types it takes and returns, and input checks.

An item is an image with a stable id: its unit semantic vector, its uncertainty, label, path, checksum and thumbnail.
An engine stores the items of one gallery and searches them.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from idml.embeddings import Embeddings, require_finite
from idml.evaluation.distance_bounds import LARGEST, Rows, RowVectors
from idml.metric import IntrospectiveMetric

FLOAT = np.dtype("<f4")

_CHECKSUM = re.compile("[0-9a-f]{64}")


class DamagedGallery(ValueError):
    """Stored bytes differ from what was written. The message names the file and, where it is known, the item."""


@dataclass(frozen=True)
class Properties:
    """The properties fixed when a gallery is made."""

    model: str
    """The fingerprint of the model: vectors of different models cannot be compared."""
    dimensions: int
    """Of the semantic vectors."""
    uncertainty: int = 0
    """Dimensions of the uncertainty vectors u. With 0 only ‖u‖ is kept, and the introspective metric is not offered."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model must be the fingerprint of a model, got {self.model!r}")
        for name, least in (("dimensions", 1), ("uncertainty", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number of {least} or more, got {value!r}")


@dataclass(frozen=True, slots=True)
class Item:
    """An image of a gallery, without its vectors and thumbnail.

    >>> Item(path="birds/1.jpg", checksum="0123456789abcdef" * 4).id
    '0123456789abcdef0123456789abcdef'
    """

    path: str
    """Relative to the gallery's root, with /, as `os.fsdecode` gives it; empty for an image without a file."""
    checksum: str
    """SHA-256 of the image's bytes, 64 hexadecimal digits."""
    label: str | None = None
    id: str = ""
    """A stable name. The default is half of the checksum, so equal images are one item."""

    def __post_init__(self) -> None:
        if not isinstance(self.checksum, str) or not _CHECKSUM.fullmatch(self.checksum):
            raise ValueError(f"a checksum is 64 hexadecimal digits (SHA-256), got {self.checksum!r}")
        if self.id == "":
            object.__setattr__(self, "id", self.checksum[:32])
        for name, text in (("id", self.id), ("path", self.path), ("label", self.label)):
            if not (text is None and name == "label"):
                check_text(name, text)
        if "\0" in self.path or self.path.startswith("/") or ".." in self.path.split("/"):
            raise ValueError(f"a path must stay below the gallery's root, got {self.path!r}")


def check_text(name: str, text: object) -> None:
    """Raise ValueError unless ``text`` is a string that can be stored (a lone surrogate cannot)."""
    try:
        if not isinstance(text, str):
            raise ValueError
        text.encode("utf-8", "surrogateescape")
    except ValueError:
        raise ValueError(f"the {name} of an item must be a valid string, got {text!r}") from None


class Added(NamedTuple):
    """How many of the items given to `Engine.add` were new, replaced an old one, or were there unchanged."""

    new: int
    replaced: int
    unchanged: int


class Found(NamedTuple):
    """The answer to n queries: ids and distances [n, min(k, items)], nearest first."""

    ids: list[list[str]]
    distances: Tensor


class Problem(NamedTuple):
    """A fault that `Engine.verify` found: the file, the item if it is known, and the reason."""

    file: str
    item: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.file}{'' if self.item is None else f', item {self.item!r}'}: {self.reason}"


class Engine(Protocol):
    """The methods of every engine.

    A method that changes the gallery returns once the change is durable. Several processes may write to one gallery.
    A method that reads sees one consistent state. Items come in the order in which they were added.
    """

    @property
    def properties(self) -> Properties:
        """The properties fixed when the gallery was made."""
        ...

    def add(self, items: Sequence[Item], embeddings: Embeddings, thumbnails: Sequence[bytes] | None = None) -> Added:
        """Add items: a known id with the same content is left alone, with other content it is replaced."""
        ...

    def remove(self, ids: Iterable[str]) -> int:
        """Remove items and return how many there were. Unknown ids are ignored."""
        ...

    def relabel(self, labels: Mapping[str, str | None]) -> int:
        """Change labels and return how many changed. An unknown id is an error, and then nothing changes."""
        ...

    def get(self, id: str) -> Item | None:
        """The item with this id, if there is one."""
        ...

    def get_many(self, ids: Sequence[str]) -> list[Item | None]:
        """The item with each of these ids, None where there is none. One request, not one for each id."""
        ...

    def items(self) -> Iterator[Item]:
        """All items."""
        ...

    def thumbnail(self, id: str) -> bytes:
        """The item's thumbnail, empty if it has none."""
        ...

    def embeddings(self, ids: Sequence[str] | None = None) -> Embeddings:
        """The vectors of some items, or of all, without u if the gallery does not store it."""
        ...

    def levels(self, ids: Sequence[str] | None = None) -> Tensor:
        """The uncertainty levels ‖u‖ of some items, or of all."""
        ...

    def search(self, queries: Embeddings, k: int, metric: IntrospectiveMetric | None = None) -> Found:
        """The k nearest items of every query: by the distance of unit vectors, or by the metric."""
        ...

    def read_metadata(self, name: str) -> bytes | None:
        """A text that was stored beside the items, None if there is none; only for engines without a folder."""
        ...

    def write_metadata(self, name: str, data: bytes) -> None:
        """Store a text beside the items durably; it replaces an earlier one of the name."""
        ...

    def verify(self) -> list[Problem]:
        """Read everything and compare checksums. The list is empty if all is intact."""
        ...

    def compact(self) -> int:
        """Free the space of removed and replaced items and return how many there were."""
        ...

    def free_log(self) -> None:
        """Free the disk space of a log of changes, if there is one; call it when the disk is full."""
        ...

    def backup(self, file: str | Path) -> None:
        """Write a copy of all items to a file."""
        ...

    def refresh(self) -> bool:
        """Read the newest state. True if another writer has changed the gallery since the last call."""
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, id: object) -> bool: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def item_rows(embeddings: Embeddings, properties: Properties) -> tuple[list[Rows], list[float]]:
    """The vectors to store, [s] or [s, u], and the levels ‖u‖."""
    rows = [_semantic(embeddings, properties)]
    if properties.uncertainty:
        rows.append(_uncertainty(embeddings, properties))
    levels: list[float] = embeddings.detach().level.float().tolist()
    return rows, levels


def query_rows(queries: Embeddings, properties: Properties, metric: IntrospectiveMetric | None) -> RowVectors:
    """Queries as the search kernel takes them, with u if there is a metric."""
    if not isinstance(queries, Embeddings):
        raise ValueError(f"queries must be Embeddings, got {type(queries).__name__}")
    semantic = _semantic(queries, properties)
    if metric is None:
        return RowVectors.of(semantic, semantic[:, :0])
    if not properties.uncertainty:
        raise ValueError("this gallery keeps no uncertainty vectors: search it without the introspective metric")
    return RowVectors.of(semantic, _uncertainty(queries, properties))


def ranking(metric: IntrospectiveMetric | None) -> IntrospectiveMetric | None:
    """The metric if it changes the order of items, else None (the distance of unit vectors)."""
    if metric is None or metric.rule == "off":
        return None
    if metric.rule != "similar":
        raise ValueError(f"rule {metric.rule!r} does not rank images; rules that do: 'similar', 'off'")
    return metric


def check_batch(items: Sequence[Item], embeddings: Embeddings, thumbnails: Sequence[bytes] | None) -> list[bytes]:
    """Check that items, embeddings and thumbnails fit together. Return one thumbnail for each item."""
    if not isinstance(embeddings, Embeddings):
        raise ValueError(f"items come with Embeddings, got {type(embeddings).__name__}")
    if not all(isinstance(item, Item) for item in items):
        raise ValueError("only Items can be added")
    images = [b""] * len(items) if thumbnails is None else list(thumbnails)
    if not all(isinstance(image, bytes) for image in images):
        raise ValueError("thumbnails must be bytes")
    if not len(items) == len(embeddings) == len(images):
        raise ValueError(f"{len(items)} items, {len(embeddings)} embeddings and {len(images)} thumbnails do not fit")
    return images


def _semantic(embeddings: Embeddings, properties: Properties) -> Rows:
    width = embeddings.semantic.shape[1]
    if width != properties.dimensions:
        raise ValueError(f"the embeddings have {width} dimensions, the gallery {properties.dimensions}")
    return _rows(embeddings.detach().unit)


def _uncertainty(embeddings: Embeddings, properties: Properties) -> Rows:
    u, width = embeddings.uncertainty.detach(), properties.uncertainty
    if u.shape[1] == 0:  # certain: u = 0
        u = u.new_zeros(len(u), width)
    if u.shape[1] != width:
        raise ValueError(f"the embeddings have {u.shape[1]} uncertainty dimensions, the gallery {width}")
    require_finite("uncertainty", u)
    if u.numel() and float(u.abs().max()) > LARGEST / math.sqrt(width):
        raise ValueError(f"the uncertainty reaches {float(u.abs().max()):.0e}, which is more than can be compared")
    return _rows(u)


def _rows(x: Tensor) -> Rows:
    return np.ascontiguousarray(x.to("cpu", torch.float32).numpy(), FLOAT)

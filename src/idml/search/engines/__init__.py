"""What keeps and searches the items of a gallery: the behaviour every engine has, and what it takes and gives.

An item is an image with a stable id: its unit semantic vector, its uncertainty, label, path, checksum and thumbnail.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from idml.embeddings import Embeddings
from idml.metric import IntrospectiveMetric

_CHECKSUM = re.compile("[0-9a-f]{64}")


class DamagedGallery(ValueError):
    """Stored bytes are not what was written; the message names the file and, where it is known, the item."""


@dataclass(frozen=True)
class Properties:
    """What is fixed when a gallery is made."""

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
    """An image of a gallery, but for its vectors and thumbnail.

    >>> Item(path="birds/1.jpg", checksum="0123456789abcdef" * 4).id
    '0123456789abcdef0123456789abcdef'
    """

    path: str
    """Below the gallery's root, with /; what is no UTF-8 as `os.fsdecode` gives it; empty for an image without file."""
    checksum: str
    """SHA-256 of the image's bytes, 64 hexadecimal digits."""
    label: str | None = None
    id: str = ""
    """Stable name; if not given, half of the checksum (equal images are then one item)."""

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
    """Refuse what is no string, or one that has no bytes (half of a surrogate pair)."""
    try:
        if not isinstance(text, str):
            raise ValueError
        text.encode("utf-8", "surrogateescape")
    except ValueError:
        raise ValueError(f"the {name} of an item must be a sound string, got {text!r}") from None


class Added(NamedTuple):
    """What became of the items given to `Engine.add`."""

    new: int
    replaced: int
    unchanged: int


class Found(NamedTuple):
    """The answer to n queries: ids and distances [n, min(k, items)], nearest first."""

    ids: list[list[str]]
    distances: Tensor


class Problem(NamedTuple):
    """Something `Engine.verify` found: in which file, of which item (if it can be told), and what."""

    file: str
    item: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.file}{'' if self.item is None else f', item {self.item!r}'}: {self.reason}"


class Engine(Protocol):
    """What every engine does.

    A changing method returns after its change can no longer be lost. Reading sees one consistent state of the gallery,
    which only the engine's own changes and `refresh` replace. Items come in the order in which they were added.
    """

    @property
    def properties(self) -> Properties:
        """What was fixed when the gallery was made."""
        ...

    def add(self, items: Sequence[Item], embeddings: Embeddings, thumbnails: Sequence[bytes] | None = None) -> Added:
        """Add items: a known id with the same content is left alone, with other content it is replaced."""
        ...

    def remove(self, ids: Iterable[str]) -> int:
        """Remove items; how many there were. Ids that are not there are passed over."""
        ...

    def relabel(self, labels: Mapping[str, str | None]) -> int:
        """Give items other labels; how many changed. An unknown id is an error, and then nothing changes."""
        ...

    def get(self, id: str) -> Item | None:
        """The item with this id, if there is one."""
        ...

    def get_many(self, ids: Sequence[str]) -> list[Item | None]:
        """The item with each of these ids, None where there is none: one question to a server, not one for each."""
        ...

    def items(self) -> Iterator[Item]:
        """All items."""
        ...

    def thumbnail(self, id: str) -> bytes:
        """The item's thumbnail, empty if it has none."""
        ...

    def embeddings(self, ids: Sequence[str] | None = None) -> Embeddings:
        """The vectors of some items, or of all; without uncertainty vectors where the gallery keeps none."""
        ...

    def levels(self, ids: Sequence[str] | None = None) -> Tensor:
        """The uncertainty levels ‖u‖ of some items, or of all."""
        ...

    def search(self, queries: Embeddings, k: int, metric: IntrospectiveMetric | None = None) -> Found:
        """The k nearest items of every query: by the distance of unit vectors, or by the metric."""
        ...

    def duplicates(self, threshold: float) -> list[list[str]]:
        """Groups of items with equal checksums, or linked by distances below the threshold."""
        ...

    def verify(self) -> list[Problem]:
        """Read everything again and compare checksums; empty if all is sound."""
        ...

    def compact(self) -> int:
        """Give back the room of removed and replaced items; how many there were."""
        ...

    def refresh(self) -> bool:
        """Go on to the newest state; whether there was one."""
        ...

    def close(self) -> None:
        """Let go of files, connections and locks."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, id: object) -> bool: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

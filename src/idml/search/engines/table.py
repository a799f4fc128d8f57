"""What a gallery's log says about its items: the records, and the table in memory that they add up to.

A record is one JSON object in ASCII. An item's vectors lie in the row of the vector files that has its number; rows
are only ever added. A replaced item gets a new row; the old one, like that of a removed item, is dead.

    {"add": {"row": the first row, "id": […], "label": […], "path": […], "checksum": […], "level": [‖u‖, …],
             "semantic": [CRC-32 of the row, …], "uncertainty": [the same; empty without uncertainty vectors],
             "thumbnail": [[first byte, length, CRC-32], …]}}
    {"remove": [id, …]}
    {"label": {id: label, …}}
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import add
from typing import Any, NamedTuple

from idml.search.engines import DamagedGallery, Item

COLUMNS = ("id", "label", "path", "checksum", "level", "semantic", "uncertainty", "thumbnail")
_KINDS: dict[str, set[type]] = {
    "id": {str}, "label": {str, type(None)}, "path": {str}, "checksum": {str}, "level": {float, int},
    "semantic": {int}, "uncertainty": {int}, "thumbnail": {list},
}  # fmt: skip


class Thumbnail(NamedTuple):
    """Where a thumbnail lies in its file, and its CRC-32."""

    begin: int
    length: int
    checksum: int


class Table:
    """The items by row; ``alive[row]`` is 1 for an item that is there, and ``row[id]`` finds it."""

    def __init__(self, uncertain: bool) -> None:
        self.uncertain = uncertain  # whether there are uncertainty vectors
        self.ids: list[str] = []
        self.labels: list[str | None] = []
        self.paths: list[str] = []
        self.checksums: list[str] = []
        self.levels: list[float] = []
        self.semantic: list[int] = []
        self.uncertainty: list[int] = []
        self.thumbnails: list[list[int]] = []
        self.thumbnails_end = 0
        self.alive = bytearray()
        self.row: dict[str, int] = {}

    def __len__(self) -> int:
        """Rows, dead ones too."""
        return len(self.ids)

    def item(self, row: int) -> Item:
        """The item in a row."""
        return Item(id=self.ids[row], path=self.paths[row], checksum=self.checksums[row], label=self.labels[row])

    def thumbnail(self, row: int) -> Thumbnail:
        """Where the thumbnail of a row lies."""
        return Thumbnail(*self.thumbnails[row])

    def bury(self, id: str) -> None:
        """Let the item's row be dead."""
        if (row := self.row.pop(id, None)) is not None:
            self.alive[row] = 0

    def live(self) -> list[int]:
        """The rows of the items, in their order."""
        return [row for row, alive in enumerate(self.alive) if alive]

    def live_ids(self, first: int) -> list[str]:
        """The items from row ``first`` on."""
        return [self.ids[row] for row in range(first, len(self)) if self.alive[row]]

    def cut(self, rows: int) -> None:
        """Give up all rows from ``rows`` on."""
        for id in self.live_ids(rows):
            self.bury(id)
        for column in self._columns():
            del column[rows:]
        del self.alive[rows:]

    def apply(self, payload: bytes, rows: int) -> None:
        """Bring the table up to date with a record, ``rows`` being as many as the vector files hold."""
        try:
            ((kind, change),) = json.loads(payload).items()
            changes: dict[str, Callable[[Any, int], None]] = {
                "add": self._add,
                "remove": self._remove,
                "label": self._label,
            }
            changes[kind](change, rows)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedGallery(f"a record cannot be read ({type(error).__name__}: {error})") from None

    def _add(self, change: dict[str, Any], rows: int) -> None:
        columns = [change[name] for name in COLUMNS]
        first, count = change["row"], len(change["id"])
        for name, column in zip(COLUMNS, columns, strict=True):
            length = count if name != "uncertainty" or self.uncertain else 0
            if type(column) is not list or len(column) != length or not set(map(type, column)) <= _KINDS[name]:
                raise ValueError(f"no sound column {name}")
        places = list(chain.from_iterable(change["thumbnail"]))
        lengths = set(map(len, change["thumbnail"]))
        if not (lengths <= {3} and set(map(type, places)) <= {int} and min(places, default=0) >= 0):
            raise ValueError("a thumbnail is nowhere")
        if first != len(self) and not (type(first) is int and len(self) < first <= rows):
            raise ValueError(f"row {first} comes after {len(self)}")
        self._skip(first - len(self))  # rows whose record is lost
        for own, column in zip(self._columns(), columns, strict=True):
            own.extend(column)
        self.thumbnails_end = max([self.thumbnails_end, *map(add, places[0::3], places[1::3])])
        self.alive.extend(b"\1" * count)
        for row, id in enumerate(change["id"], first):
            self.bury(id)
            self.row[id] = row

    def _skip(self, rows: int) -> None:
        nothing: tuple[object, ...] = ("", None, "", "", 0.0, 0, 0, [0, 0, 0])
        for own, value in zip(self._columns(), nothing, strict=True):
            own.extend([value] * rows)  # (without uncertainty vectors that column is never read)
        self.alive.extend(bytes(rows))

    def _remove(self, change: list[str], rows: int) -> None:
        for id in change:
            self.bury(id)

    def _label(self, change: dict[str, str | None], rows: int) -> None:
        for id, label in change.items():
            if type(label) not in _KINDS["label"]:
                raise ValueError("a label that is no string")
            if (row := self.row.get(id)) is not None:
                self.labels[row] = label

    def _columns(self) -> list[list[Any]]:
        return [
            self.ids, self.labels, self.paths, self.checksums, self.levels,
            self.semantic, self.uncertainty, self.thumbnails,
        ]  # fmt: skip


def add_record(
    row: int,
    items: Sequence[Item],
    levels: Sequence[float],
    semantic: Sequence[int],
    uncertainty: Sequence[int],
    thumbnails: Sequence[Thumbnail],
) -> bytes:
    """The record of items in the rows from ``row`` on, with the CRC-32 of their vectors."""
    columns = (
        [item.id for item in items], [item.label for item in items], [item.path for item in items],
        [item.checksum for item in items], levels, semantic, uncertainty, thumbnails,
    )  # fmt: skip
    return _record({"add": {"row": row, **dict(zip(COLUMNS, columns, strict=True))}})


def remove_record(ids: Sequence[str]) -> bytes:
    """The record of removed items."""
    return _record({"remove": ids})


def label_record(labels: Mapping[str, str | None]) -> bytes:
    """The record of changed labels."""
    return _record({"label": dict(labels)})


def _record(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")

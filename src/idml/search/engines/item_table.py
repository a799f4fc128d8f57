"""What is held in memory of all items of a gallery, and how it follows the changes of other processes."""

import sqlite3
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from idml.search.engines.base import DamagedGallery, Problem
from idml.search.engines.database import (
    ITEM_COLUMNS,
    LOST_ROWS,
    REPAIRABLE,
    Row,
    State,
    digests_of_any,
    digests_of_columns,
    first_text,
    read_blocks,
    to_signed,
    to_text,
)

_MORE = 1024  # positions more than are needed


class ItemTable:
    """What is held in memory of all items, by position."""

    def __init__(self, connection: sqlite3.Connection, state: State) -> None:
        self.state = state
        self.ids: list[str] = []
        self.rows: dict[str, int] = {}
        """The positions of intact items by id, in ascending order."""
        self.damaged: dict[int, str | None] = {}
        """Positions of rows that are not what was written, with their ids where these are known; −1: rows are lost."""
        self.live = np.zeros(0, np.bool_)
        self.digests = np.zeros(0, np.uint64)
        self.semantic, self.uncertainty = np.zeros(0, np.uint32), np.zeros(0, np.uint32)
        self.levels = np.zeros(0, np.float32)
        self._total = 0
        self._read(connection, 0, state.next)
        if not self.agrees():
            self._name_damage(connection)

    def __len__(self) -> int:
        """The number of items, damaged ones too."""
        return len(self.rows) + sum(position >= 0 for position in self.damaged)

    @property
    def digest(self) -> int:
        """The sum of the digests of intact rows, modulo 2⁶⁴, as a signed number."""
        return to_signed(self._total)

    def agrees(self) -> bool:
        """Whether the rows are those that the state speaks of."""
        return not self.damaged and len(self.rows) == self.state.items and self.digest == self.state.digest

    def crcs(self, kind: str) -> NDArray[np.uint32]:
        """The CRC-32 of the vectors s or u."""
        return self.semantic if kind == "semantic" else self.uncertainty

    def find(self, id: str) -> int | None:
        """The position of an item, also of a damaged one; an error if it may be one whose id is unknown."""
        position = self.rows.get(id)
        if position is None and self.damaged:
            position = next((place for place, own in self.damaged.items() if own == id), None)
            if position is None and None in self.damaged.values():
                raise DamagedGallery(LOST_ROWS)
        return position

    def problem(self, file: str, position: int) -> Problem:
        """What is wrong with a position."""
        id = self.damaged[position]
        return Problem(file, id, LOST_ROWS if id is None else REPAIRABLE.format("row"))

    def problems(self, file: str) -> list[Problem]:
        """What is wrong with all positions."""
        return list(dict.fromkeys(self.problem(file, position) for position in sorted(self.damaged)))

    def follow(self, connection: sqlite3.Connection, state: State) -> bool:
        """Read what has changed; whether that was possible and adds up to the state."""
        mine = self.state
        if state.generation != mine.generation or not state.oldest - 1 <= mine.change <= state.change:
            return False
        ranges = connection.execute("SELECT first, last FROM changes WHERE change > ?", (mine.change,)).fetchall()
        for first, last in ranges:
            if not (isinstance(first, int) and isinstance(last, int) and 0 <= first <= last < state.next):
                return False
            self.read(connection, first, last)
        self.state = state
        return self.agrees()

    def read(self, connection: sqlite3.Connection, first: int, last: int) -> None:
        """Read the rows of some positions again: they were added, changed or removed."""
        before = first + np.flatnonzero(self.live[first : last + 1])
        self.live[before] = False
        self._total -= int(self.digests[before].sum(dtype=np.uint64))
        for position in [position for position in self.damaged if first <= position <= last]:
            del self.damaged[position]
        self._read(connection, first, last + 1)
        for position in before[~self.live[before]].tolist():
            if self.rows.get(self.ids[position]) == position:
                del self.rows[self.ids[position]]

    def _read(self, connection: sqlite3.Connection, first: int, end: int) -> None:
        self._grow(end)
        for block in read_blocks(connection, "items", f"{ITEM_COLUMNS}, digest", first, end):
            *columns, digests = zip(*block, strict=True)
            with suppress(TypeError, ValueError, OverflowError):
                found = np.array(digests, np.int64).view(np.uint64)
                if np.array_equal(digests_of_columns(columns), found):
                    self._put(block, found)
                    continue
            found = np.array([row[9] if isinstance(row[9], int) else 0 for row in block], np.int64).view(np.uint64)
            intact = digests_of_any([row[:9] for row in block]) == found
            self._put([row for row, ok in zip(block, intact, strict=True) if ok], found[intact])
            for row in (row for row, ok in zip(block, intact, strict=True) if not ok):
                self.damaged[row[0]] = first_text(connection, "SELECT id FROM vectors WHERE position = ?", row[0])

    def _put(self, block: Sequence[Row], digests: NDArray[np.uint64]) -> None:
        if not block:
            return
        at, ids, _, _, _, levels, semantic, uncertainty, _, _ = zip(*block, strict=True)
        places, names = np.array(at), [id.decode("utf-8", "surrogateescape") for id in ids]
        if at[0] == len(self.ids) and places[-1] - places[0] == len(at) - 1:
            self.ids += names
        else:
            self.ids += [""] * (at[-1] + 1 - len(self.ids))
            for position, name in zip(at, names, strict=True):
                self.ids[position] = name
        fresh = self.rows.keys().isdisjoint(names) and len(set(names)) == len(names)
        if fresh:
            self.rows.update(zip(names, at, strict=True))
        for position, name in zip(at, names, strict=True) if not fresh else ():
            if (old := self.rows.get(name)) is not None and old != position:
                if self.live[old]:
                    self.damaged[old] = None  # two rows of one id: one of them is not what was written
                del self.rows[name]  # it comes last now
            self.rows[name] = position
        self.live[places], self.levels[places] = True, levels
        self.semantic[places], self.uncertainty[places] = semantic, uncertainty
        self.digests[places] = digests
        self._total += int(digests.sum(dtype=np.uint64))

    def _grow(self, end: int) -> None:
        if end > len(self.live):
            more = end + end // 4 + _MORE - len(self.live)
            for name in ("live", "digests", "semantic", "uncertainty", "levels"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))

    def _name_damage(self, connection: sqlite3.Connection) -> None:
        """Find out which items are damaged or lost, by the ids beside their vectors."""
        for block in read_blocks(connection, "vectors", "position, id", 0, self.state.next):
            for position, id in block:
                if not self.live[position]:
                    self.damaged[position] = to_text(id)
        for position, id in self.damaged.items():
            if id in self.rows:
                self.damaged[position] = None
        if len(self) != self.state.items or (not self.damaged and self.digest != self.state.digest):
            self.damaged[-1] = None

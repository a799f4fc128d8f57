"""An append log: records that are there as a whole or not at all. All numbers are little-endian.

    byte 0         b"idml log"
    byte 16, 32    two slots: end of the acknowledged records (uint64), CRC-32 of these 8 bytes, 4 bytes unused
    from byte 64   records, one after another:
                       marker b"\\xffrec", length of the payload (uint32), its CRC-32, CRC-32 of these 12 bytes, payload

A record is written behind the last one and forced to disk (fsync); then one slot, in turns, is given its end. So:

- a record that is not sound, beyond both slots, is the tail of a write that was cut short: readers stop before it, and
  the next writer cuts it off;
- a record that is not sound below a slot was acknowledged: the file is damaged, and nothing is passed over in silence;
- a slot that is not sound is ignored; the other one is at most one record behind.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from idml.search.engines import DamagedGallery

MAGIC, MARKER = b"idml log", b"\xffrec"
START = 64  # where records begin
LONGEST = 1 << 30  # payload of one record
_SLOTS = (16, 32)
_SLOT = struct.Struct("<QI")
_RECORD = struct.Struct("<4sIII")


def write_at(file: int, data: bytes | memoryview, position: int) -> None:
    """Write all of ``data``; a single call may write less than it is given."""
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written


def read_at(file: int, length: int, position: int) -> bytes:
    """``length`` bytes, fewer only at the end of the file."""
    parts = []
    while length > 0 and (part := os.pread(file, length, position)):
        parts.append(part)
        length, position = length - len(part), position + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Log:
    """An open log; ``end`` is where the records that were read or written so far end."""

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path, self.end = path, START
        self.file = os.open(path, os.O_RDWR if write else os.O_RDONLY)
        self._slot = 0  # the one to be written next

    @staticmethod
    def create(path: Path) -> None:
        """Write an empty log."""
        slot = _slot(START)
        head = MAGIC.ljust(_SLOTS[0], b"\0") + slot.ljust(16, b"\0") + slot.ljust(16, b"\0")
        with path.open("xb") as file:
            file.write(head.ljust(START, b"\0"))
            file.flush()
            os.fsync(file.fileno())

    def read(self, *, salvage: bool = False) -> Iterator[bytes]:
        """The payloads from ``end`` on. Damage raises `DamagedGallery`, or is passed over if asked to ``salvage``."""
        for begin, end, payload in self._records(self.end):
            if payload is None and not salvage:
                raise DamagedGallery(f"{self.path} is damaged at byte {begin}")
            if payload is not None:
                yield payload
            self.end = end  # not if the payload's reader raised: it is read again then

    def damage(self) -> list[tuple[int, int]]:
        """Where the file is damaged, as first byte and the byte after the last; all of it is read again."""
        return [(begin, end) for begin, end, payload in self._records(START) if payload is None]

    def write(self, payload: bytes) -> int:
        """Write one record behind ``end``; its length. It counts after `commit`, and `cut` takes it back."""
        head = _RECORD.pack(MARKER, len(payload), zlib.crc32(payload), 0)[:12]
        record = head + struct.pack("<I", zlib.crc32(head)) + payload
        write_at(self.file, record, self.end)
        return len(record)

    def commit(self, length: int) -> None:
        """Force the record that was written to disk; on return it is acknowledged."""
        os.fsync(self.file)
        self.end += length
        with suppress(OSError):  # the record is safe; a slot that is one behind costs nothing
            os.pwrite(self.file, _slot(self.end), _SLOTS[self._slot])
            self._slot = 1 - self._slot

    def cut(self) -> None:
        """Cut off whatever lies behind ``end``: what a write left that was cut short."""
        if os.fstat(self.file).st_size > self.end:
            os.ftruncate(self.file, self.end)
            os.fsync(self.file)

    def is_at(self, path: Path) -> bool:
        """Whether this is the file that ``path`` names now."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.file))
        except FileNotFoundError:
            return False

    def _records(self, position: int) -> Iterator[tuple[int, int, bytes | None]]:
        """Begin, end and payload of each record; None for a stretch of damage."""
        sound, acknowledged = self._head()  # read before the records: those it speaks of were whole by then
        if not sound and position == START:
            yield 0, START, None
        size = os.fstat(self.file).st_size
        while position < size or position < acknowledged:
            payload = self._record(position, size)
            if payload is not None:
                end = position + _RECORD.size + len(payload)
            elif position < acknowledged:
                end = self._next(position + 1, size, acknowledged)
            else:
                return
            yield position, end, payload
            position = end

    def _head(self) -> tuple[bool, int]:
        """Whether the head is sound, and where the acknowledged records end."""
        head = read_at(self.file, START, 0).ljust(START, b"\0")
        ends = []
        for place in _SLOTS:
            slot = head[place : place + _SLOT.size]
            end = int(_SLOT.unpack(slot)[0])
            ends.append(end if slot == _slot(end) else -1)
        self._slot = ends.index(min(ends))  # the one that holds less
        return head.startswith(MAGIC) and max(ends) >= START, max(ends)

    def _record(self, position: int, size: int) -> bytes | None:
        head = read_at(self.file, _RECORD.size, position)
        if len(head) < _RECORD.size:
            return None
        marker, length, checksum, own = _RECORD.unpack(head)
        if marker != MARKER or own != zlib.crc32(head[:12]) or length > min(LONGEST, size - position):
            return None
        payload = read_at(self.file, length, position + _RECORD.size)
        return payload if len(payload) == length and zlib.crc32(payload) == checksum else None

    def _next(self, position: int, size: int, acknowledged: int) -> int:
        """Where the next sound record begins; the end if there is none."""
        rest = read_at(self.file, size - position, position)
        found = rest.find(MARKER)
        while found >= 0:
            if self._record(position + found, size) is not None:
                return position + found
            found = rest.find(MARKER, found + 1)
        return max(size, acknowledged)


def _slot(end: int) -> bytes:
    number = struct.pack("<Q", end)
    return number + struct.pack("<I", zlib.crc32(number))

"""A process that decodes images, so that a decoder that hangs, crashes or takes too much memory can be killed.

`DecoderProcess` is the side of the caller. The process itself is ``python -m idml.data.decoder_main``. Of the large
libraries it imports Pillow alone. It reads jobs from a socket (its standard input) and ends when the socket closes.

    job      length of the image (8 bytes), smallest side to decode (4), length of the name (4); the name, the image
    reply    length (4 bytes), JSON: format, width and height, or refused and reason
    pixels   RGB, row by row, if the image was decoded
"""

import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from PIL import Image

COMMAND = (sys.executable, "-m", "idml.data.decoder_main")
_BAND = 1 << 22  # bytes of pixels that are copied at a time
_INHERITED = re.compile("PATH|HOME|LANG|LC_[A-Z]+|PYTHON[A-Z_]*|LD_LIBRARY_PATH|TMPDIR|SYSTEMROOT")  # no key or token
READY = b"ready"
JOB = struct.Struct(">QII")

Refusal = Literal["format", "size", "content"]


class RefusedImage(ValueError):
    """An image that is not decoded: of an unknown format, too large, or with broken content."""

    def __init__(self, kind: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.kind: Refusal = kind


class Decoded(NamedTuple):
    """An RGB image and the format of its file."""

    image: Image.Image
    format: str


class DecoderDied(Exception):
    """The process has ended: it was killed, or it crashed."""


class DecodedHeader(NamedTuple):
    """Format and size of an image that the process has decoded."""

    format: str
    width: int
    height: int


class DecoderProcess:
    """A process that decodes one image at a time. It starts with the first image, and again after its death.

    Only one thread may decode; `kill` may be called by any. A job is two calls: `decode`, then `read_pixels`.
    """

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._child: _Child | None = None
        self._header: DecodedHeader | None = None

    def decode(self, data: bytes, name: str = "upload", min_side: int = 0) -> DecodedHeader:
        """Decode an image as `idml.data.images.decode_image` does.

        An image that cannot be read is a `RefusedImage` with its ``name``.
        """
        if self._header is not None:  # nobody has read the pixels of the last image
            self.kill()
        child = self._child
        if child is None:
            child = self._child = _Child(self._command)
        try:
            reply = child.decode(data, name, min_side)
        except (EOFError, OSError):
            failed_to_start = not child.ready and self._child is child
            self.kill()
            if failed_to_start:
                raise OSError(f"the process that decodes images does not start: {' '.join(self._command)}") from None
            raise DecoderDied from None
        if "refused" in reply:
            raise RefusedImage(reply["refused"], reply["reason"])
        self._header = DecodedHeader(reply["format"], reply["width"], reply["height"])
        return self._header

    def read_pixels(self) -> Decoded:
        """Return the image that `decode` has decoded."""
        child, header, self._header = self._child, self._header, None
        try:
            if child is None or header is None:
                raise EOFError
            return Decoded(child.read_pixels(header.width, header.height), header.format)
        except (EOFError, OSError):
            self.kill()
            raise DecoderDied from None

    def kill(self) -> None:
        """End the process, whatever it does; a thread that waits for it gets `DecoderDied`."""
        child, self._child, self._header = self._child, None, None
        if child is not None:
            child.end()


class _Child:
    """A running process and its socket. The lock keeps the socket open while it is used."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.ready = False
        self._lock = threading.RLock()
        self._channel, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment)

    def decode(self, data: bytes, name: str, min_side: int) -> dict[str, Any]:
        with self._lock:
            if not self.ready:
                receive(self._channel, len(READY))
                self.ready = True
            called = name.encode("utf-8", "surrogateescape")
            self._channel.sendall(JOB.pack(len(data), min_side, len(called)) + called)
            self._channel.sendall(data)
            (length,) = struct.unpack(">I", receive(self._channel, 4))
            reply: dict[str, Any] = json.loads(bytes(receive(self._channel, length)))
            return reply

    def read_pixels(self, width: int, height: int) -> Image.Image:
        with self._lock:
            bands = list(split_rows(width, height))
            if len(bands) == 1:
                return Image.frombytes("RGB", (width, height), receive(self._channel, 3 * width * height))
            image = Image.new("RGB", (width, height))
            for top, rows in bands:
                band = Image.frombytes("RGB", (width, rows), receive(self._channel, 3 * width * rows))
                image.paste(band, (0, top))
            return image

    def end(self) -> None:
        self._process.kill()  # a thread that holds the lock now gets the end of the socket
        with self._lock:
            self._process.wait()
            self._channel.close()


def receive(channel: socket.socket, size: int) -> bytearray:
    """Receive this many bytes; the end of the socket is an EOFError."""
    data = bytearray(size)
    view, place = memoryview(data), 0
    while place < size:
        count = channel.recv_into(view[place:])
        if count == 0:
            raise EOFError
        place += count
    return data


def split_rows(width: int, height: int) -> Iterator[tuple[int, int]]:
    """Iterate over the first row and the number of rows of each band."""
    rows = max(1, _BAND // (3 * width))
    for top in range(0, height, rows):
        yield top, min(rows, height - top)

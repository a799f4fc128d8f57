"""The process that decodes images for a `idml.data.decoder_process.DecoderProcess`, which has the protocol."""

import io
import json
import os
import resource
import signal
import socket
import struct

from idml.data.decoder_process import JOB, READY, RefusedImage, receive, split_rows
from idml.data.images import decode_with_format

MAX_MEMORY = 1_500_000_000  # bytes of address space; an image of 64 million pixels needs up to 1.1 GB
_ORPHAN_SECONDS = 120  # a job of a caller that was killed ends after this time


def main() -> None:
    """Decode images until the socket at standard input closes."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, which then closes the socket
    channel = socket.socket(fileno=0)
    channel.sendall(READY)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries print what they think of broken images
    while True:
        try:
            length, min_side, letters = JOB.unpack(receive(channel, JOB.size))
            name = receive(channel, letters).decode("utf-8", "surrogateescape")
            _do_job(channel, io.BytesIO(receive(channel, length)), name, min_side)
        except (EOFError, OSError):
            return


def _do_job(channel: socket.socket, file: io.BytesIO, name: str, min_side: int) -> None:
    signal.alarm(_ORPHAN_SECONDS)  # kills the process, also within a decoder's C code
    try:
        image, format = decode_with_format(file, name, min_side=min_side)
    except RefusedImage as error:
        _send(channel, {"refused": error.kind, "reason": str(error)})
        return
    finally:
        signal.alarm(0)
    _send(channel, {"format": format, "width": image.width, "height": image.height})
    for top, height in split_rows(image.width, image.height):
        channel.sendall(image.crop((0, top, image.width, top + height)).tobytes())


def _send(channel: socket.socket, reply: dict[str, object]) -> None:
    text = json.dumps(reply).encode()
    channel.sendall(struct.pack(">I", len(text)) + text)


if __name__ == "__main__":
    main()

"""Images from files and streams, decoded as RGB; and squares of them for a model."""

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from PIL import Image

from idml.data.decoder_process import DecoderDied, DecoderProcess
from idml.data.decoding import MIN_SIDE, Decoded, RefusedImage, container_of, decode_with_format

if TYPE_CHECKING:  # imported where it is used
    from torch import Tensor

DECODE_SECONDS = 60.0  # for an image in a decoder process
_MAX_BYTES = 1 << 30
_PROCESSES = max(2, os.cpu_count() or 2)  # at a time


def read_image(path: str | Path, *, min_side: int = MIN_SIDE) -> Image.Image:
    """Decode an image file as RGB; see `decode_image`."""
    return decode_image(path, str(path), min_side=min_side)


def decode_image(file: str | Path | BinaryIO, name: str, *, min_side: int = MIN_SIDE) -> Image.Image:
    """Decode an image as RGB: rotated as its EXIF says, transparency on white, 16-bit grey scaled, the first frame.

    A large JPEG is decoded at reduced size, never below ``min_side`` pixels on its shorter side. Reducing changes an
    embedding a little. So at least 512 pixels are decoded even if fewer are wanted: a photo then has the same pixels in
    training, evaluation and search. An image that cannot be read is a ``ValueError`` with its ``name``.

    HEIF and AVIF are decoded by another process, which is killed after `DECODE_SECONDS` (see `idml.data.decoding`).
    """
    try:
        if not isinstance(file, str | Path):
            return _decode(file, name, min_side).image
        with open(file, "rb") as stream:
            return _decode(stream, name, min_side).image
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no image {name!r}") from None
    except RefusedImage:
        raise
    except OSError as error:
        raise RefusedImage("content", f"cannot read the image {name!r}: {error.strerror or error}") from error


def _decode(file: BinaryIO, name: str, min_side: int) -> Decoded:
    file.seek(0)
    if container_of(file.read(12)) is None:
        return decode_with_format(file, name, min_side=min_side)
    file.seek(0)
    data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise RefusedImage("size", f"cannot read the image {name!r}: it is larger than {_MAX_BYTES:,} bytes")
    return _decode_elsewhere(data, name)


class _Pool:
    """Decoder processes that wait for images. They start when they are needed and end with this process."""

    def __init__(self) -> None:
        self.free = threading.BoundedSemaphore(_PROCESSES)
        self.idle: list[DecoderProcess] = []


_pool = _Pool()


def _start_anew() -> None:
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):  # a forked process must not talk to its parent's decoders
    os.register_at_fork(after_in_child=_start_anew)


def _decode_elsewhere(data: bytes, name: str) -> Decoded:
    """Decode an image in a decoder process, which is killed at the deadline."""
    pool = _pool
    with pool.free:
        process = pool.idle.pop() if pool.idle else DecoderProcess()
        timer = threading.Timer(DECODE_SECONDS, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.decode(data, name)
            return process.read_pixels()
        except DecoderDied:
            reason = f"decoding crashed, or took more than {DECODE_SECONDS:g} seconds"
            raise RefusedImage("content", f"cannot read the image {name!r}: {reason}") from None
        finally:
            timer.cancel()
            pool.idle.append(process)


# -------------------- squares for a model --------------------


def load_square(path: str | Path, size: int, *, grey: bool = False) -> "Tensor":
    """Load an image file as uint8 [3, size, size] (or [1, …] if ``grey``); see `crop_for_test`."""
    return crop_for_test(read_image(path, min_side=resized_side(size)), size, grey=grey)


def crop_for_test(image: Image.Image, size: int, *, grey: bool = False) -> "Tensor":
    """Resize an RGB image of any shape to a square, and crop the centre: what the test protocol uses."""
    import numpy as np
    import torch

    side = resized_side(size)
    image = image.resize((side, side), Image.Resampling.BILINEAR)
    place = (side - size) // 2
    image = image.crop((place, place, place + size, place + size)).convert("L" if grey else "RGB")
    pixels = torch.from_numpy(np.array(image))
    return pixels.unsqueeze(0) if grey else pixels.permute(2, 0, 1).contiguous()


def resized_side(size: int) -> int:
    """Return the side to which an image is resized before ``size`` pixels are cropped from it: size·256/224.

    (The paper resizes to 256 × 256 and crops to 224 × 224.)
    """
    if size < 1:
        raise ValueError(f"the image size must be 1 or larger, got {size}")
    return round(size * 256 / 224)

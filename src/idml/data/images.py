"""Decoding and resizing of images. Images are untrusted input: only known formats and bounded sizes are decoded.

Ordinary files are decoded where they are needed: JPEG, PNG, WebP and GIF with bounded bytes, pixels, and scans of a
JPEG (each scan of a few bytes may visit every pixel). So the time is at most a constant times (bytes + pixels · scans).

Everything else is left to a decoder process, which has a deadline and little memory: larger files, JPEGs with unusually
many scans or with arithmetic coding, and formats whose time and memory do not follow from such counts. In HEIF (with
the HEVC of phones: HEIC) and AVIF a header can name a small size for a large coded picture, and one part of a picture
can be used thousands of times. A TIFF may use one part for every tile. Compressed BMP is decoded in Python.
"""

import os
import re
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from PIL import Image, ImageOps, UnidentifiedImageError

from idml.data.decoder_process import Decoded, DecoderDied, DecoderProcess, Refusal, RefusedImage

if TYPE_CHECKING:  # decoder processes need no numpy: they start in a fraction of the time
    from numpy import float64
    from numpy.typing import NDArray
    from torch import Tensor

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF")
_CONTAINERS = ("AVIF", "HEIF")
MAX_PIXELS = 64_000_000
MAX_SIDE = 65_535  # the largest side of a JPEG; the memory for resizing an image grows with its longer side
MAX_SCANS = 100
_USUAL_SCANS = 20  # an ordinary progressive JPEG has 10 (18 in CMYK)
_USUAL_BYTES = 16_000_000
_ISOLATED_STARTS = (b"BM", b"II", b"MM")  # BMP and TIFF
_SCAN = b"\xff\xda"  # the marker that begins a scan
_ARITHMETIC = re.compile(rb"\xff[\xc9-\xcb\xcd-\xcf]")  # markers of JPEGs that hardly anybody writes
MIN_SIDE = 512
_BLOCK = 1 << 18  # pixels that are converted at a time
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_TILE_WIDTH, _TILE_HEIGHT = 322, 323  # tags of a TIFF
_AVIF_BRANDS = (b"avif", b"avis")
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
_warnings_lock = threading.Lock()
_decoding: "list[warnings.catch_warnings[None]]" = []  # one for each thread that decodes now
DECODE_SECONDS = 60.0  # for an image in a decoder process
_MAX_BYTES = 1 << 30  # of an image for a decoder process
_PROCESSES = max(2, os.cpu_count() or 2)  # at a time


def read_image(path: str | Path, *, min_side: int = MIN_SIDE) -> Image.Image:
    """Decode an image file as RGB; see `decode_image`."""
    return decode_image(path, str(path), min_side=min_side)


def decode_image(file: str | Path | BinaryIO, name: str, *, min_side: int = MIN_SIDE) -> Image.Image:
    """Decode an image as RGB: rotated as its EXIF says, transparency on white, 16-bit grey scaled, the first frame.

    A large JPEG is decoded at reduced size, never below ``min_side`` pixels on its shorter side. Reducing changes an
    embedding a little. So at least 512 pixels are decoded even if fewer are wanted: a photo then has the same pixels in
    training, evaluation and search. An image that cannot be read is a ``ValueError`` with its ``name``.

    Some files are decoded by another process, which is killed after `DECODE_SECONDS` (see the head of this file).
    """
    try:
        if not isinstance(file, str | Path):
            return _decode_anywhere(file, name, min_side).image
        with open(file, "rb") as stream:
            return _decode_anywhere(stream, name, min_side).image
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no image {name!r}") from None
    except IsADirectoryError:
        raise RefusedImage("content", f"{name!r} is a folder: name image files") from None
    except RefusedImage:
        raise
    except OSError as error:
        raise RefusedImage("content", f"cannot read the image {name!r}: {error.strerror or error}") from error


def _decode_anywhere(file: BinaryIO, name: str, min_side: int) -> Decoded:
    if _is_ordinary(file):
        return decode_with_format(file, name, min_side=min_side)
    file.seek(0)
    data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise RefusedImage("size", f"cannot read the image {name!r}: it is larger than {_MAX_BYTES:,} bytes")
    return _decode_elsewhere(data, name, min_side)


def _is_ordinary(file: BinaryIO) -> bool:
    """Whether this process may decode a file, or refuse it; see the head of this file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = file.read(12)
    if size > _USUAL_BYTES or start.startswith(_ISOLATED_STARTS) or container_of(start) is not None:
        return False
    if not start.startswith(b"\xff\xd8"):
        return True
    file.seek(0)
    data = file.read()
    most = data.count(_SCAN)
    if most > _USUAL_SCANS:
        return count_scans(file) > MAX_SCANS  # it is refused at once
    return most < 2 or _ARITHMETIC.search(data) is None


def container_of(start: bytes) -> Literal["AVIF", "HEIF"] | None:
    """The container that the first 12 bytes of a file name; a container called HEIF may hold AVIF too.

    >>> container_of(b"\\0\\0\\0\\x1cftypheic"), container_of(b"GIF89a")
    ('HEIF', None)
    """
    if start[4:8] != b"ftyp":
        return None
    return "AVIF" if start[8:12] in _AVIF_BRANDS else "HEIF" if start[8:12] in _HEIF_BRANDS else None


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image of a known format and read its header; the pixels are not decoded."""
    file.seek(0)
    container = container_of(file.read(12))
    file.seek(0)
    if container is None:
        return Image.open(file, formats=[name for name in FORMATS if name not in _CONTAINERS])
    if container == "HEIF":
        _register_heif()
    from PIL import AvifImagePlugin

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    try:
        return Image.open(file, formats=_CONTAINERS if container == "HEIF" else ["AVIF"])
    except UnidentifiedImageError:
        reason = f"this {container} file is damaged, or holds no picture of a known kind"
        raise RefusedImage("content", reason) from None


def _register_heif() -> None:
    try:
        from pillow_heif import register_heif_opener
    except ImportError as error:
        raise RefusedImage("format", f"HEIF cannot be read here ({error}); pip install pillow-heif") from None
    register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)


def decode_with_format(file: BinaryIO, name: str, *, min_side: int = MIN_SIDE) -> Decoded:
    """Decode an image here and tell its format; see `decode_image`.

    An image that cannot be read is a `RefusedImage`.
    """
    try:
        with _without_warnings():  # a decoder's warnings do not name the file
            return _decode(file, min_side)
    except UnidentifiedImageError:
        reason = f"cannot read the image {name!r}: it is none of {', '.join(FORMATS)}"
        raise RefusedImage("format", reason) from None
    except Exception as error:  # decoders can raise any exception
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        large = isinstance(error, Image.DecompressionBombError)
        kind: Refusal = error.kind if isinstance(error, RefusedImage) else "size" if large else "content"
        raise RefusedImage(kind, f"cannot read the image {name!r}: {reason}") from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore warnings as long as any thread decodes. (`warnings.catch_warnings` is not made for threads.)"""
    with _warnings_lock:
        _decoding.append(warnings.catch_warnings())
        if len(_decoding) == 1:
            _decoding[0].__enter__()
            warnings.simplefilter("ignore")
    try:
        yield
    finally:
        with _warnings_lock:
            last = _decoding.pop()  # the first one is popped last
            if not _decoding:
                last.__exit__(None, None, None)


def _decode(file: BinaryIO, min_side: int) -> Decoded:
    image = open_image(file)  # the only reference: its memory is freed by conversions
    format = "JPEG" if image.format == "MPO" else str(image.format)  # MPO: several JPEGs in one file
    _check_size(image)
    if format == "JPEG":
        if (scans := count_scans(file)) > MAX_SCANS:
            raise RefusedImage("content", f"it has {scans} scans, more than {MAX_SCANS}")
        image.draft("RGB", (max(min_side, MIN_SIDE), max(min_side, MIN_SIDE)))
    image.load()
    with suppress(SyntaxError, struct.error, ValueError, TypeError, KeyError, EOFError):  # malformed EXIF is ignored
        ImageOps.exif_transpose(image, in_place=True)
    loaded = image.format == "JPEG" and image.mode == "RGB"  # it holds no file any more: no copy is needed
    return Decoded(image if loaded else _as_rgb(image), format)


# -------------------- checks before decoding --------------------


def _check_size(image: Image.Image) -> None:
    """Refuse an image with too many pixels, or a TIFF with tiles larger than that."""
    if image.width * image.height > MAX_PIXELS:
        raise RefusedImage("size", f"it has {image.width}×{image.height} pixels, more than {MAX_PIXELS:,}")
    if max(image.size) > MAX_SIDE:
        raise RefusedImage("size", f"it has {image.width}×{image.height} pixels, a side of more than {MAX_SIDE:,}")
    tags = getattr(image, "tag_v2", {})
    width, height = tags.get(_TILE_WIDTH, 0), tags.get(_TILE_HEIGHT, 0)
    if not (isinstance(width, int) and isinstance(height, int)) or width * height > MAX_PIXELS:
        raise RefusedImage("size", f"it has tiles of {width}×{height} pixels, more than {MAX_PIXELS:,}")


def count_scans(file: BinaryIO) -> int:
    """Return how many scans of a JPEG a decoder would read; a number up to `MAX_SCANS` may be too large.

    The marker FF DA begins a scan. Its number is an upper bound, and quick to count. Only if it is too large, because
    other data contain these two bytes, are the segments followed as a decoder follows them, until the end marker.
    """
    file.seek(0)
    markers, before = 0, b""
    while piece := file.read(1 << 20):
        markers += (before + piece).count(_SCAN)
        before = piece[-1:]
    if markers <= MAX_SCANS:
        return markers
    file.seek(0)
    return sum(marker == 0xDA for marker in _markers(file.read()))


def _markers(data: bytes) -> Iterator[int]:
    """Iterate over the markers of a JPEG, up to its end marker.

    A decoder skips unknown markers below C0 within a scan, but no segment: the next scan may begin right behind them.
    """
    place = 2
    while (place := data.find(b"\xff", place)) >= 0:
        while data[place : place + 1] == b"\xff":  # fill bytes
            place += 1
        marker, place = (data[place] if place < len(data) else 0xD9), place + 1
        if marker == 0xD9:
            return
        if marker < 0xC0 or 0xD0 <= marker <= 0xD8:  # no marker, or one without a segment
            continue
        yield marker
        place += int.from_bytes(data[place : place + 2])


# -------------------- conversion to RGB --------------------


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _DEEP:
        return _grey(image).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    out = Image.new("RGB", image.size)
    for top, rows in _bands(image):
        rows = rows.convert("RGBA")
        out.paste(Image.alpha_composite(Image.new("RGBA", rows.size, "white"), rows).convert("RGB"), (0, top))
    return out


def _bands(image: Image.Image) -> Iterator[tuple[int, Image.Image]]:
    """Iterate over rows of an image, a few at a time, each with the number of the first: copies stay small."""
    height = max(1, _BLOCK // image.width)
    for top in range(0, image.height, height):
        yield top, image.crop((0, top, image.width, min(top + height, image.height)))


def _grey(image: Image.Image) -> Image.Image:
    """Scale grey values of 16 bits and more to 8."""
    import numpy as np

    out = np.empty((image.height, image.width), np.uint8)
    full = 65535.0
    if image.mode in ("F", "I"):  # the scale is unknown: take it from the largest value
        largest = max(float(_values(rows).max(initial=0.0)) for _, rows in _bands(image))
        full = next((top for top in (1.0, 255.0, 65535.0) if largest <= top), largest)
    for top, rows in _bands(image):
        out[top : top + rows.height] = (_values(rows) / full * 255).clip(0, 255).round()
    return Image.fromarray(out)


def _values(image: Image.Image) -> "NDArray[float64]":
    import numpy as np

    values: NDArray[Any] = np.asarray(image)
    return np.nan_to_num(values.astype(np.float64))


# -------------------- decoder processes --------------------


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


def _decode_elsewhere(data: bytes, name: str, min_side: int) -> Decoded:
    """Decode an image in a decoder process, which is killed at the deadline."""
    pool = _pool
    with pool.free:
        process = pool.idle.pop() if pool.idle else DecoderProcess()
        timer = threading.Timer(DECODE_SECONDS, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.decode(data, name, min_side)
            return process.read_pixels()
        except DecoderDied:
            reason = f"decoding crashed, or took more than {DECODE_SECONDS:g} seconds"
            raise RefusedImage("content", f"cannot read the image {name!r}: {reason}") from None
        except RefusedImage:
            raise
        except BaseException:
            process.kill()  # its reply was not read: the next image would get this picture
            raise
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

"""Decoding and resizing of images. Images are untrusted input: only known formats and bounded sizes are decoded."""

import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 64_000_000
MIN_SIDE = 512
_BLOCK = 1 << 18  # 16-bit pixels that are scaled at a time
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")


def read_image(path: str | Path, *, min_side: int = MIN_SIDE) -> Image.Image:
    """Decode an image file as RGB; see `decode_image`."""
    return decode_image(path, str(path), min_side=min_side)


def decode_image(file: str | Path | BinaryIO, name: str, *, min_side: int = MIN_SIDE) -> Image.Image:
    """Decode an image as RGB: rotated as its EXIF says, transparency on white, 16-bit grey scaled, the first frame.

    A large JPEG is decoded at reduced size, never below ``min_side`` pixels on its shorter side. Reducing changes an
    embedding a little. So at least 512 pixels are decoded even if fewer are wanted: a photo then has the same pixels in
    training, evaluation and search. An image that cannot be read is a ``ValueError`` with its ``name``.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a decoder's warnings do not name the file
            with Image.open(file, formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"it has {image.width}×{image.height} pixels, more than {MAX_PIXELS:,}")
                if image.format == "JPEG":
                    image.draft("RGB", (max(min_side, MIN_SIDE), max(min_side, MIN_SIDE)))
                image.load()
                return _as_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no image {name!r}") from None
    except UnidentifiedImageError:
        raise ValueError(f"cannot read the image {name!r}: it is none of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders can raise any exception
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"cannot read the image {name!r}: {reason}") from error


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _DEEP:
        return _grey(image).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _grey(image: Image.Image) -> Image.Image:
    """Scale grey values of 16 bits and more to 8, block by block: a small file may hold very many pixels."""
    deep = np.asarray(image).reshape(-1)
    out = np.empty(deep.shape, np.uint8)
    parts = [slice(first, first + _BLOCK) for first in range(0, len(deep), _BLOCK)]
    full = 65535.0
    if image.mode in ("F", "I"):  # the scale is unknown: take it from the largest value
        largest = max(_values(deep[part]).max(initial=0.0) for part in parts)
        full = next((top for top in (1.0, 255.0, 65535.0) if largest <= top), largest)
    for part in parts:
        out[part] = (_values(deep[part]) / full * 255).clip(0, 255).round()
    return Image.fromarray(out.reshape(image.height, image.width))


def _values(pixels: NDArray[Any]) -> NDArray[np.float64]:
    return np.nan_to_num(pixels.astype(np.float64))


def load_square(path: str | Path, size: int, *, grey: bool = False) -> Tensor:
    """Load an image file as uint8 [3, size, size] (or [1, …] if ``grey``); see `crop_for_test`."""
    return crop_for_test(read_image(path, min_side=resized_side(size)), size, grey=grey)


def crop_for_test(image: Image.Image, size: int, *, grey: bool = False) -> Tensor:
    """Resize an RGB image of any shape to a square, and crop the centre: what the test protocol uses."""
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

"""Changed copies of images: queries whose right answer is the original, for galleries without labels.

Each kind is what happens to a picture on its way: it is cropped, made smaller, compressed again, blurred, made lighter
or darker, or turned a little. How much is drawn at random.
"""

import io
import random
from collections.abc import Callable

from PIL import Image, ImageEnhance, ImageFilter


def _crop(image: Image.Image, chance: random.Random) -> Image.Image:
    """Keep 70 to 90 % of each side."""
    width, height = (max(1, round(side * chance.uniform(0.7, 0.9))) for side in image.size)
    left, top = chance.randint(0, image.width - width), chance.randint(0, image.height - height)
    return image.crop((left, top, left + width, top + height))


def _shrink(image: Image.Image, chance: random.Random) -> Image.Image:
    """Make both sides 30 to 70 % as long."""
    share = chance.uniform(0.3, 0.7)
    return image.resize((max(1, round(image.width * share)), max(1, round(image.height * share))))


def _compress(image: Image.Image, chance: random.Random) -> Image.Image:
    """Save as JPEG with quality 10 to 40."""
    out = io.BytesIO()
    image.save(out, "JPEG", quality=chance.randint(10, 40))
    return Image.open(out).convert("RGB")


def _blur(image: Image.Image, chance: random.Random) -> Image.Image:
    """Blur with a radius of 0.5 to 1.5 % of the shorter side."""
    return image.filter(ImageFilter.GaussianBlur(min(image.size) * chance.uniform(0.005, 0.015)))


def _brighten(image: Image.Image, chance: random.Random) -> Image.Image:
    """Multiply the brightness by 0.6 to 1.5."""
    return ImageEnhance.Brightness(image).enhance(chance.uniform(0.6, 1.5))


def _turn(image: Image.Image, chance: random.Random) -> Image.Image:
    """Turn by up to 8 degrees, white at the corners."""
    return image.rotate(chance.uniform(-8, 8), Image.Resampling.BILINEAR, fillcolor="white")


CHANGES: dict[str, Callable[[Image.Image, random.Random], Image.Image]] = {
    "crop": _crop, "resize": _shrink, "re-compression": _compress, "blur": _blur, "brightness": _brighten,
    "rotation": _turn,
}  # fmt: skip


def change_copies(image: Image.Image, count: int, *, seed: object) -> list[Image.Image]:
    """Make ``count`` copies of an RGB image by different kinds of changes, always the same ones for a ``seed``.

    >>> [copy.mode for copy in change_copies(Image.new("RGB", (64, 48)), 2, seed=3)]
    ['RGB', 'RGB']
    """
    chance = random.Random(repr(seed))
    return [CHANGES[kind](image, chance) for kind in chance.sample(sorted(CHANGES), count)]

"""The pixels of glyphs, the data set that needs no download: characters in the fonts that matplotlib ships.

One class is one Unicode character that at least ten fonts contain, one image is that character in one font: white on
black, its ink centred in the square. Capitals are equally tall in every font, so that o, O and a full stop keep their
sizes; only what would leave the middle seven eighths of the square is shrunk to fit.

Some characters look identical, and it is known which: Latin A, Greek Α and Cyrillic А are the same pixels in most
fonts. An image is *ambiguous* if the same font draws another class with the same pixels. Classes that any one font
draws identically form a *twin group*. One font is enough: so no image has its twin in the other half of the split. The
groups stay small: the largest has 6 of the 2,450 classes (it would have 4 if three fonts had to agree).

Within a class, one image in six repeats another one: many symbols of an oblique font equal those of its upright font.
"""

import hashlib
import unicodedata
import uuid
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, features

from idml.files import cache_folder

VERSION = 1  # of the drawing below: raise it when the pixels change, so that old caches are not read
MIN_FONTS = 10
SIZES = range(8, 129)
OVERSAMPLING = 4  # drawn this much larger, then averaged: hinting and whole-pixel placement no longer show
CAPITAL = 9 / 16  # height of H, as a share of the square
INNER = 7 / 8  # no ink outside this part of the square
# Not text fonts: boxes for missing characters, TeX encodings, private use, sizes of brackets, a few dozen characters.
LEFT_OUT = ("LastResort", "cm", "STIXNonUni", "STIXSiz", "DejaVuSansDisplay", "DejaVuSerifDisplay")


class Drawings(NamedTuple):
    """All images, ordered by character and font."""

    pixels: NDArray[np.uint8]  # [n, size, size]
    characters: NDArray[np.int64]  # [n] code points
    fonts: NDArray[np.int64]  # [n] rows of the font list


def load_drawings(*, size: int = 32, cache: Path | None = None) -> tuple[Drawings, list[str]]:
    """Return all images of ``size`` × ``size`` pixels, and the names of the fonts.

    They are drawn the first time and then kept in a file in the folder ``cache`` (by default `cache_folder`).
    """
    if size not in SIZES:
        raise ValueError(f"glyphs: size must lie in {SIZES[0]} … {SIZES[-1]}, not {size}")
    fonts = _fonts()
    key = _key(fonts, size)
    file = (cache or cache_folder()) / f"glyphs-v{VERSION}-{size}-{key}.npz"
    drawings = _read(file, key, size, fonts)
    if drawings is None:
        drawings = draw(fonts, size)
        with suppress(OSError):  # without a cache it is only slower
            _write(file, key, drawings)
    return drawings, [font.name for font in fonts]


def draw(fonts: Sequence[Path], size: int) -> Drawings:
    """Draw every character that at least ``MIN_FONTS`` of the fonts contain, in each of these fonts."""
    from fontTools.ttLib import TTFont

    contained = []
    for path in fonts:
        with TTFont(path, lazy=True) as font:
            names = font.getBestCmap().items()
        contained.append({code for code, name in names if name != ".notdef" and is_visible(chr(code))})
    counts = Counter(code for codes in contained for code in codes)
    images: dict[tuple[int, int], NDArray[np.uint8]] = {}
    for row, (path, codes) in enumerate(zip(fonts, contained, strict=True)):
        font_at_size = _at_capital_height(path, CAPITAL * size * OVERSAMPLING)
        missing = draw_character(font_at_size, "\U0010ffff", size)  # a code point that is no character: .notdef
        for code in codes:
            if counts[code] < MIN_FONTS:
                continue
            image = draw_character(font_at_size, chr(code), size)
            if image is not None and (missing is None or not np.array_equal(image, missing)):
                images[code, row] = image
    counts = Counter(code for code, _ in images)
    order = sorted(place for place in images if counts[place[0]] >= MIN_FONTS)
    characters, rows = np.array(order, dtype=np.int64).reshape(-1, 2).T.copy()
    return Drawings(np.stack([images[place] for place in order]), characters, rows)


def is_visible(character: str) -> bool:
    """Return whether it is no control, unassigned or private character, no blank and no combining mark."""
    return unicodedata.category(character)[0] not in "CZM"


def draw_character(font: ImageFont.FreeTypeFont, character: str, size: int) -> NDArray[np.uint8] | None:
    """Draw a character in white on black, the ink centred; None if there is no ink."""
    left, top, right, bottom = font.getbbox(character, anchor="ls")
    glyph = Image.new("L", (int(right - left) + 2, int(bottom - top) + 2))
    ImageDraw.Draw(glyph).text((1 - left, 1 - top), character, fill=255, font=font, anchor="ls")
    ink = glyph.getbbox()
    if ink is None:
        return None
    glyph = glyph.crop(ink)
    square, inner = size * OVERSAMPLING, int(size * OVERSAMPLING * INNER)
    shrink = inner / max(glyph.size)
    if shrink < 1:
        width, height = (max(1, round(side * shrink)) for side in glyph.size)
        glyph = glyph.resize((width, height), Image.Resampling.BOX)
    canvas = Image.new("L", (square, square))
    canvas.paste(glyph, ((square - glyph.width) // 2, (square - glyph.height) // 2))
    pixels = np.asarray(canvas.reduce(OVERSAMPLING))
    return pixels if pixels.any() else None


def find_twins(drawings: Drawings) -> tuple[NDArray[np.bool_], dict[int, int]]:
    """Find the images that the same font draws identically for another character [n], and the twin groups.

    A twin group is named by its smallest character: the second result maps each character to it.
    """
    identical: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
    for image, row in enumerate(drawings.fonts.tolist()):
        identical[row, drawings.pixels[image].tobytes()].append(image)
    ambiguous = np.zeros(len(drawings.fonts), dtype=np.bool_)
    parent = {code: code for code in drawings.characters.tolist()}

    def smallest(code: int) -> int:
        while parent[code] != code:
            code = parent[code]
        return code

    for images in identical.values():
        if len(images) > 1:
            ambiguous[images] = True
            roots = {smallest(code) for code in drawings.characters[images].tolist()}
            parent.update(dict.fromkeys(roots, min(roots)))
    return ambiguous, {code: smallest(code) for code in parent}


def is_train_group(group: int) -> bool:
    """Return whether a twin group trains, by a hash of its smallest character: the same on every machine."""
    return hashlib.sha256(f"U+{group:04X}".encode()).digest()[0] % 2 == 0


def _fonts() -> list[Path]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = sorted(path for path in folder.glob("*.ttf") if not path.name.startswith(LEFT_OUT))
    if len(fonts) < MIN_FONTS:
        raise FileNotFoundError(f"glyphs needs the fonts that matplotlib ships: {len(fonts)} found in {str(folder)!r}")
    return fonts


def _at_capital_height(path: Path, height: float) -> ImageFont.FreeTypeFont:
    basic = ImageFont.Layout.BASIC  # Raqm is not in every build of Pillow
    _, top, _, bottom = ImageFont.truetype(path, 1000, layout_engine=basic).getbbox("H", anchor="ls")
    return ImageFont.truetype(path, round(1000 * height / (bottom - top)), layout_engine=basic)


def _key(fonts: Sequence[Path], size: int) -> str:
    """A hash of everything that the pixels depend on."""
    made_by = (PIL.__version__, features.version("freetype2"), unicodedata.unidata_version)
    how = (VERSION, size, OVERSAMPLING, CAPITAL, INNER, MIN_FONTS)
    files = [(font.name, font.stat().st_size) for font in fonts]
    return hashlib.sha256(repr((made_by, how, files)).encode()).hexdigest()[:16]


def _read(file: Path, key: str, size: int, fonts: Sequence[Path]) -> Drawings | None:
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as held:
            drawings = Drawings(held["pixels"], held["characters"], held["fonts"])
            if str(held["key"]) != key or not _is_sound(drawings, size, len(fonts)):
                raise ValueError("made by something else")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # a damaged zip can raise any exception
        reason = " ".join(str(error).split()) or type(error).__name__
        warnings.warn(f"glyphs: cannot use the cache {str(file)!r} ({reason}): it is drawn again", stacklevel=4)
        return None
    return drawings


def _is_sound(drawings: Drawings, size: int, fonts: int) -> bool:
    _, characters, rows = drawings
    shapes = (len(rows), size, size), (len(rows),), (len(rows),)
    return (
        [array.dtype.name for array in drawings] == ["uint8", "int64", "int64"]
        and tuple(array.shape for array in drawings) == shapes
        and len(rows) > 0
        and bool(((rows >= 0) & (rows < fonts) & (characters > 0) & (characters < 0x110000)).all())
    )


def _write(file: Path, key: str, drawings: Drawings) -> None:
    """Write the file under a unique temporary name and rename it: several processes may do so at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        with unfinished.open("xb") as opened:
            np.savez_compressed(opened, key=np.array(key), **drawings._asdict())
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)

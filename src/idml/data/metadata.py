"""Pictures without metadata: what is served carries no place, no camera and no comment, and stands upright.

JPEG and PNG lose the parts of the file that hold metadata; their pixels stay as they are. GIF, WebP and BMP stay as
they are if they have no part but those that show the picture. An image that is stored turned, one whose parts cannot be
told apart, all other formats, and HEIF and AVIF, which not every browser shows, must be decoded and written again as
JPEG. The caller decodes them: where strangers ask for pictures, that is work for a process with a deadline.
"""

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator

from PIL import Image

from idml.data.images import container_of, open_image

_ORIENTATION = 0x0112
_PNG_KEPT = tuple(b"IHDR PLTE IDAT tRNS gAMA cHRM sRGB iCCP sBIT cICP mDCV cLLI bKGD pHYs acTL fcTL fdAT".split())
_PNG_TEXTS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")  # they too may say how a picture is turned
_PROFILE = b"ICC_PROFILE\0"
_SCAN_END = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # neither a stuffed byte nor a restart nor filling
_FILLING = re.compile(rb"\xff*(?=\xff)")  # before a marker
_WEBP_KEPT = (b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ANIM", b"ANMF", b"ICCP")
_GIF_LOOPS = (b"\x21\xff\x0bNETSCAPE2.0", b"\x21\xff\x0bANIMEXTS1.0")  # how often an animation is shown
_MOST_PARTS = 500_000  # a file of 64 MB with the usual parts has fewer
_QUALITY = 92


def strip_metadata(data: bytes) -> bytes | None:
    """Return an upright image without metadata; None if it must be decoded, and written with `write_again`.

    Nothing is decoded here. An image whose header cannot be read is a ``ValueError``.

    >>> out = io.BytesIO()
    >>> Image.new("RGB", (8, 4)).save(out, "JPEG", comment=b"secret")
    >>> b"secret" in out.getvalue(), b"secret" in strip_metadata(out.getvalue())
    (True, False)
    """
    if container_of(data[:12]) is not None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with open_image(io.BytesIO(data)) as image:
                kind = image.format
        except Exception as error:  # decoders can raise any exception
            raise ValueError(f"cannot read the image: {type(error).__name__}") from None
        try:
            match kind:
                case "JPEG":
                    return None if _is_turned(data) else _strip_jpeg(data)
                case "PNG":
                    return None if _is_turned(_turns_of_png(data)) else _strip_png(data)
                case "GIF":
                    return data if _is_plain_gif(data) else None
                case "WEBP":
                    return data if _is_plain_webp(data) else None
                case "BMP":
                    return data if _is_plain_bmp(data) else None
        except Exception:  # malformed parts, which decoding passes over
            return None
    return None


def write_again(image: Image.Image) -> bytes:
    """Write an RGB image as a JPEG without metadata."""
    out = io.BytesIO()
    image.save(out, "JPEG", quality=_QUALITY)
    return _strip_jpeg(out.getvalue())


def _is_turned(data: bytes) -> bool:
    with open_image(io.BytesIO(data)) as image:
        return Image.Image.getexif(image).get(_ORIENTATION, 1) not in (0, 1)  # that of a PNG would decode the picture


# -------------------- JPEG --------------------


def _strip_jpeg(data: bytes) -> bytes:
    """Leave out the segments with metadata, and whatever follows the end of the image."""
    out, place = bytearray(data[:2]), 2
    for _ in range(_MOST_PARTS):
        if (filling := _FILLING.match(data, place)) is not None:
            place = filling.end()
        if place + 4 > len(data) or data[place : place + 2] == b"\xff\xd9":
            return bytes(out + b"\xff\xd9")
        marker = data[place + 1]
        if data[place] != 0xFF or marker < 0xC0 or 0xD0 <= marker <= 0xD8:
            break
        end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == 0xDA:
            found = _SCAN_END.search(data, end)
            if found is None:
                return bytes(out + data[place:] + b"\xff\xd9")
            end = found.start()
        out += _kept_segment(marker, data[place:end])
        place = end
    raise ValueError("a segment of the JPEG begins wrongly")


def _kept_segment(marker: int, segment: bytes) -> bytes:
    """What is kept of a segment: what is needed to decode, JFIF without a thumbnail, colours and their profile."""
    content = segment[4:]
    if marker <= 0xDF or (marker == 0xE2 and content.startswith(_PROFILE)):
        return segment
    if marker == 0xE0 and content.startswith(b"JFIF\0") and len(content) >= 14:
        return b"\xff\xe0\0\x10" + content[:12] + b"\0\0"
    if marker == 0xEE and content.startswith(b"Adobe") and len(content) >= 12:
        return b"\xff\xee\0\x0e" + content[:12]
    return b""


# -------------------- PNG --------------------


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Iterate over the kinds of chunks and the chunks of a PNG, up to its end."""
    place = 8
    for _ in range(_MOST_PARTS):
        kind, end = data[place + 4 : place + 8], place + 12 + int.from_bytes(data[place : place + 4], "big")
        if place + 12 > len(data) or kind == b"IEND":
            return
        yield kind, data[place:end]
        place = end
    raise ValueError("the PNG has too many chunks")


def _turns_of_png(data: bytes) -> bytes:
    """The header of a PNG with all chunks that may say how it is turned: they may also follow the picture."""
    turns = b"".join(chunk for kind, chunk in _png_chunks(data) if kind == b"eXIf" or chunk.startswith(_PNG_TEXTS, 8))
    return data[:33] + turns + _png_chunk(b"IDAT", b"")  # the first chunk of a PNG has 25 bytes


def _png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _strip_png(data: bytes) -> bytes:
    """Leave out whatever is not needed to show the image, and what follows its end."""
    out = bytearray(data[:8])
    for kind, chunk in _png_chunks(data):
        if kind == b"iCCP":
            _, nul, profile = chunk[8:-4].partition(b"\0")
            out += _png_chunk(kind, b"icc" + nul + profile)  # its name may be any text
        elif kind in _PNG_KEPT:
            out += chunk
        elif kind[:1].isupper():  # a capital marks a chunk that no reader may ignore
            raise ValueError("the PNG has a chunk of an unknown kind")
    return bytes(out + _png_chunk(b"IEND", b""))


# -------------------- GIF, WebP, BMP --------------------


def _is_plain_gif(data: bytes) -> bool:
    """Whether a GIF has nothing but frames, their timing and how often they are shown."""
    parts = 0

    def table(flags: int) -> int:
        return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

    def end_of_blocks(place: int) -> int:
        nonlocal parts
        while parts < _MOST_PARTS:
            parts += 1
            if data[place] == 0:
                return place + 1
            place += 1 + data[place]
        raise ValueError("the GIF has too many blocks")

    place = 13 + table(data[10])
    while data[place] != 0x3B:  # the end of the image; beyond the end of the file is an IndexError
        start = place
        if data[place] == 0x2C:  # a frame
            place = end_of_blocks(place + 11 + table(data[place + 9]))
            continue
        place = end_of_blocks(place + 2)
        block = data[start:place]
        timing = block[:3] == b"\x21\xf9\x04" and len(block) == 8
        if not timing and not (block[:14] in _GIF_LOOPS and block[14] == 3 and len(block) == 19):
            return False
    return place + 1 == len(data)


def _is_plain_webp(data: bytes) -> bool:
    """Whether a WebP has nothing but pictures and the colour profile."""
    place, parts = 12, 0
    while place + 8 <= len(data) and parts < _MOST_PARTS:
        kind, size = data[place : place + 4], int.from_bytes(data[place + 4 : place + 8], "little")
        if kind not in _WEBP_KEPT:
            return False
        place += 8 + (16 if kind == b"ANMF" else size + size % 2)  # a frame consists of chunks
        parts += 1
    return place == len(data) == 8 + int.from_bytes(data[4:8], "little")


def _is_plain_bmp(data: bytes) -> bool:
    """Whether a BMP has the usual header, its colours and its uncompressed rows, and nothing else."""
    start, header, width, height, _, depth, coding, _, _, _, colours = struct.unpack_from("<IIiiHHIIiiI", data, 10)
    if header != 40 or coding != 0 or (depth > 8 and colours):
        return False
    table = 4 * (colours or 1 << depth) if depth <= 8 else 0
    end: int = start + (width * depth + 31) // 32 * 4 * abs(height)
    return start == 54 + table and len(data) == end

"""Pictures without metadata: what is served carries no place, no camera and no comment, and stands upright.

JPEG and PNG lose the parts of the file that hold metadata; their pixels stay as they are. An image that is stored
turned, other formats with metadata, and HEIF and AVIF, which not every browser shows, must be decoded and written again
as JPEG. The caller decodes them: where strangers ask for pictures, that is work for a process with a deadline.
"""

import io
import warnings

from PIL import Image

from idml.data.images import container_of, open_image

_ORIENTATION = 0x0112
_PNG_KEPT = tuple(b"tRNS gAMA cHRM sRGB iCCP sBIT cICP mDCV cLLI bKGD pHYs acTL fcTL fdAT".split())  # colours, frames
_KEPT_SEGMENTS = (0xE0, 0xE2, 0xEE)  # of a JPEG: JFIF, the colour profile, and Adobe's kind of colours
_PROFILE = b"ICC_PROFILE\0"
_HIDDEN = ("exif", "xmp", "XML:com.adobe.xmp", "comment", "photoshop")
_QUALITY = 92


def strip_metadata(data: bytes) -> bytes | None:
    """Return an upright image without metadata; None if it must be decoded, and written with `write_again`.

    An image that cannot be read is a ``ValueError``.

    >>> out = io.BytesIO()
    >>> Image.new("RGB", (8, 4)).save(out, "JPEG", comment=b"secret")
    >>> b"secret" in out.getvalue(), b"secret" in strip_metadata(out.getvalue())
    (True, False)
    """
    if container_of(data[:12]) is not None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_image(io.BytesIO(data)) as image:
                kind, turned = image.format, image.getexif().get(_ORIENTATION, 1) not in (0, 1)
                hidden = any(image.info.get(name) for name in _HIDDEN) or len(image.getexif()) > 0
    except Exception as error:  # decoders can raise any exception
        raise ValueError(f"cannot read the image: {type(error).__name__}") from None
    if not turned:
        if kind == "JPEG":
            return _strip_jpeg(data)
        if kind == "PNG":
            return _strip_png(data)
        if kind == "BMP" or (kind in ("GIF", "WEBP") and not hidden and _ends_as_it_says(data, kind)):
            return data
    return None


def write_again(image: Image.Image) -> bytes:
    """Write an RGB image as a JPEG without metadata."""
    out = io.BytesIO()
    image.save(out, "JPEG", quality=_QUALITY)
    return _strip_jpeg(out.getvalue())


def _ends_as_it_says(data: bytes, kind: str) -> bool:
    """Whether nothing follows the end of a GIF or WebP image."""
    if kind == "WEBP":
        return len(data) == 8 + int.from_bytes(data[4:8], "little")
    return data.endswith(b"\0;")  # the end of the last block, and of the image


def _strip_jpeg(data: bytes) -> bytes:
    """Leave out the segments with metadata, and whatever follows the end of the image."""
    out, place = bytearray(data[:2]), 2
    while place + 4 <= len(data):
        if data[place] != 0xFF:
            raise ValueError("cannot read the image: a segment of the JPEG begins wrongly")
        marker = data[place + 1]
        if marker == 0xFF:  # filling
            place += 1
            continue
        end = place + 2 + int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == 0xDA:  # a scan: up to the next marker that is neither a stuffed byte nor a restart
            while True:
                end = data.find(b"\xff", end)
                if end < 0 or end + 1 >= len(data):
                    return bytes(out + data[place:] + b"\xff\xd9")
                if data[end + 1] != 0 and not 0xD0 <= data[end + 1] <= 0xD7 and data[end + 1] != 0xFF:
                    break
                end += 1 if data[end + 1] == 0xFF else 2
        private = 0xE0 <= marker <= 0xEF and marker not in _KEPT_SEGMENTS
        other = marker == 0xE2 and data[place + 4 : place + 4 + len(_PROFILE)] != _PROFILE  # not the colour profile
        if not (private or other or marker == 0xFE):
            out += data[place:end]
        place = end
        if data[place : place + 2] == b"\xff\xd9":
            break
    return bytes(out + b"\xff\xd9")


def _strip_png(data: bytes) -> bytes:
    """Leave out whatever is not needed to show the image, and what follows its end."""
    out, place = bytearray(data[:8]), 8
    while place + 12 <= len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4], "big")
        kind = data[place + 4 : place + 8]
        if kind[:1].isupper() or kind in _PNG_KEPT:  # a capital marks a chunk that no reader may ignore
            out += data[place:end]
        place = end
        if kind == b"IEND":
            break
    return bytes(out)

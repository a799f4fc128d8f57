"""Untrusted images and form data: multipart bodies, uploaded images, and image files on disk.

File names, extensions and content types from the client are ignored. The format is read from the bytes.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import Image, UnidentifiedImageError
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from idml.data.images import FORMATS, MAX_PIXELS, container_of, open_image
from idml.data.metadata import strip_metadata
from idml.search import uploads
from idml.search.uploads import EXTENSIONS
from idml.server.responses import ApiError

LABEL_PATTERN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"  # no control characters: one line
_MAX_SERVED = 64_000_000  # bytes of a file that is served
_MAX_FIELD = 2000  # bytes of a form field other than the image


# -------------------- images --------------------


class ImageHeader(NamedTuple):
    """The format and the number of pixels, read from the header of an image."""

    format: str
    pixels: int

    @property
    def media_type(self) -> str:
        """The content type."""
        return f"image/{self.format.lower()}"

    def file_name(self, id: str) -> str:
        """Return a file name made of an item's id."""
        return f"{id}.{EXTENSIONS[self.format]}"


def read_header(file: BinaryIO) -> ImageHeader:
    """Read the format and size of an image without decoding it; refuse an image that must not be decoded.

    HEIF and AVIF are not parsed here but by the process that decodes them; their number of pixels is given as 0.
    """
    if (container := container_of(file.read(12))) is not None:
        return ImageHeader(container, 0)
    try:
        with open_image(file) as image:
            format = str(image.format)  # MPO: several JPEGs in one file
            header = ImageHeader("JPEG" if format == "MPO" else format, image.width * image.height)
    except UnidentifiedImageError:
        raise ApiError(415, f"this is not an image of a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        header = ImageHeader("", MAX_PIXELS + 1)
    except Exception:  # image decoders raise many kinds of exceptions
        raise ApiError(422, "the image is broken") from None
    if header.pixels > MAX_PIXELS:
        raise ApiError(413, f"the image has more than {MAX_PIXELS:,} pixels")
    return header


class ImageFile(NamedTuple):
    """An open image file."""

    file: BinaryIO
    size: int
    header: ImageHeader


def open_image_file(path: Path) -> ImageFile:
    """Open the image file of an item; refuse anything that is not a regular file with an image in it."""
    try:
        # Do not follow a link or wait for a pipe that someone put there in the meantime.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError:
        raise ApiError(404, "the file of this item does not exist") from None
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ApiError(404, "the file of this item is not a regular file")
        try:
            header = read_header(file)
        except ApiError:
            raise ApiError(404, "the file of this item is not an image of a known format") from None
        file.seek(0)
        return ImageFile(file, status.st_size, header)
    except BaseException:
        file.close()
        raise


UNREADABLE = "the file of this item is not an image that can be read"


def read_image_file(path: Path) -> bytes:
    """Read the image file of an item."""
    file, size, _ = open_image_file(path)
    with file:
        if size > _MAX_SERVED:
            raise ApiError(413, f"the file of this item is larger than {_MAX_SERVED:,} bytes")
        data = file.read(_MAX_SERVED)
    if len(data) != size:
        raise ApiError(404, "the file of this item changed while it was read")
    return data


def read_clean_image(path: Path) -> bytes | None:
    """Read the image file of an item without its metadata, upright; None if it must be decoded for that."""
    try:
        return strip_metadata(read_image_file(path))
    except ValueError:
        raise ApiError(404, UNREADABLE) from None


# -------------------- forms --------------------


class _Form:
    """Collects the fields of a multipart body; the parser calls these methods."""

    def __init__(self, known: tuple[str, ...]) -> None:
        self.fields: dict[str, bytearray] = {}
        self.ended = False
        self._known = known
        self._header, self._value, self._name = b"", b"", ""

    def on_part_begin(self) -> None:
        self._header, self._value, self._name = b"", b"", ""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._name = parse_options_header(self._value)[1].get(b"name", b"").decode("utf-8", "replace")
        self._header, self._value = b"", b""

    def on_headers_finished(self) -> None:
        if self._name not in self._known:
            raise ApiError(422, f"the form has an unknown field; known fields: {', '.join(self._known)}")
        if self._name in self.fields:
            raise ApiError(422, f"the form has the field {self._name!r} twice")
        self.fields[self._name] = bytearray()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        field = self.fields[self._name]
        field += data[start:end]
        if self._name != "image" and len(field) > _MAX_FIELD:
            raise ApiError(413, f"the field {self._name!r} is longer than {_MAX_FIELD} bytes")

    def on_end(self) -> None:
        self.ended = True


async def read_form(request: Request, known: tuple[str, ...]) -> dict[str, bytes]:
    """Read the fields of a multipart request; stop at the first unknown or repeated field."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError(415, "send a multipart/form-data body with the image in the field 'image'")
    form = _Form(known)
    callbacks = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    try:
        parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]  # a TypedDict
        async for chunk in request.stream():
            parser.write(chunk)
    except FormParserError:
        raise ApiError(422, "the multipart body is broken") from None
    if not form.ended:
        raise ApiError(422, "the multipart body ends too early")
    if not form.fields.get("image"):
        raise ApiError(422, "the form needs an image in the field 'image'")
    return {name: bytes(value) for name, value in form.fields.items()}


def clean_label(label: str | None) -> str | None:
    """Strip a label; None if it is empty. A label that is not one line of text is refused."""
    try:
        return uploads.clean_label(label or "") or None
    except ValueError as error:
        raise ApiError(422, str(error)) from None

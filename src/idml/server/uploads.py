"""What is uploaded: a multipart body read piece by piece, and images looked at before they are decoded.

Names, endings and content types are not believed; what counts is the format that the bytes have.
"""

import io
from typing import BinaryIO, NamedTuple
from unicodedata import category

from PIL import Image, UnidentifiedImageError
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from idml.data.images import FORMATS, MAX_PIXELS, decode_image
from idml.search.gallery_folder import EXTENSIONS
from idml.server.responses import Refusal

_FIELD = 2000  # bytes of a field that is no image


class Head(NamedTuple):
    """What the head of an image says."""

    format: str
    pixels: int

    @property
    def media_type(self) -> str:
        """Its content type."""
        return f"image/{self.format.lower()}"

    @property
    def ending(self) -> str:
        """Of a file name."""
        return EXTENSIONS[self.format]


def look(file: BinaryIO) -> Head:
    """The format and size of an image, without decoding it; one that will not be decoded is refused."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            format = str(image.format)
            head = Head("JPEG" if format == "MPO" else format, image.width * image.height)  # MPO: several in one file
    except UnidentifiedImageError:
        raise Refusal(415, f"this is no image of a known format ({', '.join(FORMATS)})") from None
    except Image.DecompressionBombError:
        head = Head("", MAX_PIXELS + 1)
    except Exception:  # decoders raise whatever they like
        raise Refusal(422, "the image is broken") from None
    if head.pixels > MAX_PIXELS:
        raise Refusal(413, f"the image has more than {MAX_PIXELS:,} pixels")
    return head


def decode(data: bytes) -> Image.Image:
    """The image as RGB, or a refusal that says what is wrong with it."""
    try:
        return decode_image(io.BytesIO(data), "upload")
    except ValueError as error:
        raise Refusal(422, str(error)) from None


class _Form:
    """Takes the parts of a multipart body as the parser finds them."""

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
            raise Refusal(422, f"the form has a field that is not known here; known are: {', '.join(self._known)}")
        if self._name in self.fields:
            raise Refusal(422, f"the form has the field {self._name!r} twice")
        self.fields[self._name] = bytearray()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        field = self.fields[self._name]
        field += data[start:end]
        if self._name != "image" and len(field) > _FIELD:
            raise Refusal(413, f"the field {self._name!r} is longer than {_FIELD} bytes")

    def on_end(self) -> None:
        self.ended = True


async def read_form(request: Request, known: tuple[str, ...]) -> dict[str, bytes]:
    """The fields of a multipart request. The first part that is not known, or comes twice, ends the reading."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise Refusal(415, "send a multipart/form-data body with the image in the field 'image'")
    form = _Form(known)
    callbacks = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    try:
        parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]  # a TypedDict
        async for chunk in request.stream():
            parser.write(chunk)
    except FormParserError:
        raise Refusal(422, "the multipart body is broken") from None
    if not form.ended:
        raise Refusal(422, "the multipart body ends too early")
    if not form.fields.get("image"):
        raise Refusal(422, "the form needs an image in the field 'image'")
    return {name: bytes(value) for name, value in form.fields.items()}


def clean_label(label: str | None) -> str | None:
    """A label as it is kept: without spaces around it, None if nothing is left; what is no line of text is refused."""
    label = (label or "").strip()
    if len(label) > 200 or any(category(c) in ("Cc", "Cs", "Zl", "Zp") for c in label):
        raise Refusal(422, "a label is one line of at most 200 characters, without control characters")
    return label or None

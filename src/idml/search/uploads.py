"""Images on their way into a gallery: their bytes are decoded, embedded and made into thumbnails; their labels."""

import hashlib
import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from unicodedata import category

from PIL import Image

from idml.data.decoder_process import Decoded
from idml.data.images import container_of, decode_image, open_image
from idml.embeddings import Embeddings
from idml.search.embedder import BATCH, Embedder
from idml.search.engines import DamagedGallery, Engine

EXTENSIONS = {
    "JPEG": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "GIF": "gif",
    "BMP": "bmp",
    "TIFF": "tif",
    "AVIF": "avif",
    "HEIF": "heic",
}
MAX_LABEL = 200  # characters
_THUMBNAIL_SIDE = 128  # pixels along the longer side
_PIXELS = 8_000_000  # decode at most this many pixels, plus one image, before embedding them


@dataclass(frozen=True)
class Upload:
    """The bytes of an image to add or to search for. The name appears only in error messages.

    ``decoded`` is the image if it has been decoded already, in a decoder process for example.

    >>> Upload(b"no image", name="holiday.jpg").decode()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    idml.data.decoder_process.RefusedImage: cannot read the image 'holiday.jpg': it is none of JPEG, PNG, ...
    """

    data: bytes
    label: str | None = None
    name: str = ""
    decoded: Decoded | None = None

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of the bytes."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def id(self) -> str:
        """The id of the item that the image becomes; images with equal bytes are one item."""
        return self.checksum[:32]

    def decode(self) -> Image.Image:
        """Decode the image as RGB; ``ValueError`` if that is not possible."""
        if self.decoded is not None:
            return self.decoded.image
        return decode_image(io.BytesIO(self.data), self.name[:1000] or "upload")

    @property
    def extension(self) -> str:
        """The file extension for the format of the bytes; only for an image that `decode` can read."""
        if self.decoded is not None:
            return EXTENSIONS[self.decoded.format]
        if (container := container_of(self.data[:12])) is not None:
            return EXTENSIONS[container]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_image(io.BytesIO(self.data)) as image:
                return EXTENSIONS.get(str(image.format), "jpg")  # a JPEG file with several images has the format MPO


def make_thumbnail(image: Image.Image) -> bytes:
    """Make a JPEG of an RGB image, at most 128 pixels a side, without the metadata of the original.

    >>> Image.open(io.BytesIO(make_thumbnail(Image.new("RGB", (640, 480))))).size
    (128, 96)
    """
    scale = min(1.0, _THUMBNAIL_SIDE / max(image.size))
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    small = image.resize(size, Image.Resampling.BILINEAR, reducing_gap=1.0)  # the fastest; good enough to look at
    small.info.clear()  # drops comments, XMP and locations
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85)
    return out.getvalue()


def clean_label(label: str) -> str:
    """Return a label without spaces at its ends; ``ValueError`` if it is not one line of text.

    >>> clean_label(" blue jay ")
    'blue jay'
    """
    if len(label) > MAX_LABEL or any(category(c) in ("Cc", "Cs", "Zl", "Zp") for c in label):
        raise ValueError(f"a label is one line of at most {MAX_LABEL} characters, without control characters")
    return label.strip()


class EmbeddedImages(NamedTuple):
    """The images that could be read: their positions in the input, embeddings and thumbnails."""

    positions: list[int]
    embeddings: Embeddings | None  # None if no image could be read
    thumbnails: list[bytes]


def embed_uploads(
    embedder: Embedder, images: Iterable[Upload], on_error: Callable[[int, ValueError], None] | None = None
) -> EmbeddedImages:
    """Decode and embed images, and make their thumbnails. Only a few decoded images are in memory at a time.

    An image that cannot be decoded raises ``ValueError``. With ``on_error``, that function is called with its position
    and the error instead, and the image is left out.
    """
    positions: list[int] = []
    thumbnails: list[bytes] = []
    parts: list[Embeddings] = []
    waiting: list[Image.Image] = []
    for position, image in enumerate(images):
        try:
            picture = image.decode()
        except ValueError as error:
            if on_error is None:
                raise
            on_error(position, error)
            continue
        positions.append(position)
        thumbnails.append(make_thumbnail(picture))
        waiting.append(picture)
        if len(waiting) == BATCH or sum(x.width * x.height for x in waiting) > _PIXELS:
            parts.append(embedder.embed(waiting))
            waiting = []
    if waiting:
        parts.append(embedder.embed(waiting))
    return EmbeddedImages(positions, Embeddings.cat(parts) if parts else None, thumbnails)


def find_intact(engine: Engine, ids: Sequence[str]) -> set[str]:
    """Return the ids of existing items whose stored bytes are undamaged."""
    existing = [id for id, item in zip(ids, engine.get_many(ids), strict=True) if item is not None]
    with suppress(DamagedGallery):
        _read_stored(engine, existing)
        return set(existing)
    intact = set()
    for id in existing:
        with suppress(DamagedGallery):
            _read_stored(engine, [id])
            intact.add(id)
    return intact


def _read_stored(engine: Engine, ids: Sequence[str]) -> None:
    if ids:
        engine.embeddings(ids)
    for id in ids:
        engine.thumbnail(id)

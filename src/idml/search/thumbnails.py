"""An image's bytes as a gallery needs them: the picture, its small version, and what kind of file it is."""

import hashlib
import io
import warnings
from dataclasses import dataclass
from functools import cached_property

from PIL import Image

from idml.data.images import FORMATS, decode_image

SIDE = 128  # pixels along the longer side of a thumbnail
EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif"}


@dataclass(frozen=True)
class Upload:
    """An image that somebody sends. Its name is shown in error messages and used for nothing else.

    >>> Upload(b"no image", name="holiday.jpg").decode()
    Traceback (most recent call last):
    ...
    ValueError: cannot read the image 'holiday.jpg': it is none of JPEG, PNG, WEBP, GIF, BMP, TIFF
    """

    data: bytes
    label: str | None = None
    name: str = ""

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of the bytes."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def id(self) -> str:
        """The id of the item that it becomes: equal images are one item."""
        return self.checksum[:32]

    def decode(self) -> Image.Image:
        """The image as RGB; ``ValueError`` if it cannot be read."""
        return decode_image(io.BytesIO(self.data), self.name[:1000] or "upload")

    @property
    def extension(self) -> str:
        """What a file of this kind is called, as its content tells; for an image that `decode` could read."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(self.data), formats=FORMATS) as image:
                return EXTENSIONS.get(str(image.format), "jpg")  # several photographs in one JPEG are called MPO


def thumbnail(image: Image.Image) -> bytes:
    """A JPEG of an RGB image, at most 128 pixels a side, that carries nothing but pixels.

    >>> Image.open(io.BytesIO(thumbnail(Image.new("RGB", (640, 480))))).size
    (128, 96)
    """
    small = image.copy()
    small.thumbnail((SIDE, SIDE))
    bare = Image.new("RGB", small.size)  # what came with the file (comments, XMP, places) stays behind
    bare.paste(small)
    out = io.BytesIO()
    bare.save(out, "JPEG", quality=85)
    return out.getvalue()

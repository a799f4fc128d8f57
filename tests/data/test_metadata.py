"""Served pictures: no metadata, upright, and the same pixels where they need not be turned."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from idml.data.images import decode_image
from idml.data.metadata import strip_metadata, write_again

SECRET = b"51.5007N 0.1246W"


def pixels_of(data):
    return np.asarray(decode_image(io.BytesIO(data), "x"), dtype=int)


def remove_metadata(data):
    clean = strip_metadata(data)
    return clean or write_again(decode_image(io.BytesIO(data), "x", min_side=1000))


def encoded(kind, orientation=None, size=(64, 40), **options):
    noise = np.random.default_rng(0).integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    image = Image.fromarray(noise.repeat(8, axis=0).repeat(8, axis=1))
    exif = Image.Exif()
    exif[0x010E] = SECRET.decode()
    exif[0x8825] = {1: "N", 2: (51.0, 30.0, 2.5)}
    if orientation is not None:
        exif[0x0112] = orientation
    out = io.BytesIO()
    image.save(out, kind, exif=exif.tobytes(), **options)
    return out.getvalue()


def check_clean(data):
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert len(image.getexif()) == 0
        assert not {"exif", "xmp", "comment", "photoshop"} & image.info.keys()
    assert SECRET not in data


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"comment": SECRET}, {"restart_marker_blocks": 2}])
def test_a_jpeg_keeps_its_pixels(options):
    data = encoded("JPEG", **options)
    assert SECRET in data
    data = data[:2] + b"\xff\xe2\0\x17FPXR\0" + SECRET + data[2:]  # where the colour profile would be
    trailing = data + b"\xff\xe1\x00\x12" + SECRET  # some phones put another picture behind the first
    for given in (data, trailing):
        clean = strip_metadata(given)
        check_clean(clean)
        assert np.array_equal(pixels_of(clean), pixels_of(data))


def test_a_png_keeps_its_pixels():
    text = PngImagePlugin.PngInfo()
    text.add_text("place", SECRET.decode())
    text.add_itxt("XML:com.adobe.xmp", SECRET.decode())
    data = encoded("PNG", pnginfo=text)
    private = struct.pack(">I", len(SECRET)) + b"caBX" + SECRET  # where cameras put the history of a picture
    data = data[:33] + private + struct.pack(">I", zlib.crc32(private[4:])) + data[33:]
    clean = strip_metadata(data)
    check_clean(clean)
    assert np.array_equal(pixels_of(clean), pixels_of(data))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [None, 1, 6, 3])
def test_every_format_is_clean_and_upright(kind, orientation):
    data = encoded(kind, orientation)
    clean = remove_metadata(data)
    check_clean(clean)
    with Image.open(io.BytesIO(clean)) as image:
        assert image.size == ((40, 64) if orientation == 6 else (64, 40))
    assert np.abs(pixels_of(clean) - pixels_of(data)).mean() < 12  # written again, colours at half the resolution


def test_what_has_nothing_to_hide_is_left_alone():
    for kind in ("BMP", "GIF", "WEBP"):
        out = io.BytesIO()
        Image.new("RGB", (9, 9), "red").save(out, kind)
        assert remove_metadata(out.getvalue()) == out.getvalue()


def test_broken_images_are_refused():
    for data in (b"", b"no image", encoded("JPEG")[:30], b"\xff\xd8" + bytes(50)):
        with pytest.raises(ValueError, match="cannot read the image"):
            remove_metadata(data)
    assert remove_metadata(encoded("JPEG")[:-200]).endswith(b"\xff\xd9")  # cut off: what is there is served

"""Served pictures: no metadata, upright, and the same pixels where they need not be turned."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile, PngImagePlugin

from idml.data import metadata
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


def plain(kind, mode="RGB", **options):
    out = io.BytesIO()
    Image.new(mode, (9, 9), 1).save(out, kind, **options)
    return out.getvalue()


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def with_chunk(data, kind, content):
    """A WebP with one more chunk at its end."""
    data += kind + struct.pack("<I", len(content)) + content + bytes(len(content) % 2)
    return data[:4] + struct.pack("<I", len(data) - 8) + data[8:]


def test_what_has_nothing_to_hide_is_left_alone():
    frames = {"save_all": True, "append_images": [Image.new("RGB", (9, 9), "red")], "loop": 0, "duration": 100}
    for data in (
        *(plain("BMP", mode) for mode in ("1", "L", "RGB")), plain("GIF"), plain("GIF", transparency=0),
        plain("GIF", **frames), plain("WEBP"), plain("WEBP", lossless=True), plain("WEBP", "RGBA"),
        plain("WEBP", icc_profile=b"profile"), plain("WEBP", **frames),
    ):  # fmt: skip
        assert remove_metadata(data) == data


def test_what_else_a_gif_a_webp_and_a_bmp_may_hold_is_left_out():
    gif, webp, bmp = plain("GIF"), plain("WEBP"), plain("BMP")
    said = bytes([len(SECRET)]) + SECRET + b"\0"
    for data in (
        gif[:-1] + b"\x21\xff\x0bXMP DataXMP" + said + b";",
        gif[:-1] + b"\x21\xfe" + said + b";",  # behind the frame
        gif[:-1] + b"\x21\x01\x0c" + bytes(12) + said + b";",
        gif[:-1] + b"\x21\xff\x0bNETSCAPE2.0" + said + b";",
        gif + SECRET + b"\0;",
        with_chunk(webp, b"abcd", SECRET),
        webp + SECRET,
        bmp + SECRET,
        bmp[:10] + struct.pack("<I", 54 + len(SECRET)) + bmp[14:54] + SECRET + bmp[54:],
    ):
        original = {b"G": gif, b"R": webp, b"B": bmp}[data[:1]]
        assert np.array_equal(pixels_of(data), pixels_of(original))
        assert SECRET in data
        assert strip_metadata(data) is None
        check_clean(remove_metadata(data))


def test_segments_of_a_jpeg_and_profiles_of_a_png_hide_nothing():
    data = encoded("JPEG")
    jfif = data.index(b"JFIF") - 4
    for hidden in (
        b"\xff\xe0" + struct.pack(">H", 8 + len(SECRET)) + b"JFXX\0\x13" + SECRET,  # a small picture
        b"\xff\xee" + struct.pack(">H", 2 + len(SECRET)) + SECRET,
        b"\xff\xff\xff\xfe" + struct.pack(">H", 2 + len(SECRET)) + SECRET,  # behind filling
    ):
        clean = strip_metadata(data[: jfif + 18] + hidden + data[jfif + 18 :])
        check_clean(clean)
        assert np.array_equal(pixels_of(clean), pixels_of(data))
    thumbnail = struct.pack(">H", 16 + 15) + data[jfif + 4 : jfif + 16] + b"\5\1" + SECRET[:15]
    clean = strip_metadata(data[: jfif + 2] + thumbnail + data[jfif + 18 :])
    assert SECRET[:15] not in clean
    assert clean == strip_metadata(data)
    png = plain("PNG")
    named = chunk(b"iCCP", SECRET + b"\0\0" + zlib.compress(b"profile"))
    clean = strip_metadata(png[:33] + named + png[33:])
    check_clean(clean)
    with Image.open(io.BytesIO(clean)) as image:
        assert image.info["icc_profile"] == b"profile"


def test_what_cannot_be_told_apart_is_written_again():
    """Such files are indexed and found, so they must be shown too."""
    jpeg, png = encoded("JPEG"), plain("PNG")
    exif = b"not what begins a TIFF"
    for data in (
        png[:33] + chunk(b"eXIf", exif) + png[33:],
        png[:33] + chunk(b"ABCD", SECRET) + png[33:],
        with_chunk(plain("WEBP"), b"EXIF", exif),
        jpeg[:20] + b"stray" + jpeg[20:],
    ):
        assert strip_metadata(data) is None
        check_clean(remove_metadata(data))


@pytest.mark.parametrize("orientation", [None, 6])
@pytest.mark.parametrize("behind", [False, True])
def test_a_png_is_not_decoded(orientation, behind, monkeypatch):
    data = encoded("PNG", orientation)
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4])
    if behind:  # the picture
        data = data[:start] + data[end:-12] + data[start:end] + data[-12:]
    for plugin in (ImageFile.ImageFile, PngImagePlugin.PngImageFile):
        monkeypatch.setattr(plugin, "load", None)
    assert (strip_metadata(data) is None) == (orientation == 6)


def test_many_parts_do_not_take_long(monkeypatch):
    monkeypatch.setattr(metadata, "_MOST_PARTS", 50)
    gif, png, webp, jpeg = plain("GIF"), plain("PNG"), plain("WEBP"), encoded("JPEG")
    for data in (
        gif[:-1] + 60 * b"\x21\xf9\4\0\0\0\0\0" + b";",
        png[:33] + 60 * chunk(b"tEXt", b"") + png[33:],
        jpeg[:20] + 60 * b"\xff\xfe\0\2" + jpeg[20:],
    ):
        assert strip_metadata(data) is None
    for _ in range(60):
        webp = with_chunk(webp, b"ICCP", b"")
    assert strip_metadata(webp) is None


def test_broken_images_are_refused():
    for data in (b"", b"no image", encoded("JPEG")[:30], b"\xff\xd8" + bytes(50)):
        with pytest.raises(ValueError, match="cannot read the image"):
            remove_metadata(data)
    assert remove_metadata(encoded("JPEG")[:-200]).endswith(b"\xff\xd9")  # cut off: what is there is served

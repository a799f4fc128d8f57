"""HEIF and AVIF: read like other images, by a process that is killed at a deadline; hostile files are refused."""

import io
import os
import threading

import numpy as np
import pytest
from heif_files import encode, repeated_tile, with_size
from PIL import Image

from idml.data import decoder_process, images
from idml.data.images import RefusedImage, container_of, decode_image, load_square, read_image
from idml.data.metadata import strip_metadata, write_again

KINDS = ("HEIF", "AVIF")
ORIENTATION = 0x0112


def blocks():
    """Four colours, 96 × 64 pixels."""
    small = np.array([[(255, 0, 0), (0, 255, 0), (0, 0, 255)], [(255, 255, 255), (0, 0, 0), (255, 255, 0)]], np.uint8)
    return Image.fromarray(small.repeat(32, axis=0).repeat(32, axis=1))


def difference(image, other):
    assert image.size == other.size
    return np.abs(np.asarray(image, dtype=int) - np.asarray(other, dtype=int)).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_of_the_picture(kind, tmp_path):
    path = tmp_path / "photo.jpg"  # the suffix means nothing
    path.write_bytes(encode(blocks(), kind))
    assert read_image(path).mode == "RGB"
    assert difference(read_image(path), blocks()) < 8
    assert load_square(path, 28).shape == (3, 28, 28)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_turned_upright(kind, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    turn = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    stored = blocks() if orientation == 1 else blocks().transpose(turn[orientation])
    data = encode(stored, kind, exif=exif.tobytes())
    assert orientation == 1 or b"irot" in data  # the container says it too; readers of HEIF ignore EXIF's word
    assert difference(decode_image(io.BytesIO(data), "x"), blocks()) < 8


@pytest.mark.parametrize("kind", KINDS)
def test_transparency_and_the_first_frame(kind):
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    assert difference(decode_image(io.BytesIO(encode(clear, kind)), "x"), Image.new("RGB", (64, 64), "white")) < 3
    red, blue = Image.new("RGB", (64, 64), "red"), Image.new("RGB", (64, 64), "blue")
    data = encode(red, kind, save_all=True, append_images=[blue])
    assert difference(decode_image(io.BytesIO(data), "x"), red) < 3


@pytest.mark.parametrize("kind", KINDS)
def test_served_pictures_are_jpeg_without_metadata(kind):
    exif = Image.Exif()
    exif[0x010E] = "a secret place"
    data = encode(blocks(), kind, exif=exif)
    assert b"secret" in data
    assert strip_metadata(data) is None
    clean = write_again(decode_image(io.BytesIO(data), "x"))
    assert b"secret" not in clean
    assert Image.open(io.BytesIO(clean)).format == "JPEG"


def refused(data, match, kind=None):
    with pytest.raises(RefusedImage, match=match) as caught:
        decode_image(io.BytesIO(data), "holiday.heic")
    assert "holiday.heic" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert kind is None or caught.value.kind == kind


@pytest.mark.parametrize("kind", KINDS)
def test_broken_files(kind):
    data = encode(blocks(), kind)
    assert container_of(data) == kind
    for share in (0.05, 0.3, 0.6, 0.95):
        refused(data[: max(12, int(share * len(data)))], "cannot read the image 'holiday.heic'", "content")
    refused(data[:12] + b"x" * 500, f"this {kind} file is damaged, or holds no picture of a known kind", "content")
    assert difference(decode_image(io.BytesIO(data), "x"), blocks()) < 8  # the process still works


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_is_refused_before_anything_is_decoded(kind):
    data = with_size(encode(Image.new("RGB", (64, 64)), kind), (64, 64), (9000, 9000))
    refused(data, "9000×9000 pixels, more than 64,000,000", "size")


def test_too_many_bytes(monkeypatch):
    monkeypatch.setattr(images, "_MAX_BYTES", 200)
    refused(encode(blocks(), "HEIF"), "larger than 200 bytes", "size")


def test_a_picture_larger_than_its_header_says():
    data = encode(Image.new("RGB", (512, 512)), "HEIF", quality=1)
    refused(with_size(data, (512, 512), (64, 64)), "exceeds the maximum image size")
    data = encode(Image.new("L", (512, 512)), "AVIF", quality=1, speed=10)  # this decoder scales instead
    assert decode_image(io.BytesIO(with_size(data, (512, 512), (64, 64))), "x").size == (64, 64)


def test_one_part_used_many_times_ends_at_the_deadline(monkeypatch):
    """A small file that would take a quarter of a minute: 30 × 30 times a picture of a million pixels."""
    fine = repeated_tile((64, 64), 2, 2, (128, 128))
    assert difference(decode_image(io.BytesIO(fine), "x"), Image.new("RGB", (128, 128), "grey")) < 3
    hostile = repeated_tile((1024, 1024), 30, 30, (64, 64))
    assert len(hostile) < 3_000
    monkeypatch.setattr(images, "DECODE_SECONDS", 0.5)
    refused(hostile, "crashed, or took more than 0.5 seconds", "content")
    monkeypatch.undo()
    assert difference(decode_image(io.BytesIO(fine), "x"), Image.new("RGB", (128, 128), "grey")) < 3


def test_memory_is_bounded(monkeypatch):
    script = f"from idml.data import decoder_main as d; d.MAX_MEMORY = {300_000_000}; d.main()"
    command = (decoder_process.COMMAND[0], "-c", script)
    monkeypatch.setattr(images, "DecoderProcess", lambda: decoder_process.DecoderProcess(command))
    monkeypatch.setattr(images, "_pool", images._Pool())
    fine, large = repeated_tile((64, 64), 1, 1, (64, 64)), repeated_tile((256, 256), 27, 27, (6900, 6900))
    assert decode_image(io.BytesIO(fine), "x").size == (64, 64)
    refused(large, "cannot read the image", "content")
    assert decode_image(io.BytesIO(fine), "x").size == (64, 64)


def test_nothing_of_these_formats_is_parsed_in_this_process(monkeypatch):
    monkeypatch.setattr(images, "open_image", None)
    assert decode_image(io.BytesIO(encode(blocks(), "HEIF")), "x").size == (96, 64)


def test_threads_and_forked_processes(monkeypatch):
    monkeypatch.setattr(images, "_pool", images._Pool())
    pictures = [Image.new("RGB", (32 + 16 * n, 32), (40 * n, 0, 0)) for n in range(4)]
    data = [encode(picture, "HEIF") for picture in pictures]
    wrong = []

    def decode_all():
        for _ in range(3):
            for picture, content in zip(pictures, data, strict=True):
                if difference(decode_image(io.BytesIO(content), "x"), picture) > 3:
                    wrong.append(picture.size)

    threads = [threading.Thread(target=decode_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 <= len(images._pool.idle) <= 3
    child = os.fork()
    if child == 0:
        decode_all()
        os._exit(1 if wrong else 0)
    decode_all()
    assert os.waitpid(child, 0)[1] == 0
    assert not wrong


def test_without_the_library(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(RefusedImage, match=r"HEIF cannot be read here .*pip install pillow-heif"):
        images.decode_with_format(io.BytesIO(encode(blocks(), "HEIF")), "x")

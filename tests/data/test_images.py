"""Decoding images: every mode as the eye sees it, hostile and broken files refused in one line with their name."""

import io
import struct
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from idml.data import decoder_process, images
from idml.data.augment import View
from idml.data.datasets import ImageSet
from idml.data.images import MAX_SCANS, MAX_SIDE, load_square, read_image
from idml.data.pixel_cache import load_pixels
from idml.data.sources import FileSource

T = Image.Transpose
STORED = {  # how the upright picture lies in the file, for each EXIF orientation
    1: None,
    2: T.FLIP_LEFT_RIGHT,
    3: T.ROTATE_180,
    4: T.FLIP_TOP_BOTTOM,
    5: T.TRANSPOSE,
    6: T.ROTATE_90,
    7: T.TRANSVERSE,
    8: T.ROTATE_270,
}
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


@pytest.fixture
def saved(tmp_path):
    """A function that saves an image (or an array) and returns the path."""

    def save(image, name, **options):
        image = image if isinstance(image, Image.Image) else Image.fromarray(image)
        image.save(tmp_path / name, **options)
        return tmp_path / name

    return save


def blocks():
    """A 48×32 picture of six colours, without any symmetry."""
    small = np.array([[RED, GREEN, BLUE], [WHITE, (0, 0, 0), (255, 255, 0)]], dtype=np.uint8)
    return small.repeat(16, axis=0).repeat(16, axis=1)


def pixels(path):
    image = read_image(path)
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def refused(path, match, read=read_image):
    with pytest.raises(ValueError, match=match) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tif"])
def test_exif_orientation(saved, orientation, suffix):
    turn, exif = STORED[orientation], Image.Exif()
    upright = Image.fromarray(blocks())
    exif[0x0112] = orientation
    options = {"jpg": {"quality": 95, "subsampling": 0}, "webp": {"lossless": True}}.get(suffix, {})
    stored = upright if turn is None else upright.transpose(turn)
    path = saved(stored, f"turned.{suffix}", exif=exif, **options)
    assert Image.open(path).getexif()[0x0112] == orientation
    got = pixels(path)
    assert got.shape == (32, 48, 3)
    assert np.abs(got - blocks()).max() <= (12 if suffix == "jpg" else 0)
    straight = load_square(saved(upright, "straight.png"), 28).int()
    assert (load_square(path, 28).int() - straight).abs().max() <= (12 if suffix == "jpg" else 0)


def exif_cases():
    """EXIF blocks that cameras and attackers write: all of them are read as if there were none."""
    sound = Image.Exif()
    sound[0x0112] = 6
    whole = sound.tobytes()
    for orientation in (0, 9, 65535):
        odd = Image.Exif()
        odd[0x0112] = orientation
        yield f"orientation {orientation}", odd.tobytes()
    yield "empty", b"Exif\0\0"
    yield "no header", b"Exif\0\0" + bytes(40)
    yield "noise", b"Exif\0\0" + np.random.default_rng(0).bytes(200)
    yield "cut in its header", whole[:12]
    yield "offset beyond the end", whole[:10] + b"\xff\xff\xff\x7f" + whole[14:]
    yield "offset to itself", whole[:10] + b"\0\0\0\0" + whole[14:]
    order = "<" if whole[6:8] == b"II" else ">"
    head = b"Exif\0\0" + (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    text = struct.pack(f"{order}HHI4s", 0x0112, 2, 4, b"six\0")
    yield "orientation as text", head + struct.pack(f"{order}H", 1) + text + bytes(4)
    entry = struct.pack(f"{order}HHII", 0x0112, 3, 10**9, 26)
    yield "a billion orientations", head + struct.pack(f"{order}H", 1) + entry + bytes(4)
    yield "65,535 entries", head + struct.pack(f"{order}H", 65535) + entry
    again = struct.pack(f"{order}HHII", 0x8769, 4, 1, 8)  # the directory within is this directory
    yield "a directory within itself", head + struct.pack(f"{order}H", 1) + again + struct.pack(f"{order}I", 8)


@pytest.mark.parametrize("exif", [pytest.param(exif, id=name) for name, exif in exif_cases()])
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_malformed_exif_is_ignored(saved, suffix, exif):
    options = {"jpg": {"quality": 95, "subsampling": 0}, "webp": {"lossless": True}}.get(suffix, {})
    path = saved(blocks(), f"odd.{suffix}", exif=exif, **options)
    assert exif[6:] in path.read_bytes()
    tracemalloc.start()
    try:
        got = pixels(path)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert got.shape == (32, 48, 3)
    assert np.abs(got - blocks()).max() <= (12 if suffix == "jpg" else 0)
    assert held < 5_000_000


def test_cmyk_jpeg(saved):
    colour = (200, 30, 60)
    path = saved(Image.new("RGB", (32, 32), colour).convert("CMYK"), "print.jpg", quality=95)
    assert Image.open(path).mode == "CMYK"
    assert np.abs(pixels(path) - colour).max() <= 4


def test_palette_with_transparency(saved):
    image = Image.fromarray(np.array([[0, 1], [2, 1]], dtype=np.uint8), "P")
    image.putpalette([*RED, *GREEN, *BLUE])
    for name in ("palette.png", "palette.gif"):
        assert pixels(saved(image, name, transparency=0)).tolist() == [[[*WHITE], [*GREEN]], [[*BLUE], [*GREEN]]]
    assert pixels(saved(image, "opaque.png"))[0, 0].tolist() == [*RED]


def test_transparent_becomes_white(saved):
    rgba = np.array([[(*RED, 255), (*RED, 0), (*RED, 128)]], dtype=np.uint8)
    assert pixels(saved(rgba, "a.png")).tolist() == [[[*RED], [*WHITE], [255, 127, 127]]]
    grey = np.array([[(0, 255), (0, 0), (0, 128)]], dtype=np.uint8)
    path = saved(Image.fromarray(grey, "LA"), "la.png")
    assert Image.open(path).mode == "LA"
    assert pixels(path)[0, :, 0].tolist() == [0, 255, 127]


@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_16_bit_grey(saved, name):
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    path = saved(values, name)
    assert Image.open(path).mode.startswith("I;16")
    assert pixels(path).tolist() == [[[v] * 3 for v in (0, 1, 128, 255)]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.25, 0.5, 1.0], [0, 64, 128, 255]),
        ([0.0, 257.0, 32768.0, 65535.0], [0, 1, 128, 255]),
        ([-1.0, 0.5, 0.5, 1.0], [0, 128, 128, 255]),
        ([float("nan"), 0.25, 0.5, 1.0], [0, 64, 128, 255]),
    ],
    ids=["unit", "16 bit", "negative", "nan"],
)
def test_float_tiff(saved, values, expected):
    path = saved(np.array([values], dtype=np.float32), "float.tif")
    assert Image.open(path).mode == "F"
    assert pixels(path)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("shape", [(1500, 1400), (31, 65_535), (65_535, 31)])
@pytest.mark.parametrize("kind", [np.uint16, np.float32])
def test_many_deep_pixels_take_little_memory(shape, kind):
    """Small files hold very many of them; a float64 for each, several times over, would be gigabytes."""
    values = np.random.default_rng(0).integers(0, 65536, shape).astype(kind)
    values.flat[-1] = 65535
    image = Image.fromarray(values)
    tracemalloc.start()
    try:
        found = images._grey(image)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(np.asarray(found), np.round(values.astype(np.float64) / 65535 * 255))
    assert held < 16_000_000 + 7 * values.size


def test_one_bit_and_grey(saved):
    values = np.array([[0, 255], [255, 0]], dtype=np.uint8)
    for image in (Image.fromarray(values), Image.fromarray(values).convert("1")):
        assert pixels(saved(image, f"{image.mode}.png"))[..., 1].tolist() == values.tolist()


@pytest.mark.parametrize("name", ["moving.gif", "moving.png", "pages.tif", "moving.webp", "pair.mpo"])
def test_first_frame(saved, name):
    first, *rest = (Image.new("RGB", (16, 16), colour) for colour in (RED, BLUE, GREEN))
    path = saved(first, name, save_all=True, append_images=rest, **({"lossless": True} if "webp" in name else {}))
    assert Image.open(path).n_frames == 3
    assert np.abs(pixels(path) - RED).max() <= 2
    square = load_square(path, 8)
    assert (square - torch.tensor(RED, dtype=torch.int).view(3, 1, 1)).abs().max() <= 2


@pytest.mark.parametrize("name", ["moving.gif", "moving.png", "moving.webp"])
def test_later_frames_do_not_matter(saved, name):
    """Cut or damaged behind the first frame, as an interrupted download is: the first one is shown, or one line."""
    noise = np.random.default_rng(0)
    frames = [Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(6)]
    options = {"lossless": True} if "webp" in name else {}
    whole = saved(frames[0], name, save_all=True, append_images=frames[1:], **options)
    expected, content = pixels(whole), whole.read_bytes()
    shown = 0
    for end in range(len(content) // 3, len(content), len(content) // 7):
        whole.write_bytes(content[:end])
        try:
            found = pixels(whole)
        except ValueError:
            refused(whole, "cannot read the image")
            continue
        assert np.array_equal(found, expected)
        shown += 1
    assert shown or "webp" in name  # a WebP is decoded as a whole


def test_a_first_frame_with_transparency(saved):
    frames = [Image.new("RGBA", (8, 8), (*colour, alpha)) for colour, alpha in ((RED, 0), (BLUE, 255))]
    for name in ("clear.gif", "clear.png", "clear.webp"):
        path = saved(frames[0], name, save_all=True, append_images=frames[1:])
        assert Image.open(path).n_frames == 2
        assert pixels(path).min() == 255


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.97])
def test_truncated(saved, share):
    for name in ("cut.jpg", "cut.png"):
        path = saved(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8), name)
        pixels(path)  # sound as it is
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        refused(path, "cannot read the image")
        refused(path, "cannot read the image", lambda p: load_square(p, 28))


def test_not_images(saved, tmp_path):
    for name, content in (("empty.png", b""), ("text.jpg", b"a letter, not a picture\n" * 100)):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "cannot read the image")
    refused(tmp_path, "is a folder: name image files")
    for name in ("known.ico", "known.ppm", "known.tga"):
        path = saved(blocks(), name)
        Image.open(path).load()  # a format that PIL reads and we do not
        refused(path, "cannot read the image")
        disguised = path.rename(tmp_path / "disguised.png")
        refused(disguised, "cannot read the image")


def test_the_suffix_means_nothing(saved):
    path = saved(blocks(), "really.png", format="BMP")
    assert np.array_equal(pixels(path), blocks())


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no image .*absent\.png") as caught:
        read_image(tmp_path / "absent.png")
    assert "\n" not in str(caught.value)


def test_pixel_limit(saved, monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 100)
    assert read_image(saved(Image.new("RGB", (20, 5)), "just.png")).size == (20, 5)
    refused(saved(Image.new("RGB", (11, 10)), "over.png"), "11×10 pixels, more than 100")


def bomb(path, side):
    """A black 1-bit PNG of side × side pixels, a few hundred kB of file."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, rows = zlib.compressobj(1), bytes((1 + (side + 7) // 8) * 1000)
    body = b"".join(packer.compress(rows) for _ in range(side // 1000)) + packer.flush()
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", body) + chunk(b"IEND", b""))
    return path


@pytest.mark.parametrize("side", [10_000, 30_000])
def test_decompression_bomb(tmp_path, monkeypatch, side):
    assert np.array_equal(pixels(bomb(tmp_path / "small.png", 1000)), np.zeros((1000, 1000, 3)))  # it is a picture
    path = bomb(tmp_path / "bomb.png", side)
    assert path.stat().st_size < 1_000_000
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)  # it is refused before a pixel is decoded
    with warnings.catch_warnings(record=True) as seen:
        refused(path, "10000×10000 pixels, more than 64,000,000" if side == 10_000 else "900000000 pixels")
    assert not seen


@pytest.mark.parametrize("name", ["a b.png", "ça 画 é.png", "-n.png", "two\nlines.png"])
def test_names(saved, name):
    path = saved(blocks(), name)
    assert np.array_equal(pixels(str(path)), blocks())
    path.write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot read the image") as caught:
        read_image(path)
    message = str(caught.value)
    assert name in message or repr(name)[1:-1] in message
    assert len(message.splitlines()) == 1 or "\n" in name


@pytest.mark.parametrize("size", [28, 64, 224])
@pytest.mark.parametrize("grey", [False, True])
def test_square(saved, size, grey):
    for shape in ((32, 48), (48, 32), (300, 200), (1, 1)):
        tensor = load_square(saved(Image.new("RGB", shape, RED), "red.png"), size, grey=grey)
        assert tensor.dtype == torch.uint8
        assert tensor.shape == (1 if grey else 3, size, size)
        assert tensor.is_contiguous()
        assert tensor.float().mean((1, 2)).tolist() == ([76.0] if grey else [*RED])  # ITU-R 601 grey of red


def test_centre_of_an_image_that_needs_no_resizing(saved):
    across, down = np.meshgrid(np.arange(256), np.arange(256))
    array = np.stack([across // 2, down // 2, across % 2 + 2 * (down % 2)], axis=2).astype(np.uint8)
    expected = torch.from_numpy(array[16:240, 16:240]).permute(2, 0, 1)
    assert torch.equal(load_square(saved(array, "grid.png"), 224), expected)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize("shape", [(50, 90), (600, 200), (1000, 1400)])
def test_a_file_is_seen_as_a_test_sees_it(saved, suffix, shape):
    """The same pixels as the cache of decoded images and the centre that evaluation takes of it."""
    rng = np.random.default_rng(0)
    path = saved(Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).resize(shape), f"image.{suffix}")
    images = ImageSet("one", [FileSource(path.parent, path.name)], torch.tensor([0]), ("a",))
    decoded = load_pixels(images, 32, folder=path.parent)
    seen = View().images(decoded, torch.tensor([0]), 28)
    assert torch.equal(load_square(path, 28) / 255, seen[0])


def with_scans(number, **options):
    """A progressive JPEG whose last scan is repeated."""
    out = io.BytesIO()
    Image.fromarray(blocks()).convert("L").save(out, "JPEG", progressive=True, **options)
    data = out.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * number + b"\xff\xd9"


def test_scans_are_counted_before_decoding(tmp_path, monkeypatch):
    path = tmp_path / "scans.jpg"
    path.write_bytes(with_scans(MAX_SCANS - 6))
    assert pixels(path).shape == (32, 48, 3)
    path.write_bytes(with_scans(13_000))
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    refused(path, "13006 scans, more than 100")
    images = ImageSet("one", [FileSource(path.parent, path.name)], torch.tensor([0]), ("a",))
    with pytest.raises(ValueError, match="13006 scans"):
        load_pixels(images, 32, folder=tmp_path)


@pytest.mark.parametrize("where", ["comment", "trailer"])
def test_bytes_that_only_look_like_scans(tmp_path, where):
    """A scan's marker in other data: in a segment, or behind the end as a phone appends its film."""
    many = b"\xff\xda\0" * 5000
    data = with_scans(0, comment=many) if where == "comment" else with_scans(0) + many
    (tmp_path / "photo.jpg").write_bytes(data)
    assert data.count(b"\xff\xda") > MAX_SCANS
    assert np.abs(pixels(tmp_path / "photo.jpg") - pixels_of_grey(blocks())).max() < 40


def pixels_of_grey(array):
    return np.asarray(Image.fromarray(array).convert("L").convert("RGB")).astype(int)


@pytest.mark.parametrize("padding", [b"\xff" * 7, b"\0" * 7, b"\xff\xd0" * 3])
def test_scans_behind_padding_are_counted(padding):
    """What a decoder skips between segments hides no scan."""
    data = with_scans(200)
    scan = data[data.rindex(b"\xff\xda") : -2]
    padded = data.replace(scan, padding + scan)
    assert images.count_scans(io.BytesIO(padded)) == 206


def test_scans_behind_an_unknown_marker_are_counted():
    """Within a scan a decoder skips the marker FF 02, but not the segment whose length seems to follow it."""
    data = with_scans(0)
    first, last = data.index(b"\xff\xda"), data.rindex(b"\xff\xda")
    restarts = b"\xff\xdd\0\x04\0\x01"
    empty = data[last : last + 10]  # a scan's head alone
    hidden = data[:first] + restarts + data[first:-2] + empty + b"\xff\x02\xff\xff" + empty * 5000 + b"\xff\xd9"
    assert Image.open(io.BytesIO(hidden)).convert("RGB").size == (48, 32)  # it is a picture
    assert images.count_scans(io.BytesIO(hidden)) == 5007
    with pytest.raises(ValueError, match="5007 scans, more than 100"):
        images.decode_image(io.BytesIO(hidden), "x")


def arithmetic_jpeg():
    """A grey JPEG with arithmetic coding and two scans without data."""
    frame = struct.pack(">BHHB", 8, 32, 48, 1) + bytes([1, 0x11, 0])
    scans = [b"\xff\xda\0\x08" + bytes([1, 1, 0, *band]) for band in ((0, 0, 0), (1, 63, 0))]
    tables = b"\xff\xdb\0\x43\0" + bytes([1] * 64)
    return b"\xff\xd8" + tables + b"\xff\xca\0\x0b" + frame + b"".join(scans) + b"\xff\xd9"


def saved_bytes(format):
    out = io.BytesIO()
    Image.fromarray(blocks()).save(out, format)
    return out.getvalue()


UNUSUAL = {
    "many scans": with_scans(30),
    "arithmetic": arithmetic_jpeg(),
    "BMP": saved_bytes("BMP"),
    "TIFF": saved_bytes("TIFF"),
    "large": saved_bytes("PNG") + bytes(16_000_000),
}


@pytest.mark.parametrize("data", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_files_are_decoded_in_a_process_with_a_deadline(data, monkeypatch):
    expected = images.decode_with_format(io.BytesIO(data), "x").image
    monkeypatch.setattr(images, "_decode", None)  # in this process
    assert np.array_equal(images.decode_image(io.BytesIO(data), "x"), expected)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP"])
def test_ordinary_files_need_no_process(format, monkeypatch):
    monkeypatch.setattr(images, "_decode_elsewhere", None)
    assert images.decode_image(io.BytesIO(saved_bytes(format)), "x").size == (48, 32)
    images.decode_image(io.BytesIO(with_scans(0)), "x")
    with pytest.raises(ValueError, match="scans"):
        images.decode_image(io.BytesIO(with_scans(100)), "x")


def test_a_process_decodes_at_the_same_size(monkeypatch):
    out = io.BytesIO()
    Image.new("RGB", (2400, 1200), RED).save(out, "JPEG")
    sizes = [images.decode_image(out, "x", min_side=side).size for side in (32, 601)]
    assert sizes[0] != sizes[1]
    monkeypatch.setattr(images, "_USUAL_BYTES", 0)
    monkeypatch.setattr(images, "_decode", None)
    assert [images.decode_image(out, "x", min_side=side).size for side in (32, 601)] == sizes


@pytest.mark.parametrize("size", [4, 3 * 48 * 32])  # of what is not read: the reply, the pixels
def test_after_an_interruption_the_next_image_gets_its_own_picture(size, monkeypatch):
    real, other = decoder_process.receive, io.BytesIO()
    Image.new("RGB", (48, 32), "blue").save(other, "BMP")

    def interrupted(channel, count):
        if count == size:
            raise KeyboardInterrupt
        return real(channel, count)

    monkeypatch.setattr(images, "_pool", images._Pool())
    images.decode_image(io.BytesIO(saved_bytes("BMP")), "x")
    monkeypatch.setattr(decoder_process, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        images.decode_image(io.BytesIO(saved_bytes("BMP")), "x")
    monkeypatch.setattr(decoder_process, "receive", real)
    assert images.decode_image(other, "x").getpixel((0, 0)) == (0, 0, 255)


def test_sides_and_tiles_are_bounded(saved, tmp_path):
    """Resizing takes memory in proportion to the longer side; a tile is decoded whole."""
    refused(saved(Image.new("1", (MAX_SIDE + 1, 1)), "wide.png"), "65536×1 pixels, a side of more than 65,535")
    refused(saved(Image.new("1", (1, MAX_SIDE + 1)), "high.bmp"), "1×65536 pixels")
    for side in (16, 20_000):
        (tmp_path / "tiles.tif").write_bytes(tiled_tiff(side))
        if side == 16:
            assert np.array_equal(pixels(tmp_path / "tiles.tif"), np.zeros((16, 16, 3)))
    refused(tmp_path / "tiles.tif", "tiles of 20000×20000 pixels")


def tiled_tiff(side):
    """A grey TIFF of 16 × 16 pixels in one tile of side × side."""
    body = zlib.compress(bytes(256))
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side, 324: 8, 325: len(body)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    start = struct.pack("<2sHI", b"II", 42, 8 + len(body))
    return start + body + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_large_transparent_images_are_converted_in_bands(monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (50, 40, 4), dtype=np.uint8)
    image = Image.fromarray(noise)
    whole = images._as_rgb(image)
    monkeypatch.setattr(images, "_BLOCK", 130)  # 3 rows
    assert images._as_rgb(image) == whole


def test_reduced_decoding_of_jpeg(saved):
    path = saved(Image.new("RGB", (2400, 1200), RED), "large.jpg")
    assert read_image(path).size == read_image(path, min_side=32).size == (1200, 600)
    assert min(read_image(path, min_side=601).size) >= 601
    assert read_image(saved(Image.new("RGB", (2400, 1200), RED), "large.png")).size == (2400, 1200)


def test_narrow_images_are_squeezed_into_the_square(saved):
    for shape in ((1, 5000), (5000, 1)):
        path = saved(Image.new("RGB", shape, RED), "line.png")
        assert read_image(path).size == shape
        assert load_square(path, 28).float().mean((1, 2)).tolist() == [*RED]

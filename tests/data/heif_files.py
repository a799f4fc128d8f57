"""HEIF and AVIF files for tests: ordinary ones, and ones whose header says something else than the coded picture."""

import io
import struct

from PIL import Image
from pillow_heif import register_heif_opener

register_heif_opener()


def encode(image, kind, **options):
    """The bytes of an image file."""
    out = io.BytesIO()
    image.save(out, kind, **{"quality": 90, **options})
    return out.getvalue()


def with_size(data, true, told):
    """The file with another size in its header (the property `ispe`)."""
    changed = data.replace(
        b"ispe" + bytes(4) + struct.pack(">II", *true), b"ispe" + bytes(4) + struct.pack(">II", *told)
    )
    assert changed != data
    return changed


def repeated_tile(tile, rows, columns, size):
    """A HEIF image of ``size`` that uses one coded picture of size ``tile`` rows × columns times."""
    coded = encode(Image.new("RGB", tile, "grey"), "HEIF", quality=1)
    properties = {
        kind: coded[start - 8 : end] for kind, start, end in _boxes(coded, *_find(coded, b"meta", b"iprp", b"ipco"))
    }
    start, end = _find(coded, b"mdat")
    picture, count = coded[start:end], rows * columns
    grid = struct.pack(">BBBBII", 0, 1, rows - 1, columns - 1, *size)
    shared = _box(b"ipco", properties[b"hvcC"], properties[b"ispe"], _full(b"ispe", struct.pack(">II", *size)))
    used = _full(
        b"ipma", struct.pack(">I", 2), struct.pack(">HB", 1, 2), b"\x81\x02", struct.pack(">HB", 2, 1), b"\x03"
    )

    def meta(place):
        extents = [struct.pack(">HHHII", 1, 0, 1, place, len(picture))]
        extents.append(struct.pack(">HHHII", 2, 0, 1, place + len(picture), len(grid)))
        return _full(
            b"meta",
            _full(b"hdlr", struct.pack(">I4s", 0, b"pict"), bytes(13)),
            _full(b"pitm", struct.pack(">H", 2)),
            _full(b"iinf", struct.pack(">H", 2), _item(1, b"hvc1"), _item(2, b"grid")),
            _full(b"iref", _box(b"dimg", struct.pack(">HH", 2, count), struct.pack(">H", 1) * count)),
            _box(b"iprp", shared, used),
            _full(b"iloc", b"\x44\x00", struct.pack(">H", 2), *extents),
        )

    head = _box(b"ftyp", b"heic", bytes(4), b"mif1heic")
    return head + meta(len(head) + len(meta(0)) + 8) + _box(b"mdat", picture, grid)


def _box(kind, *parts):
    body = b"".join(parts)
    return struct.pack(">I", 8 + len(body)) + kind + body


def _full(kind, *parts, version=0):
    return _box(kind, struct.pack(">I", version << 24), *parts)


def _item(number, kind):
    return _full(b"infe", struct.pack(">HH4sB", number, 0, kind, 0), version=2)


def _boxes(data, start, end):
    while start < end:
        size, kind = struct.unpack(">I4s", data[start : start + 8])
        yield kind, start + 8, start + size
        start += size


def _find(data, *path):
    start, end = 0, len(data)
    for wanted in path:
        start, end = next((a, b) for kind, a, b in _boxes(data, start, end) if kind == wanted)
        start += 4 if wanted == b"meta" else 0
    return start, end

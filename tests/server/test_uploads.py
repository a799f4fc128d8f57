"""Hostile uploads and addresses: each is refused with one line, and harms nobody else."""

import gzip
import io
import os
import socket
import struct
import tracemalloc
import zlib
from urllib.parse import quote

import pytest
from PIL import GifImagePlugin, Image, PngImagePlugin, TiffImagePlugin, WebPImagePlugin
from service_client import client_of, identity, picture, said, search

from idml.data.images import decode_with_format
from idml.data.metadata import strip_metadata
from idml.search.gallery import Gallery
from idml.search.indexing import index_folder
from idml.server import uploads


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_bomb(side):
    """A PNG of a few kilobytes that claims to hold side × side pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1_000_000))) + chunk(b"IEND", b"")


def claiming(format, side):
    """A small image whose head claims side × side pixels."""
    data = bytearray(picture(1, format=format))
    if format == "JPEG":
        place, size = data.index(b"\xff\xc0") + 5, struct.pack(">HH", side, side)
    elif format == "GIF":
        place, size = 6, struct.pack("<HH", side, side)
    elif format == "BMP":
        place, size = 18, struct.pack("<ii", side, side)
    elif format == "WEBP":
        place, size = data.index(b"\x9d\x01\x2a") + 3, struct.pack("<HH", side, side)
    else:
        (place,) = struct.unpack_from("<I", data, 4)
        size = b"".join(struct.pack("<HHII", tag, 4, 1, side) for tag in (256, 257))
        place += 2
        assert struct.unpack_from("<H", data, place) == (256,)
    data[place : place + len(size)] = size
    return bytes(data)


def png_with(*chunks):
    """A sound PNG with more chunks behind its head."""
    data = picture(1)
    return data[:33] + b"".join(chunks) + data[33:]


def multipart(*parts):
    """A body of (headers, content) parts."""
    return b"".join(b"--b\r\n" + head + b"\r\n\r\n" + data + b"\r\n" for head, data in parts) + b"--b--\r\n"


def field(name, data, more=b""):
    return b'Content-Disposition: form-data; name="' + name + b'"' + more, data


def post(client, body, kind="multipart/form-data; boundary=b", path="/api/search"):
    return client.post(path, content=body, headers={"content-type": kind})


@pytest.mark.parametrize("side", [8_001, 20_000, 60_000, 2**31 - 1])
def test_decompression_bombs(shared, side):
    for response in (search(shared, png_bomb(side)), shared.post("/api/items", files={"image": png_bomb(side)})):
        assert response.status_code == 413
        assert "pixels" in said(response)


@pytest.mark.parametrize("format", ["JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_bombs_of_every_format(shared, format):
    assert search(shared, picture(1, format=format)).status_code == 200
    response = search(shared, claiming(format, 16_000))
    assert response.status_code == 413
    assert "pixels" in said(response)


ZEROS = zlib.compress(bytes(100_000_000), 9)  # 100 kB
HIDDEN = {
    "zTXt": png_with(chunk(b"zTXt", b"k\0\0" + ZEROS)),
    "iTXt": png_with(chunk(b"iTXt", b"k\0\1\0\0\0" + ZEROS)),
    "iCCP": png_with(chunk(b"iCCP", b"k\0\0" + ZEROS)),
    "IDAT": png_with(chunk(b"IDAT", ZEROS)),  # many more pixels than the head speaks of
}


@pytest.mark.parametrize("data", HIDDEN.values(), ids=HIDDEN)
def test_bombs_behind_a_harmless_header(shared, data):
    tracemalloc.start()
    try:
        response = search(shared, data)
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert response.status_code in (200, 422)
    assert held < 20_000_000


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_frames_are_not_decoded(shared, monkeypatch, format):
    frames, out = [Image.new("RGB", (40, 32), (n, 0, 0)) for n in range(100)], io.BytesIO()
    frames[0].save(out, format, save_all=True, append_images=frames[1:])
    assert search(shared, out.getvalue()).status_code == 200
    kind, name = {
        "GIF": (GifImagePlugin.GifImageFile, "_seek"),
        "PNG": (PngImagePlugin.PngImageFile, "_seek"),
        "WEBP": (WebPImagePlugin.WebPImageFile, "_get_next"),
        "TIFF": (TiffImagePlugin.TiffImageFile, "_seek"),
    }[format]
    real, calls = getattr(kind, name), []
    monkeypatch.setattr(kind, name, lambda *args, **options: calls.append(args) or real(*args, **options))
    decode_with_format(io.BytesIO(out.getvalue()), "x")
    assert len(calls) <= 2


@pytest.fixture
def listener():
    """A socket that somebody would connect to who opened an address; its address, and whether somebody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)

        def connected():
            try:
                server.accept()[0].close()
            except BlockingIOError:
                return False
            return True

        yield f"127.0.0.1:{server.getsockname()[1]}", connected


def test_addresses_are_never_opened(client, gallery, tmp_path, listener):
    """As the image, as a field, as a label, a name or an id: an address or a path is text, nothing follows it."""
    place, connected = listener
    secret = tmp_path / "secret.png"
    secret.write_bytes(picture(55))
    before = len(gallery)
    for address in (f"http://{place}/x.png", f"ftp://{place}/x", f"//{place}/x", f"file://{secret}", str(secret)):
        text = address.encode()
        for path in ("/api/search", "/api/items"):
            assert client.post(path, files={"image": text}).status_code == 415
            for name in ("url", "path", "image_url", "file"):
                assert client.post(path, files={name: text}).status_code == 422
                assert client.post(path, data={name: address, "image": address}).status_code in (415, 422)
            assert client.post(path, json={"image": address, "url": address}).status_code == 415
            assert client.post(f"{path}?url={quote(address, safe='')}", content=b"").status_code in (415, 422)
        assert client.get(f"/api/items/{quote(address, safe='')}/image").status_code == 404
    svg = f'<svg xmlns="http://www.w3.org/2000/svg"><image href="http://{place}/x.png"/></svg>'.encode()
    assert client.post("/api/search", files={"image": ("x.svg", svg, "image/svg+xml")}).status_code == 415
    assert len(gallery) == before
    added = client.post(
        "/api/items", files={"image": (f"http://{place}/x.png", picture(56))}, data={"label": f"http://{place}/"}
    )
    assert added.status_code == 201
    item = client.get(f"/api/items/{added.json()['id']}").json()
    assert (item["label"], item["path"]) == (f"http://{place}/", f"uploads/{identity(picture(56))}.png")
    assert not connected()
    with socket.create_connection(place.split(":")):  # the test can see a connection
        assert connected()


def test_a_compressed_body_stays_compressed(shared):
    """Nothing unpacks a request: a bomb in its encoding is no form."""
    headers = {"content-type": "multipart/form-data; boundary=b", "content-encoding": "gzip"}
    response = shared.post("/api/search", content=gzip.compress(bytes(10_000_000)), headers=headers)
    assert response.status_code == 422
    assert said(response)


PAGE = b"<html><script>alert(1)</script></html>"
POLYGLOTS = {
    "GIF and page": (picture(60, format="GIF") + PAGE, "gif", "page.html", "text/html"),
    "GIF and script": (
        picture(61, format="GIF", comment=b"*/=1;alert(1)/*") + b"//",
        "gif",
        "x.js",
        "application/javascript",
    ),
    "JPEG and page": (picture(62, format="JPEG", comment=PAGE), "jpeg", "page.html", "text/html"),
    "JPEG and PHP": (picture(63, format="JPEG", comment=b"<?php system('id'); ?>"), "jpeg", "x.php.jpg", "image/jpeg"),
    "PNG and archive": (picture(64) + b"PK\x05\x06" + bytes(18), "png", "x.jar", "application/java-archive"),
    "PNG and SVG": (picture(65) + b"<svg xmlns='http://www.w3.org/2000/svg'/>", "png", "x.svg", "image/svg+xml"),
    "PNG named as a page": (picture(66), "png", "x.png.html", "text/html"),
}


@pytest.mark.parametrize("case", POLYGLOTS.values(), ids=POLYGLOTS)
def test_a_polyglot_is_served_as_its_image_format(client, gallery, case):
    """An image that is also something else: it is kept, and served as the image alone, whatever it was sent as."""
    data, kind, name, claimed = case
    files = {"image": (name, data, claimed)}
    assert client.post("/api/search", files=files).status_code == 200
    added = client.post("/api/items", files=files)
    assert added.status_code == 201
    id, ending = added.json()["id"], {"jpeg": "jpg"}.get(kind, kind)
    response = client.get(f"/api/items/{id}/image")
    assert response.content == (strip_metadata(data) or response.content)
    served = "jpeg" if response.content[:2] == b"\xff\xd8" else kind  # a GIF with a comment is written again
    assert response.headers["content-type"] == f"image/{served}"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-disposition"] == f'inline; filename="{id}.{ {"jpeg": "jpg"}.get(served, served) }"'
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert gallery.image_file(id).name == f"{id}.{ending}"
    assert gallery.image_file(id).read_bytes() == data
    small = client.get(f"/api/items/{id}/thumbnail")  # made anew: pixels and nothing else
    assert small.headers["content-type"] == "image/jpeg"
    for content in (small.content, response.content):
        assert not any(word in content for word in (b"alert", b"<?php", b"PK\x05", b"<svg"))


@pytest.mark.parametrize(
    "data",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
        b"<?xml version='1.0'?><svg/>",
        b"<html><body>",
        b"%PDF-1.7\n",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"\x80\x04\x95cos\nsystem\n",
        b"PK\x03\x04",
        b"x",
        b"\x00" * 1000,
        b"P6 1000000 1000000 255\n",
    ],
)
def test_data_that_is_not_an_image(shared, data):
    for kind in ("image/png", "image/svg+xml", "text/plain"):
        for path in ("/api/search", "/api/items"):
            response = shared.post(path, files={"image": ("picture.png", data, kind)})
            assert response.status_code == 415
            assert "known format" in said(response)


def test_a_wrong_content_type_does_not_matter(shared):
    for kind in ("text/html", "image/svg+xml", "application/octet-stream", "nonsense"):
        response = shared.post("/api/search", files={"image": ("x.exe", picture(3, format="JPEG"), kind)})
        assert response.status_code == 200


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP"])
def test_broken_images(shared, format):
    """Cut at many places: served or refused, never a 500."""
    whole = picture(1, size=(64, 64), format=format)
    for cut in range(1, len(whole), max(1, len(whole) // 12)):
        response = search(shared, whole[:cut])
        assert response.status_code in (200, 415, 422)
        if response.status_code != 200:
            assert said(response)


def test_a_file_with_several_images(client):
    """A camera's MPO is a JPEG to everybody."""
    out = io.BytesIO()
    first, second = (Image.open(io.BytesIO(picture(n))) for n in (70, 71))
    first.convert("RGB").save(out, "MPO", save_all=True, append_images=[second.convert("RGB")])
    added = client.post("/api/items", files={"image": out.getvalue()})
    assert added.status_code == 201
    response = client.get(f"/api/items/{added.json()['id']}/image")
    assert response.headers["content-type"] == "image/jpeg"


def test_a_hundred_thousand_parts(shared, monkeypatch):
    body = multipart(*[field(b"image", b"x")] + [field(b"f%d" % n, b"x") for n in range(100_000)])
    begun, real = [], uploads._Form.on_part_begin
    monkeypatch.setattr(uploads._Form, "on_part_begin", lambda form: begun.append(form) or real(form))
    for content in (body, multipart(*[(b"X: y", b"")] * 100_000)):
        begun.clear()
        response = post(shared, content)
        assert len(begun) <= 2  # reading stops at the first unknown field
        assert response.status_code == 422
        assert "unknown field" in said(response)


IMAGE = picture(3)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 422, "ends too early"),
        (b"nonsense", 422, "broken"),
        (b"--b--\r\n", 422, "needs an image"),
        (multipart(field(b"image", b"")), 422, "needs an image"),
        (multipart(field(b"file", IMAGE)), 422, "unknown field"),
        (multipart(field(b"image", IMAGE), field(b"image", IMAGE)), 422, "twice"),
        (multipart(field(b"image", IMAGE), field(b"label", b"x")), 422, "unknown field"),  # searching takes no label
        (multipart(field(b"../../image", IMAGE)), 422, "unknown field"),
        (multipart(field(b"image\x00", IMAGE)), 422, "unknown field"),
        (multipart((b"X: y", IMAGE)), 422, "unknown field"),
        (multipart((b"", IMAGE)), 422, ""),
        (multipart((b"Content-Disposition: form-data", IMAGE)), 422, "unknown field"),
        (multipart((b"A: " + b"x" * 100_000, IMAGE)), 422, "broken"),
        (multipart((b"\r\n".join(b"A: x" for _ in range(1000)), IMAGE)), 422, "broken"),
        (multipart(field(b"image", IMAGE))[:-10], 422, "ends too early"),
        (multipart(field(b"image", IMAGE))[:200], 422, "ends too early"),
    ],
)
def test_bad_forms(shared, body, status, words):
    response = post(shared, body)
    assert response.status_code == status
    assert words in said(response)


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "image/png",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=b",
    ],
)
def test_bodies_that_are_not_forms(shared, kind):
    response = post(shared, multipart(field(b"image", IMAGE)), kind)
    assert response.status_code == 415
    assert "multipart/form-data" in said(response)


def test_a_very_long_boundary(shared):
    response = post(shared, b"x", "multipart/form-data; boundary=" + "b" * 5000)
    assert response.status_code == 422
    assert said(response)


def test_the_file_name_is_not_used(client, gallery, tmp_path):
    name = b'; filename="../../../../' + str(tmp_path).encode() + b'/evil.html"'
    body = multipart(field(b"image", picture(80), name), field(b"label", b"<img src=x onerror=alert(1)>"))
    response = post(client, body, path="/api/items")
    assert response.status_code == 201
    assert not list(tmp_path.rglob("evil*"))
    content = client.get(f"/api/items/{response.json()['id']}")
    assert content.headers["content-type"] == "application/json"
    assert content.json()["label"] == "<img src=x onerror=alert(1)>"
    assert content.json()["path"] == f"uploads/{response.json()['id']}.png"


def test_a_link_out_of_an_indexed_folder_is_not_served(tmp_path, tiny_run):
    secret = tmp_path / "secret.png"
    secret.write_bytes(picture(1))
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "good.png").write_bytes(picture(2))
    (folder / "later.png").write_bytes(picture(3))
    with Gallery.create(tmp_path / "g", tiny_run) as gallery:
        index_folder(gallery, folder)
        with client_of(gallery) as client:
            ids = {item["path"].split("/")[-1]: item["id"] for item in client.get("/api/items").json()["items"]}
            assert client.get(f"/api/items/{ids['good.png']}/image").content == picture(2)
            (folder / "later.png").unlink()
            (folder / "later.png").symlink_to(secret)
            response = client.get(f"/api/items/{ids['later.png']}/image")
            assert response.status_code == 404
            (folder / "later.png").unlink()
            os.mkfifo(folder / "later.png")  # nobody writes to it: opening it would wait
            assert client.get(f"/api/items/{ids['later.png']}/image").status_code == 404


def test_a_late_link_is_not_followed(tmp_path):
    from idml.server.responses import ApiError
    from idml.server.uploads import open_image_file

    (tmp_path / "secret.png").write_bytes(picture(1))
    (tmp_path / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("link.png", "pipe.png", "nothing.png", "."):
        with pytest.raises(ApiError) as refusal:
            open_image_file(tmp_path / name)
        assert refusal.value.status == 404

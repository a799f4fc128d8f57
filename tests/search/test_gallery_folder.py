"""How images come into a gallery and go, and who may do what."""

import hashlib
import io
import os
import threading

import pytest
import torch
from numbered_changes import child, damage_value
from PIL import Image
from synthetic_images import cloud, encoded, picture

from idml.search.engines import Added, Item
from idml.search.gallery import Gallery, Upload, open_engine

pytestmark = pytest.mark.usefixtures("_no_waiting")


# images come and go


def test_uploads(gallery, tmp_path):
    data = encoded(picture(1), "JPEG")
    upload = Upload(data, "label <b>", "../../evil\n<script>.exe")
    assert gallery.add([upload]) == Added(1, 0, 0)
    item = gallery.get(upload.id)
    assert item == Item(f"uploads/{upload.id}.jpg", hashlib.sha256(data).hexdigest(), "label <b>")
    assert (tmp_path / "g" / item.path).read_bytes() == data
    assert gallery.image_file(item.id) == (tmp_path / "g" / item.path).resolve()
    assert gallery.add([Upload(data)]) == Added(0, 0, 1)  # no label given: it keeps its own
    assert gallery.get(item.id).label == "label <b>"
    assert gallery.add([Upload(data, "a"), Upload(data, "b")]) == Added(0, 1, 0)  # of equal images the last counts
    assert gallery.get(item.id).label == "b"
    (tmp_path / "g" / item.path).unlink()
    assert gallery.add([Upload(data)]) == Added(0, 0, 1)
    assert gallery.image_file(item.id).read_bytes() == data  # what was lost is back
    assert gallery.add([]) == Added(0, 0, 0)
    assert gallery.search([picture(1)])[0].results[0].id == item.id
    assert len(gallery) == 1
    assert gallery.remove([item.id]) == 1
    assert list((tmp_path / "g" / "uploads").iterdir()) == []
    assert gallery.image_file(item.id) is None


@pytest.mark.parametrize(
    ("kind", "extension"),
    [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("GIF", "gif"), ("BMP", "bmp"), ("TIFF", "tif")],
)
def test_the_file_extension_comes_from_the_content(gallery, kind, extension):
    upload = Upload(encoded(picture(1), kind), name="photo.php")
    gallery.add([upload])
    assert gallery.get(upload.id).path == f"uploads/{upload.id}.{extension}"
    gallery.remove([upload.id])
    assert gallery.image_file(upload.id) is None


def test_a_jpeg_with_several_images(gallery):
    out = io.BytesIO()
    picture(1).save(out, "MPO", save_all=True, append_images=[picture(2)])
    upload = Upload(out.getvalue())
    gallery.add([upload])
    assert gallery.get(upload.id).path.endswith(".jpg")


@pytest.mark.parametrize("data", [b"", b"no image", encoded(picture(1))[:-40], b"<svg/>", b"%PDF-1.4"])
def test_a_broken_upload_changes_nothing(gallery, tmp_path, data):
    with pytest.raises(ValueError, match=r"cannot read the image 'x\.png'") as caught:
        gallery.add([Upload(encoded(picture(2)), "a"), Upload(data, "b", "x.png")])
    assert "\n" not in str(caught.value)
    assert len(gallery) == 0
    assert not (tmp_path / "g" / "uploads").exists()
    with pytest.raises(ValueError, match="the label of an item must be a valid string"):
        gallery.add([Upload(encoded(picture(2)), "\ud800")])
    assert len(gallery) == 0


def test_bytes_are_stored_before_the_item(gallery, tmp_path, monkeypatch):
    upload, add = Upload(encoded(picture(1))), gallery.engine.add
    place = tmp_path / "g" / "uploads" / f"{upload.id}.png"

    def checked(items, *rest):
        assert place.read_bytes() == upload.data
        return add(items, *rest)

    monkeypatch.setattr(gallery.engine, "add", checked)
    gallery.add([upload])
    assert len(gallery) == 1


def test_removing_again_after_a_kill(gallery, tmp_path, monkeypatch):
    """A kill between the item's end and that of its bytes: the next call for it finishes the work."""
    upload = Upload(encoded(picture(1)))
    gallery.add([upload])
    gallery.engine.remove([upload.id])
    assert gallery.remove([upload.id, "../model", "unknown"]) == 0
    assert list((tmp_path / "g" / "uploads").iterdir()) == []
    assert (tmp_path / "g" / "model" / "model.safetensors").exists()
    with pytest.raises(ValueError, match="must be a list of ids"):
        gallery.remove(upload.id)


def test_thumbnails_are_small_and_without_metadata(gallery):
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "secret place"  # turned by a quarter
    wide = picture(1, size=(600, 200))
    data = encoded(wide, "JPEG", exif=exif, comment=b"secret comment", xmp=b"secret xmp", icc_profile=b"secret icc")
    assert data.count(b"secret") >= 3
    upload = Upload(data)
    gallery.add([upload])
    small = gallery.thumbnail(upload.id)
    assert b"secret" not in small
    with Image.open(io.BytesIO(small)) as image:
        assert (image.format, image.size) == ("JPEG", (43, 128))
        assert not image.getexif()
    gallery.add([long := Upload(encoded(Image.new("RGB", (2000, 1))))])
    assert Image.open(io.BytesIO(gallery.thumbnail(long.id))).size == (128, 1)
    gallery.add([tiny := Upload(encoded(Image.new("RGB", (2, 3))))])
    assert Image.open(io.BytesIO(gallery.thumbnail(tiny.id))).size == (2, 3)


def test_adding_again_repairs_a_damaged_item(gallery, tmp_path):
    uploads = [Upload(encoded(picture(n)), f"c{n}") for n in range(3)]
    gallery.add(uploads)
    expected = gallery.engine.embeddings()
    gallery.close()
    damage_value(tmp_path / "g", "vectors", "semantic", uploads[1].id)
    damage_value(tmp_path / "g", "thumbnails", "image", uploads[2].id)
    with Gallery.open(gallery.location, write=True) as opened:
        assert len(opened.engine.verify()) == 2
        assert opened.add([Upload(x.data) for x in uploads]) == Added(0, 2, 1)
        assert opened.engine.verify() == []
        assert torch.allclose(opened.engine.embeddings([x.id for x in uploads]).semantic, expected.semantic, atol=1e-5)
        assert [opened.get(x.id).label for x in uploads] == ["c0", "c1", "c2"]


# who may do what


def test_readers_that_refresh(gallery):
    with Gallery.open(gallery.location) as reader:
        assert (reader.writable, reader.status().writable) == (False, False)
        gallery.add([Upload(encoded(picture(1)), "a")])
        assert reader.refresh()
        assert (len(reader), reader.status().items, reader.status().classes) == (1, 1, 1)
        assert not reader.refresh()
        id = next(reader.items()).id
        assert reader.image_file(id) is not None
        for change in (
            lambda: reader.add([Upload(encoded(picture(2)))]),
            lambda: reader.remove([id]),
            lambda: reader.relabel({id: "b"}),
        ):
            with pytest.raises(ValueError, match="open for reading only"):
                change()
        assert reader.image_file(id) is not None
    with open_engine(gallery.location) as engine:
        assert len(engine) == 1


def test_no_path_leaves_its_root(gallery, tmp_path):
    """Whatever the items and roots.json say, and wherever links lead."""
    root, secret = tmp_path / "photos", tmp_path / "secret.png"
    (root / "sub").mkdir(parents=True)
    secret.write_bytes(b"secret")
    (root / "sub" / "a.png").write_bytes(b"a")
    (root / "link.png").symlink_to(secret)
    (root / "up").symlink_to(tmp_path)
    (root / "inside.png").symlink_to("sub/a.png")
    (root / "loop.png").symlink_to("loop.png")
    assert gallery.roots.register(str(root)) == "photos"
    names = {
        "photos/sub/a.png": root / "sub" / "a.png",
        "photos/inside.png": root / "sub" / "a.png",
        "photos/link.png": None,
        "photos/up/secret.png": None,
        "photos/loop.png": None,
        "photos/sub": None,
        "photos": None,
        "photos/": None,
        "other/a.png": None,
        "uploads/model.safetensors": None,
        "": None,
        f"photos/{'x' * 5000}": None,
    }
    for n, (path, expected) in enumerate(names.items()):
        gallery.add_embedded([Item(path, "0" * 64, id=f"i{n}")], cloud(1, 1)[0])
        assert gallery.image_file(f"i{n}") == (None if expected is None else expected.resolve()), path
        assert gallery.roots.find_file(f"photos/../../{secret.name}") is None
    assert gallery.image_file("unknown") is None
    for damage in (b"[1]", b'{"a": 1}', b"{", b"\xff"):
        (tmp_path / "g" / "roots.json").write_bytes(damage)
        with pytest.raises(ValueError, match=r"roots\.json is damaged"):
            gallery.image_file("i0")


def test_threads_share_a_gallery(gallery):
    """Searches, adds, labels and removals at once: no error, and the counts are right afterwards."""
    uploads = [Upload(encoded(picture(n % 5, n)), f"c{n % 5}") for n in range(40)]
    gallery.add(uploads[:20])
    queries = gallery.embedder.embed([picture(n % 5, 100 + n) for n in range(8)])
    errors, ended = [], threading.Event()

    def guarded(work):
        def loop():
            try:
                while not ended.is_set():
                    work()
            except Exception as error:
                errors.append(error)

        return threading.Thread(target=loop)

    def look():
        for reply in gallery.search_embeddings(queries, k=5):
            assert 1 <= len(reply.results) <= 5
        assert gallery.status().items >= 19

    def come_and_go():
        gallery.add(uploads[20:])
        gallery.relabel({uploads[3].id: None})
        gallery.remove([upload.id for upload in uploads[20:]])
        gallery.relabel({uploads[3].id: "c3"})

    def one_by_one():
        gallery.add([uploads[0]])
        gallery.remove([uploads[0].id])

    threads = [guarded(work) for work in (look, look, come_and_go, one_by_one)]
    for thread in threads:
        thread.start()
    ended.wait(3)
    ended.set()
    for thread in threads:
        thread.join()
    assert errors == []
    labels = [item.label for item in gallery.items()]
    assert gallery.status().items == len(labels) == 19
    assert gallery.status().labelled == sum(label is not None for label in labels)


def test_a_forked_reader_sees_what_was_acknowledged(gallery):
    """The bytes and the item of an acknowledged upload survive the process's death."""
    gallery.close()

    def work():
        with Gallery.open(gallery.location, write=True) as opened:
            opened.add([Upload(encoded(picture(1)), "a")])

    with child(work) as pid:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with Gallery.open(gallery.location) as reader:
        (item,) = reader.items()
        assert hashlib.sha256(reader.image_file(item.id).read_bytes()).hexdigest() == item.checksum

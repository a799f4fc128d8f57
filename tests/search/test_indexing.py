"""Indexing folders: what is in them, what changes in them, and what people and kills do to them."""

import hashlib
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import torch
from numbered_changes import child, damage_value, state
from PIL import Image
from synthetic_images import encoded, picture, save_run, write_picture

import idml.search.indexing
from idml.search.gallery import Gallery, Upload, open_or_create
from idml.search.indexing import Indexed, index_folder

KILLS = int(os.environ.get("IDML_KILLS", "2"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def gallery(run, tmp_path, request):
    request.getfixturevalue("_no_waiting")
    with Gallery.create(tmp_path / "g", run) as made:
        yield made


@pytest.fixture
def photos(tmp_path):
    """birds/0 … 2, cats/0 … 2, deep/below/0, and one picture beside the folders."""
    for n in range(3):
        write_picture(tmp_path / "photos" / "birds" / f"{n}.png", 1, n)
        write_picture(tmp_path / "photos" / "cats" / f"{n}.PNG", 2, n)
    write_picture(tmp_path / "photos" / "deep" / "below" / "0.png", 3)
    write_picture(tmp_path / "photos" / "top.png", 4)
    return tmp_path / "photos"


class Embedding:
    """Counts what is embedded."""

    def __init__(self, embedder, patch):
        self.count, embed = 0, embedder.embed

        def counted(images):
            self.count += len(images)
            return embed(images)

        patch.setattr(embedder, "embed", counted)


def test_index_a_folder(gallery, photos):
    progress = []
    done = index_folder(gallery, photos, progress=lambda *row: progress.append(row))
    assert done == Indexed(new=8, replaced=0, unchanged=0, removed=0, broken=0)
    assert progress == [(8, 8)]
    expected = {
        **{f"photos/birds/{n}.png": "birds" for n in range(3)},
        **{f"photos/cats/{n}.PNG": "cats" for n in range(3)},
        "photos/deep/below/0.png": "deep",
        "photos/top.png": None,
    }
    assert {item.path: item.label for item in gallery.items()} == expected
    for item in gallery.items():
        file = photos.parent / item.path
        assert item.id == hashlib.sha256(item.path.encode()).hexdigest()[:32]
        assert item.checksum == hashlib.sha256(file.read_bytes()).hexdigest()
        assert gallery.image_file(item.id) == file.resolve()
        with Image.open(file) as image:
            assert torch.allclose(
                gallery.engine.embeddings([item.id]).semantic,
                gallery.embedder.embed([image.convert("RGB")]).unit,
                atol=1e-5,
            )
    (reply,) = gallery.search([picture(2, 1)], k=3)
    assert reply.results[0].path == "photos/cats/1.PNG"
    assert "1 of 8 images have no label" in reply.notes[0]


def test_only_changed_files_are_embedded_again(gallery, photos, monkeypatch):
    index_folder(gallery, photos)
    before = {item.path: item for item in gallery.items()}
    seen = Embedding(gallery.embedder, monkeypatch)
    assert astuple(index_folder(gallery, photos)) == (0, 0, 8, 0, 0, 0)
    assert seen.count == 0
    write_picture(photos / "birds" / "1.png", 9)  # other content
    os.utime(photos / "birds" / "2.png")  # only touched
    (photos / "cats" / "0.PNG").unlink()
    (photos / "cats" / "1.PNG").rename(photos / "birds" / "moved.png")
    write_picture(photos / "new" / "0.png", 5)
    gallery.relabel({before["photos/birds/0.png"].id: "eagle"})
    assert astuple(index_folder(gallery, photos)) == (2, 1, 5, 2, 0, 0)
    assert seen.count == 3
    after = {item.path: item for item in gallery.items()}
    assert after["photos/birds/1.png"].checksum != before["photos/birds/1.png"].checksum
    assert after["photos/birds/moved.png"].label == "birds"
    assert after["photos/birds/0.png"].label == "eagle"  # who gave it a label meant it
    assert set(before) - set(after) == {"photos/cats/0.PNG", "photos/cats/1.PNG"}


def test_folders_with_equal_names_and_uploads_stay_separate(gallery, photos, tmp_path):
    shutil.copytree(photos, tmp_path / "elsewhere" / "photos")
    shutil.copytree(photos / "cats", tmp_path / "uploads")
    gallery.add([Upload(encoded(picture(7)), "mine")])
    for folder in (photos, tmp_path / "elsewhere" / "photos", tmp_path / "uploads"):
        index_folder(gallery, folder)
    roots = {item.path.split("/")[0] for item in gallery.items()}
    assert roots == {"photos", "photos-2", "uploads", "uploads-2"}
    assert len(gallery) == 8 + 8 + 3 + 1
    (photos / "top.png").unlink()
    assert index_folder(gallery, photos).removed == 1
    assert len(gallery) == 19  # nothing of the other folders, nothing uploaded
    (tmp_path / "link").symlink_to(photos)
    assert index_folder(gallery, tmp_path / "link").unchanged == 7  # the same folder
    for item in gallery.items():
        assert gallery.image_file(item.id).is_file()
    shutil.move(photos, tmp_path / "moved")
    assert sum(gallery.image_file(item.id) is None for item in gallery.items()) == 7


def test_unusual_file_names(gallery, tmp_path):
    root = os.fsencode(tmp_path / "caf\u00e9")
    names = [b"<script>alert(1)<.png", b"new\nline.png", b"caf\xe9.png", b"\xff\xfe/x.png", b"=cmd|x/'.png", b" /a.png"]
    for n, name in enumerate(names):
        write_picture(os.path.join(root, name), n)
    write_picture(os.path.join(root, b"x" * 240 + b"/" + b"y" * 240 + b".png"), 9)
    assert index_folder(gallery, tmp_path / "caf\u00e9").new == 7
    labels = {os.fsencode(item.path): item.label for item in gallery.items()}
    prefix = "caf\u00e9/".encode()
    assert labels[prefix + b"<script>alert(1)<.png"] is None
    assert labels[prefix + b"\xff\xfe/x.png"] == "\\xff\\xfe"
    assert labels[prefix + b"=cmd|x/'.png"] == "=cmd|x"
    assert set(labels) >= {prefix + name for name in names}
    assert all(gallery.image_file(item.id) is not None for item in gallery.items())
    assert astuple(index_folder(gallery, tmp_path / "caf\u00e9")) == (0, 0, 7, 0, 0, 0)
    gallery.close()
    with Gallery.open(gallery.location) as reader:
        assert {os.fsencode(item.path): item.label for item in reader.items()} == labels


def test_files_that_are_not_images_are_named_and_skipped(gallery, photos, monkeypatch):
    (photos / "cats" / "broken.jpg").write_bytes(b"no image")
    (photos / "cats" / "empty.png").write_bytes(b"")
    (photos / "cut\n<b>.png").write_bytes(encoded(picture(1))[:-30])
    (photos / "large.png").write_bytes(b"")
    os.truncate(photos / "large.png", (1 << 30) + 1)
    (photos / "notes.txt").write_text("not meant to be one")
    (photos / ".hidden.png").write_bytes(encoded(picture(1)))
    write_picture(photos / ".trash" / "0.png", 1)
    lines = []
    assert astuple(index_folder(gallery, photos, note=lines.append)) == (8, 0, 0, 0, 4, 1)
    assert len(lines) == 5
    assert lines[4] == "1 file of other types left out ('notes.txt')"
    assert "cannot read the image 'cats/broken.jpg': it is none of" in lines[0]
    assert lines[2].startswith(r"cannot read the image 'cut\n<b>.png': ")
    assert lines[3] == "cannot read the image 'large.png': it is larger than 1,073,741,824 bytes"
    assert all("\n" not in line for line in lines)
    monkeypatch.setattr(idml.search.indexing, "_MAX_NAMED", 2)
    lines.clear()
    assert astuple(index_folder(gallery, photos, note=lines.append)) == (0, 0, 8, 0, 4, 1)
    assert lines[3:] == ["… 2 more images cannot be read"]
    (photos / "top.png").write_bytes(b"it was an image once")
    assert astuple(index_folder(gallery, photos)) == (0, 0, 7, 1, 5, 1)


def test_links(gallery, photos, tmp_path):
    write_picture(tmp_path / "outside" / "o.png", 6)
    (photos / "loop").symlink_to(photos)
    (photos / "birds" / "up").symlink_to("..")
    (photos / "out").symlink_to(tmp_path / "outside")
    (photos / "cats" / "out.png").symlink_to(tmp_path / "outside" / "o.png")
    (photos / "cats" / "again.png").symlink_to(photos / "birds" / "0.png")
    (photos / "cats" / "nowhere.png").symlink_to("nothing")
    (photos / "cats" / "itself.png").symlink_to("itself.png")
    lines = []
    assert astuple(index_folder(gallery, photos, note=lines.append)) == (10, 0, 0, 0, 0, 0)
    assert lines == [
        "3 links to folders not followed",
        "1 images are links to files outside the folder: only their thumbnails are shown",
        "1 image added with bytes that are in the gallery under another name too",
    ]
    files = {item.path: gallery.image_file(item.id) for item in gallery.items()}
    assert [path for path, file in files.items() if file is None] == ["photos/cats/out.png"]


def test_a_gallery_inside_the_folder_it_indexes(run, photos):
    with Gallery.create(photos / "birds" / "gallery", run) as gallery:
        gallery.add([Upload(encoded(picture(7)))])
        assert index_folder(gallery, photos).new == 8
        assert index_folder(gallery, photos).unchanged == 8
        assert len(gallery) == 9
        for folder in (photos / "birds" / "gallery", photos / "birds" / "gallery" / "uploads"):
            with pytest.raises(ValueError, match="belongs to the gallery itself"):
                index_folder(gallery, folder)


@pytest.fixture
def closed(monkeypatch):
    """Paths that cannot be read, also not by root."""
    names, scan, opened = set(), os.scandir, open

    def refuse(path):
        if os.path.basename(os.fspath(path).rstrip("/")) in names:
            raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", lambda path: (refuse(path), scan(path))[1])
    monkeypatch.setattr("builtins.open", lambda path, *a, **b: (refuse(path), opened(path, *a, **b))[1])
    return names


def test_items_of_unreadable_files_stay(gallery, photos, closed):
    index_folder(gallery, photos)
    closed |= {"cats", "top.png"}
    lines = []
    assert astuple(index_folder(gallery, photos, note=lines.append)) == (0, 0, 4, 0, 1, 0)
    assert lines == [
        "cannot read the image 'top.png': Permission denied",
        "cannot read the folder 'cats/' (Permission denied); its images stay as they were",
    ]
    assert len(gallery) == 8
    closed.add("photos")
    with pytest.raises(OSError, match=r"cannot read the folder .*photos' \(Permission denied\); nothing was changed"):
        index_folder(gallery, photos)
    assert len(gallery) == 8


def test_a_folder_that_no_longer_exists(gallery, photos, tmp_path, monkeypatch):
    """An unmounted disk must not empty the gallery."""
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nothing was changed"):
        index_folder(gallery, tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"top.png' is a file, name its folder; nothing was changed"):
        index_folder(gallery, photos / "top.png")
    assert not (tmp_path / "g" / "roots.json").exists()
    index_folder(gallery, photos)
    shutil.move(photos, tmp_path / "away")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        index_folder(gallery, photos)
    photos.mkdir()
    with pytest.raises(ValueError, match="contains no image, but the gallery has 8 from it: nothing was changed"):
        index_folder(gallery, photos)
    photos.rmdir()
    shutil.move(tmp_path / "away", photos)
    real = idml.search.indexing._Indexer.add_files

    def gone(work, names):
        shutil.move(photos, tmp_path / "away")
        real(work, names)

    monkeypatch.setattr(idml.search.indexing._Indexer, "add_files", gone)
    with pytest.raises(FileNotFoundError, match="is gone; what was read is kept, nothing was removed"):
        index_folder(gallery, photos)
    assert len(gallery) == 8


def test_files_deleted_during_indexing(gallery, photos, monkeypatch):
    index_folder(gallery, photos)
    real = idml.search.indexing._Indexer.add_files

    def take(work, names):
        (photos / "top.png").unlink()
        real(work, names)

    monkeypatch.setattr(idml.search.indexing._Indexer, "add_files", take)
    assert astuple(index_folder(gallery, photos)) == (0, 0, 7, 1, 0, 0)


def test_a_reader_cannot_index(gallery, photos, tmp_path):
    gallery.close()
    with Gallery.open(gallery.location) as reader, pytest.raises(ValueError, match="open for reading only"):
        index_folder(reader, photos)
    assert not (tmp_path / "g" / "roots.json").exists()


def test_an_empty_folder(gallery, photos, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "cats").symlink_to(photos / "cats")
    with pytest.raises(ValueError, match=r"links' contains no image .*; 1 link to folders not followed$"):
        index_folder(gallery, tmp_path / "links")
    with pytest.raises(ValueError, match="empty' contains no image"):
        index_folder(gallery, tmp_path / "empty")
    assert len(gallery) == 0
    assert not (tmp_path / "g" / "roots.json").exists()  # nothing was changed


def test_a_folder_of_which_nothing_can_be_read(gallery, photos, tmp_path, monkeypatch):
    """It is no success, and the items of pictures that were readable before stay."""
    monkeypatch.setattr(idml.search.indexing, "_MAX_NAMED", 2)
    more, lines = ["… 6 more images cannot be read"], []
    index_folder(gallery, photos)
    for item in list(gallery.items()):
        gallery.image_file(item.id).write_bytes(b"no image any more")
    words = r"no image in '.*' can be read \(8 tried\); nothing was changed"
    with pytest.raises(ValueError, match=words):
        index_folder(gallery, photos, note=lines.append)
    assert lines[2:] == more
    assert len(gallery) == 8
    lines.clear()
    shutil.copytree(photos, tmp_path / "others")
    with pytest.raises(ValueError, match=words):
        index_folder(gallery, tmp_path / "others", note=lines.append)
    assert lines[2:] == more
    assert lines[0].startswith("cannot read the image 'birds/")
    assert list(gallery.roots.read()) == ["photos"]


def test_indexing_again_repairs_damage(gallery, photos, tmp_path):
    index_folder(gallery, photos)
    expected = state(gallery.engine)
    gallery.close()
    damage_value(tmp_path / "g", "vectors", "semantic", expected[2][0].id)
    with Gallery.open(gallery.location, write=True) as opened:
        assert len(opened.engine.verify()) == 1
        assert astuple(index_folder(opened, photos)) == (0, 1, 7, 0, 0, 0)
        assert opened.engine.verify() == []
        assert {row[0] for row in state(opened.engine)} == {row[0] for row in expected}


def test_large_images_are_not_in_memory_together(gallery, tmp_path, monkeypatch):
    """Images are embedded as soon as many pixels wait, and still acknowledged 64 at a time."""
    for n in range(70):
        write_picture(tmp_path / "many" / f"{n:02}.png", n % 5, n)
    monkeypatch.setattr(idml.search.uploads, "_PIXELS", 10 * 40 * 30)
    sizes, acknowledged, embed, add = [], [], gallery.embedder.embed, gallery.engine.add
    monkeypatch.setattr(gallery.embedder, "embed", lambda images: sizes.append(len(images)) or embed(images))
    monkeypatch.setattr(
        gallery.engine, "add", lambda items, *rest: acknowledged.append(len(items)) or add(items, *rest)
    )
    assert index_folder(gallery, tmp_path / "many").new == 70
    assert sorted(sizes) == [6, 9, 11, 11, 11, 11, 11]
    assert acknowledged == [64, 6]


def test_threads_leave_the_same_gallery_in_the_same_order(run, tmp_path, monkeypatch):
    """Three threads take groups of five files; what is stored, counted and said is as with one thread."""
    for n in range(150):
        write_picture(tmp_path / "many" / f"{n:03}.png", n % 5, n)
    for n in (7, 70):
        (tmp_path / "many" / f"{n:03}.png").write_bytes(b"no image")
    told, threads = {}, set()
    for count in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        with Gallery.create(tmp_path / f"g{count}", run) as gallery:
            monkeypatch.setattr(gallery.embedder, "batch", 5, raising=False)
            embed, said, steps = gallery.embedder.embed, [], []

            def named(images, embed=embed):
                threads.add(threading.current_thread().name)
                return embed(images)

            monkeypatch.setattr(gallery.embedder, "embed", named)
            done = index_folder(
                gallery, tmp_path / "many", progress=lambda *row, to=steps: to.append(row), note=said.append
            )
            told[count] = done, said, steps, state(gallery.engine)
    assert told[1] == told[3]
    assert told[3][0] == Indexed(new=148, replaced=0, unchanged=0, removed=0, broken=2)
    assert told[3][2] == [(64, 150), (128, 150), (150, 150)]
    assert threading.current_thread().name not in threads


def test_an_error_in_a_thread_ends_the_work(gallery, tmp_path, monkeypatch):
    for n in range(200):
        write_picture(tmp_path / "many" / f"{n:03}.png", n % 5, n)
    calls = []

    def full(images):
        calls.append(len(images))
        raise MemoryError("too large")

    monkeypatch.setattr(gallery.embedder, "batch", 8, raising=False)
    monkeypatch.setattr(gallery.embedder, "embed", full)
    with pytest.raises(MemoryError, match="too large"):
        index_folder(gallery, tmp_path / "many")
    assert len(calls) < 10
    assert len(gallery) == 0


def test_killed_at_random_moments(run, tmp_path):
    """SIGKILL while a folder is indexed, again and again: what was acknowledged stays, and the end is the same."""
    for n in range(300):
        write_picture(tmp_path / "photos" / "abc"[n % 3] / f"{n}.png", n % 3, n)
    (tmp_path / "photos" / "b" / "broken.png").write_bytes(b"no image")
    with Gallery.create(tmp_path / "whole", run) as gallery:
        begin = time.monotonic()
        assert astuple(index_folder(gallery, tmp_path / "photos")) == (300, 0, 0, 0, 1, 0)
        expected, takes = state(gallery.engine), time.monotonic() - begin
    chance, partly = random.Random(0), 0
    for _ in range(KILLS):
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        for waits in (True, False, False):
            acknowledged, ready = os.pipe()

            def work(ready=ready, waits=waits):
                def progress(done, _):
                    os.write(ready, bytes([64]))
                    if waits:  # for its end: at least this one dies in the middle, however busy the machine
                        signal.pause()

                with open_or_create(tmp_path / "killed", run) as gallery:
                    os.write(ready, b"ready")
                    index_folder(gallery, tmp_path / "photos", progress=progress)

            with child(work):
                os.close(ready)
                os.read(acknowledged, 5)
                if waits:
                    assert os.read(acknowledged, 1) == bytes([64])
                time.sleep(chance.random() * takes / 2)
            with open(acknowledged, "rb") as pipe:
                said = min(301, sum(pipe.read()))
            with Gallery.open(tmp_path / "killed") as reader:
                assert len(reader) >= said - 1  # one of them is broken
                assert state(reader.engine) == expected[: len(reader)]
                assert reader.engine.verify() == []
                partly += 0 < len(reader) < 300
        with Gallery.open(tmp_path / "killed", write=True) as gallery:
            done = index_folder(gallery, Path(tmp_path / "photos"))
            assert (done.new + done.unchanged, done.replaced, done.removed, done.broken) == (300, 0, 0, 1)
            assert state(gallery.engine) == expected
    assert partly


def test_milvus_separates_folders_by_their_full_path(gallery, photos, tmp_path):
    gallery.roots = None  # as it is in Milvus
    shutil.copytree(photos, tmp_path / "elsewhere" / "photos")
    assert index_folder(gallery, photos).new == 8
    assert astuple(index_folder(gallery, tmp_path / "elsewhere" / "photos")) == (8, 0, 0, 0, 0, 0)
    assert astuple(index_folder(gallery, photos)) == (0, 0, 8, 0, 0, 0)
    names = {item.path.split("/")[0] for item in gallery.items()}
    assert len(names) == 2
    assert all(name.startswith("photos-") and len(name) == 15 for name in names)


def test_image_bytes_are_read_once(gallery, tmp_path):
    """The checksum is of the bytes that were decoded, whatever happens to the file meanwhile."""
    write_picture(tmp_path / "photos" / "a.png", 1)
    data = (tmp_path / "photos" / "a.png").read_bytes()
    real = Upload.decode

    def swapped(upload):
        write_picture(tmp_path / "photos" / "a.png", 2)
        return real(upload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Upload, "decode", swapped)
        index_folder(gallery, tmp_path / "photos")
    (item,) = gallery.items()
    assert item.checksum == hashlib.sha256(data).hexdigest()
    assert np.allclose(gallery.engine.embeddings().semantic, gallery.embedder.embed([picture(1)]).unit, atol=1e-5)

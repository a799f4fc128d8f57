"""Torn tails are repaired, flipped bytes are found, a full disk changes nothing."""

import os
import random
import resource
import struct
from contextlib import contextmanager

import pytest
import torch
from made import batch, made, state

from idml.metric import IntrospectiveMetric
from idml.search.engines import Added, DamagedGallery
from idml.search.engines.sqlite import SqliteEngine
from idml.search.engines.log import START, Log

pytestmark = pytest.mark.usefixtures("_no_waiting")


def small(path):
    """A gallery with a bit of everything: a dead row, a new label, thumbnails."""
    engine = made(path)
    engine.add(*batch((1, 0), (2, 0)))
    engine.remove(["i1"])
    engine.relabel({"i2": "x"})
    engine.add(*batch((3, 0), (4, 0)))
    return engine


def everything(path):
    """All that can be read of a gallery."""
    with SqliteEngine.open(path) as engine:
        _, queries, _ = batch((1, 0), (3, 0))
        found = [engine.search(queries, 3, metric) for metric in (None, IntrospectiveMetric())]
        return state(engine), [(f.ids, f.distances.tolist()) for f in found]


def generation(path):
    return next(path.glob("generation-*"))


def test_every_truncation_of_the_last_record(tmp_path):
    """Cut short by a kill it is repaired; if it was acknowledged, the loss is told."""
    path = tmp_path / "g"
    engine = small(path)
    before = state(engine)
    log = generation(path) / "items.log"
    old = log.read_bytes()
    engine.add(*batch((5, 0)))
    after = state(engine)
    engine.close()
    new = log.read_bytes()
    for length in range(len(old), len(new)):
        log.write_bytes(old[:START] + new[START:length])  # killed: nobody was told
        with SqliteEngine.open(path) as reader:
            assert state(reader) == before
            assert reader.verify() == []
        assert log.stat().st_size == length  # a reader repairs nothing
        if length % 16 == 0:
            with SqliteEngine.open(path, write=True) as writer:
                assert state(writer) == before
                assert log.read_bytes() == old
                writer.add(*batch((5, 0)))
                assert state(writer) == after
        log.write_bytes(new[:length])  # acknowledged
        with pytest.raises(DamagedGallery, match=rf"items\.log is damaged at byte {len(old)}"):
            SqliteEngine.open(path, write=bool(length % 2))
        assert log.read_bytes() == new[:length]
    log.write_bytes(old[:START] + new[START:])
    with SqliteEngine.open(path) as reader:  # whole, though its slot was not written
        assert state(reader) == after


def test_rubbish_behind_the_last_record(tmp_path):
    path = tmp_path / "g"
    engine = small(path)
    before = state(engine)
    engine.close()
    log = generation(path) / "items.log"
    sound = log.read_bytes()
    for rubbish in (bytes(4096), b"\xffrec" * 9, os.urandom(333), sound[START : START + 40]):
        log.write_bytes(sound + rubbish)
        with SqliteEngine.open(path) as reader:
            assert state(reader) == before
        SqliteEngine.open(path, write=True).close()
        assert log.read_bytes() == sound


def outcome(path, expected):
    """What is said about a damage; nothing if it makes no difference."""
    try:
        found = everything(path)
    except DamagedGallery as error:
        return str(error)
    assert found == expected
    return ""


def test_every_flipped_byte_is_found_or_harmless(tmp_path):
    path = tmp_path / "g"
    small(path).close()
    expected, chance = everything(path), random.Random(0)
    harmless, told = {}, {}
    for file in sorted(f for f in path.rglob("*") if f.is_file()):
        content = file.read_bytes()
        for place in range(len(content)):
            flipped = bytearray(content)
            flipped[place] ^= chance.choice([1, 128, 255, 1 + chance.randrange(255)])
            file.write_bytes(flipped)
            said = outcome(path, expected)
            (told if said else harmless).setdefault(file.name, []).append(place)
            if said:
                assert file.name in said
            if said and file.name != "current.json":
                with SqliteEngine.open(path, salvage=True) as engine:
                    assert any(file.name in problem.file for problem in engine.verify())
        file.write_bytes(content)
    assert harmless == {
        "items.log": [*range(8, START)],  # the slots and the room around them
        "semantic.f32": [*range(16)],  # the row of the removed item
        "uncertainty.f32": [*range(12)],
        "thumbnails.bin": [*range(len(b"picture 1 0 "))],
    }
    assert set(told) == {"current.json", "items.log", "semantic.f32", "uncertainty.f32", "thumbnails.bin"}


@pytest.mark.parametrize("name", ["semantic.f32", "uncertainty.f32", "thumbnails.bin"])
def test_a_damaged_item_is_named_and_can_be_mended(tmp_path, name):
    path = tmp_path / "g"
    engine = small(path)
    expected = state(engine)
    file = generation(path) / name
    content = bytearray(file.read_bytes())
    content[-3] ^= 4  # of the last item that has such a thing
    item = "i2" if name == "thumbnails.bin" else "i4"
    file.write_bytes(content)
    for opened in (engine, SqliteEngine.open(path)):  # also one that was open all the time
        (problem,) = opened.verify()
        assert (problem.file, problem.item) == (str(file), item)
        with pytest.raises(DamagedGallery, match=rf"{name}, item '{item}': the .* is damaged"):
            state(opened)
        if name != "thumbnails.bin":
            with pytest.raises(DamagedGallery, match=item):
                opened.search(batch((1, 0))[1], 9)
            with pytest.raises(DamagedGallery, match=item):
                engine.compact()
    number = int(item[1:])
    assert engine.add(*batch((number, 0))) == Added(0, 1, 0)  # adding it again mends it
    assert engine.verify() == []
    assert len(engine.search(batch((1, 0))[1], 9).ids[0]) == 3
    assert len(state(engine)) == len(expected)
    engine.close()


def test_bytes_that_rot_under_an_open_gallery_are_not_returned(tmp_path):
    path = tmp_path / "g"
    with small(path) as engine:
        _, queries, _ = batch((4, 0))
        assert engine.search(queries, 1).ids == [["i4"]]  # all vectors were checked by now
        with (generation(path) / "semantic.f32").open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\xff")
        with pytest.raises(DamagedGallery, match="i4"):
            engine.search(queries, 3)
        engine.remove(["i4"])
        assert engine.search(queries, 3).ids[0] in (["i2", "i3"], ["i3", "i2"])


def test_a_damaged_item_is_found_though_it_would_not_be_returned(tmp_path):
    """It might have been among the results before it was damaged."""
    path = tmp_path / "g"
    small(path).close()
    with (generation(path) / "semantic.f32").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with SqliteEngine.open(path) as engine, pytest.raises(DamagedGallery, match="item 'i4'"):
        engine.search(batch((2, 0))[1], 1)


def test_slots_hold_the_last_two_ends(tmp_path):
    Log.create(tmp_path / "log")
    ends = [START, START]
    for payload in (b"a", b"bb", b"ccc", b"dddd"):
        log = Log(tmp_path / "log", write=True)
        list(log.read())
        log.commit(log.write(payload))
        ends.append(log.end)
        head = (tmp_path / "log").read_bytes()[:START]
        assert sorted(struct.unpack_from("<Q", head, place)[0] for place in (16, 32)) == ends[-2:]
        os.close(log.file)


def test_salvage_keeps_what_is_sound(tmp_path):
    path = tmp_path / "g"
    with made(path) as engine:
        for n in range(1, 9):
            engine.add(*batch((n, 0)))
        expected = state(engine)
    folder = generation(path)
    log = Log(folder / "items.log", write=False)
    ends = [log.end for _ in log.read()]
    content = bytearray((folder / "items.log").read_bytes())
    content[ends[2] + 30] ^= 1  # the record of i3
    content[ends[5] + 5] ^= 1  # the length of i6
    (folder / "items.log").write_bytes(content)
    vectors = bytearray((folder / "semantic.f32").read_bytes())
    vectors[16] ^= 1  # i2
    (folder / "semantic.f32").write_bytes(vectors)
    with pytest.raises(DamagedGallery, match=r"items\.log"):
        SqliteEngine.open(path)
    with SqliteEngine.open(path, write=True, salvage=True) as engine:
        with pytest.raises(ValueError, match="compact it before it is changed"):
            engine.remove(["i1"])
        assert [(p.file.rsplit("/")[-1], p.item) for p in engine.verify()] == [
            ("items.log", None), ("items.log", None), ("semantic.f32", "i2"),
        ]  # fmt: skip
        assert len(engine) == 6
        engine.compact()
        assert state(engine) == [expected[n - 1] for n in (1, 4, 5, 7, 8)]
    with SqliteEngine.open(path) as engine:
        assert engine.verify() == []
        assert len(engine) == 5


@pytest.mark.parametrize("name", ["semantic.f32", "uncertainty.f32", "thumbnails.bin", "items.log"])
def test_files_that_are_cut_or_missing(tmp_path, name):
    path = tmp_path / "g"
    small(path).close()
    file = generation(path) / name
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    if name == "thumbnails.bin":
        with SqliteEngine.open(path) as engine, pytest.raises(DamagedGallery, match=r"thumbnails\.bin, item 'i2'"):
            engine.thumbnail("i2")
    else:
        with pytest.raises(DamagedGallery, match=name):
            SqliteEngine.open(path)
    with SqliteEngine.open(path, salvage=True) as engine:
        assert any(name in problem.file for problem in engine.verify())
        list(engine.items())
        engine.search(batch((1, 0))[1], 9)
    file.unlink()
    with pytest.raises(DamagedGallery, match=f"{name} is missing"):
        SqliteEngine.open(path)
    file.write_bytes(content)
    (path / "current.json").write_bytes(b"")
    with pytest.raises(DamagedGallery, match=r"current\.json is damaged"):
        SqliteEngine.open(path)


@pytest.mark.parametrize(
    "record",
    [b"[]", b"{}", b"null", b'{"add": {}}', b'{"add": 1}', b'{"drop": []}', b'{"label": {"i2": 7}}', b"[" * 9999,
     b"\xff", b'{"add":{"row":99,"id":[],"label":[],"path":[],"checksum":[],"level":[],"semantic":[],"uncertainty":[],'
     b'"thumbnail":[]}}',
     b'{"add":{"row":4,"id":["x"],"label":[1],"path":["a"],"checksum":["b"],"level":[0],"semantic":[0],"uncertainty":[0],'
     b'"thumbnail":[[0,0,0]]}}',
     b'{"add":{"row":4,"id":["x"],"label":[null],"path":["a"],"checksum":["b"],"level":[0],"semantic":[0],"uncertainty":'
     b'[0],"thumbnail":[[0,-1,0]]}}'],
)  # fmt: skip
def test_a_sound_frame_around_nonsense(tmp_path, record):
    """A gallery may come from a stranger."""
    path = tmp_path / "g"
    small(path).close()
    log = Log(generation(path) / "items.log", write=True)
    list(log.read())
    log.commit(log.write(record))
    with pytest.raises(DamagedGallery, match=r"items\.log: a record cannot be read"):
        SqliteEngine.open(path)
    with SqliteEngine.open(path, salvage=True) as engine:
        assert len(engine) == 3


@contextmanager
def full_disk(length):
    """No file may grow beyond this many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(call):
    """What the disk had against it."""
    try:
        call()
    except OSError as error:
        return str(error)
    return ""


def test_full_disk(tmp_path):
    path = tmp_path / "g"
    with small(path) as engine:
        expected = state(engine)
        sizes = {f.name: f.stat().st_size for f in generation(path).iterdir()}
        for limit in (1, sizes["uncertainty.f32"] + 3, sizes["semantic.f32"] + 9, *range(100, 3000, 170)):
            length = (generation(path) / "items.log").stat().st_size
            with full_disk(limit):
                said = refused(lambda: engine.add(*batch((5, 0), (6, 0), (7, 0))))
            if said:
                assert said == f"cannot write to the gallery {path} (File too large)"
                assert (generation(path) / "items.log").stat().st_size == length
            else:
                engine.remove(["i5", "i6", "i7"])
            assert state(engine) == expected
            with SqliteEngine.open(path) as reader:
                assert state(reader) == expected
                assert reader.verify() == []
        for call in (lambda: engine.relabel({"i3": "y"}), lambda: engine.remove(["i3"]), engine.compact):
            with full_disk(10), pytest.raises(OSError, match="cannot write to the gallery"):
                call()
            assert state(engine) == expected
        assert len(list(path.glob("generation-*"))) == 1
        engine.add(*batch((5, 0)))
        assert engine.compact() > 0
        assert engine.verify() == []


def test_a_disk_that_refuses_to_force(tmp_path, monkeypatch):
    """After a failed fsync nobody knows what the disk holds: no more writes until the gallery is opened again."""
    path = tmp_path / "g"
    with small(path) as engine:
        log, before = engine._store.log, state(engine)

        def refuse(file):
            if file == log.file:
                raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", refuse)
            with pytest.raises(OSError, match="Input/output error"):
                engine.remove(["i3"])
        with pytest.raises(OSError, match="open the gallery again"):
            engine.add(*batch((5, 0)))
        assert state(engine) == before
    with SqliteEngine.open(path, write=True) as engine:
        assert len(state(engine)) in (2, 3)
        engine.add(*batch((5, 0)))
        assert torch.isfinite(engine.embeddings().semantic).all()

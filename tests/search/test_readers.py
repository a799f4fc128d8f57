"""One writer, many readers: each sees one state as a whole, in this process and in others."""

import gc
import os
import shutil
import time

import pytest
import torch
from made import PROPERTIES, Expected, batch, child, expected_after, made, make_change, state

from idml.search.engines import DamagedGallery, Properties, embedded, generations
from idml.search.engines.sqlite import SqliteEngine

pytestmark = pytest.mark.usefixtures("_no_waiting")
CHANGES = 150


def test_a_reader_beside_a_busy_writer(tmp_path):
    """Another process changes and compacts; whatever a reader finds is the state after one of the changes."""
    path = tmp_path / "g"
    made(path).close()
    states = [expected_after(0)]
    expected = Expected()
    for number in range(CHANGES):
        make_change(number, expected)
        states.append(expected.state())

    def write():
        with SqliteEngine.open(path, write=True) as engine:
            expected = Expected()
            for number in range(CHANGES):
                make_change(number, expected, engine)
                time.sleep(0.002)
        time.sleep(60)

    seen, last, deadline = set(), 0, time.monotonic() + 20
    _, queries, _ = batch((1, 0))
    with child(write), SqliteEngine.open(path) as staying:
        while last < CHANGES and time.monotonic() < deadline:
            with SqliteEngine.open(path) as fresh:
                now = states.index(state(fresh), last)  # some state, and never an older one
            staying.refresh()
            found, again = state(staying), state(staying)
            assert found == again
            last = states.index(found, now)
            seen.add(last)
            assert sorted(staying.search(queries, 99).ids[0]) == sorted(item.id for item, *_ in found)
            assert staying.verify() == []
    assert last == CHANGES
    assert len(seen) > 5


def test_a_snapshot_stays_until_refreshed(tmp_path):
    path = tmp_path / "g"
    with made(path, 12) as writer, SqliteEngine.open(path) as reader:
        before = state(reader)
        _, queries, _ = batch((1, 0), (5, 1))
        found = reader.search(queries, 9)
        writer.add(*batch((20, 0), (21, 0)))
        writer.remove([before[0][0].id])
        writer.compact()  # the reader's files have no name any more
        writer.compact()
        writer.add(*batch((22, 0)))
        assert state(reader) == before
        again = reader.search(queries, 9)
        assert again.ids == found.ids
        assert torch.equal(again.distances, found.distances)
        assert reader.refresh()
        assert state(reader) == state(writer)
        assert not reader.refresh()
        assert not writer.refresh()
        with pytest.raises(ValueError, match="open for reading only"):
            reader.add(*batch((1, 0)))
        with pytest.raises(ValueError, match="open for reading only"):
            reader.compact()
        items = writer.items()
        writer.relabel({"i22": "other"})
        assert list(items) == [item for item, *_ in state(reader)]  # an iteration is of one state too


def test_compacted_while_a_reader_opens(tmp_path, monkeypatch):
    """The generation it was told of is gone when it comes to open the files."""
    path = tmp_path / "g"
    with made(path, 6) as writer:
        told = []

        def read_current(path):
            told.append(generations.Current(PROPERTIES, writer._current.generation))
            if len(told) == 2:
                writer.compact()
            return told[-1]

        monkeypatch.setattr(generations, "read_current", read_current)
        monkeypatch.setattr(embedded, "read_current", read_current)
        with SqliteEngine.open(path) as reader:
            assert state(reader) == state(writer)
        assert len(told) == 3


def test_a_gallery_made_anew_under_a_reader(tmp_path):
    path = tmp_path / "g"
    made(path, 5).close()
    with SqliteEngine.open(path) as reader:
        before = state(reader)
        shutil.rmtree(path)
        with made(path, 9) as writer:
            assert state(reader) == before
            assert reader.refresh()  # the generation has the same number
            assert state(reader) == state(writer)
        shutil.rmtree(path)
        with pytest.raises(FileNotFoundError, match="there is no gallery"):
            reader.refresh()
        SqliteEngine.create(path, Properties("another", 4)).close()
        with pytest.raises(ValueError, match="made anew with other properties"):
            reader.refresh()


def test_one_writer(tmp_path):
    path = tmp_path / "g"
    with made(path, 3):
        for opened in (lambda: SqliteEngine.open(path, write=True), lambda: SqliteEngine.create(path, PROPERTIES)):
            with pytest.raises(ValueError, match=r"^the gallery .* is being written to by another process; try again"):
                opened()
        said, end = os.pipe()

        def write_too():
            try:
                SqliteEngine.open(path, write=True)
                os.write(end, b"it was let in")
            except ValueError as error:
                os.write(end, str(error).encode())

        with child(write_too):
            assert b"is being written to by another process" in os.read(said, 1000)
        os.close(said)
        os.close(end)
        SqliteEngine.open(path).close()
    SqliteEngine.open(path, write=True).close()


def test_a_forked_child_neither_holds_the_gallery_nor_writes(tmp_path):
    path = tmp_path / "g"
    engine = made(path, 3)

    def work():
        try:
            engine.remove(["i1"])
            os.write(end, b"it wrote")
        except ValueError as error:
            os.write(end, str(error).encode())
        time.sleep(30)

    said, end = os.pipe()
    with child(work):
        assert b"open for reading only" in os.read(said, 1000)
        engine.close()
        SqliteEngine.open(path, write=True).close()  # though the child lives
    os.close(said)
    os.close(end)


def test_forgotten_galleries_leave_no_open_files(tmp_path):
    path = tmp_path / "g"
    made(path, 4).close()
    before = len(os.listdir("/proc/self/fd"))
    for n in range(5):
        forgotten = SqliteEngine.open(path, write=n % 2 == 0)
        forgotten.search(batch((1, 0))[1], 1)
        forgotten.refresh()
        del forgotten
        gc.collect()
    (path / "current.json").write_text("")
    with pytest.raises(DamagedGallery):
        SqliteEngine.open(path)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        SqliteEngine.create(tmp_path / "file", PROPERTIES)
    with pytest.raises(FileNotFoundError, match="there is no gallery"):
        SqliteEngine.open(tmp_path / "file")

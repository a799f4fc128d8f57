"""Several processes and threads: each sees one state as a whole, and changes of others are noticed."""

import gc
import os
import shutil
import sqlite3
import time
from contextlib import ExitStack, suppress

import pytest
import torch
from numbered_changes import PROPERTIES, Expected, batch, child, expected_after, made, make_change, state

from idml.search.engines import DamagedGallery, Properties, sqlite_storage
from idml.search.engines.sqlite import SqliteEngine
from idml.search.engines.sqlite_storage import DATABASE

pytestmark = pytest.mark.usefixtures("_no_waiting")
CHANGES = 150


def test_a_reader_beside_a_busy_writer(tmp_path):
    """Another process changes and compacts; every state that a reader finds is the state after one of the changes."""
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
        time.sleep(600)

    seen, last, deadline = set(), 0, time.monotonic() + 600
    _, queries, _ = batch((1, 0))
    with child(write), SqliteEngine.open(path) as staying:
        while last < CHANGES and time.monotonic() < deadline:
            with SqliteEngine.open(path) as fresh, fresh._reading():
                now = states.index(state(fresh), last)  # some state, and never an older one
            with staying._reading():
                found = state(staying)
                last = states.index(found, now)
                assert sorted(staying.search(queries, 99).ids[0]) == sorted(item.id for item, *_ in found)
                assert staying.verify() == []
            seen.add(last)
    assert last == CHANGES
    assert len(seen) > 5


def test_changes_are_seen_without_a_refresh(tmp_path):
    path = tmp_path / "g"
    with made(path, 12) as writer, SqliteEngine.open(path) as reader:
        _, queries, _ = batch((1, 0), (5, 1))
        reader.search(queries, 9)
        writer.add(*batch((20, 0), (21, 0)))
        writer.remove([next(writer.items()).id])
        assert state(reader) == state(writer)
        found, again = writer.search(queries, 99), reader.search(queries, 99)
        assert again.ids == found.ids
        assert torch.equal(again.distances, found.distances)
        writer.compact()
        writer.relabel({"i20": "new"})
        assert state(reader) == state(writer)
        assert reader.refresh()  # for whoever keeps counts: something has changed since the last call
        assert not reader.refresh()
        assert not writer.refresh()
        items = writer.items()
        writer.relabel({"i20": "other"})
        assert [item.label for item in items if item.id == "i20"] == ["new"]  # an iteration is of one state


def test_only_what_changed_is_read(tmp_path, monkeypatch):
    path = tmp_path / "g"
    with made(path, 30) as writer, SqliteEngine.open(path) as reader:
        table = reader._table
        writer.add(*batch((60, 0), (61, 0)))
        writer.relabel({"i60": "x"})
        writer.remove(["i61"])
        assert state(reader) == state(writer)
        assert reader._table is table
        writer.compact()  # positions are numbered again
        assert state(reader) == state(writer)
        assert reader._table is not table


def test_a_gallery_made_again_under_a_reader(tmp_path):
    path = tmp_path / "g"
    made(path, 5).close()
    with SqliteEngine.open(path) as reader:
        before = state(reader)
        shutil.rmtree(path)
        with made(path, 9) as writer:
            assert [item for item, *_ in before] == list(reader.items())
            assert reader.refresh()
            assert state(reader) == state(writer)
        shutil.rmtree(path)
        with pytest.raises(FileNotFoundError, match="there is no gallery"):
            reader.refresh()
        SqliteEngine.create(path, Properties("another", 4)).close()
        with pytest.raises(ValueError, match="made again with other properties"):
            reader.refresh()


def test_a_writer_whose_gallery_is_deleted_acknowledges_nothing(tmp_path):
    path = tmp_path / "g"
    with made(path, 5) as writer:
        shutil.rmtree(path)
        with pytest.raises(FileNotFoundError, match="there is no gallery"):
            writer.add(*batch((70, 0)))


@pytest.mark.parametrize("writers", [2, 4])
def test_several_processes_write_at_once(tmp_path, writers):
    """Each adds, replaces, relabels and removes items of its own and shared ones; what it was told stays true."""
    path, rounds = tmp_path / "g", 25
    made(path).close()
    pipes = [os.pipe() for _ in range(writers)]

    def write(own):
        with SqliteEngine.open(path, write=True) as engine:
            for n in range(rounds):
                numbers = [(1000 * (own + 1) + n, 0), (5, n), (1000 * (own + 1), n)]  # new, shared, replaced
                engine.add(*batch(*numbers))
                engine.relabel({f"i{1000 * (own + 1) + n}": f"by {own}"})
                if n % 5 == 4:
                    assert engine.remove([f"i{1000 * (own + 1) + n - 1}"]) == 1
                if n % 10 == 9:
                    engine.compact()
        os.write(pipes[own][1], b"done")
        time.sleep(60)

    with ExitStack() as stack:
        for own in range(writers):
            stack.enter_context(child(lambda own=own: write(own)))
        assert [os.read(pipe[0], 4) for pipe in pipes] == [b"done"] * writers
    with SqliteEngine.open(path) as reader:
        assert reader.verify() == []
        labels = {item.id: item.label for item in reader.items()}
        kept = {
            f"i{1000 * (own + 1) + n}": f"by {own}" for own in range(writers) for n in range(1, rounds) if n % 5 != 3
        }
        assert {id: label for id, label in labels.items() if id in kept} == kept
        assert set(labels) == {*kept, "i5", *(f"i{1000 * (own + 1)}" for own in range(writers))}
        _, queries, _ = batch((1, 0))
        assert set(reader.search(queries, 999).ids[0]) == set(labels)


def test_a_database_that_is_locked_too_long(tmp_path, monkeypatch):
    path = tmp_path / "g"
    made(path, 5).close()
    monkeypatch.setattr(sqlite_storage, "WAIT", 0.2)
    with SqliteEngine.open(path, write=True) as engine:
        before = state(engine)
        other = sqlite3.connect(path / DATABASE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        for change in (lambda: engine.add(*batch((70, 0))), lambda: engine.remove(["i1"]), engine.compact):
            with pytest.raises(
                TimeoutError, match=r"^the gallery .* was locked by another process for 0\.2 seconds; try"
            ):
                change()
        assert state(engine) == before  # reading goes on
        other.execute("ROLLBACK")
        other.close()
        engine.add(*batch((70, 0)))
        assert "i70" in engine


def test_a_forked_child_reads_and_writes(tmp_path):
    path = tmp_path / "g"
    engine = made(path, 3)
    engine.search(batch((1, 0))[1], 3)
    said, end = os.pipe()

    def work():
        engine.add(*batch((80, 0)))
        engine.search(batch((1, 0))[1], 3)
        os.write(end, b"done")
        time.sleep(30)

    with child(work):
        assert os.read(said, 1000) == b"done"
        assert "i80" in engine
        engine.add(*batch((81, 0)))
        assert {"i80", "i81"} <= {item.id for item in engine.items()}
        engine.close()
    os.close(said)
    os.close(end)
    with SqliteEngine.open(path) as reader:
        assert reader.verify() == []
        assert {"i80", "i81"} <= {item.id for item in reader.items()}


def open_files(folder):
    """The files below a folder that this process holds open; other tests may open and close theirs meanwhile."""
    found = []
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing itself
            found.append(os.readlink(f"/proc/self/fd/{file}"))
    return [name for name in found if name.startswith(str(folder))]


def test_forgotten_galleries_leave_no_open_files(tmp_path):
    path = tmp_path / "g"
    with made(path, 4):
        assert open_files(path) != []
    assert open_files(path) == []
    for n in range(5):
        forgotten = SqliteEngine.open(path, write=n % 2 == 0)
        forgotten.search(batch((1, 0))[1], 1)
        forgotten.refresh()
        del forgotten
        gc.collect()
    (path / DATABASE).write_text("")
    with pytest.raises((DamagedGallery, ValueError)):
        SqliteEngine.open(path)
    gc.collect()
    assert open_files(path) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        SqliteEngine.create(tmp_path / "file", PROPERTIES)
    with pytest.raises(FileNotFoundError, match="there is no gallery"):
        SqliteEngine.open(tmp_path / "file")

"""The SQLite engine: the contract, a comparison with a dictionary, names of all kinds, backups."""

import ast
import os
import shutil
import tempfile
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from engine_contract import EngineContract, Folders
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numbered_changes import PROPERTIES, D, Expected, U, batch, expected_after, made, state

from idml import search
from idml.embeddings import Embeddings
from idml.metric import IntrospectiveMetric
from idml.search.engines import Added, Item, Properties, sqlite_changes, sqlite_storage, sqlite_vectors
from idml.search.engines.sqlite import SqliteEngine
from idml.search.engines.sqlite_storage import DATABASE

pytestmark = pytest.mark.usefixtures("_no_waiting")

NUMBERS = st.integers(0, 9)


@pytest.fixture
def galleries(tmp_path):
    out = Folders(tmp_path)
    yield out
    for engine in out.made:
        engine.close()


class TestContract(EngineContract):
    """Every test of the contract."""


class Gallery(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.patch = mock.patch.object(sqlite_storage, "SYNCHRONOUS", "OFF")
        self.patch.start()
        self.engine = SqliteEngine.create(f"{self.folder}/g", PROPERTIES)
        self.expected, self.removed = Expected(), set()

    @rule(pairs=st.lists(st.tuples(NUMBERS, st.integers(0, 3)), max_size=5))
    def add(self, pairs):
        given = batch(*pairs) if pairs else ([], Embeddings(torch.empty(0, D), torch.empty(0, U)), [])
        last = {item.id: n for n, item in enumerate(given[0])}
        before = dict(self.expected)
        for n in sorted(last.values()):
            self.expected.add([given[0][n]], given[1][n], [given[2][n]])
        outcome = self.engine.add(*given)
        assert outcome.new == len(self.expected) - len(before)
        assert outcome.unchanged == sum(before.get(id) == self.expected[id] for id in last)
        assert sum(outcome) == len(last)
        self.removed -= set(last)

    @rule(numbers=st.lists(NUMBERS, max_size=3))
    def remove(self, numbers):
        ids = [f"i{n}" for n in numbers]
        assert self.engine.remove(ids) == len(set(ids) & set(self.expected))
        self.removed |= set(ids) & set(self.expected)
        for id in ids:
            self.expected.pop(id, None)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), label=st.none() | st.text(max_size=4))
    def relabel(self, data, label):
        id = data.draw(st.sampled_from(list(self.expected)))
        assert self.engine.relabel({id: label}) == (self.expected[id][0].label != label)
        self.expected.relabel(id, label)

    @rule()
    def compact(self):
        self.engine.compact()
        assert self.engine.compact() == 0  # nothing is left to free
        assert sum(name.endswith(".semantic") for name in os.listdir(self.engine.path)) <= 1

    @rule(write=st.booleans())
    def reopen(self, write):
        self.engine.close()
        with SqliteEngine.open(f"{self.folder}/g", write=write) as engine:
            assert state(engine) == self.expected.state()
        self.engine = SqliteEngine.open(f"{self.folder}/g", model="a model", write=True)

    @invariant()
    def holds_what_it_should(self):
        assert state(self.engine) == self.expected.state()

    @rule(k=st.integers(1, 12), metric=st.sampled_from([None, IntrospectiveMetric()]))
    def search(self, k, metric):
        _, queries, _ = batch((3, 1), (12, 2))
        found = self.engine.search(queries, k, metric)
        assert found.distances.shape == (2, min(k, len(self.expected)))
        for ids in found.ids:
            assert len(set(ids)) == len(ids) == min(k, len(self.expected))
            assert set(ids) <= set(self.expected)

    def teardown(self):
        assert self.engine.verify() == []
        self.engine.close()
        self.patch.stop()
        shutil.rmtree(self.folder)


TestGallery = Gallery.TestCase
TestGallery.settings = settings(
    max_examples=30,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_search_never_imports_training():
    for file in Path(search.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.startswith(("idml.training", "idml.server", "idml.reproduction"))], file


names = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\udc80\udcff"), min_size=1, max_size=12)


@settings(max_examples=40)
@given(id=names, label=names, path=names.filter(lambda p: "\0" not in p and p[0] != "/" and ".." not in p))
def test_strange_names_come_back(id, label, path):
    item = Item(id=id, label=label, path=path, checksum="0" * 64)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sqlite_storage, "SYNCHRONOUS", "OFF"):
        with SqliteEngine.create(folder, Properties("m", D)) as engine:
            engine.add([item], batch((1, 0))[1], [b"\xff\xd8"])
            engine.relabel({id: id})
            engine.relabel({id: label})
        with SqliteEngine.open(folder) as engine:
            assert engine.get(id) == item
            assert id in engine
            assert list(engine.items()) == [item]
            assert engine.search(batch((1, 0))[1], 1).ids == [[id]]


def test_names_from_the_file_system(tmp_path):
    path = os.fsdecode(b"caf\xe9/\xff\n<b>.jpg")
    item = Item(path=path, checksum="ab" * 32)
    assert item.id == "ab" * 16
    with SqliteEngine.create(tmp_path, Properties("m", D)) as engine:
        engine.add([item], batch((1, 0))[1])
    with SqliteEngine.open(tmp_path) as engine:
        assert os.fsencode(engine.get(item.id).path) == b"caf\xe9/\xff\n<b>.jpg"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"path": "/etc/passwd"}, "below the gallery's root"),
        ({"path": "a/../../b"}, "below the gallery's root"),
        ({"path": "a\0b"}, "below the gallery's root"),
        ({"path": None}, "the path of an item"),
        ({"checksum": "AB" * 32}, "64 hexadecimal digits"),
        ({"checksum": "ab"}, "64 hexadecimal digits"),
        ({"id": "\ud83d"}, "the id of an item"),
        ({"id": 7}, "the id of an item"),
        ({"label": 7}, "the label of an item"),
    ],
)
def test_unsound_items_are_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        Item(**{"path": "a", "checksum": "ab" * 32, **change})


def test_adding_again_writes_nothing(tmp_path):
    with made(tmp_path) as engine:
        engine.add(*batch((1, 0), (2, 0)))
        files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".sqlite-shm"}
        assert engine.add(*batch((2, 0), (1, 0))) == Added(0, 0, 2)
        assert {p: p.read_bytes() for p in files} == files


def test_a_gallery_that_is_there_is_not_replaced(tmp_path):
    made(tmp_path / "g", 5).close()
    before = (tmp_path / "g" / DATABASE).read_bytes()
    with pytest.raises(ValueError, match=r"^there is a gallery at .* already$"):
        SqliteEngine.create(tmp_path / "g", PROPERTIES)
    assert (tmp_path / "g" / DATABASE).read_bytes() == before
    assert sorted(p.suffix for p in (tmp_path / "g").iterdir()) == [".semantic", ".sqlite", ".uncertainty"]


def test_two_processes_that_create_one_gallery(tmp_path):
    """Both find no gallery; one of them makes it, and the other is told."""
    made(tmp_path / "other", 3).close()
    with mock.patch.object(sqlite_changes, "is_gallery", return_value=False):
        with made(tmp_path / "g", 3) as engine:
            with pytest.raises(ValueError, match="there is a gallery"):
                SqliteEngine.create(tmp_path / "g", Properties("another", 9))
            assert state(engine) == expected_after(3)
        assert not [p for p in (tmp_path / "g").iterdir() if p.name.startswith(".")]


def test_settings_that_make_changes_durable(tmp_path, monkeypatch):
    monkeypatch.undo()  # without the fixture that turns fsync off
    with made(tmp_path) as engine:
        values = {
            name: sqlite_storage.first_value(engine._connected(), f"PRAGMA {name}")
            for name in ("journal_mode", "synchronous")
        }
    assert values == {"journal_mode": "wal", "synchronous": 2}


def test_backup_and_restore(tmp_path):
    with made(tmp_path / "g", 20) as engine:
        expected = state(engine)
        (tmp_path / "b.sqlite").write_text("an older backup")
        engine.backup(tmp_path / "b.sqlite")
        engine.add(*batch((70, 1), (71, 2)))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["b.sqlite", "g"]
        with pytest.raises(ValueError, match="own database"):
            engine.backup(tmp_path / "g" / "gallery.sqlite")
        with pytest.raises(OSError, match=r"^cannot write the backup .*/none/b: there is no folder .*/none$"):
            engine.backup(tmp_path / "none" / "b")
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "b.sqlite", tmp_path / "again" / "gallery.sqlite")
    with SqliteEngine.open(tmp_path / "again", write=True) as restored:
        assert state(restored) == expected
        assert restored.verify() == []
        restored.add(*batch((70, 1)))
    shutil.copy(tmp_path / "b.sqlite", tmp_path / "g" / "gallery.sqlite")  # beside the vectors of later items
    with SqliteEngine.open(tmp_path / "g", write=True) as restored:
        assert state(restored) == expected
        given = batch((71, 0), (70, 0))
        restored.add(*given)
        assert restored.search(given[1], 99).ids == fresh_search(tmp_path / "h", expected, given)
        assert restored.verify() == []


def fresh_search(path, expected, given):
    """What a gallery with these items, made from nothing, finds."""
    items = [item for item, *_ in expected]
    s, u = (torch.tensor(np.array([np.frombuffer(row[n], np.float32) for row in expected])) for n in (1, 2))
    with SqliteEngine.create(path, PROPERTIES) as engine:
        engine.add(items, Embeddings(s, u))
        engine.add(*given)
        return engine.search(given[1], 99).ids


def test_backup_beside_a_writer(tmp_path):
    """A backup is one state, whatever another thread adds at the same time."""
    with made(tmp_path / "g", 30) as engine, SqliteEngine.open(tmp_path / "g") as reader:
        stop = threading.Event()

        def write():
            for n in range(1000):
                if stop.is_set():
                    return
                engine.add(*batch((100 + n, 0), (2000 + n, 0)))

        thread = threading.Thread(target=write)
        thread.start()
        for n in range(5):
            reader.backup(tmp_path / f"{n}.sqlite")
        stop.set()
        thread.join()
    for n in range(5):
        (tmp_path / str(n)).mkdir()
        shutil.move(tmp_path / f"{n}.sqlite", tmp_path / str(n) / "gallery.sqlite")
        with SqliteEngine.open(tmp_path / str(n)) as restored:
            assert restored.verify() == []
            ids = {item.id for item in restored.items()}
            assert all((f"i{100 + m}" in ids) == (f"i{2000 + m}" in ids) for m in range(1000))


def test_vectors_are_copied_beside_the_database(tmp_path):
    """The copy is used, mended where it differs, and made again where it is missing; the answer is always the same."""
    with made(tmp_path, 30) as engine:
        _, queries, _ = batch((1, 0), (5, 2))
        expected = engine.search(queries, 99, IntrospectiveMetric())
        stored = state(engine)
    copies = {p: p.read_bytes() for p in tmp_path.glob("vectors-*")}
    assert len(copies) == 2
    for change in (
        lambda p: p.unlink(),
        lambda p: p.write_bytes(b""),
        lambda p: p.write_bytes(copies[p][:50]),
        lambda p: p.write_bytes(bytes(len(copies[p]))),
        lambda p: p.write_bytes(bytes(255 - x for x in copies[p])),
    ):
        for path in copies:
            change(path)
        with SqliteEngine.open(tmp_path) as reader:
            found = reader.search(queries, 99, IntrospectiveMetric())
            assert found.ids == expected.ids
            assert torch.equal(found.distances, expected.distances)
            assert state(reader) == stored
            live = list(reader_positions(tmp_path))
        for path, content in copies.items():
            found, wanted = (np.frombuffer(x[: len(content)], np.float32) for x in (path.read_bytes(), content))
            width = D if path.suffix == ".semantic" else U
            assert np.array_equal(*(x[: len(x) // width * width].reshape(-1, width)[live] for x in (found, wanted)))


def reader_positions(path):
    with SqliteEngine.open(path) as reader:
        return reader._table.rows.values()


def test_a_copy_that_changes_under_an_open_gallery(tmp_path):
    """What is about to be returned is checked, and read from the database again."""
    with made(tmp_path, 30) as engine:
        _, queries, _ = batch((1, 0), (5, 2))
        expected = engine.search(queries, 4)
        (path,) = tmp_path.glob("vectors-*.semantic")
        with path.open("r+b") as file:
            file.write(bytes(255 - x for x in path.read_bytes()))
        found = engine.search(queries, 4)
        assert found.ids == expected.ids
        assert torch.equal(found.distances, expected.distances)


def test_a_gallery_that_grows_beyond_its_mapped_vectors(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_vectors, "_ROOM", 2)
    with made(tmp_path) as engine, SqliteEngine.open(tmp_path) as reader:
        for n in range(40):
            engine.add(*batch((n, 0)))
            _, queries, _ = batch((n, 0))
            found = reader.search(queries, 99, IntrospectiveMetric())
            assert len(found.ids[0]) == n + 1
            assert found.ids == engine.search(queries, 99, IntrospectiveMetric()).ids


def test_positions_are_numbered_again(tmp_path):
    with made(tmp_path, 40) as engine, SqliteEngine.open(tmp_path) as reader:
        before, (_, queries, _) = state(engine), batch((1, 0), (4, 2))
        found = engine.search(queries, 50)
        engine.remove([before[0][0].id, before[3][0].id])
        engine.compact()
        assert list(engine._table.rows.values()) == list(range(len(before) - 2))
        assert state(engine) == state(reader) == [x for n, x in enumerate(before) if n not in (0, 3)]
        gone = {before[0][0].id, before[3][0].id}
        assert reader.search(queries, 50).ids == [[id for id in ids if id not in gone] for ids in found.ids]
        assert engine.verify() == reader.verify() == []

"""The embedded gallery against a dictionary; what it refuses; names of all kinds."""

import ast
import os
import shutil
import tempfile
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from made import PROPERTIES, D, Expected, U, batch, made, state

from idml import search
from idml.embeddings import Embeddings
from idml.metric import IntrospectiveMetric
from idml.search.engines import Added, Item, Properties
from idml.search.engines.sqlite import SqliteEngine

pytestmark = pytest.mark.usefixtures("_no_waiting")

NUMBERS = st.integers(0, 9)


class Gallery(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.patch = mock.patch.object(os, "fsync", return_value=None)
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
        folders = [name for name in os.listdir(self.engine.path) if name.startswith("generation")]
        assert len(folders) == 1
        size = os.path.getsize(self.engine.path / folders[0] / "semantic.f32")
        assert size == len(self.expected) * D * 4

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


def test_adding_again_changes_nothing(tmp_path):
    with made(tmp_path) as engine:
        assert engine.add(*batch((1, 0), (2, 0))) == Added(2, 0, 0)
        files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        assert engine.add(*batch((2, 0), (1, 0))) == Added(0, 0, 2)
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == files
        assert engine.add(*batch((1, 1), (2, 0), (3, 0))) == Added(1, 1, 1)
        assert [item.id for item in engine.items()] == ["i2", "i1", "i3"]
        items, e, images = batch((2, 0))
        assert engine.add(items, Embeddings(e.semantic * 4, e.uncertainty), images) == Added(0, 0, 1)  # the same unit
        assert engine.add(items, Embeddings(e.semantic, e.uncertainty * 2), images) == Added(0, 1, 0)
        assert engine.add(items, e, [b"another"]) == Added(0, 1, 0)


def test_an_empty_gallery_answers(tmp_path):
    with made(tmp_path) as engine:
        _, queries, _ = batch((1, 0), (2, 0))
        for metric in (None, IntrospectiveMetric()):
            found = engine.search(queries, 3, metric)
            assert found.ids == [[], []]
            assert found.distances.shape == (2, 0)
        assert (engine.duplicates(1.0), engine.verify(), list(engine.items()), len(engine)) == ([], [], [], 0)
        assert len(engine.embeddings()) == len(engine.levels()) == engine.compact() == 0
        engine.add(*batch((1, 0)))
        assert engine.search(queries[torch.tensor([], dtype=torch.long)], 3).ids == []
        engine.remove(["i1"])
        assert engine.search(queries, 3).ids == [[], []]


def test_only_lengths_of_u(tmp_path):
    with SqliteEngine.create(tmp_path, Properties("m", D)) as engine:
        items, e, images = batch((1, 0), (2, 0))
        engine.add(items, e, images)
        assert torch.equal(engine.levels(), e.level)
        assert engine.embeddings().uncertainty.shape == (2, 0)
        assert not list(tmp_path.rglob("uncertainty.f32"))
        assert engine.search(e, 1).ids == [["i1"], ["i2"]]
        assert engine.search(e, 1, IntrospectiveMetric(rule="off")).ids == [["i1"], ["i2"]]
        with pytest.raises(ValueError, match="keeps no uncertainty vectors"):
            engine.search(e, 1, IntrospectiveMetric())
        assert engine.compact() == 0
        assert torch.equal(engine.levels(["i2"]), e.level[1:])


names = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\udc80\udcff"), min_size=1, max_size=12)


@settings(max_examples=40)
@given(id=names, label=names, path=names.filter(lambda p: "\0" not in p and p[0] != "/" and ".." not in p))
def test_strange_names_come_back(id, label, path):
    item = Item(id=id, label=label, path=path, checksum="0" * 64)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(os, "fsync", return_value=None):
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


def test_what_does_not_fit_is_refused(tmp_path):
    items, e, images = batch((1, 0), (2, 0))
    with made(tmp_path) as engine:
        for bad, complaint in [
            ((items[:1], e, images), "do not fit"),
            ((items, e, images[:1]), "do not fit"),
            ((items, e, [1, 2]), "thumbnails must be bytes"),
            ((items, e.semantic, images), "Embeddings"),
            ((["i1", "i2"], e, images), "only Items"),
            ((items, Embeddings(torch.ones(2, 5), e.uncertainty), images), "5 dimensions, the gallery 4"),
            ((items, Embeddings(e.semantic, torch.ones(2, 5)), images), "5 uncertainty dimensions, the gallery 3"),
            ((items, Embeddings(e.semantic * float("nan"), e.uncertainty), images), "NaN"),
            ((items, Embeddings(e.semantic, e.uncertainty * float("inf")), images), "NaN or infinity"),
            ((items, Embeddings(e.semantic, e.uncertainty * 1e20), images), "more than can be compared"),
        ]:
            with pytest.raises(ValueError, match=complaint):
                engine.add(*bad)
        assert len(engine) == 0
        engine.add(items, Embeddings.certain(e.semantic.double()), images)  # u = 0
        assert torch.equal(engine.levels(), torch.zeros(2))
        for k in (0, -1, True, 1.0):
            with pytest.raises(ValueError, match="k must be a whole number"):
                engine.search(e, k)
        for call, complaint in [
            (lambda: engine.search(e.semantic, 1), "must be Embeddings"),
            (lambda: engine.search(e, 1, IntrospectiveMetric(rule="strict")), "does not rank"),
            (lambda: engine.remove("i1"), "a list of ids"),
            (lambda: engine.relabel({"i1": "x", "i9": "y"}), "no item 'i9'"),
            (lambda: engine.relabel({"i1": "\ud83d"}), "the label of an item"),
            (lambda: engine.thumbnail("i9"), "no item 'i9'"),
            (lambda: engine.embeddings(["i9"]), "no item 'i9'"),
            (lambda: engine.duplicates(float("nan")), "threshold"),
            (lambda: SqliteEngine.create(tmp_path, PROPERTIES), "being written to by another"),
        ]:
            with pytest.raises(ValueError, match=complaint):
                call()
        assert engine.get("i1").label == items[0].label
        assert engine.get("i9") is None
    with pytest.raises(ValueError, match="is closed"):
        len(engine)
    with pytest.raises(ValueError, match=r"a gallery at .* already"):
        SqliteEngine.create(tmp_path, PROPERTIES)


def test_bound_to_its_model(tmp_path):
    made(tmp_path / "g").close()
    for write in (False, True):
        with pytest.raises(ValueError, match=r"made with another model \(a model, not another\)"):
            SqliteEngine.open(tmp_path / "g", model="another", write=write)
        SqliteEngine.open(tmp_path / "g", model="a model", write=write).close()
    with pytest.raises(FileNotFoundError, match="there is no gallery at"):
        SqliteEngine.open(tmp_path / "elsewhere")
    for bad in (Properties, lambda *a: Properties("m", *a)):
        with pytest.raises(ValueError, match="must be"):
            bad("", 1) if bad is Properties else bad(0)


def test_duplicates_are_grouped(tmp_path):
    noise = torch.Generator().manual_seed(0)
    s = torch.nn.functional.normalize(torch.randn(40, D, generator=noise))
    s[20:30] = s[:10] + 1e-4  # near
    s[35:] = s[5]  # equal
    items = [Item(path=f"{n}", checksum=f"{n if n != 33 else 31:064x}", id=str(n)) for n in range(40)]
    with SqliteEngine.create(tmp_path, Properties("m", D)) as engine:
        engine.add(items, Embeddings.certain(s))
        engine.remove(["7", "36"])
        unit = engine.embeddings().semantic.double()
        ids = [item.id for item in engine.items()]
        for threshold in (0.0, 1e-3, 0.1, 0.4, 2.5):
            assert engine.duplicates(threshold) == loops(ids, unit, threshold, {"31", "33"})


def loops(ids, unit, threshold, same):
    """Groups of linked items, by looking at all pairs again and again."""
    groups = [{i} for i in range(len(ids))]
    for i in range(len(ids)):
        for j in range(i):
            near = float((unit[i] - unit[j]).norm()) < threshold or {ids[i], ids[j]} == same
            if near:
                a, b = (next(g for g in groups if k in g) for k in (i, j))
                if a is not b:
                    groups.remove(b)
                    a |= b
    return sorted(([ids[k] for k in sorted(g)] for g in groups if len(g) > 1), key=lambda g: ids.index(g[0]))


def test_threads_share_a_gallery(tmp_path):
    """Searches beside changes: no error, and every answer is of one state."""
    with made(tmp_path, 8) as engine:
        _, queries, _ = batch((1, 0), (2, 2))
        engine.add(*batch((30, 1)))
        failures, done = [], threading.Event()

        def search():
            try:
                while not done.is_set():
                    found = engine.search(queries, 50)
                    assert all(len(set(ids)) == len(ids) and "i30" in ids for ids in found.ids)
                    assert any(item.id == "i30" for item in engine.items())
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=search) for _ in range(2)]
        for thread in threads:
            thread.start()
        for n in range(40):
            engine.add(*batch((n % 20, n), (30, 1)))
            engine.remove([f"i{(n + 7) % 20}"])
            if n % 10 == 9:
                engine.compact()
        done.set()
        for thread in threads:
            thread.join()
        assert failures == []

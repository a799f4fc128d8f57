"""What every engine does, as tests. A subclass of `EngineContract` has a fixture ``galleries`` that gives engines:

galleries.fresh(properties)       an empty gallery, open for writing
galleries.again(engine, **more)   the same gallery, opened once more
galleries.absent()                what opening a gallery that is not there does, as a function
"""

import threading

import numpy as np
import pytest
import torch
from numbered_changes import PROPERTIES, D, Expected, U, batch, change, make_change, state

from idml.embeddings import Embeddings
from idml.metric import IntrospectiveMetric
from idml.search.engines import Added, Item, Properties
from idml.search.engines.sqlite import SqliteEngine

METRICS = [None, IntrospectiveMetric(), IntrospectiveMetric(tau=0.5, gamma=1.0)]
NAMES = [
    "plain",
    'a "quoted" name',
    "it's",
    "back\\slash\\",
    "\\",
    '"',
    "two\nlines\r\n\ttabbed",
    'x"] or key != "',
    "x') or true or ('",
    "key >= '' -- ; drop",
    "{template} %s %(x)s $1",
    "<b>&amp;</b>",
    "żółw 亀 🐢 e\u0301",
    "\u202eright to left\u2028",
    "nul \0 bell \a",
    "no utf-8 \udc80\udcff",
    " spaces ",
    "long " * 400,
]


class Folders:
    """Galleries in folders."""

    def __init__(self, folder):
        self.folder, self.made = folder, []

    def fresh(self, properties):
        self.made.append(SqliteEngine.create(self.folder / str(len(self.made)), properties))
        return self.made[-1]

    def again(self, engine, **more):
        return SqliteEngine.open(engine.path, **more)

    def absent(self):
        return lambda: SqliteEngine.open(self.folder / "elsewhere")


def item(id, **more):
    return Item(**{"path": "", "checksum": "0" * 64, "id": id, **more})


def distances(queries, stored, metric):
    """D, or α, of all pairs in float64, by the formula."""
    q, g = queries.unit.double().numpy(), stored.semantic.double().numpy()
    alpha = np.sqrt(((q[:, None] - g[None]) ** 2).sum(2))
    if metric is None:
        return alpha
    beta = np.linalg.norm(queries.uncertainty.double().numpy()[:, None] + stored.uncertainty.double().numpy(), axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(alpha == 0, 0, alpha * np.exp(-(beta + metric.gamma) / (metric.tau * alpha)))


class EngineContract:
    def test_holds_what_it_was_given(self, galleries):
        engine, expected = galleries.fresh(PROPERTIES), Expected()
        for number in range(14):
            if change_is_light(number, expected):
                make_change(number, expected, engine)
            assert len(engine) == len(expected)
        assert len(expected) > 5
        assert state(engine) == expected.state()
        assert engine.verify() == []
        with galleries.again(engine) as reader:
            assert reader.properties == PROPERTIES
            assert state(reader) == expected.state()

    def test_adding_again_changes_nothing(self, galleries):
        engine = galleries.fresh(PROPERTIES)
        assert engine.add(*batch((1, 0), (2, 0))) == Added(2, 0, 0)
        before = state(engine)
        assert engine.add(*batch((2, 0), (1, 0))) == Added(0, 0, 2)
        assert state(engine) == before
        assert engine.add(*batch((1, 1), (2, 0), (3, 0))) == Added(1, 1, 1)
        assert [item.id for item in engine.items()] == ["i2", "i1", "i3"]  # a replaced item comes last
        items, e, images = batch((2, 0))
        assert engine.add(items, Embeddings(e.semantic * 4, e.uncertainty), images) == Added(0, 0, 1)  # the same unit
        assert engine.add(items, Embeddings(e.semantic, e.uncertainty * 2), images) == Added(0, 1, 0)
        assert engine.add(items, e, [b"another"]) == Added(0, 1, 0)
        assert engine.thumbnail("i2") == b"another"
        twice, e, images = batch((4, 0), (4, 1))
        assert engine.add(twice, e, images) == Added(1, 0, 0)  # of equal ids the last counts
        assert engine.get("i4") == twice[1]
        assert engine.remove(["i4", "i4", "i99"]) == 1
        assert engine.add(twice[1:], e[1], images[1:]) == Added(1, 0, 0)
        assert len(engine) == 4

    def test_an_empty_gallery_answers(self, galleries):
        engine = galleries.fresh(PROPERTIES)
        _, queries, _ = batch((1, 0), (2, 0))
        for metric in (None, IntrospectiveMetric()):
            found = engine.search(queries, 3, metric)
            assert found.ids == [[], []]
            assert found.distances.shape == (2, 0)
        assert (engine.verify(), list(engine.items()), len(engine)) == ([], [], 0)
        assert engine.embeddings().semantic.shape == (0, D)
        assert engine.embeddings().uncertainty.shape == (0, U)
        assert len(engine.levels()) == engine.remove(["i1"]) == engine.relabel({}) == 0
        assert engine.add([], Embeddings(torch.empty(0, D), torch.empty(0, U)), []) == Added(0, 0, 0)
        engine.add(*batch((1, 0)))
        assert engine.search(queries[torch.tensor([], dtype=torch.long)], 3).ids == []
        engine.remove(["i1"])
        assert engine.search(queries, 3).ids == [[], []]

    def test_some_items(self, galleries):
        engine = galleries.fresh(PROPERTIES)
        items, e, images = batch((1, 0), (2, 1), (3, 2))
        engine.add(items, e, images)
        ids = ["i3", "i1", "i3"]
        assert torch.equal(engine.embeddings(ids).semantic, e.unit[[2, 0, 2]])
        assert torch.equal(engine.embeddings(ids).uncertainty, e.uncertainty[[2, 0, 2]])
        assert torch.equal(engine.levels(ids), e.level[[2, 0, 2]])
        assert len(engine.embeddings([])) == len(engine.levels([])) == 0
        assert [engine.thumbnail(item.id) for item in items] == images
        assert (engine.get("i2"), engine.get("i9"), engine.get("\ud83d")) == (items[1], None, None)
        assert engine.get_many(["i3", "i9", "i1", "\ud83d", "i3"]) == [items[2], None, items[0], None, items[2]]
        assert engine.get_many([]) == []
        assert "i2" in engine
        assert "i9" not in engine
        assert 7 not in engine

    def test_labels(self, galleries):
        engine = galleries.fresh(PROPERTIES)
        items, e, images = batch((1, 0), (2, 1), (5, 2))
        engine.add(items, e, images)
        assert engine.relabel({"i2": "x", "i1": items[0].label, "i5": None}) == 1  # i5 had none
        assert engine.get("i2").label == "x"
        assert engine.relabel({"i2": None, "i5": ""}) == 2
        assert [(i.id, i.label) for i in engine.items()] == [("i1", items[0].label), ("i2", None), ("i5", "")]
        assert state(engine)[1][1:] == (e.unit[1].numpy().tobytes(), *state(engine)[1][2:])
        for bad, complaint in [({"i1": "y", "i9": "z"}, "no item 'i9'"), ({"i1": "y", "i2": "\ud83d"}, "the label")]:
            with pytest.raises(ValueError, match=complaint):
                engine.relabel(bad)
            assert engine.get("i1") == items[0]
        assert engine.verify() == []

    def test_only_lengths_of_u(self, galleries):
        engine = galleries.fresh(Properties("m", D))
        items, e, images = batch((1, 0), (2, 0))
        engine.add(items, e, images)
        assert torch.equal(engine.levels(), e.level)
        assert engine.embeddings().uncertainty.shape == (2, 0)
        for metric in (None, IntrospectiveMetric(rule="off")):
            assert engine.search(e, 1, metric).ids == [["i1"], ["i2"]]
        with pytest.raises(ValueError, match="keeps no uncertainty vectors"):
            engine.search(e, 1, IntrospectiveMetric())
        assert torch.equal(engine.levels(["i2"]), e.level[1:])
        assert engine.verify() == []

    def test_names_of_all_kinds(self, galleries):
        engine = galleries.fresh(Properties("m", D))
        kept = [item(name, label=name, path=f"d/{n}") for n, name in enumerate(NAMES)]
        kept += [item(f"p{n}", path=name) for n, name in enumerate(NAMES) if "\0" not in name]
        engine.add(kept, Embeddings.certain(torch.randn(len(kept), D)))
        assert list(engine.items()) == kept
        for name in NAMES:
            assert engine.get(name).label == name
            assert name in engine
            assert f"{name}?" not in engine
            assert engine.search(engine.embeddings([name]), 1).ids == [[name]]
        assert engine.relabel(dict.fromkeys(NAMES, '"] or true')) == len(NAMES)
        assert engine.remove(NAMES[:9]) == 9
        assert [i.id for i in engine.items()] == [i.id for i in kept[9:]]
        assert engine.remove(['x"] or key != "', "%", "_", "*"]) == 0
        assert engine.verify() == []

    def test_what_does_not_fit_is_refused(self, galleries):
        items, e, images = batch((1, 0), (2, 0))
        engine = galleries.fresh(PROPERTIES)
        for bad, complaint in [
            ((items[:1], e, images), "do not fit"),
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
            (lambda: engine.search(Embeddings.certain(torch.ones(1, 5)), 1), "5 dimensions, the gallery 4"),
            (lambda: engine.search(e, 1, IntrospectiveMetric(rule="strict")), "does not rank"),
            (lambda: engine.remove("i1"), "a list of ids"),
            (lambda: engine.thumbnail("i9"), "no item 'i9'"),
            (lambda: engine.embeddings(["i9"]), "no item 'i9'"),
            (lambda: engine.levels(["i1", "i9"]), "no item 'i9'"),
        ]:
            with pytest.raises(ValueError, match=complaint):
                call()
        engine.close()
        for call in (lambda: len(engine), lambda: engine.search(e, 1), lambda: engine.add(items, e)):
            with pytest.raises(ValueError, match="is closed"):
                call()

    def test_bound_to_its_model(self, galleries):
        engine = galleries.fresh(PROPERTIES)
        engine.add(*batch((1, 0)))
        with pytest.raises(ValueError, match=r"made with another model \(a model, not another\)"):
            galleries.again(engine, model="another")
        with galleries.again(engine, model="a model") as reader:
            for change in (
                lambda: reader.add(*batch((1, 0))),
                lambda: reader.remove([]),
                lambda: reader.relabel({}),
                reader.compact,
            ):
                with pytest.raises(ValueError, match="open for reading only"):
                    change()
        with pytest.raises(FileNotFoundError, match="there is no gallery at"):
            galleries.absent()()

    def test_a_reader_goes_on(self, galleries):
        writer = galleries.fresh(PROPERTIES)
        writer.add(*batch((1, 0), (2, 0)))
        with galleries.again(writer) as reader:
            assert not reader.refresh()
            for change in (
                lambda: writer.add(*batch((3, 0))),
                lambda: writer.add(*batch((3, 1))),
                lambda: writer.relabel({"i1": "new"}),
                lambda: writer.remove(["i2"]),
            ):
                change()
                assert reader.refresh()
                assert state(reader) == state(writer)
            assert not writer.refresh()  # nothing but its own

    @pytest.mark.parametrize("metric", METRICS)
    def test_search_against_loops(self, galleries, metric):
        """Near duplicates, 40 copies, items that were removed, a vector without direction."""
        torch.manual_seed(1)
        n, centres = 160, torch.randn(4, D)
        s = centres[torch.arange(n) % 4] + torch.randn(n, D) * torch.logspace(-7, 0, n)[:, None]
        u = torch.randn(n, U) * torch.logspace(-3, 0.5, n)[torch.randperm(n)][:, None]
        s[100:140], u[100:140] = s[5], u[5]
        s[150] = 0
        ids = [f"n{i}" for i in torch.randperm(n).tolist()]
        engine = galleries.fresh(PROPERTIES)
        engine.add([item(id) for id in ids], Embeddings(s, u))
        gone = set(ids[20:50])
        assert engine.remove(gone) == 30
        live = [id for id in ids if id not in gone]
        queries = Embeddings(torch.cat([centres, s[::23]]), torch.cat([u[:4], u[::23]]))
        expected = distances(queries, engine.embeddings(), metric)
        for k in (1, 7, 50, 999):
            found = engine.search(queries, k, metric)
            assert found.distances.shape == (len(queries), min(k, len(live)))
            for line, chosen, measured in zip(expected, found.ids, found.distances.numpy(), strict=True):
                rows = [live.index(id) for id in chosen]
                assert len(set(rows)) == len(rows)
                np.testing.assert_allclose(measured, np.sort(line)[: len(rows)], rtol=1e-5, atol=1e-30)
                np.testing.assert_allclose(measured, line[rows], rtol=1e-5, atol=1e-30)
                copies = [row for row in rows if live[row] in ids[100:140] or live[row] == ids[5]]
                assert copies == sorted(copies)  # in the order in which they were added

    def test_threads_share_a_gallery(self, galleries):
        """Searches beside changes: no error, and what is there all the time is always found."""
        engine = galleries.fresh(PROPERTIES)
        _, queries, _ = batch((1, 0), (2, 2))
        engine.add(*batch((30, 1), (1, 0)))
        failures, done = [], threading.Event()

        def search():
            try:
                while not done.is_set():
                    found = engine.search(queries, 50)
                    assert all(len(set(ids)) == len(ids) and "i30" in ids for ids in found.ids)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=search) for _ in range(2)]
        for thread in threads:
            thread.start()
        for n in range(8):
            engine.add(*batch((n % 20, n), (30, 1)))
            engine.remove([f"i{(n + 7) % 20}"])
        done.set()
        for thread in threads:
            thread.join()
        assert failures == []


def change_is_light(number, expected):
    """Not a compaction: a server takes seconds for it."""
    return change(number, expected)[0] != "compact"

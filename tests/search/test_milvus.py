"""The Milvus engine against a real server, and both engines against one contract."""

import json
import os
import re
import tempfile
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
import torch
from engine_contract import METRICS, EngineContract, Folders, item
from hypothesis import given, settings
from hypothesis import strategies as st
from milvus_server import missing
from numbered_changes import PROPERTIES, D, batch, state
from PIL import Image

import idml
from idml.embeddings import Embeddings
from idml.metric import IntrospectiveMetric
from idml.model import build_model, save_model
from idml.search.engines import DamagedGallery, Properties, milvus_schema, sqlite_storage
from idml.search.engines import milvus as milvus_module
from idml.search.engines.milvus import MilvusEngine
from idml.search.engines.milvus_connection import WRITING, Connection, Place
from idml.search.engines.milvus_search import MilvusSearch

LONG = "IDML_KILLS" in os.environ  # make faults
DOCS = Path(__file__).parents[2] / "docs" / "milvus.md"


class Collections:
    """Galleries in Milvus. Making one takes a second, so those that a test leaves are emptied for the next."""

    def __init__(self, server):
        self.server, self.made = server, []

    def fresh(self, properties, index="FLAT"):
        known = self.server.known
        name = known.get((properties, index))
        if name is None:
            name = f"g{len(known)}"
            engine = MilvusEngine.create(self.server.place(name), properties, index=index)
            known[properties, index] = name
        else:
            engine = MilvusEngine.open(self.server.place(name), write=True)
            engine.remove([item.id for item in engine.items()])
        assert len(engine) == 0
        self.made.append(engine)
        return engine

    def again(self, engine, **more):
        return MilvusEngine.open(str(engine.place), **more)

    def absent(self):
        return lambda: MilvusEngine.open(self.server.place("elsewhere"))


@pytest.fixture
def folders(tmp_path, _no_waiting):
    out = Folders(tmp_path)
    yield out
    for engine in out.made:
        engine.close()


@pytest.fixture
def collections(milvus):
    out = Collections(milvus)
    yield out
    for engine in out.made:
        engine.close()


class TestMilvus(EngineContract):
    @pytest.fixture
    def galleries(self, collections):
        return collections


def raw(server):
    """A plain client of the server."""
    from pymilvus import MilvusClient

    return closing(MilvusClient(uri=f"http://127.0.0.1:{server.port}", token=server.token, timeout=120))


def both(folders, collections, properties=PROPERTIES):
    return folders.fresh(properties), collections.fresh(properties)


NUMBERS = st.integers(0, 9)
CHANGES = st.one_of(
    st.tuples(st.just("add"), st.lists(st.tuples(NUMBERS, st.integers(0, 3)), max_size=4)),
    st.tuples(st.just("remove"), st.lists(NUMBERS, max_size=3)),
    st.tuples(st.just("relabel"), st.dictionaries(NUMBERS, st.none() | st.text(max_size=4), max_size=2)),
    st.tuples(st.just("search"), st.tuples(st.integers(1, 12), st.sampled_from(METRICS))),
)


@pytest.fixture(scope="module")
def shared_folder():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_both_engines_hold_and_find_the_same(collections, shared_folder):
    """Random changes: after each of them the outcome is the same, and in the end everything is."""
    _, queries, _ = batch((3, 1), (12, 2), (40, 0))

    @settings(max_examples=6)
    @given(changes=st.lists(CHANGES, min_size=3, max_size=9))
    def check(changes):
        folders = Folders(Path(tempfile.mkdtemp(dir=shared_folder)))
        with mock.patch.object(sqlite_storage, "SYNCHRONOUS", "OFF"):
            engines = both(folders, collections)
            for kind, what in changes:
                results = [outcome(engine, kind, what, queries) for engine in engines]
                assert results[0] == results[1]
            assert state(engines[0]) == state(engines[1])
            found = [engine.search(queries, 6) for engine in engines]
            assert found[0].ids == found[1].ids
            assert torch.equal(found[0].distances, found[1].distances)
            folders.made[0].close()

    check()


def outcome(engine, kind, what, queries):
    """What a change returns or raises."""
    try:
        if kind == "add":
            return engine.add(*batch(*what)) if what else 0
        if kind == "remove":
            return engine.remove([f"i{n}" for n in what])
        if kind == "relabel":
            return engine.relabel({f"i{n}": label for n, label in what.items()})
        found = engine.search(queries, *what)
        return found.ids, found.distances.tolist()
    except ValueError as error:
        return str(error).split(" in the gallery")[0]


def rounds(call):
    """How often candidates were asked for, and what came out."""
    with mock.patch.object(MilvusSearch, "_candidates", autospec=True, side_effect=MilvusSearch._candidates) as asked:
        found = call()
    return asked.call_count, found


def test_more_copies_than_candidates(collections):
    engine = collections.fresh(PROPERTIES)
    s = torch.cat([torch.ones(200, D), torch.randn(60, D)])
    engine.add([item(f"c{n}") for n in range(260)], Embeddings.certain(s))
    count, found = rounds(lambda: engine.search(Embeddings.certain(torch.ones(1, D)), 5))
    assert found.ids == [[f"c{n}" for n in range(5)]]
    assert found.distances.tolist() == [[0.0] * 5]
    assert count == 3  # 13, 52, 208: the last candidate is no copy


def test_items_that_are_far_but_uncertain(folders, collections):
    """The nearest by the metric are the farthest by Euclid: candidates are asked for until that is noticed."""
    torch.manual_seed(3)
    near, far = torch.randn(1, D) + 0.2 * torch.randn(300, D), -torch.randn(40, D).abs()
    s, u = torch.cat([near, far]), torch.cat([torch.zeros(300, 3), 20 * torch.randn(40, 3)])
    engines = both(folders, collections)
    for engine in engines:
        engine.add([item(f"n{n}") for n in range(340)], Embeddings(s, u))
    queries, metric = Embeddings(near[:3], torch.zeros(3, 3)), IntrospectiveMetric(tau=1.0)
    expected = engines[0].search(queries, 9, metric)
    count, found = rounds(lambda: engines[1].search(queries, 9, metric))
    assert {int(id[1:]) >= 300 for id in expected.ids[0][1:]} == {True}
    assert found.ids == expected.ids
    assert torch.equal(found.distances, expected.distances)
    assert count > 1
    engines[1].remove([f"n{n}" for n in range(300, 340)])  # no large u is left: one look is enough
    assert rounds(lambda: engines[1].search(queries[0], 9, metric))[0] == 1


def test_milvus_gives_squares(collections):
    engine = collections.fresh(PROPERTIES)
    engine.add([item("a")], Embeddings.certain(torch.tensor([[0.0, 1.0, 0.0, 0.0]])))
    query = Embeddings.certain(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    with mock.patch.object(MilvusSearch, "_measured", autospec=True, side_effect=MilvusSearch._measured) as measured:
        assert engine.search(query, 1).distances.item() == pytest.approx(2**0.5)
    assert measured.call_args.args[2][0]["distance"] == pytest.approx(2.0)


def test_everything_in_small_pages(folders, collections, monkeypatch):
    engines = both(folders, collections)
    given = batch(*((n, n % 3) for n in range(24)))
    for size in (700, 1 << 19):
        monkeypatch.setattr(milvus_schema, "PAGE", size)
        monkeypatch.setattr(milvus_module, "_KEYS", 5)
        for engine in engines:
            assert engine.add(*given).unchanged == (0 if size == 700 else 24)
            engine.relabel({f"i{n}": f"{size}" for n in range(24)})
        assert state(engines[1]) == state(engines[0])
        if size > 700:
            assert engines[1].search(given[1][:5], 9).ids == engines[0].search(given[1][:5], 9).ids
        assert engines[1].verify() == []
        for engine in engines:
            engine.relabel({item.id: item.label for item in given[0]})
    monkeypatch.setattr(milvus_schema, "PAGE", 700)
    with pytest.raises(ValueError, match="Milvus gives at most 1 results of this gallery at a time, got k = 2"):
        engines[1].search(given[1][:1], 2)
    assert engines[1].remove([f"i{n}" for n in range(24)]) == 24


def test_more_items_than_milvus_gives_at_a_time(collections):
    count = milvus_schema.MOST + 616 if LONG else 1000
    engine = collections.fresh(Properties("m", 2))
    angle = torch.linspace(0, 6.28, count)
    engine.add([item(f"{n}") for n in range(count)], Embeddings.certain(torch.stack([angle.cos(), angle.sin()], 1)))
    assert len(engine) == count
    assert [int(item.id) for item in engine.items()] == list(range(count))
    assert engine.levels().shape == (count,)
    expected = Embeddings.certain(torch.tensor([[1.0, 0.001]]))
    near = (angle.cos() - expected.unit[0, 0]) ** 2 + (angle.sin() - expected.unit[0, 1]) ** 2
    assert engine.search(expected, 3).ids[0][0] == str(int(near.double().argmin()))


@pytest.mark.parametrize("index", ["HNSW", "IVF_FLAT"] if LONG else ["HNSW"])
def test_approximate_indexes(collections, index):
    """Measured exactly, in the right order, nearly all of the right ones; the index stays after opening again."""
    torch.manual_seed(5)
    s = torch.randn(40, 8)[torch.arange(3000) % 40] + 0.3 * torch.randn(3000, 8)
    engine = collections.fresh(Properties("m", 8, 2), index)
    engine.add([item(f"{n}") for n in range(3000)], Embeddings(s, 0.1 * torch.randn(3000, 2)))
    engine._opened().do("flush")  # the index is built from what is flushed
    with collections.again(engine) as reader:
        assert reader.index == index
        stored, hits = reader.embeddings(), 0
        for metric in (None, IntrospectiveMetric()):
            queries = Embeddings(s[::100], 0.1 * torch.randn(30, 2))
            found = reader.search(queries, 10, metric)
            measure = metric or IntrospectiveMetric(rule="off")
            own = measure.distances(queries.to(torch.float64), stored.to(torch.float64))
            for line, ids, measured in zip(own, found.ids, found.distances, strict=True):
                rows = [int(id) for id in ids]
                assert torch.allclose(line[rows].float(), measured, atol=1e-5)
                assert (measured.diff() >= 0).all()
                hits += len(set(rows) & set(line.topk(10, largest=False).indices.tolist()))
        assert hits > 0.9 * 600
        assert reader.verify() == []


def test_compaction_gives_room_back(collections):
    engine = collections.fresh(PROPERTIES)
    for version in range(3):
        engine.add(*batch(*((n, version) for n in range(9))))
    engine.remove(["i1", "i2"])
    before, given_back = state(engine), 0
    for _ in range(5):  # a busy server puts it off
        given_back += engine.compact()
        if given_back >= 20:
            break
    assert given_back >= 20
    assert state(engine) == before
    assert engine.compact() == 0
    assert engine.add(*batch((1, 0))).new == 1


@pytest.mark.parametrize(
    "place",
    [
        "milvus://",
        "milvus://host",
        "milvus://host:19530/",
        "milvus://host:port/birds",
        "milvus://host:0/birds",
        "milvus://host:99999/birds",
        "milvus://host:19530/a/b",
        "milvus://host:19530/birds?x=1",
        "milvus://host:19530/1birds",
        "milvus://host:19530/bïrds",
        "http://host:19530/birds",
        "milvus://[::1/birds",
        "/a/folder",
        Path("/a/folder"),
        None,
    ],
)
def test_addresses_that_are_none(place):
    for make in (MilvusEngine.open, lambda place: MilvusEngine.create(place, PROPERTIES)):
        with pytest.raises(ValueError, match=r"a gallery in Milvus is milvus://host:port/collection") as error:
            make(place)
        assert "\n" not in str(error.value)


def test_addresses():
    assert Place.parse("milvus://host:1/b") == Place("host", 1, "b", secure=False)
    assert Place.parse("milvuss://host/b_1") == Place("host", 19530, "b_1", secure=True)
    for text in ("milvus://host:1/b", "milvuss://host:443/b_1", "milvus://[::1]:5/b"):
        assert str(Place.parse(text)) == text
    for secret in ("milvus://root:secret@host/b", "milvus://secret@host/b", "milvus://a:secret@host/1b"):
        with pytest.raises(ValueError, match=r"IDML_MILVUS_TOKEN") as error:
            Place.parse(secret)
        assert "secret" not in str(error.value)
    with pytest.raises(ValueError, match=r"got 'milvus://…@\[x'") as error:
        Place.parse("milvus://root:secret@[x")
    assert "secret" not in str(error.value)


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


def test_a_server_that_is_away(capfd):
    if reason := missing():
        pytest.skip(reason)
    for place in ("milvus://127.0.0.1:1/birds", "milvuss://127.0.0.1:1/birds"):
        with pytest.raises(OSError, match=r"cannot open Milvus at 127.0.0.1:1 \(is it there") as error:
            MilvusEngine.open(place)
        one_line(error)
    assert capfd.readouterr().err == ""


def test_a_token_that_is_wrong(milvus, monkeypatch):
    for token in ("root:wrong", "", "nobody"):
        monkeypatch.setenv("IDML_MILVUS_TOKEN", token)
        with pytest.raises(OSError, match=r"is \$IDML_MILVUS_TOKEN right") as error:
            MilvusEngine.open(milvus.place("birds"))
        assert "wrong" not in one_line(error)


def test_tls_is_never_left_out(collections):
    """A connection without it is open; one with it to the same server is not made of that."""
    engine = collections.fresh(PROPERTIES)
    with pytest.raises(OSError, match="cannot open Milvus") as error:
        MilvusEngine.open(str(engine.place).replace("milvus:", "milvuss:"))
    one_line(error)


def test_galleries_that_are_none(milvus, collections, capfd):
    from pymilvus import DataType

    engine = collections.fresh(PROPERTIES)
    with pytest.raises(ValueError, match=r"there is a collection at .* already"):
        MilvusEngine.create(str(engine.place), PROPERTIES)
    with raw(milvus) as client:
        for n, text in enumerate(["", "[]", '{"idml": 2}', '{"idml": 1, "model": 3}', "{" * 5000]):
            schema = client.create_schema(auto_id=False, description=text)
            schema.add_field("key", DataType.VARCHAR, is_primary=True, max_length=64)
            schema.add_field("semantic", DataType.FLOAT_VECTOR, dim=4)
            client.create_collection(f"other{n}", schema=schema)
            with pytest.raises(ValueError, match="is no gallery of idml"):
                MilvusEngine.open(milvus.place(f"other{n}"))
        killed = mock.patch.object(type(client), "create_index", side_effect=KeyboardInterrupt)
        with killed, pytest.raises(KeyboardInterrupt):
            MilvusEngine.create(milvus.place("half"), PROPERTIES)
        with pytest.raises(ValueError, match="has no index: its making was cut short"):
            MilvusEngine.open(milvus.place("half"))
        client.rename_collection(engine.place.collection, "elsewhere_now")
        with pytest.raises(OSError, match=r"Milvus at .* failed: .*not found") as error:
            engine.search(batch((1, 0))[1], 1)
        one_line(error)
        client.rename_collection("elsewhere_now", engine.place.collection)
    assert capfd.readouterr().err == ""


def test_what_milvus_cannot_hold_is_refused(milvus, collections):
    place = milvus.place("never")
    for properties in (Properties("m", 1), Properties("m", 32769), Properties("m", 4, 20000)):
        with pytest.raises(ValueError, match="Milvus takes 2 to 32768 dimensions and 12287 of the uncertainty"):
            MilvusEngine.create(place, properties)
    with pytest.raises(ValueError, match="unknown index 'IVF'; known: FLAT, HNSW, IVF_FLAT"):
        MilvusEngine.create(place, PROPERTIES, index="IVF")
    engine = collections.fresh(PROPERTIES)
    items, e, _ = batch((1, 0), (2, 0))
    with pytest.raises(ValueError, match=r"thumbnail of 'i2' has 49,150 bytes; Milvus takes 49,149"):
        engine.add(items, e, [b"", bytes(49150)])
    with pytest.raises(ValueError, match=r"names of item 'x{40}' are too long"):
        engine.add([items[0], item("x" * 70000)], e)
    assert len(engine) == 0
    largest = bytes(range(256)) * 191 + bytes(253)
    assert engine.add(items, e, [largest, b"\0"]).new == 2
    assert engine.thumbnail("i1") == largest
    with pytest.raises(ValueError, match="names of item 'i2' are too long"):
        engine.relabel({"i1": "new", "i2": "é" * 1400})
    assert engine.get("i1") == items[0]
    assert engine.relabel({"i2": "é" * 1250}) == 1
    assert engine.get("i2").label == "é" * 1250
    assert engine.verify() == []


def test_damage_is_named(milvus, collections):
    engine = collections.fresh(PROPERTIES)
    items, e, images = batch(*((n, 0) for n in range(1, 8)))
    engine.add(items, e, images)
    rows = [engine._fetch([f"i{n}"], milvus_schema.fields(PROPERTIES))[f"i{n}"] for n in range(1, 8)]
    rows[0]["semantic"] = [0.5, 0.5, 0.5, 0.5]
    rows[1]["uncertainty"] = rows[2]["uncertainty"]
    rows[2]["uncertainty"] = "AAAAAA=="
    rows[3]["thumbnail"] = "?"
    rows[4]["level"] += 0.25
    rows[5]["item"] = rows[5]["item"].replace("i6", "i5")
    with raw(milvus) as client:
        client.upsert(engine.place.collection, rows[:6])
    engine.refresh()
    problems = {problem.item: problem.reason for problem in engine.verify()}
    key = milvus_schema.key_of("i6")
    assert set(problems) == {"i1", "i2", "i3", "i4", "i5", key}
    assert all("not what was written" in problems[id] for id in ("i1", "i2", "i5"))
    assert "has 4 bytes, not 12" in problems["i3"]
    assert "cannot be read" in problems["i4"]
    assert "key of another" in problems[key]
    for call in (lambda: list(engine.items()), engine.embeddings, lambda: engine.thumbnail("i4")):
        with pytest.raises(DamagedGallery, match=r"cannot be read|has 4 bytes"):
            call()
    engine.remove(["i6"])  # a damaged item is removed, or added again
    assert engine.add(items, e, images).unchanged == 6
    for n in range(6):
        engine.remove([f"i{n}"])
    engine.add(items, e, images)
    assert engine.verify() == []
    assert state(engine)[0][0] == items[-1]


def test_acknowledged_changes_survive_a_kill(milvus, collections):
    """kill -9 of the server right after a change was acknowledged: it is there again, and engines go on."""
    engine = collections.fresh(PROPERTIES)
    engine.add(*batch(*((n, 0) for n in range(20))))
    engine.remove(["i3", "i4"])
    engine.relabel({"i5": "kept"})
    before = engine.search(batch((1, 0))[1], 30).ids
    engine.add(*batch((21, 0)))
    milvus.kill()
    with pytest.raises(OSError, match=r"Milvus at .* failed") as error:
        engine.search(batch((1, 0))[1], 1)
    one_line(error)
    milvus.start()
    with collections.again(engine) as reader:
        assert len(reader) == 19
        assert {"i3", "i4"} & {item.id for item in reader.items()} == set()
        assert reader.get("i5").label == "kept"
        assert reader.verify() == []
    assert len(engine.search(batch((1, 0))[1], 30).ids[0]) == len(before[0]) + 1
    assert engine.add(*batch((21, 0), (22, 0))) == (1, 0, 1)


def test_examples_of_the_docs_run(milvus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(build_model("conv4", pretrained=False, image_size=28, embedding_dim=512), Path("runs/birds"))
    Path("photos/robin").mkdir(parents=True)
    for name in ("photos/robin/one.jpg", "query.jpg"):
        Image.new("RGB", (40, 40), "red").save(name)
    searching, creating = re.findall(r"^```python no-run\n(.*?)^```", DOCS.read_text(), re.DOTALL | re.MULTILINE)

    def run(code):
        here = re.sub(r"milvuss?://[\w.]+(:\d+)?/(\w+)", lambda match: milvus.place(match[2]), code)
        exec(compile(here, "example", "exec"), {})

    run(creating)
    idml.index("photos", to=milvus.place("birds"), model="runs/birds")
    run(searching)
    assert "one.jpg" in capsys.readouterr().out


def test_properties_are_kept_as_json(milvus, collections):
    engine = collections.fresh(PROPERTIES)
    with raw(milvus) as client:
        text = client.describe_collection(engine.place.collection)["description"]
    assert json.loads(text) == {"idml": 1, "model": "a model", "dimensions": D, "uncertainty": 3}


def test_found_items_are_not_asked_for_again(collections):
    engine = collections.fresh(PROPERTIES)
    items, e, images = batch((1, 0), (2, 1), (3, 2))
    engine.add(items, e, images)
    engine.search(e, 2)
    with mock.patch.object(Connection, "do", side_effect=AssertionError):
        assert engine.get_many([item.id for item in items]) == items
    with collections.again(engine, write=True) as other:
        other.relabel({"i1": "new"})
    engine.refresh()
    assert engine.get("i1").label == "new"
    engine.search(e, 2)
    engine.relabel({"i2": "newer"})
    assert engine.get("i2").label == "newer"
    engine.search(e, 2)
    engine.remove(["i3"])
    assert engine.get("i3") is None


def test_a_busy_server_may_let_a_writer_wait(collections):
    engine = collections.fresh(PROPERTIES)
    items, e, images = batch((1, 0), (2, 1), (3, 2))
    usual, waited, do = engine._opened().patience, [], Connection.do
    with mock.patch.object(
        Connection, "do", lambda self, *a, **k: (waited.append(self.patience), do(self, *a, **k))[1]
    ):
        engine.add(items, e, images)
    assert set(waited) == {WRITING}
    assert engine._opened().patience == usual
    with mock.patch.object(Connection, "do", side_effect=OSError("away")), pytest.raises(OSError, match="away"):
        engine.remove(["i1"])
    assert engine._opened().patience == usual < WRITING

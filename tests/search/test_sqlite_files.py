"""What lies beside the rows of a gallery: the copy of the vectors, what a change writes, and what verify finds."""

import os
import sqlite3
import zlib

import numpy as np
import pytest
import torch
from numbered_changes import PROPERTIES, D, U, batch, made, state

from idml.embeddings import Embeddings
from idml.metric import IntrospectiveMetric
from idml.search.engines import sqlite_changes, sqlite_storage, sqlite_vectors
from idml.search.engines.base import FLOAT, Properties
from idml.search.engines.sqlite import SqliteEngine
from idml.search.engines.sqlite_changes import back_up, create_database
from idml.search.engines.sqlite_storage import DATABASE, connect, read_state
from idml.search.engines.sqlite_vectors import VectorCache, Vectors, checksums_of, write_rows

pytestmark = pytest.mark.usefixtures("_no_waiting")


def rows_of(n, width=3, seed=0):
    return np.random.default_rng(seed).normal(size=(n, width)).astype(FLOAT)


@pytest.fixture
def path(tmp_path):
    """The folder of a gallery with ten items, of which the third is removed and the fifth replaced."""
    with made(tmp_path / "g") as engine:
        engine.add(*batch(*[(n, 0) for n in range(10)]))
        engine.remove(["i2"])
        engine.add(*batch((4, 1)))
    return tmp_path / "g"


def change(path, *statements):
    connection = sqlite3.connect(path / DATABASE, isolation_level=None)
    for statement in statements:
        connection.execute(*statement) if isinstance(statement, tuple) else connection.execute(statement)
    connection.close()


# -------------------- the copy of the vectors --------------------


def test_checksums_of_rows():
    rows = rows_of(5)
    assert checksums_of(rows).tolist() == [zlib.crc32(row.tobytes()) for row in rows]
    assert checksums_of(rows).dtype == np.uint32
    assert checksums_of([]).tolist() == []


def test_rows_are_written_at_their_place(tmp_path):
    file, rows = tmp_path / "v", rows_of(6)
    write_rows(file, 2, rows[2:4])
    assert np.frombuffer(file.read_bytes(), FLOAT).reshape(-1, 3)[2:].tolist() == rows[2:4].tolist()
    assert not np.frombuffer(file.read_bytes(), FLOAT)[:6].any()
    write_rows(file, 0, rows[:2].astype(np.float64))
    write_rows(file, 4, np.asfortranarray(rows[4:]))
    assert np.frombuffer(file.read_bytes(), FLOAT).reshape(-1, 3).tolist() == rows.tolist()
    assert file.stat().st_mode & 0o777 == 0o644 & ~umask()
    write_rows(tmp_path / "no folder" / "v", 0, rows)  # just missing
    assert not any(os.path.realpath(f"/proc/self/fd/{n}") == str(file) for n in os.listdir("/proc/self/fd"))


def umask():
    before = os.umask(0)
    os.umask(before)
    return before


def test_rows_that_are_written_in_parts(tmp_path, monkeypatch):
    whole, calls = os.pwrite, []

    def some(file, data, place):
        calls.append(place)
        return whole(file, data[:5], place)

    monkeypatch.setattr(os, "pwrite", some)
    rows = rows_of(2)
    write_rows(tmp_path / "v", 1, rows)
    assert calls == [12, 17, 22, 27, 32]
    assert (tmp_path / "v").read_bytes()[12:] == rows.tobytes()


def test_a_cache_reads_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_vectors, "_CHECKED", 4)
    rows, asked = rows_of(10), []
    crcs = checksums_of(rows)

    def read(positions):
        asked.append(list(positions))
        return [(n, rows[n].tobytes()) for n in positions] + [(77, b"not asked for")]

    file = tmp_path / "v"
    write_rows(file, 0, rows[:3])
    cache = VectorCache(file, 3, 10)
    assert cache.capacity == 10 + 2 + 8192
    assert cache.rows.shape == (cache.capacity, 3)
    assert file.stat().st_size == cache.capacity * 12
    positions = np.array([0, 1, 2, 4, 5, 6, 8, 9])
    assert cache.check(positions, crcs[positions], read) == []
    assert asked == [[4], [5, 6, 8, 9]]
    assert cache.rows[positions].tolist() == rows[positions].tolist()
    assert not cache.rows[[3, 7]].any()
    assert np.frombuffer(file.read_bytes(), FLOAT).reshape(-1, 3)[positions].tolist() == rows[positions].tolist()
    assert cache.check(positions, crcs[positions], read) == []
    assert VectorCache(file, 3, 10).check(positions, crcs[positions], read) == []
    assert len(asked) == 2  # nothing is read twice
    assert cache.check(np.array([], np.int64), crcs[:0], read) == []


def test_a_cache_names_what_is_damaged_in_the_database_too(tmp_path):
    rows = rows_of(8)
    crcs = checksums_of(rows)
    found = {0: rows[0].tobytes(), 1: rows[2].tobytes(), 2: rows[2].tobytes()[:8], 3: b"", 5: rows[5].tobytes()}
    cache = VectorCache(tmp_path / "v", 3, 8)
    damaged = cache.check(np.arange(6), crcs[:6], lambda positions: found.items())
    assert damaged == [1, 2, 3, 4]
    assert cache.rows[[0, 5]].tolist() == rows[[0, 5]].tolist()
    zeros = np.zeros((1, 3), FLOAT)  # zeros are found without a file
    assert VectorCache(tmp_path / "w", 3, 8).check(np.array([7]), checksums_of(zeros), None) == []


def test_a_cache_in_a_folder_that_cannot_be_written(tmp_path):
    rows = rows_of(3)
    cache = VectorCache(tmp_path / "none" / "v", 3, 3)
    assert cache.rows.shape == (3 + 8192, 3)
    assert (
        cache.check(np.arange(3), checksums_of(rows), lambda positions: [(n, rows[n].tobytes()) for n in positions])
        == []
    )
    assert cache.rows[:3].tolist() == rows.tolist()
    assert not (tmp_path / "none").exists()


def test_a_longer_file_is_not_cut(tmp_path):
    write_rows(tmp_path / "v", 20_000, rows_of(1))
    size = (tmp_path / "v").stat().st_size
    VectorCache(tmp_path / "v", 3, 5)
    assert (tmp_path / "v").stat().st_size == size
    cache = VectorCache(tmp_path / "v", 3, 5)
    holders = [n for n in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{n}") == str(tmp_path / "v")]
    assert len(holders) == 1  # Python's mapping holds the file, and nothing else does
    assert cache.rows.shape[1] == 3


def test_files_of_earlier_generations_are_deleted(tmp_path):
    names = ["vectors-1.semantic", "vectors-2.uncertainty", "vectors-3.semantic", "vectors-12.semantic"]
    others = ["vectors-x.semantic", "vectors-1.other", "avectors-1.semantic", "vectors-1.semantic.txt", "note"]
    for name in [*names, *others]:
        (tmp_path / name).touch()
    vectors = Vectors(tmp_path, PROPERTIES)
    assert vectors.widths == {"semantic": D, "uncertainty": U}
    assert Vectors(tmp_path, Properties("m", 7)).widths == {"semantic": 7}
    vectors.sweep(3)
    assert {file.name for file in tmp_path.iterdir()} == {*names[2:], *others}


def test_the_rows_that_are_searched(path):
    with SqliteEngine.open(path) as engine, engine._reading() as (connection, table):
        vectors = Vectors(path, PROPERTIES)
        plain, metric = (vectors.searched(connection, table, with_u) for with_u in (False, True))
        assert plain.s.shape == metric.s.shape == (11, D)
        assert (plain.u.shape, metric.u.shape) == ((11, 0), (11, U))
        live = list(table.rows.values())
        assert live == [0, 1, 3, 5, 6, 7, 8, 9, 10]
        e = engine.embeddings()
        assert np.array_equal(metric.s[live], e.semantic.numpy())
        assert np.array_equal(metric.u[live], e.uncertainty.numpy())
        assert vectors.searched(connection, table, True) is vectors.searched(connection, table, True)
        assert vectors.intact(table, metric, np.array(live))
        assert vectors.intact(table, plain, np.array(live))
        broken = metric.s.copy()
        broken[5, 0] += 1
        assert not vectors.intact(table, type(metric)(broken, *vars_of(metric)[1:]), np.array(live))
        assert vectors.intact(table, type(metric)(broken, *vars_of(metric)[1:]), np.array([1, 3]))
        broken = metric.u.copy()
        broken[5, 0] += 1
        s, lengths, _, squares = vars_of(metric)
        assert not vectors.intact(table, type(metric)(s, lengths, broken, squares), np.array(live))


def vars_of(rows):
    """The four parts of what is searched."""
    return [getattr(rows, name) for name in rows.__slots__] if hasattr(rows, "__slots__") else list(vars(rows).values())


def test_searches_see_each_change(path):
    """Whatever the state in memory: removed, replaced, added, with the metric and without."""
    _, queries, _ = batch((4, 0), (4, 1), (30, 2))
    with SqliteEngine.open(path, write=True) as engine:
        for step in (
            lambda: None,
            lambda: engine.remove(["i0", "i9"]),
            lambda: engine.add(*batch((20, 2), (0, 0))),
            lambda: engine.add(*batch((20, 1))),
            engine.compact,
            lambda: engine.add(*batch((21, 2))),
        ):
            step()
            e, ids = engine.embeddings(), [item.id for item in engine.items()]
            for metric in (None, IntrospectiveMetric(), None):
                found = engine.search(queries, 99, metric)
                assert [sorted(line) for line in found.ids] == [sorted(ids)] * 3
            d = torch.cdist(queries.unit.double(), e.semantic.double())
            found = engine.search(queries, 99)
            assert torch.allclose(found.distances.double(), d.sort(dim=1).values, atol=1e-6)


# -------------------- what a change writes --------------------


def test_an_empty_gallery(tmp_path):
    create_database(tmp_path / "a" / "g", PROPERTIES)
    assert os.listdir(tmp_path / "a" / "g") == [DATABASE]
    connection = connect(tmp_path / "a" / "g" / DATABASE, write=False)
    assert read_state(connection, "f") == (0, 1, 1, 0, 0, 0)
    for name in ("properties", "state"):
        assert [row[0] for row in connection.execute(f"SELECT copy FROM {name}")] == [1, 2]
        one, two = (row[1:] for row in connection.execute(f"SELECT * FROM {name}"))
        assert one == two
    connection.close()
    with pytest.raises(ValueError, match=r"^there is a gallery at .*/a/g already$"):
        create_database(tmp_path / "a" / "g", PROPERTIES)


def test_a_new_gallery_is_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    create_database(tmp_path / "g", PROPERTIES)
    assert any(name.startswith(f"{tmp_path}/g/.{DATABASE}") for name in synced)
    assert synced[-2:] == [str(tmp_path / "g"), str(tmp_path)]


def test_a_gallery_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        create_database(tmp_path / "file" / "g", PROPERTIES)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sqlite_changes.os, "link", full)
    with pytest.raises(OSError, match=r"^cannot write to the gallery .*/g \(No space left on device\)$"):
        create_database(tmp_path / "g", PROPERTIES)
    assert os.listdir(tmp_path / "g") == []


def test_a_backup_is_whole_and_on_the_disk(path, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    connection = connect(path / DATABASE, write=False)
    back_up(connection, tmp_path / "b")
    assert synced == [str(tmp_path / ".b.part"), str(tmp_path)]
    assert sorted(os.listdir(tmp_path)) == ["b", "g"]
    copy = sqlite3.connect(tmp_path / "b")
    for name in ("items", "vectors", "thumbnails", "changes", "state", "properties"):
        query = f"SELECT * FROM {name}"
        assert copy.execute(query).fetchall() == connection.execute(query).fetchall()
    copy.close()
    connection.close()


def test_changes_are_listed_and_the_state_is_true(path):
    connection = connect(path / DATABASE, write=False)
    assert connection.execute("SELECT * FROM changes").fetchall() == [(1, 0, 9), (2, 2, 2), (3, 4, 4), (4, 10, 10)]
    assert read_state(connection, "f")[:5] == (4, 1, 1, 11, 9)
    digests = [row[0] for row in connection.execute("SELECT digest FROM items")]
    assert read_state(connection, "f").digest == sqlite_storage.to_signed(sum(digests))
    for name, count in (("items", 9), ("vectors", 9)):
        assert len(connection.execute(f"SELECT * FROM {name}").fetchall()) == count
    images = dict(connection.execute("SELECT position, image FROM thumbnails"))
    assert set(images) == {1, 5, 7}  # the others have none
    with SqliteEngine.open(path, write=True) as engine:
        before = state(engine)
        assert engine.compact() == 2
        assert state(engine) == before
    assert connection.execute("SELECT * FROM changes").fetchall() == []
    assert read_state(connection, "f")[:5] == (5, 5, 2, 9, 9)
    for name in ("items", "vectors"):
        assert [row[0] for row in connection.execute(f"SELECT position FROM {name}")] == list(range(9))
    assert dict(connection.execute("SELECT position, image FROM thumbnails")).keys() == {1, 3, 5}
    connection.close()


def test_a_gallery_without_vectors_of_uncertainty(tmp_path):
    with SqliteEngine.create(tmp_path, Properties("m", D)) as engine:
        items, e, _ = batch((1, 0), (2, 0))
        engine.add(items, Embeddings.certain(e.semantic))
        rows = engine._connected().execute("SELECT uncertainty FROM vectors").fetchall()
        crcs = engine._connected().execute("SELECT uncertainty, thumbnail FROM items").fetchall()
        assert (rows, crcs) == ([(None,), (None,)], [(0, 0), (0, 0)])
        assert engine.verify() == []


# -------------------- verify --------------------


def verified(path):
    with SqliteEngine.open(path) as engine:
        return [(problem.file == str(path / DATABASE), problem.item, problem.reason) for problem in engine.verify()]


@pytest.mark.parametrize(
    ("statement", "item", "reason"),
    [
        ("UPDATE vectors SET semantic = x'00' WHERE position = 3", "i3", "the vector is damaged"),
        ("UPDATE vectors SET uncertainty = x'00' WHERE position = 3", "i3", "the vector is damaged"),
        ("UPDATE vectors SET uncertainty = NULL WHERE position = 3", "i3", "the vector is damaged"),
        ("UPDATE vectors SET id = x'00' WHERE position = 3", "i3", "the vector is damaged"),
        ("DELETE FROM vectors WHERE position = 3", "i3", "the vector is missing"),
        ("UPDATE thumbnails SET image = x'00' WHERE position = 1", "i1", "the thumbnail is damaged"),
        ("UPDATE thumbnails SET image = NULL WHERE position = 1", "i1", "the thumbnail is damaged"),
        ("DELETE FROM thumbnails WHERE position = 1", "i1", "the thumbnail is missing"),
        ("INSERT INTO thumbnails VALUES (0, x'00')", "i0", "the thumbnail is damaged"),
        ("INSERT INTO thumbnails VALUES (2, x'00')", None, "the thumbnail of position 2 belongs to no item"),
        ("INSERT INTO vectors VALUES (2, x'00', x'00', x'00')", None, "the vectors of position 2 belong to no item"),
        ("UPDATE state SET crc = 0 WHERE copy = 2", None,
         "copy 2 of the state is damaged; the next change writes it again"),
        ("DELETE FROM state WHERE copy = 2", None, "copy 2 of the state is damaged; the next change writes it again"),
        ("UPDATE properties SET crc = 0 WHERE copy = 1", None,
         "copy 1 of the properties is damaged; the next change writes it again"),
    ],
)  # fmt: skip
def test_what_verify_says(path, statement, item, reason):
    assert verified(path) == []
    change(path, statement)
    for copy in path.glob("vectors-*"):
        copy.unlink()
    assert (True, item, reason) in verified(path)
    if item is not None or "position" in reason:
        assert len(verified(path)) == 1
    change(path, "UPDATE items SET path = x'00' WHERE position = 5")
    damaged = (True, "i5", "the row is damaged; remove the item or add it again")
    assert damaged in verified(path)
    assert not [reason for _, _, reason in verified(path) if "position 5" in reason]  # its vectors belong to it


def test_verify_repeats_what_sqlite_finds(path):
    change(path, "PRAGMA writable_schema = ON", "CREATE INDEX by_id ON items (id)",
           "UPDATE sqlite_schema SET sql = 'CREATE INDEX by_id ON items (path)' WHERE name = 'by_id'")  # fmt: skip
    said = verified(path)
    assert said
    assert all(file and item is None and reason.startswith("SQLite finds: ") for file, item, reason in said)
    assert all("\n" not in reason for _, _, reason in said)


def test_verify_repairs_the_copy_of_the_vectors(path):
    files = {file: file.read_bytes() for file in path.glob("vectors-*")}
    for file, content in files.items():
        file.write_bytes(bytes(len(content)))
    assert verified(path) == []
    live = [0, 1, 3, 5, 6, 7, 8, 9, 10]
    for file, content in files.items():
        width = D if file.suffix == ".semantic" else U
        one, two = (
            np.frombuffer(x[: 11 * width * 4], FLOAT).reshape(11, width)[live] for x in (file.read_bytes(), content)
        )
        assert np.array_equal(one, two)
        assert one.any()

"""Flipped bits are found or harmless, a full or read-only disk loses nothing, and other files are refused."""

import os
import random
import resource
import shutil
import signal
import sqlite3
import tempfile
import tracemalloc
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
from numbered_changes import PROPERTIES, batch, damage_value, made, state
from synthetic_images import encoded, picture

from idml.metric import IntrospectiveMetric
from idml.search.engines import Added, DamagedGallery, sqlite, sqlite_storage
from idml.search.engines.sqlite import SqliteEngine
from idml.search.engines.sqlite_storage import DATABASE, ITEM_COLUMNS, State, is_intact
from idml.search.gallery import Gallery, Upload
from idml.search.gallery_folder import ImageRoots

pytestmark = pytest.mark.usefixtures("_no_waiting")
STEP = 1 if "IDML_KILLS" in os.environ else 61  # of all bytes, every one in make faults


def small(path):
    """A gallery with a bit of everything: removed and replaced items, a changed label, thumbnails, free pages."""
    engine = made(path)
    engine.add(*batch(*[(n, 0) for n in range(30)]))
    engine.remove([f"i{n}" for n in range(6, 30)])
    engine.add(*batch((1, 1)))
    engine.relabel({"i2": "x"})
    return engine


def everything(path):
    """All that can be read of a gallery."""
    with SqliteEngine.open(path) as engine:
        _, queries, _ = batch((1, 0), (3, 0))
        found = [engine.search(queries, 3, metric) for metric in (None, IntrospectiveMetric())]
        levels = engine.levels().tolist()
        return state(engine), levels, [(f.ids, f.distances.tolist()) for f in found]


def flipped(content, place, chance):
    out = bytearray(content)
    out[place] ^= 1 << chance.randrange(8)
    return bytes(out)


def readable(path, expected):
    """How many items can be read one by one, of a gallery that is damaged; what is read must be right."""
    count = 0
    with suppress(DamagedGallery, ValueError, OSError), SqliteEngine.open(path) as engine:
        for item, s, u, _, picture in expected:
            with suppress(DamagedGallery):
                assert engine.get(item.id) == item
                e = engine.embeddings([item.id])
                assert (e.semantic.numpy().tobytes(), e.uncertainty.numpy().tobytes()) == (s, u)
                assert engine.thumbnail(item.id) == picture
                count += 1
    return count


def outcome(path, expected):
    """What is said about a damage; nothing if it makes no difference."""
    try:
        found = everything(path)
    except (DamagedGallery, ValueError, OSError) as error:
        return str(error)
    assert found == expected
    return ""


def test_every_flipped_bit_is_found_or_harmless(tmp_path, monkeypatch):
    """In cells, headers of pages, the header of the file, free pages: never a wrong answer."""
    monkeypatch.setattr(sqlite_storage, "PAGE", 1024)
    path = tmp_path / "g"
    small(path).close()
    expected, file, chance = everything(path), path / DATABASE, random.Random(0)
    content, items = file.read_bytes(), len(expected[0])
    outcomes = {"harmless": 0, "one item": 0, "more": 0, "all": 0}
    for place in range(0, len(content), STEP):
        file.write_bytes(flipped(content, place, chance))
        for copy in path.glob("vectors-*"):
            copy.unlink()
        if (said := outcome(path, expected)) == "":
            outcomes["harmless"] += 1
            continue
        assert "\n" not in said
        lost = items - readable(path, expected[0])
        try:
            with SqliteEngine.open(path) as engine:
                assert engine.verify() != []
        except (DamagedGallery, ValueError, OSError):
            pass
        outcomes["one item" if lost <= 1 else "all" if lost == items else "more"] += 1
    assert outcomes["one item"] > outcomes["more"]  # a flipped bit in a cell spares the other items
    assert min(outcomes["harmless"], outcomes["one item"]) * STEP > 400


def test_a_row_without_content_and_without_digest_is_not_intact(tmp_path):
    """A flipped bit can turn both into NULL, which no statement can write: the two must not agree with each other."""
    with small(tmp_path / "g") as engine:
        connection = sqlite3.connect(engine.path / DATABASE)
        row = connection.execute(f"SELECT {ITEM_COLUMNS}, digest FROM items").fetchone()
        connection.close()
    assert is_intact(row[:9], row[9])
    for damaged in ((*row[:6], None, *row[7:9]), (None,) * 9):
        for digest in (None, 0, row[9], b""):
            assert not is_intact(damaged, digest)
    assert not is_intact(row[:9], None)


@pytest.mark.parametrize(
    ("table", "column"),
    [("vectors", "semantic"), ("vectors", "uncertainty"), ("vectors", "id"), ("thumbnails", "image"), ("items", "id"),
     ("items", "path"), ("items", "label"), ("items", "checksum"), ("items", "level"), ("items", "semantic"),
     ("items", "uncertainty"), ("items", "thumbnail"), ("items", "digest")],
)  # fmt: skip
@pytest.mark.parametrize("mend", ["add", "remove"])
def test_a_damaged_item_is_named_and_can_be_mended(tmp_path, table, column, mend):
    path = tmp_path / "g"
    with small(path) as engine:
        expected = state(engine)
    damage_value(path, table, column, "i2")
    for copy in path.glob("vectors-*"):
        copy.unlink()
    with SqliteEngine.open(path, write=True) as engine:
        assert [problem.item for problem in engine.verify()] == ["i2"]
        others = [item.id for item, *_ in expected if item.id != "i2"]
        assert engine.get_many(others) == [item for item, *_ in expected if item.id != "i2"]
        engine.embeddings(others)
        if table == "items":
            for call in (lambda: engine.get("i2"), lambda: list(engine.items()), engine.compact):
                with pytest.raises(DamagedGallery, match=r"item 'i2': the row is damaged; remove the item or add it"):
                    call()
        if column not in ("id", "image") or table == "items":
            with pytest.raises(DamagedGallery, match="'i2'"):
                engine.search(batch((1, 0))[1], 1, IntrospectiveMetric())  # though it might not be returned
        if mend == "add" and (table, column) != ("vectors", "id"):
            assert engine.add(*batch((2, 0))) == Added(0, 1, 0)
        else:
            assert engine.remove(["i2"]) == 1
            engine.add(*batch((2, 0)))
        assert engine.verify() == []
        assert len(engine) == len(expected)
        assert len(engine.search(batch((1, 0))[1], 99, IntrospectiveMetric()).ids[0]) == len(expected)
        engine.compact()
        assert engine.verify() == []


def test_damage_under_an_open_gallery(tmp_path):
    path = tmp_path / "g"
    with small(path) as engine:
        queries = batch((2, 0))[1]
        before = engine.search(queries, 9)
        damage_value(path, "vectors", "semantic", "i2")
        damage_value(path, "items", "path", "i3")
        assert engine.search(queries, 9).ids == before.ids  # the copies are right
        assert {problem.item for problem in engine.verify()} == {"i2", "i3"}
        with pytest.raises(DamagedGallery, match="item 'i2': the vector is damaged"):
            engine.embeddings(["i2"])
        with pytest.raises(DamagedGallery, match="item 'i3': the row is damaged"):
            engine.get("i3")
        assert engine.add(*batch((2, 0), (3, 0))) == Added(0, 2, 0)
        assert engine.verify() == []


@pytest.mark.parametrize("table", ["items", "vectors", "thumbnails"])
def test_a_lost_row_is_noticed(tmp_path, table):
    path = tmp_path / "g"
    small(path).close()
    connection = sqlite3.connect(path / DATABASE)
    connection.execute(f"DELETE FROM {table} WHERE position = (SELECT position FROM items WHERE id = ?)", (b"i2",))
    connection.commit()
    connection.close()
    for copy in path.glob("vectors-*"):
        copy.unlink()
    with SqliteEngine.open(path) as engine:
        assert "i2" in [problem.item for problem in engine.verify()]
        with pytest.raises(DamagedGallery, match="i2"):
            engine.thumbnail("i2") if table == "thumbnails" else engine.search(batch((1, 0))[1], 1)


def test_a_row_that_is_lost_with_its_vectors(tmp_path):
    """Nobody can name it: reading the others goes on, but nothing is said to be absent."""
    path = tmp_path / "g"
    with small(path) as engine:
        expected = state(engine)
    connection = sqlite3.connect(path / DATABASE)
    (position,) = connection.execute("SELECT position FROM items WHERE id = ?", (b"i2",)).fetchone()
    for table in ("items", "vectors", "thumbnails"):
        connection.execute(f"DELETE FROM {table} WHERE position = ?", (position,))
    connection.commit()
    connection.close()
    with SqliteEngine.open(path, write=True) as engine:
        assert "restore a backup" in str(engine.verify()[0])
        assert engine.get("i3") == next(item for item, *_ in expected if item.id == "i3")
        for call in (
            lambda: engine.get("i2"),
            lambda: list(engine.items()),
            lambda: engine.search(batch((1, 0))[1], 1),
            lambda: engine.add(*batch((2, 0))),
            engine.compact,
        ):
            with pytest.raises(DamagedGallery, match="restore a backup, or delete the gallery and index again"):
                call()


@pytest.mark.parametrize("name", ["properties", "state"])
def test_one_copy_of_what_is_stored_twice(tmp_path, name):
    path = tmp_path / "g"
    with small(path) as engine:
        expected = state(engine)
    connection = sqlite3.connect(path / DATABASE, isolation_level=None)
    for copies, problems in (((1,), 1), ((1, 2), None)):
        for copy in copies:
            connection.execute(f"UPDATE {name} SET crc = crc + 1 WHERE copy = ?", (copy,))
        if problems is None:
            connection.execute(f"UPDATE {name} SET crc = crc + 7")
            with pytest.raises(DamagedGallery, match=f"both copies of the {name} are damaged"):
                SqliteEngine.open(path)
            continue
        with SqliteEngine.open(path) as engine:
            (problem,) = engine.verify()
            assert f"copy 1 of the {name} is damaged" in problem.reason
            assert state(engine) == expected
    connection.close()


def test_state_is_written_again_with_the_next_change(tmp_path):
    path = tmp_path / "g"
    small(path).close()
    connection = sqlite3.connect(path / DATABASE, isolation_level=None)
    connection.execute("UPDATE state SET items = 99 WHERE copy = 2")
    connection.close()
    with SqliteEngine.open(path, write=True) as engine:
        assert len(engine.verify()) == 1
        engine.add(*batch((9, 0)))
        assert engine.verify() == []


@pytest.mark.parametrize("changes", [{"next": 10**12}, {"items": 10**12}, {"next": 2**62, "items": 2**62}], ids=str)
def test_a_header_that_claims_very_many_rows(tmp_path, changes):
    """With a right checksum, as somebody may write it: nothing is allocated for the claim."""
    path = tmp_path / "g"
    small(path).close()
    connection = sqlite3.connect(path / DATABASE, isolation_level=None)
    claimed = State(*connection.execute("SELECT * FROM state").fetchone()[1:7])._replace(**changes)
    connection.execute(
        "UPDATE state SET change = ?, oldest = ?, generation = ?, next = ?, items = ?, digest = ?, crc = ?",
        (*claimed, claimed.crc()),
    )
    connection.close()

    def change():
        with SqliteEngine.open(path, write=True) as engine:
            engine.add(*batch((77, 0)))

    for call in (lambda: everything(path), change):
        tracemalloc.start()
        try:
            with pytest.raises(DamagedGallery, match="restore a backup") as error:
                call()
            assert tracemalloc.get_traced_memory()[1] < 10_000_000
        finally:
            tracemalloc.stop()
        assert "\n" not in str(error.value)
    with pytest.raises(DamagedGallery, match="restore a backup"), SqliteEngine.open(path) as engine:  # noqa: PT012
        (problem,) = engine.verify()
        raise DamagedGallery(str(problem))


def test_a_database_that_is_cut(tmp_path):
    path = tmp_path / "g"
    small(path).close()
    content = (path / DATABASE).read_bytes()
    for length in (1, 99, 100, 5000, *range(16384, len(content), 16384)):
        (path / DATABASE).write_bytes(content[:length])
        with pytest.raises((DamagedGallery, ValueError)) as caught:
            everything(path)
        assert "\n" not in str(caught.value)
        assert (path / DATABASE).stat().st_size == length  # nothing more is lost


def test_files_that_are_not_galleries(tmp_path):
    path = tmp_path / "g"
    path.mkdir()
    for content, complaint in [
        (b"", "is not the database of a gallery"),
        (b"not a database at all" * 1000, "is damaged, or not a database"),
        (os.urandom(40000), "is damaged, or not a database"),
    ]:
        (path / DATABASE).write_bytes(content)
        with pytest.raises(ValueError, match=complaint) as caught:
            SqliteEngine.open(path)
        assert "\n" not in str(caught.value)
        with pytest.raises(ValueError, match="there is a gallery at"):
            SqliteEngine.create(path, PROPERTIES)
        assert (path / DATABASE).read_bytes() == content
    (path / DATABASE).unlink()
    connection = sqlite3.connect(path / DATABASE)
    connection.execute("CREATE TABLE items (id)")
    connection.close()
    with pytest.raises(ValueError, match="is not the database of a gallery"):
        SqliteEngine.open(path)


def test_another_format_is_refused(tmp_path):
    small(tmp_path / "g").close()
    connection = sqlite3.connect(tmp_path / "g" / DATABASE)
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    with pytest.raises(ValueError, match=r"^the gallery .* has format 3, this version of idml reads 2: index again$"):
        SqliteEngine.open(tmp_path / "g")
    (tmp_path / "old" / "generation-000001").mkdir(parents=True)
    (tmp_path / "old" / "current.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^the gallery .* of an older version of idml: delete it and index again$"):
        SqliteEngine.open(tmp_path / "old", write=True)
    with pytest.raises(ValueError, match="there is a gallery at"):
        SqliteEngine.create(tmp_path / "old", PROPERTIES)


def test_a_drive_without_a_write_ahead_log(tmp_path, monkeypatch):
    """As on network drives: SQLite's locks by files have no shared memory."""
    small(tmp_path / "g").close()
    before, connect = (tmp_path / "g" / DATABASE).read_bytes(), sqlite3.connect

    def without(name, *args, **options):
        name = str(name)
        place = name if name.startswith("file:") else Path(name).absolute().as_uri()
        return connect(f"{place}{'&' if '?' in place else '?'}vfs=unix-dotfile", *args, **(options | {"uri": True}))

    monkeypatch.setattr(sqlite3, "connect", without)
    for call in (
        lambda: SqliteEngine.create(tmp_path / "new", PROPERTIES),
        lambda: SqliteEngine.open(tmp_path / "g"),
        lambda: SqliteEngine.open(tmp_path / "g", write=True),
    ):
        with pytest.raises(OSError, match=r"write-ahead log does not work in .* put the gallery on a local disk$"):
            call()
    assert list((tmp_path / "new").iterdir()) == []
    assert (tmp_path / "g" / DATABASE).read_bytes() == before


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
    path, refusals = tmp_path / "g", 0
    with small(path) as engine:
        expected = state(engine)
        for limit in (1, 100, *range(4000, 400_000, 30_011)):
            with full_disk(limit):
                said = refused(lambda: engine.add(*batch((7, 0), (8, 0), (9, 0))))
            if said:
                assert said.startswith(f"cannot write to the gallery {path} (")
                refusals += 1
            else:
                engine.remove(["i7", "i8", "i9"])
            assert state(engine) == expected
            with SqliteEngine.open(path) as reader:
                assert state(reader) == expected
                assert reader.verify() == []
        for call in (lambda: engine.relabel({"i3": "y"}), lambda: engine.remove(["i3"]), engine.compact):
            with full_disk(10), pytest.raises(OSError, match="cannot write to the gallery"):
                call()
            assert state(engine) == expected
        with full_disk(10), pytest.raises(OSError, match="cannot write the backup"):
            engine.backup(tmp_path / "b")
        with full_disk(10), pytest.raises(OSError, match="cannot write to the gallery"):
            SqliteEngine.create(tmp_path / "new", PROPERTIES)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["g", "new"]
        engine.add(*batch((7, 0)))
        assert engine.compact() > 0
        assert engine.verify() == []
    assert refusals > 2


def test_a_database_that_may_not_grow(tmp_path):
    """SQLite says that the disk is full."""
    with small(tmp_path / "g") as engine:
        expected = state(engine)
        engine._connected().execute("PRAGMA max_page_count = 1").fetchall()
        with pytest.raises(OSError, match=r"^cannot write to the gallery .* \(database or disk is full\)$"):
            engine.add(*batch(*[(n, 3) for n in range(100, 900)]))
        assert state(engine) == expected
        engine._connected().execute("PRAGMA max_page_count = 1000000").fetchall()
        engine.add(*batch(*[(n, 3) for n in range(100, 900)]))
        assert engine.verify() == []


def test_a_log_that_has_filled_the_disk_is_emptied(tmp_path, run):
    """Else a small disk would stay full for ever: the log grows until SQLite moves it into the database."""
    with Gallery.create(tmp_path / "g", run) as gallery:
        gallery.add([Upload(encoded(picture(n)), "a") for n in range(4)])
        expected, log = state(gallery.engine), tmp_path / "g" / f"{DATABASE}-wal"
        engine = gallery.engine
        engine._connected().execute("PRAGMA max_page_count = 1").fetchall()
        assert log.stat().st_size > 0
        with pytest.raises(OSError, match="database or disk is full"):
            engine.relabel(dict.fromkeys((item.id for item in engine.items()), "b" * 100_000))
        assert log.stat().st_size == 0
        engine._connected().execute("PRAGMA max_page_count = 1000000").fetchall()
        assert state(engine) == expected
        engine.relabel({expected[0][0].id: "c"})
        assert log.stat().st_size > 0
        full = mock.patch.object(ImageRoots, "write_upload", side_effect=OSError(28, "No space left on device"))
        with full, pytest.raises(OSError, match="No space left"):
            gallery.add([Upload(encoded(picture(9)), "a")])
        assert log.stat().st_size == 0
        gallery.add([Upload(encoded(picture(9)), "a")])
        with SqliteEngine.open(tmp_path / "g") as reader, reader._reading():  # somebody reads an older state
            engine.relabel({expected[0][0].id: "d"})
            engine.free_log()
            assert log.stat().st_size > 0
        assert engine.verify() == []
        assert engine.get(expected[0][0].id).label == "d"


def test_a_log_stays_short_on_a_small_disk(tmp_path, monkeypatch):
    """A log could fill the disk by itself, and emptying it needs some space."""

    def longest_log(path):
        with small(path) as engine:
            sizes = []
            for n in range(150):
                engine.relabel({"i2": f"label {n}"})
                sizes.append((path / f"{DATABASE}-wal").stat().st_size)
            assert engine.verify() == []
        return max(sizes)

    assert longest_log(tmp_path / "large") > 2 * sqlite.SHORT_LOG
    monkeypatch.setattr(sqlite, "SCARCE", 1 << 62)
    assert longest_log(tmp_path / "small") < 1.5 * sqlite.SHORT_LOG


def as_nobody(work):
    """Run ``work`` in a process of a user who owns nothing: root may write to what is read-only. What it says."""
    said, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            os.write(end, str(work()).encode())
        except BaseException as error:
            os.write(end, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(end)
    with open(said, "rb") as file:
        out = file.read().decode()
    os.waitpid(pid, 0)
    return out


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_read_only_gallery(what):
    """It can be read, and a change says why not."""
    top = Path(tempfile.mkdtemp())
    try:
        path = top / "g"
        with small(path) as engine:
            expected, queries = state(engine), batch((1, 0))[1]
            found = engine.search(queries, 3).ids
        top.chmod(0o755)
        for file in path.iterdir():
            file.chmod(0o444)
        path.chmod(0o777 if what == "file" else 0o555)

        def read():
            with SqliteEngine.open(path) as engine:
                return state(engine) == expected and engine.search(queries, 3).ids == found and engine.verify() == []

        assert as_nobody(read) == "True"
        said = as_nobody(lambda: SqliteEngine.open(path, write=True))
        assert said.startswith(f"PermissionError: cannot write to the gallery {path} (")
        assert said.endswith("is read-only)")
        said = as_nobody(lambda: SqliteEngine.create(top / "new" / "g", PROPERTIES))
        assert "Permission denied" in said
        path.chmod(0o755)
        assert everything(path)[0] == expected
    finally:
        shutil.rmtree(top)


def test_a_reader_that_may_not_write_follows_the_owner(tmp_path, monkeypatch):
    """In a folder that it may not write, SQLite takes a database for one that never changes."""
    path, own = tmp_path / "g", sqlite.connect
    small(path).close()
    monkeypatch.setattr(sqlite, "connect", lambda file, write: sqlite_storage.connect_immutable(file))
    with SqliteEngine.open(path) as reader:
        assert state(reader)
        assert not reader.refresh()

        def change(work):
            with monkeypatch.context() as patch:
                patch.setattr(sqlite, "connect", own)
                with SqliteEngine.open(path, write=True) as owner:
                    work(owner)
                    return state(owner)

        added = change(lambda owner: owner.add(*batch(*[(n, 1) for n in range(2, 40)])))
        assert reader.refresh()
        assert not reader.refresh()
        assert state(reader) == added
        changed = change(lambda owner: (owner.remove([f"i{n}" for n in range(3, 30)]), owner.compact()))
        assert reader.thumbnail(changed[-1][0].id) == changed[-1][4]  # also without a refresh
        assert state(reader) == changed
        assert reader.verify() == []

        def read():
            with reader._reading():
                change(lambda owner: owner.relabel({"i2": "z"}))
                raise DamagedGallery("of pages before and after the change")

        with pytest.raises(OSError, match=r"changed while it was read; try again$"):
            read()
        assert reader.get("i2").label == "z"


def test_a_read_only_folder_with_changes_in_the_log():
    """A killed writer left them, and SQLite needs a folder that can be written to read them."""
    top = Path(tempfile.mkdtemp())
    try:
        path = top / "g"
        pid = os.fork()
        if pid == 0:
            small(path)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        Path(f"{path / DATABASE}-shm").unlink()
        top.chmod(0o755)
        path.chmod(0o555)
        said = as_nobody(lambda: SqliteEngine.open(path))
        assert said.endswith("gallery.sqlite-wal holds changes, and its folder is read-only")
        path.chmod(0o755)
        assert len(everything(path)[0]) == 6
    finally:
        shutil.rmtree(top)

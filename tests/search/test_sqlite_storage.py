"""The database of a gallery by itself: settings, what errors say, blocks of rows, digests, the table in memory."""

import json
import sqlite3
import struct
import threading
import zlib

import numpy as np
import pytest
from numbered_changes import PROPERTIES, batch, made

from idml.search.engines import DamagedGallery, Item, sqlite_storage
from idml.search.engines.base import Problem, Properties
from idml.search.engines.sqlite_changes import create_database
from idml.search.engines.sqlite_storage import (
    DATABASE,
    FACTORS,
    LOST_ROWS,
    ItemTable,
    State,
    connect,
    digests_of,
    encode_names,
    explain_errors,
    fetch_rows,
    first_text,
    first_value,
    is_gallery,
    is_intact,
    matches,
    parse_properties,
    parse_state,
    ranges_of,
    read_blocks,
    read_properties,
    read_state,
    require_gallery,
    require_log,
    to_item,
    to_signed,
    to_text,
)

pytestmark = pytest.mark.usefixtures("_no_waiting")


@pytest.fixture
def database(tmp_path):
    """A connection to the database of a gallery with ten items, of which the third is removed."""
    with made(tmp_path) as engine:
        engine.add(*batch(*[(n, 0) for n in range(10)]))
        engine.remove(["i2"])
    connection = connect(tmp_path / DATABASE, write=True)
    yield connection
    connection.close()


def table_of(connection, file="the file"):
    return ItemTable(connection, read_state(connection, file), file)


# -------------------- opening --------------------


def test_what_is_a_gallery(tmp_path):
    assert not is_gallery(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^there is no gallery at .*"):
        require_gallery(tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "current.json").touch()
    assert is_gallery(str(tmp_path / "old"))
    words = r"^the gallery .*/old has the format of an older version of idml: delete it and index again$"
    with pytest.raises(ValueError, match=words):
        require_gallery(tmp_path / "old")
    create_database(tmp_path / "new", PROPERTIES)
    assert is_gallery(tmp_path / "new")
    require_gallery(tmp_path / "new")
    (tmp_path / "folder" / DATABASE).mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="there is no gallery"):
        require_gallery(tmp_path / "folder")


@pytest.mark.parametrize("write", [False, True])
def test_settings_of_a_connection(tmp_path, monkeypatch, write):
    monkeypatch.setattr(sqlite_storage, "SYNCHRONOUS", "FULL")
    create_database(tmp_path, PROPERTIES)
    connection = connect(tmp_path / DATABASE, write=write)
    expected = {
        "cache_size": -2048, "wal_autocheckpoint": 2048, "journal_size_limit": 64 << 20, "synchronous": 2,
        "cell_size_check": 1, "trusted_schema": 0, "query_only": int(not write), "busy_timeout": 60_000,
        "journal_mode": "wal", "page_size": 16384, "application_id": 0x49444D4C, "user_version": 2,
    }  # fmt: skip
    assert {name: first_value(connection, f"PRAGMA {name}") for name in expected} == expected
    assert connection.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) == 1 << 28
    assert connection.isolation_level is None
    found = []
    thread = threading.Thread(target=lambda: found.append(first_value(connection, "SELECT count(*) FROM state")))
    thread.start()
    thread.join()
    assert found == [2]
    connection.close()


def test_other_databases_are_refused(tmp_path):
    file = tmp_path / DATABASE
    for number, value, words in [
        ("application_id", 7, r"^.*/gallery.sqlite is not the database of a gallery$"),
        ("user_version", 9, r"^the gallery .* has format 9, this version of idml reads 2: index again$"),
    ]:
        file.unlink(missing_ok=True)
        create_database(tmp_path, PROPERTIES)
        connection = sqlite3.connect(file)
        connection.execute(f"PRAGMA {number} = {value}")
        connection.close()
        with pytest.raises(ValueError, match=words):
            connect(file, write=False)
    with pytest.raises(
        OSError, match=r"^SQLite's write-ahead log does not work in here \(is it on a network drive\?\): "
    ):
        require_log("delete", "here")
    with pytest.raises(OSError, match=r"put the gallery on a local disk$"):
        require_log(None, "here")
    require_log("wal", "here")


def error_of(code, words="something\nhappened"):
    error = sqlite3.OperationalError(words)
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (sqlite3.SQLITE_BUSY, TimeoutError,
         "the gallery /g was locked by another process for 60 seconds; try again later"),
        (sqlite3.SQLITE_LOCKED_SHAREDCACHE, TimeoutError, "the gallery /g was locked by another process"),
        (sqlite3.SQLITE_CORRUPT_VTAB, DamagedGallery,
         "/g/gallery.sqlite is damaged, or not a database (something happened); restore a backup, or delete the "
         "gallery and index again"),
        (sqlite3.SQLITE_NOTADB, DamagedGallery, "/g/gallery.sqlite is damaged, or not a database (something happened)"),
        (sqlite3.SQLITE_TOOBIG, DamagedGallery, "is damaged"),
        (sqlite3.SQLITE_FULL, OSError, "cannot write to the gallery /g (something happened)"),
        (0, OSError, "cannot write to the gallery /g (something happened)"),
    ],
)  # fmt: skip
def test_errors_of_sqlite_in_one_line(tmp_path, code, kind, words):
    path = type(tmp_path)("/g")
    with pytest.raises(kind) as caught, explain_errors(path):
        raise error_of(code)
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert isinstance(caught.value.__cause__, sqlite3.Error)
    with pytest.raises(OSError, match=r"^cannot write to the gallery /g \(a a .* …\)$") as caught, explain_errors(path):
        raise sqlite3.Error("a " * 500)
    assert len(str(caught.value)) < 160
    with pytest.raises(KeyError), explain_errors(path):
        raise KeyError


# -------------------- what is stored twice --------------------


def test_copies_of_properties_and_state():
    content = json.dumps({"model": "m", "dimensions": 4, "uncertainty": 0}).encode()
    good = (1, content, zlib.crc32(content))
    assert parse_properties(good) == Properties("m", 4)
    for bad in ((1, content, 0), (1, None, 0), (1,), (1, b"{", zlib.crc32(b"{")), (1, b"{}", zlib.crc32(b"{}"))):
        assert parse_properties(bad) is None
    state = State(3, 1, 1, 9, 5, -7)
    assert state.crc() == zlib.crc32(struct.pack("<6q", 3, 1, 1, 9, 5, -7))
    assert parse_state((1, *state, state.crc())) == state
    for bad in (
        (1, *state, 0),
        (1, *state),
        (1, 2),
        (1, None, *state[1:], 0),
        (1, "x", *state[1:], 0),
        (1, 2.5, *state[1:], 0),
    ):
        assert parse_state(bad) is None


def test_the_first_intact_copy_counts(database):
    properties, state = read_properties(database, "f"), read_state(database, "f")
    assert properties == PROPERTIES
    assert (state.next, state.items, state.generation) == (10, 9, 1)
    for name, read, good in (("properties", read_properties, properties), ("state", read_state, state)):
        database.execute(f"UPDATE {name} SET crc = 0 WHERE copy = 1")
        assert read(database, "f") == good
        database.execute(f"UPDATE {name} SET crc = 0")
        words = f"^f: both copies of the {name} are damaged; restore a backup or index again$"
        with pytest.raises(DamagedGallery, match=words):
            read(database, "f")
    database.execute("UPDATE properties SET crc = ? WHERE copy = 2", (zlib.crc32(b""),))
    with pytest.raises(DamagedGallery):
        read_properties(database, "f")


def test_single_values(database):
    assert first_value(database, "SELECT position FROM items WHERE position > ? AND position < ?", 1, 9) == 3
    assert first_value(database, "SELECT position FROM items WHERE position = ?", 2) is None
    query = "SELECT id FROM vectors WHERE position = ?"
    assert (first_text(database, query, 1), first_text(database, query, 2)) == ("i1", None)
    with pytest.raises(sqlite3.OperationalError):  # not damage, but a mistake
        first_text(database, "SELECT nothing FROM vectors WHERE position = ?", 1)


class Broken:
    """A connection that cannot read some positions, as with a damaged page."""

    def __init__(self, connection, damaged, code=sqlite3.SQLITE_CORRUPT):
        self.connection, self.damaged, self.code, self.queries = connection, set(damaged), code, 0

    def execute(self, query, values=()):
        self.queries += 1
        first, end = values if len(values) == 2 else (values[0], values[0] + 1)
        if self.damaged & set(range(first, end)):
            raise error_of(self.code)
        return self.connection.execute(query, values)


def test_blocks_of_rows(database, monkeypatch):
    monkeypatch.setattr(sqlite_storage, "_BLOCK", 4)
    blocks = list(read_blocks(database, "items", "position, id", 1, 9))
    assert [[row[0] for row in block] for block in blocks] == [[1, 3, 4, 5], [6, 7, 8]]
    assert blocks[0][0] == (1, b"i1")
    assert list(read_blocks(database, "items", "position", 2, 3)) == []
    for damaged in ([5], [0], [9], [3, 4], [1, 8]):
        broken = Broken(database, damaged)
        found = [row[0] for rows in read_blocks(broken, "items", "position", 0, 10) for row in rows]
        assert found == [n for n in range(10) if n != 2 and n not in damaged]
        assert broken.queries < 20
    with pytest.raises(sqlite3.OperationalError):
        list(read_blocks(Broken(database, [5], sqlite3.SQLITE_IOERR), "items", "position", 0, 10))


def test_a_block_that_breaks_off_is_not_read_twice(database, monkeypatch):
    """What was read before SQLite came upon the damage counts, and reading goes on behind it."""
    monkeypatch.setattr(sqlite_storage, "_BLOCK", 3)

    class Cursor:
        def __init__(self, rows):
            self.rows, self.count = rows, 0

        def fetchmany(self, size):
            self.count += 1
            if self.count == 2:
                raise error_of(sqlite3.SQLITE_CORRUPT)
            return self.rows[:size]

    class Once(Broken):
        def execute(self, query, values=()):
            self.queries += 1
            rows = self.connection.execute(query, values).fetchall()
            return Cursor(rows) if self.queries == 1 else self.connection.execute(query, values)

    found = [row[0] for rows in read_blocks(Once(database, []), "items", "position", 0, 10) for row in rows]
    assert found == [0, 1, 3, 4, 5, 6, 7, 8, 9]


def test_rows_of_some_positions(database):
    assert fetch_rows(database, "items", "position, id", []) == {}
    near = fetch_rows(database, "items", "position, id", [4, 1, 2])  # all from the first to the last
    assert near == {n: (n, b"i%d" % n) for n in (1, 3, 4)}
    for some, found in (([0, 2, 5, 9], {0, 9}), ([0, 2, 5, 6, 9], {0, 1, 3, 4, 6, 7, 8, 9})):
        assert set(fetch_rows(Broken(database, [5]), "items", "position, id", some)) == found
    one, many = Broken(database, []), Broken(database, [])
    assert set(fetch_rows(one, "items", "position, id", [0, 9])) == {0, 9}
    assert one.queries == 2  # far apart: each by itself
    assert {0, 3} <= set(fetch_rows(many, "items", "position, id", [0, 3])) <= {0, 1, 3}
    assert many.queries == 1  # close together: all at once
    apart = Broken(database, [9])
    assert set(fetch_rows(apart, "items", "position, id", [0, 9, 2])) == {0}
    with pytest.raises(sqlite3.OperationalError):
        fetch_rows(Broken(database, [9], sqlite3.SQLITE_IOERR), "items", "position, id", [0, 9])


# -------------------- digests and names --------------------

ROW = (5, b"id", b"path", b"label", b"\x01" * 32, 0.25, 11, 12, 13)


def digest_by_hand(row):
    position, id, path, label, checksum, level, *crcs = row
    texts = [zlib.crc32(id), zlib.crc32(path), 0 if label is None else zlib.crc32(label) + 1, zlib.crc32(checksum)]
    numbers = [position, *texts, int(np.float32(level).view(np.uint32)), *crcs]
    return sum(factor * number for factor, number in zip(FACTORS, numbers, strict=True)) % 2**64


def test_digests_by_hand():
    rows = [ROW, (6, b"", b"", None, b"", 0.0, 0, 0, 0), (7, b"", b"", b"", b"", 1e30, 2**32 - 1, 0, 1)]
    assert digests_of(rows).tolist() == [digest_by_hand(row) for row in rows]
    assert digests_of([]).tolist() == []
    assert digests_of([]).dtype == np.uint64
    assert len({*FACTORS}) == 9
    assert all(factor % 2 == 1 and factor < 2**64 for factor in FACTORS)
    assert FACTORS[3] == int.from_bytes(zlib.crc32(b"3").to_bytes(4) * 2) | 1
    with np.errstate(all="raise"):
        digests_of([(*ROW[:5], 1e300, *ROW[6:])])  # a damaged level may be of any size


def test_intact_rows():
    digest = to_signed(digest_by_hand(ROW))
    assert is_intact(ROW, digest)
    for place in range(9):
        other = 99 if isinstance(ROW[place], int | float) else b"other"
        assert not is_intact((*ROW[:place], other, *ROW[place + 1 :]), digest)
        for odd in (None, "text", 2**70):
            changed = (*ROW[:place], odd, *ROW[place + 1 :])
            if not (place == 3 and odd is None):
                assert not is_intact(changed, digest)
    for odd in (None, float(digest), str(digest), digest + 1, digest + 2**64):
        assert not is_intact(ROW, odd)


def test_bytes_texts_and_numbers():
    assert matches(b"abc", zlib.crc32(b"abc"))
    for data, crc in ((b"abc", 0), (None, 0), ("abc", zlib.crc32(b"abc")), (b"abc", None)):
        assert not matches(data, crc)
    assert (to_text(b"caf\xc3\xa9"), to_text(b"\xff"), to_text(None), to_text("x"), to_text(3)) == (
        "café", "\udcff", None, None, None,
    )  # fmt: skip
    item = Item(id="a\udcff", path="p/é", label=None, checksum="ab" * 32)
    assert encode_names(item) == (b"a\xff", b"p/\xc3\xa9", None, b"\xab" * 32)
    assert to_item((0, *encode_names(item))) == item
    assert [to_signed(n) for n in (0, 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -1, -(2**63))] == [
        0, 1, 2**63 - 1, -(2**63), -1, 0, -1, -(2**63),
    ]  # fmt: skip
    assert list(ranges_of([1, 2, 3, 7, 9, 10])) == [(1, 3), (7, 7), (9, 10)]
    assert list(ranges_of([])) == []


# -------------------- the table in memory --------------------


def test_the_table_of_a_sound_gallery(database):
    table = table_of(database)
    assert (len(table), table.agrees(), table.damaged, table.problems()) == (9, True, {}, [])
    assert list(table.rows) == [f"i{n}" for n in range(10) if n != 2]
    assert (table.ids[1], table.ids[2], table.ids[9]) == ("i1", "", "i9")
    assert (table.find("i3"), table.find("i2")) == (3, None)
    for position in table.rows.values():
        row = database.execute("SELECT * FROM items WHERE position = ?", (position,)).fetchone()
        assert table.stored_digest(position) == row[9]
        assert (table.semantic[position], table.uncertainty[position]) == (row[6], row[7])
        assert table.levels[position] == np.float32(row[5])
    assert table.crcs("semantic") is table.semantic
    assert table.crcs("uncertainty") is table.uncertainty
    assert np.flatnonzero(table.live).tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert table.digest == table.state.digest == to_signed(sum(int(x) for x in table.digests))
    table.require_intact()


def test_the_table_names_damaged_rows(database):
    database.execute("UPDATE items SET path = x'00' WHERE position = 4")
    table = table_of(database)
    assert table.damaged == {4: "i4"}
    assert (len(table), table.agrees(), "i4" in table.rows) == (9, False, False)
    words = "the row is damaged; remove the item or add it again"
    assert table.problem(4) == Problem("the file", "i4", words)
    assert table.problems() == [table.problem(4)]
    assert table.find("i4") == 4
    assert table.find("i2") is None  # all damaged rows have a name
    with pytest.raises(DamagedGallery, match=words):
        table.require_intact()
    assert words.replace("row", "vector") in str(table.damage(3, "vector"))
    assert "'i3'" in str(table.damage(3, "vector"))
    database.execute("UPDATE vectors SET id = NULL WHERE position = 4")
    nameless = table_of(database)
    assert nameless.damaged == {4: None}
    assert nameless.problem(4) == Problem("the file", None, LOST_ROWS)
    assert nameless.find("i3") == 3
    with pytest.raises(DamagedGallery) as caught:
        nameless.find("i2")
    assert str(caught.value) == LOST_ROWS


def test_the_table_notices_lost_rows(database):
    database.execute("DELETE FROM items WHERE position = 5")
    assert table_of(database).damaged == {5: "i5"}
    database.execute("DELETE FROM vectors WHERE position = 5")
    table = table_of(database)
    assert table.damaged == {-1: None}
    assert len(table) == 8  # it is not known how many are lost
    assert [problem.item for problem in table.problems()] == [None]


def test_the_table_notices_two_rows_of_one_item(database):
    row = database.execute("SELECT * FROM items WHERE position = 3").fetchone()
    twin = (8, *row[1:9])
    database.execute("DELETE FROM items WHERE position = 8")
    database.execute(
        f"INSERT INTO items VALUES ({', '.join('?' * 10)})", (*twin, to_signed(int(digests_of([twin])[0])))
    )
    table = table_of(database)
    assert not table.agrees()
    assert table.damaged
    assert table.rows["i3"] == 8


def test_the_table_follows_changes(tmp_path):
    with made(tmp_path) as engine:
        engine.add(*batch(*[(n, 0) for n in range(6)]))
        connection = connect(tmp_path / DATABASE, write=False)
        table = table_of(connection)
        for change in (
            lambda: engine.add(*batch((6, 0), (7, 0))),
            lambda: engine.add(*batch((1, 1))),
            lambda: engine.relabel({"i3": "x"}),
            lambda: engine.remove(["i0", "i6"]),
        ):
            change()
            assert table.follow(connection, read_state(connection, "f"))
            fresh = table_of(connection)
            assert list(table.rows.items()) == list(fresh.rows.items())
            assert (table.digest, table.state, len(table)) == (fresh.digest, fresh.state, len(fresh))
            n = table.state.next
            assert table.live[:n].tolist() == fresh.live[:n].tolist()
            live = fresh.live[:n]
            for name in ("digests", "semantic", "uncertainty", "levels"):
                assert getattr(table, name)[:n][live].tolist() == getattr(fresh, name)[:n][live].tolist()
        state = table.state
        assert table.follow(connection, state)
        for other in (
            state._replace(generation=state.generation + 1),
            state._replace(change=state.change - 1),
            state._replace(oldest=state.change + 2),
            state._replace(items=state.items + 1),
            state._replace(digest=state.digest ^ 1),
        ):
            assert not table_of(connection).follow(connection, other)
        assert table_of(connection).follow(connection, state._replace(oldest=state.change + 1))
        connection.close()


@pytest.mark.parametrize("bounds", [(None, 1), (1, "x"), (-1, 1), (2, 1), (0, 99), (0, 8)])
def test_changes_that_make_no_sense_are_not_followed(tmp_path, bounds):
    with made(tmp_path) as engine:
        engine.add(*batch(*[(n, 0) for n in range(6)]))
        table = table_of(engine._connected())
        engine.add(*batch((6, 0), (7, 0)))
        state = read_state(engine._connected(), "f")
        connection = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
        connection.execute("UPDATE changes SET first = ?, last = ? WHERE change = ?", (*bounds, state.change))
        assert not table.follow(connection, state)
        connection.execute("UPDATE changes SET first = 6, last = 7 WHERE change = ?", (state.change,))
        assert table.follow(connection, state)
        connection.close()


def test_a_table_that_does_not_fit_into_memory(database, monkeypatch):
    state = read_state(database, "f")
    sizes = 1 + 8 + 4 + 4 + 4  # live, digests, two checksums, levels
    monkeypatch.setattr(sqlite_storage, "_physical_memory", lambda: 10 * sizes)
    ItemTable(database, state, "f")
    monkeypatch.setattr(sqlite_storage, "_physical_memory", lambda: 10 * sizes - 1)
    words = "^f claims 10 positions, more than fit into memory here; restore a backup$"
    with pytest.raises(DamagedGallery, match=words):
        ItemTable(database, state, "f")


def test_a_large_table_grows_in_steps(database, monkeypatch):
    table = table_of(database)
    assert len(table.live) == 10 + 2 + 1024
    assert {len(getattr(table, name)) for name in ("digests", "semantic", "uncertainty", "levels")} == {1036}
    before = table.digests[:10].tolist()
    table._grow(1036)
    assert len(table.live) == 1036
    table._grow(1037)
    assert len(table.live) == 1037 + 259 + 1024
    assert table.digests[:10].tolist() == before
    assert table.live.dtype == np.bool_

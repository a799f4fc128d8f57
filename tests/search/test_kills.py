"""Acknowledged changes survive SIGKILL at any moment, and a log that was cut short."""

import os
import random
import shutil
import signal
import struct
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from numbered_changes import Expected, batch, change, child, expected_after, made, make_change, state

from idml.search.engines.sqlite import SqliteEngine
from idml.search.engines.sqlite_storage import DATABASE

KILLS = 10 * int(os.environ.get("IDML_KILLS", "1"))  # 200 in make faults

pytestmark = pytest.mark.usefixtures("_no_waiting")


def read_all(pipe):
    with open(pipe, "rb") as file:
        return file.read()


def check_after_kill(path, acknowledged):
    """What is found: all that was acknowledged, and the change under way as a whole or not at all."""
    allowed = [expected_after(acknowledged), expected_after(acknowledged + 1)]
    with SqliteEngine.open(path) as reader:
        found = state(reader)
        assert found in allowed
        assert reader.verify() == []
        with SqliteEngine.open(path, write=True) as writer:
            assert state(writer) == found
    return acknowledged + allowed.index(found)


def test_killed_at_random_moments(tmp_path):
    path, done, chance = tmp_path / "g", 0, random.Random(0)
    made(path).close()

    def work():
        engine = SqliteEngine.open(path, write=True)
        expected = Expected()
        for number in range(done):
            make_change(number, expected)
        os.write(ready, struct.pack("<I", done))
        for number in range(done, 10**6):
            make_change(number, expected, engine)
            os.write(ready, struct.pack("<I", number + 1))

    for _ in range(KILLS):
        acknowledgements, ready = os.pipe()
        with child(work):
            os.close(ready)
            os.read(acknowledgements, 4)
            time.sleep(chance.random() * 0.05)
        rest = read_all(acknowledgements)
        done = check_after_kill(path, struct.unpack("<I", rest[-4:])[0] if rest else done)
        if done > 400:  # to keep the replay short
            shutil.rmtree(path)
            made(path).close()
            done = 0


@pytest.mark.parametrize("kind", ["add", "compact"])
def test_killed_in_the_middle(tmp_path, kind):
    """At random points of an add and of a compaction; a kill that comes too late does not count."""
    path, chance, takes, hits = tmp_path / "g", random.Random(0), 0.0, 0

    def work(told, fresh):
        engine = SqliteEngine.open(path, write=True)
        os.write(told, b"begun")
        engine.add(*fresh) if kind == "add" else engine.compact()
        os.write(told, b"done")
        signal.pause()

    for number in range(20 * KILLS):
        if number % 20 == 0:
            shutil.rmtree(path, ignore_errors=True)
            made(path).close()
            expected = Expected()
        fresh = batch(*[(n, number) for n in range(100)])  # it replaces all there are
        before = expected.state()
        expected.add(*fresh)
        if kind == "compact":
            with SqliteEngine.open(path, write=True) as engine:
                engine.add(*fresh)
            before = expected.state()
        said, told = os.pipe()
        with child(lambda told=told, fresh=fresh: work(told, fresh)):
            os.close(told)
            assert os.read(said, 5) == b"begun"
            started = time.monotonic()
            if number == 0:  # not killed: how long does it take?
                assert os.read(said, 4) == b"done"
                takes = time.monotonic() - started
            time.sleep(chance.random() * takes)
        done = read_all(said) == b"done" or number == 0
        with SqliteEngine.open(path) as reader:
            found = state(reader)
            assert found == expected.state() if done else found in (before, expected.state())
            assert reader.verify() == []
        with SqliteEngine.open(path, write=True) as writer:
            assert state(writer) == found
        if found == before and kind == "add":
            expected = Expected({item.id: (item, *rest) for item, *rest in before})
        hits += not done
        if hits == KILLS:
            return
    raise AssertionError(f"only {hits} kills fell into the {kind}")


@pytest.mark.parametrize("writers", [2, 4])
def test_killed_beside_other_writers(tmp_path, writers):
    """Several processes add and compact, one of them is killed again and again: nothing acknowledged is lost."""
    path, chance, acknowledged, started = tmp_path / "g", random.Random(writers), set(), 0
    made(path).close()

    def work(own, told):
        engine = SqliteEngine.open(path, write=True)
        for n in range(10**6):
            numbers = [10**6 * own + 2 * n, 10**6 * own + 2 * n + 1]
            engine.add(*batch(*[(number, 0) for number in numbers]))
            os.write(told, struct.pack("<I", numbers[0]))
            if n % 20 == 19:
                engine.remove([f"i{numbers[0]}"])
                engine.add(*batch((numbers[0], 0)))
            if n % 40 == 39:
                engine.compact()

    while started < max(writers + 2, KILLS // 5):
        with ExitStack() as stack:
            pipes = []
            for _ in range(writers):
                started += 1
                said, told = os.pipe()
                stack.enter_context(child(lambda own=started, told=told: work(own, told)))
                os.close(told)
                pipes.append(said)
            for pipe in pipes:
                os.read(pipe, 4)
            time.sleep(chance.random() * 0.3)
        for pipe in pipes:
            acknowledged |= {number for (number,) in struct.iter_unpack("<I", read_all(pipe))}
        with SqliteEngine.open(path) as reader:
            assert reader.verify() == []
            ids = {item.id for item in reader.items()}
            removed = {number for number in acknowledged if number % 10**6 // 2 % 20 == 19}  # may be on its way back
            assert {f"i{number}" for number in acknowledged - removed} <= ids
            assert {f"i{number + 1}" for number in acknowledged} <= ids  # each pair as a whole


def test_killed_while_it_is_made(tmp_path):
    """A kill before any call that changes the disk leaves no gallery, or an empty one."""
    calls, kills = [(os, "fsync"), (os, "link"), (Path, "unlink"), (Path, "mkdir")], 0
    while True:
        path, kills = tmp_path / str(kills), kills + 1
        ended, end = os.pipe()

        def work(path=path, left=kills, end=end):
            def dying(original):
                def call(*args, **options):
                    nonlocal left
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return original(*args, **options)

                return call

            for owner, name in calls:
                setattr(owner, name, dying(getattr(owner, name)))
            made(path)
            os.write(end, b"the end")

        with child(work):
            os.close(end)
            said = read_all(ended)
        if not (path / DATABASE).exists():
            made(path).close()
        assert check_after_kill(path, 0) == 0
        if said:
            break
    assert kills > 4


def test_a_log_that_is_cut_short(tmp_path):
    """After a power failure the end of the write-ahead log may be missing or wrong: an earlier state is found."""
    path, expected, sizes = tmp_path / "g", Expected(), []
    engine, log = made(path), Path(f"{path / DATABASE}-wal")
    engine._connected().execute("PRAGMA wal_autocheckpoint = 0")
    states = [expected.state()]
    for number in range(12):
        if change(number, expected)[0] != "compact":  # a compaction empties the log
            make_change(number, expected, engine)
        states.append(expected.state())
        sizes.append(log.stat().st_size)
    files = {file.name: file.read_bytes() for file in path.iterdir() if not file.name.endswith("-shm")}
    content, step = files[log.name], max(1, len(files[log.name]) // (10 * KILLS))
    for cut in range(0, len(content), step):
        lost = tmp_path / "lost"
        lost.mkdir()
        for name, data in files.items():
            (lost / name).write_bytes(data)
        torn = content[:cut] if cut % 2 else content[:cut] + bytes(255 - x for x in content[cut : cut + 100])
        (lost / log.name).write_bytes(torn)
        whole = sum(size <= cut for size in sizes)
        with SqliteEngine.open(lost, write=True) as found:
            assert state(found) == states[whole]
            assert found.verify() == []
            found.add(*batch((99, 0)))
            assert found.verify() == []
        shutil.rmtree(lost)
    engine.close()

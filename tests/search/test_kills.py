"""Acknowledged changes survive SIGKILL at any moment, and a power failure at any moment."""

import os
import random
import shutil
import signal
import struct
import time
from pathlib import Path

import pytest
from made import Expected, batch, child, expected_after, made, make_change, state

from idml.search.engines.sqlite import SqliteEngine

KILLS = 10 * int(os.environ.get("IDML_KILLS", "2"))  # a kill is cheap here


def read_all(pipe):
    with open(pipe, "rb") as file:
        return file.read()


def check_after_kill(path, acknowledged):
    """What readers and the next writer find: all that was acknowledged, and the change under way as a whole or not."""
    allowed = [expected_after(acknowledged), expected_after(acknowledged + 1)]
    with SqliteEngine.open(path) as reader:
        found = state(reader)
        assert found in allowed
        assert reader.verify() == []
        with SqliteEngine.open(path, write=True) as writer:
            assert state(writer) == found
            assert writer.verify() == []
            assert len(list(path.glob("generation-*"))) == 1
        assert state(reader) == found
    return acknowledged + allowed.index(found)


@pytest.mark.usefixtures("_no_waiting")
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
            time.sleep(chance.random() * 0.03)
        rest = read_all(acknowledgements)
        done = check_after_kill(path, struct.unpack("<I", rest[-4:])[0] if rest else done)
        if done > 400:  # to keep the replay short
            shutil.rmtree(path)
            made(path).close()
            done = 0


@pytest.mark.usefixtures("_no_waiting")
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
        if number % 20 == 0:  # to keep the log short
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
            assert len(list(path.glob("generation-*"))) == 1
        if found == before and kind == "add":
            expected = Expected({item.id: (item, *rest) for item, *rest in before})
        hits += not done
        if hits == KILLS:
            return
    raise AssertionError(f"only {hits} kills fell into the {kind}")


CALLS = [(os, "pwrite"), (os, "fsync"), (os, "ftruncate"), (Path, "replace"), (Path, "mkdir"), (shutil, "rmtree")]


def test_killed_at_every_call(tmp_path):
    """The process dies before, or in the middle of, each call that changes the disk."""
    changes, kills = 7, 0  # each kind of change is among them
    while True:
        path, kills = tmp_path / str(kills), kills + 1
        ended, end = os.pipe()

        def work(path=path, left=kills, end=end):
            def dying(name, original):
                def call(*args, **options):
                    nonlocal left
                    left -= 1
                    if left == 0:
                        if name == "pwrite":
                            original(args[0], args[1][: len(args[1]) // 2], args[2])
                        os.kill(os.getpid(), signal.SIGKILL)
                    return None if name == "fsync" else original(*args, **options)

                return call

            for owner, name in CALLS:
                setattr(owner, name, dying(name, getattr(owner, name)))
            engine, expected = made(path), Expected()
            os.write(end, b"x")
            for number in range(changes):
                make_change(number, expected, engine)
                os.write(end, b"x")
            os.write(end, b"the end")

        with child(work):
            os.close(end)
            said = read_all(ended)
        if not said:  # while it was being made
            if not (path / "current.json").exists():
                made(path).close()
            assert check_after_kill(path, 0) == 0
        else:
            check_after_kill(path, said.count(b"x") - 1)
        if said.endswith(b"the end"):
            break
    assert kills > 40


class Disk:
    """A disk that can lose power: what was written but not forced may be there, or not, or in part."""

    def __init__(self, patch, root):
        self.root, self.forced, self.pending, self.names, self.renamed = root, {}, {}, set(), None
        self.moment = lambda: None
        calls, rename = {name: getattr(os, name) for name in ("pwrite", "ftruncate", "fsync")}, Path.replace

        def path(file):
            return Path(os.readlink(f"/proc/self/fd/{file}"))

        def pwrite(file, data, position):
            self.pending.setdefault(path(file), []).append((position, bytes(data)))
            return calls["pwrite"](file, data, position)

        def ftruncate(file, length):
            self.pending.setdefault(path(file), []).append((length, None))
            return calls["ftruncate"](file, length)

        def fsync(file):
            self.moment()
            if path(file).is_file():
                self.forced[path(file)] = path(file).read_bytes()
                self.pending.pop(path(file), None)
                return
            self.names |= set(path(file).iterdir())
            if path(file) == root and self.renamed:
                self.forced[root / "current.json"], self.renamed = self.renamed, None

        def replace(old, new):
            self.renamed = self.forced.pop(old)  # never a file that was not forced
            rename(old, new)

        for call in (pwrite, ftruncate, fsync):
            patch.setattr(os, call.__name__, call)
        patch.setattr(Path, "replace", replace)

    def after_failure(self, chance, to):
        """What may be found when the power is back."""
        for file in [f for f in self.root.rglob("*") if f.is_file() and f.suffix != ".part"]:
            if not {file, file.parent} - {self.root} <= self.names and chance.random() < 0.5:
                continue  # nobody forced the name
            content = bytearray(self.forced.get(file, b""))
            for position, data in self.pending.get(file, []):
                if chance.random() < 0.5:
                    if data is None:
                        del content[position:]
                    else:
                        data = data[: chance.randrange(len(data) + 1)]
                        content[len(content) :] = bytes(max(0, position - len(content)))
                        content[position : position + len(data)] = data
            if file.name == "current.json" and self.renamed and chance.random() < 0.5:
                content = self.renamed
            (to / file.relative_to(self.root)).parent.mkdir(parents=True, exist_ok=True)
            (to / file.relative_to(self.root)).write_bytes(content)


def test_power_failure_before_every_fsync(tmp_path):
    chance, root, lost, moments = random.Random(0), tmp_path / "g", tmp_path / "lost", 0
    real = {"pwrite": os.pwrite, "fsync": lambda file: None, "ftruncate": os.ftruncate}
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, root)
        engine, expected = made(root), Expected()

        def fail():
            nonlocal moments
            moments += 1
            with pytest.MonkeyPatch.context() as other:
                for name, call in real.items():
                    other.setattr(os, name, call)
                disk.after_failure(chance, lost)
                check_after_kill(lost, number)
            shutil.rmtree(lost)

        disk.moment = fail
        for number in range(24):
            make_change(number, expected, engine)
        engine.close()
    assert moments > 60

"""Made galleries: changes that follow from their number, and what a gallery must hold after them."""

import hashlib
import os
import random
import signal
import sqlite3
from contextlib import contextmanager

import numpy as np
import torch

from idml.embeddings import Embeddings
from idml.search.engines import Item, Properties
from idml.search.engines.sqlite import SqliteEngine
from idml.search.engines.sqlite_storage import DATABASE

D, U = 4, 3
PROPERTIES = Properties(model="a model", dimensions=D, uncertainty=U)


def batch(*pairs):
    """Items, embeddings and thumbnails of (number, version) pairs; vectors repeat, so that there are ties."""
    items, s, u, images = [], [], [], []
    for number, version in pairs:
        noise = np.random.default_rng([number % 7, version % 3])
        checksum = hashlib.sha256(f"{number} {version}".encode()).hexdigest()
        label = None if number % 5 == 0 else f"class {number % 3}"
        items.append(Item(id=f"i{number}", path=f"d/{number}.jpg", checksum=checksum, label=label))
        s.append(noise.normal(size=D))
        u.append(noise.normal(size=U) * 0.3)
        images.append(b"" if number % 4 == 0 else f"picture {number} {version} ".encode() * (number % 3))
    return items, Embeddings(torch.tensor(np.array(s)).float(), torch.tensor(np.array(u)).float()), images


def state(engine):
    """Everything an engine says about its items, in their order."""
    items, e, levels = list(engine.items()), engine.embeddings(), engine.levels()
    assert len(items) == len(engine) == len(e)
    return [
        (item, e.semantic[n].numpy().tobytes(), e.uncertainty[n].numpy().tobytes(), levels[n].item(), picture)
        for n, (item, picture) in enumerate(zip(items, map(engine.thumbnail, (i.id for i in items)), strict=True))
    ]


class Expected(dict):
    """What a gallery must hold, by id."""

    def add(self, items, embeddings, images):
        rows = zip(items, embeddings.unit, embeddings.uncertainty, embeddings.level, images, strict=True)
        for item, s, u, level, image in rows:
            new = (item, s.numpy().tobytes(), u.numpy().tobytes(), level.item(), image)
            if self.get(item.id) != new:
                self.pop(item.id, None)  # a replaced item comes last
                self[item.id] = new

    def relabel(self, id, label):
        item, *rest = self[id]
        self[id] = (Item(id=id, path=item.path, checksum=item.checksum, label=label), *rest)

    def state(self):
        return list(self.values())


def change(number, expected):
    """The change with this number, given what is there: a name and arguments."""
    chance = random.Random(number)
    kind = chance.choices(["add", "remove", "relabel", "compact"], [6, 2, 2, 1])[0]
    known = chance.sample(list(expected), min(len(expected), 1 + chance.randrange(3)))
    if kind == "add" or not known:
        return "add", [(n, number) for n in chance.sample(range(25), 1 + chance.randrange(5))]
    if kind == "remove":
        return "remove", known
    if kind == "relabel":
        return "relabel", {known[0]: chance.choice([None, f"label {number}"])}
    return "compact", None


def make_change(number, expected, engine=None):
    """Make the change with this number, in ``expected`` and in an engine."""
    kind, what = change(number, expected)
    if kind == "add":
        expected.add(*batch(*what))
    elif kind == "remove":
        for id in what:
            del expected[id]
    elif kind == "relabel":
        for id, label in what.items():
            expected.relabel(id, label)
    if engine is not None:
        if kind == "add":
            engine.add(*batch(*what))
        elif kind == "compact":
            engine.compact()
        else:
            getattr(engine, kind)(what)


def expected_after(changes):
    expected = Expected()
    for number in range(changes):
        make_change(number, expected)
    return expected.state()


def made(path, changes=0):
    """A gallery after so many changes, open for writing."""
    engine, expected = SqliteEngine.create(path, PROPERTIES), Expected()
    for number in range(changes):
        make_change(number, expected, engine)
    return engine


@contextmanager
def child(work):
    """A forked process that runs ``work``; it is killed and gone afterwards."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def damage_value(path, table, column, id):
    """Change one byte of a value as a faulty disk does, which SQLite does not notice."""
    connection = sqlite3.connect(path / DATABASE)
    query = f"SELECT position, {column} FROM {table} WHERE position = (SELECT position FROM items WHERE id = ?)"
    position, value = connection.execute(query, (id.encode(),)).fetchone()
    wrong = value + 1 if isinstance(value, int | float) else bytes([value[0] ^ 4]) + value[1:]
    connection.execute(f"UPDATE {table} SET {column} = ? WHERE position = ?", (wrong, position))
    connection.commit()
    connection.close()

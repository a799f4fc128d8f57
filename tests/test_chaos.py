"""The chaos run in short, and that its checks can fail. `make chaos` runs it for longer, also against Milvus."""

import numpy as np
import pytest

from chaos import ABSENT, Picture, Violation, World, run_chaos


def test_a_short_run():
    """Eight clients; the service is killed once at least, and the disk is full once where root may mount one."""
    found = run_chaos("sqlite", 8, pictures=60)
    assert found["recovery"]["kill -9 of the service"]["times"] >= 1
    assert not found["full_disk_possible"] or any("full disk" in kind for kind in found["recovery"])
    assert found["searches_checked"] >= 1
    assert found["changes_acknowledged"] >= 5
    assert found["whole_comparisons"] >= 1


@pytest.fixture
def world():
    """Six pictures in a row; all but the last are there."""
    pictures = [Picture(str(n).encode(), np.array([0.1 * n, 0.0])) for n in range(6)]
    made = World(pictures, refused_is_final=True)
    for picture in pictures[:5]:
        made.known[picture.id].become("a")
    return made


def answer(world, *numbers, label="a"):
    known = list(world.known.values())
    return {"results": [{"id": known[n].picture.id, "label": label, "distance": 0.1 * n} for n in numbers]}


def checked(world, k, found, start=float("inf"), end=float("inf")):
    world.check_search(next(iter(world.known.values())).picture, k, found, start, end)


def test_searches_are_compared(world):
    checked(world, 3, answer(world, 0, 1, 2))
    checked(world, 9, answer(world, 0, 1, 2, 3, 4))
    for k, found, words in (
        (3, answer(world, 0, 1, 3), "missed"),
        (3, answer(world, 0, 1), "missed"),
        (3, answer(world, 0, 2, 1), "order"),
        (3, answer(world, 0, 1, 1), "different"),
        (2, answer(world, 0, 1, 2), "listed 3"),
        (3, answer(world, 0, 1, 5), "not there"),
        (3, answer(world, 0, 1, 2, label="b"), "shows"),
    ):
        with pytest.raises(Violation, match=words):
            checked(world, k, found)
    wrong = answer(world, 0, 1, 2)
    wrong["results"][2]["distance"] += 0.01
    with pytest.raises(Violation, match="away"):
        checked(world, 3, wrong)


def test_a_change_under_way_may_be_seen_or_not(world):
    one = list(world.known)[1]
    before = world.begin(one, ABSENT)
    checked(world, 3, answer(world, 0, 1, 2))
    checked(world, 3, answer(world, 0, 2, 3))
    world.end(one, before, ABSENT, "done")
    checked(world, 3, answer(world, 0, 2, 3))
    with pytest.raises(Violation, match="not there"):
        checked(world, 3, answer(world, 0, 1, 2))
    checked(world, 3, answer(world, 0, 1, 2), start=0.0)  # a search that began before


def test_what_is_there_is_compared(world):
    ids = list(world.known)
    items = dict.fromkeys(ids[:5], "a")
    world.check_listing(items)
    for wrong in ({**items, ids[5]: "a"}, {**items, ids[0]: "b"}, dict.fromkeys(ids[:4], "a"), {**items, "x": "a"}):
        with pytest.raises(Violation):
            world.check_listing(wrong)
    before = world.begin(ids[5], "b")
    world.end(ids[5], before, "b", "open")
    world.check_listing(items)
    world.check_listing({**items, ids[5]: "b"})
    before = world.begin(ids[0], ABSENT)
    world.end(ids[0], before, ABSENT, "refused")
    with pytest.raises(Violation):
        world.check_listing(dict.fromkeys(ids[1:5], "a"))

"""The map of a gallery: alike is near, and it is drawn only when something changed."""

import json
import math

import pytest
import torch
from synthetic_images import DIMENSIONS, as_items, cloud, save_run

import idml.search.tsne_map
from idml import Embeddings
from idml.search.gallery import Gallery
from idml.search.tsne_map import gallery_map

pytestmark = pytest.mark.usefixtures("_no_waiting")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def gallery(run, tmp_path):
    with Gallery.create(tmp_path / "g", run) as made:
        yield made


@pytest.fixture
def drawn(monkeypatch):
    """How often a map was drawn."""
    calls, draw = [], idml.search.tsne_map._compute
    monkeypatch.setattr(
        idml.search.tsne_map, "_compute", lambda units, check: calls.append(len(units)) or draw(units, check)
    )
    return calls


def test_similar_images_are_close(gallery):
    embeddings, labels = cloud(4, 15, noise=0.1)
    items = as_items(labels.tolist())
    gallery.add_embedded(items, embeddings)
    points = gallery_map(gallery)
    assert {p.id: p.label for p in points} == {item.id: item.label for item in items}
    levels = dict(zip([item.id for item in items], embeddings.level.tolist(), strict=True))
    assert all(p.level == pytest.approx(levels[p.id]) for p in points)
    assert all(0 <= p.x <= 1 and 0 <= p.y <= 1 for p in points)
    assert max(max(p.x for p in points) - min(p.x for p in points), max(p.y for p in points)) == pytest.approx(
        1, abs=0.01
    )
    right = 0
    for p in points:
        near = min((q for q in points if q is not p), key=lambda q: math.dist((p.x, p.y), (q.x, q.y)))
        right += near.label == p.label
    assert right == 60


def test_a_map_is_stored_until_items_change(gallery, run, tmp_path, drawn):
    embeddings, labels = cloud(3, 4)
    items = as_items(labels.tolist())
    gallery.add_embedded(items, embeddings)
    first = gallery_map(gallery)
    assert gallery_map(gallery) == first
    gallery.relabel({items[0].id: "other"})
    assert {p.id: p.label for p in gallery_map(gallery)}[items[0].id] == "other"
    with Gallery.open(gallery.location) as reader:
        assert [p[:3] for p in gallery_map(reader)] == [p[:3] for p in first]
    assert drawn == [12]
    gallery.remove([items[1].id])
    assert len(gallery_map(gallery)) == 11
    assert drawn == [12, 11]
    for damage in (b"", b"{", b"[]", b'{"key": "x"}', b"\xff", json.dumps({"key": 1, "places": [[1, 2]]}).encode()):
        (tmp_path / "g" / "map.json").write_bytes(damage)
        assert len(gallery_map(gallery)) == 11
    assert len(drawn) == 8


def test_large_galleries_are_sampled(gallery, drawn):
    embeddings, labels = cloud(3, 20)
    gallery.add_embedded(as_items(labels.tolist()), embeddings)
    some = {p.id for p in gallery_map(gallery, limit=12)}
    assert len(some) == 12
    new = as_items([1], first=500)
    gallery.add_embedded(new, cloud(1, 1)[0])
    after = {p.id for p in gallery_map(gallery, limit=12)}
    assert len(some - after) <= 1  # the others stay
    with pytest.raises(ValueError, match="needs at least one item"):
        gallery_map(gallery, limit=0)


@pytest.mark.parametrize("items", [0, 1, 2, 3, 4, 5, 9])
def test_small_galleries(gallery, items):
    if items:
        embeddings, labels = cloud(items, 1)
        gallery.add_embedded(as_items(labels.tolist()), embeddings)
    points = gallery_map(gallery)
    assert len({(p.x, p.y) for p in points}) == items
    assert all(0 <= p.x <= 1 and 0 <= p.y <= 1 for p in points)


def test_identical_items(gallery):
    for n, s in enumerate((torch.ones(6, DIMENSIONS), torch.zeros(6, DIMENSIONS))):
        gallery.add_embedded(as_items([0] * 6, first=100 * n), Embeddings(s, torch.zeros(6, DIMENSIONS)))
        assert all(math.isfinite(p.x + p.y) for p in gallery_map(gallery))


def test_a_folder_without_write_permission(gallery, monkeypatch, drawn):
    gallery.add_embedded(as_items([0] * 5), cloud(1, 5)[0])

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(idml.search.tsne_map, "write_atomic", full)
    assert len(gallery_map(gallery)) == len(gallery_map(gallery)) == 5
    assert drawn == [5, 5]


def test_maps_of_milvus_galleries_are_cached(gallery, tmp_path, monkeypatch, drawn):
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    gallery.add_embedded(as_items([0] * 5), cloud(1, 5)[0])
    gallery.roots = None  # as it is in Milvus
    assert gallery_map(gallery) == gallery_map(gallery)
    assert drawn == [5]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_map_that_nobody_waits_for_ends(gallery, tmp_path):
    embeddings, labels = cloud(4, 15, noise=0.1)
    gallery.add_embedded(as_items(labels.tolist()), embeddings)
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        gallery_map(gallery, check=check)
    assert len(calls) == 3
    assert not (tmp_path / "g" / "map.json").exists()
    assert len(gallery_map(gallery)) == 60

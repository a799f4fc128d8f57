"""Open-set queries against searches in the smaller gallery."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idml import Embeddings
from idml.calibration.evidence import build_evidence
from idml.calibration.open_set import QueryPool, draw_unknown
from idml.evaluation import nearest


def made(n, classes, seed=0, spread=0.7, dimensions=6):
    """Embeddings around the centres of their classes, some of them twins, and the classes."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    semantic = torch.randn(classes, dimensions, generator=g)[labels] + spread * torch.randn(n, dimensions, generator=g)
    semantic[1::7] = semantic[0::7][: len(semantic[1::7])]  # equal images: ties everywhere
    return Embeddings(semantic, torch.rand(n, 3, generator=g)), labels


def check_search(found, queries, labels, gallery, gallery_labels, listed, **ids):
    """Compare with a search in the gallery as it is given."""
    indices, distances = nearest(queries, max(10, listed), gallery=gallery, **ids)
    near = gallery_labels[indices.clamp_min(0)]
    evidence = build_evidence(queries, distances, gallery.uncertainty[indices[:, 0]], classes=near)
    assert found.evidence.searched == evidence.searched
    assert set(found.evidence.scores) == set(evidence.scores)
    for name, score in evidence.scores.items():
        torch.testing.assert_close(found.evidence.scores[name], score, rtol=1e-6, atol=1e-6)
    same = ((near == labels.unsqueeze(1)) & (indices >= 0))[:, :listed]
    width = same.shape[1]
    assert torch.equal(found.same_class[:, :width], same)
    torch.testing.assert_close(found.distances[:, :width], distances[:, :listed], rtol=0, atol=1e-6)
    assert bool((found.distances[:, width:] == torch.inf).all())
    assert torch.equal(found.correct, same[:, 0])


@pytest.mark.parametrize("depth", [3, 30, 256])  # of 3, all are searched again; of 30 some, of 256 none
@pytest.mark.parametrize("listed", [4, 10, 25])
def test_lists_without_some_classes_equal_a_search_without_them(depth, listed):
    for seed in range(4):
        e, labels = made(150, 8, seed)
        unknown = draw_unknown(labels, 0.4, torch.Generator().manual_seed(seed))
        there = torch.tensor([int(c) not in unknown.tolist() for c in labels])
        rows = there.nonzero().flatten()
        found = QueryPool(e, labels, depth=depth).search(without=unknown, listed=listed)
        ids = {"query_ids": torch.arange(150), "gallery_ids": rows}
        check_search(found, e, labels, e[rows], labels[rows], listed, **ids)
        assert torch.equal(found.gallery, there)
        assert not bool((found.correct & ~found.known).any())
        for i in range(150):
            others = [j for j in range(150) if j != i and bool(there[j]) and labels[j] == labels[i]]
            assert bool(found.known[i]) == bool(others)


def test_a_pool_with_its_own_gallery():
    queries, labels = made(60, 6, 1)
    gallery, theirs = made(90, 7, 2)
    unknown = torch.tensor([0, 3])
    rows = (~torch.isin(theirs, unknown)).nonzero().flatten()
    pool = QueryPool(queries, labels, gallery, theirs, depth=20)
    found = pool.search(without=unknown)
    check_search(found, queries, labels, gallery[rows], theirs[rows], 10)
    assert found.known.tolist() == [int(c) in theirs[rows].tolist() for c in labels]
    check_search(pool.search(), queries, labels, gallery, theirs, 10)


@pytest.mark.parametrize("depth", [3, 256])
def test_a_query_finds_no_copy_of_itself(depth):
    """Copies may have another class. The lists equal those of loops over all images that a query may see."""
    e, labels = made(80, 5, 3)
    copies = torch.arange(80) % 30
    labels[30:45], labels[62] = labels[:15], labels[2]  # some copies have their class, some another one
    rows = torch.arange(5, 70)
    pool = QueryPool(e[rows], labels[rows], e, labels, rows=rows, copies=copies, depth=depth)
    known, alone = pool.search(), pool.search_without_own()
    every = torch.cdist(e.unit, e.unit)
    for i, row in enumerate(rows.tolist()):
        other = copies != copies[row]
        assert int(pool.visible[i]) == int(other.sum())
        assert bool(known.known[i]) == bool((other & (labels == labels[row])).any())
        away = other & (labels != labels[row])
        assert int(pool.visible_without_own[i]) == int(away.sum())
        for found, seen in ((known, other), (alone, away)):
            expected = every[row][seen].sort().values[:10]
            torch.testing.assert_close(found[i].distances[0], expected, rtol=0, atol=2e-3)
    assert torch.equal(pool[3:9].search().distances, known.distances[3:9])
    stranger = QueryPool(e[:2], labels[:2], e, labels, rows=torch.tensor([-1, 0]), copies=copies)
    assert stranger.visible.tolist() == [80, 77]


def test_lists_of_small_galleries_end_early():
    e, labels = made(12, 4)
    found = QueryPool(e, labels).search(without=labels.unique()[:2], listed=15)
    rows = found.gallery.nonzero().flatten()
    assert found.distances.shape == (12, 15)
    assert (found.distances != torch.inf).sum(dim=1).tolist() == [len(rows) - int(i in rows) for i in range(12)]
    assert not bool(found.same_class[found.distances == torch.inf].any())


@given(st.integers(0, 10_000), st.floats(0.01, 0.99), st.integers(3, 30))
def test_unknown_classes_hold_about_the_requested_share(seed, share, classes):
    g = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.arange(classes), torch.randint(classes, (200,), generator=g)])
    drawn = draw_unknown(labels, share, g)
    counts = labels.bincount()
    assert len(drawn.unique()) == len(drawn)
    assert 1 <= len(drawn) <= classes - 2
    held = int(counts[drawn].sum()) / len(labels)
    if 1 < len(drawn) < classes - 2:
        assert abs(held - share) <= int(counts.max()) / len(labels)
    assert len(draw_unknown(labels, 0.0, g)) == 0
    with pytest.raises(ValueError, match="share of unknown queries"):
        draw_unknown(labels, 1.0, g)

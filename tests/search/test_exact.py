"""Exact search against float64 references: ties, duplicates, dead rows, and every size of chunk."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered_changes import D, U

from idml.embeddings import Embeddings
from idml.evaluation import distance_bounds as exact
from idml.evaluation.distance_bounds import ExactSearch, RowVectors
from idml.metric import IntrospectiveMetric
from idml.search.engines import Item, Properties
from idml.search.engines.sqlite import SqliteEngine

pytestmark = pytest.mark.usefixtures("_no_waiting")

METRICS = [None, IntrospectiveMetric(), IntrospectiveMetric(tau=0.5, gamma=1.0)]


def keys(q, g, metric):
    """D, or α, of all pairs in float64; equal where α² and β² are."""
    square = ((q.s[:, None].astype(float) - g.s[None]) ** 2).sum(2)
    if metric is None:
        return np.sqrt(square)
    other = ((q.u[:, None].astype(float) + g.u[None]) ** 2).sum(2)
    alpha = np.sqrt(square)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(alpha == 0, 0, alpha * np.exp(-(np.sqrt(other) + metric.gamma) / (metric.tau * alpha)))


def lattice(noise, n, width):
    """Whole numbers, so that squares are exact, from few values, so that there are many ties."""
    return noise.integers(-2, 3, (n, width)).astype(np.float32)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 60) | st.integers(100, 300),
    queries=st.integers(0, 9) | st.just(1),
    k=st.integers(1, 5) | st.integers(6, 70),
    metric=st.sampled_from(METRICS),
    sizes=st.sampled_from([(1 << 24, 256, 1 << 20, 1 << 21), (64, 4, 100, 0), (7, 2, 1, 0), (1, 1, 1, 1)]),
    dead=st.sampled_from([0, 0.1, 0.5, 1]),
    block=st.sampled_from([1, 2, 64]),
)
def test_lattice_with_ties(seed, n, queries, k, metric, sizes, dead, block):
    noise = np.random.default_rng(seed)
    q, g = (RowVectors.of(lattice(noise, m, 3), lattice(noise, m, 2)) for m in (queries, n))
    hidden = noise.random(n) < dead
    g.s[hidden] = np.nan  # whatever a dead row holds
    g = RowVectors(g.s, np.where(hidden, np.inf, g.s_squares), g.u, g.u_squares)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("_CHUNK", "_QUERIES", "_LIST", "_MAPPED"), sizes, strict=True):
            patch.setattr(exact, name, size)
        patch.setattr(exact, "_BLOCK", block)  # 1: a single query has a way of its own even among few rows
        rows, distances = ExactSearch(q, g, metric).top(k)
    for i in range(queries):
        live = np.flatnonzero(~hidden)
        expected = keys(RowVectors.of(q.s[i : i + 1], q.u[i : i + 1]), RowVectors.of(g.s[live], g.u[live]), metric)[0]
        order = np.lexsort([live, expected.round(12)])[:k]
        assert rows[i].tolist() == live[order].tolist()
        np.testing.assert_allclose(distances[i].numpy(), expected[order], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("copies", [1, 50])
def test_one_query_among_many_rows_is_answered_as_in_a_batch(copies):
    noise = np.random.default_rng(copies)
    some = noise.standard_normal((6000 // copies, 32)).astype(np.float32)
    rows = np.concatenate([some] * copies)[noise.permutation(6000)]
    dead = noise.random(6000) < 0.3
    rows[dead] = np.nan
    items = RowVectors.of(rows, rows[:, :0])
    items = RowVectors(items.s, np.where(dead, np.inf, items.s_squares), items.u, items.u_squares)
    queries = noise.standard_normal((8, 32)).astype(np.float32)
    together = ExactSearch(RowVectors.of(queries, queries[:, :0]), items, None).top(12)
    for i in range(8):
        alone = ExactSearch(RowVectors.of(queries[i : i + 1], queries[:1, :0]), items, None).top(12)
        assert torch.equal(alone[0][0], together[0][i])
        assert torch.equal(alone[1][0], together[1][i])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-20, 1e-4, 1.0, 1e6, 1e14])
def test_near_duplicates_through_a_gallery(tmp_path, metric, scale):
    """Rows nearer to each other than float32 products can tell, exact copies, and u of every size."""
    torch.manual_seed(1)
    centres = torch.randn(6, 16)
    s = centres[torch.arange(900) % 6] + torch.randn(900, 16) * torch.logspace(-8, 0, 900)[:, None]
    u = torch.randn(900, 3) * 0.3 * scale
    s[800:860], u[800:860] = s[5], u[5]
    with SqliteEngine.create(tmp_path, Properties("m", 16, 3)) as engine:
        ids = [str(n) for n in range(900)]
        items = [Item(path="", checksum="0" * 64, id=id) for id in ids]
        engine.add(items, Embeddings(s, u))
        engine.remove(ids[100:300])
        queries = Embeddings(torch.cat([centres, s[::97]]), torch.cat([u[:6], u[::97]]))
        found = engine.search(queries, 30, metric)
        stored = engine.embeddings()
    live = [int(id) for id in ids if not 100 <= int(id) < 300]
    g = RowVectors.of(stored.semantic.numpy(), stored.uncertainty.numpy())
    expected = keys(RowVectors.of(queries.unit.numpy(), queries.uncertainty.numpy()), g, metric)
    place = {str(row): n for n, row in enumerate(live)}
    for line, ids, distances in zip(expected, found.ids, found.distances, strict=True):
        chosen = [place[id] for id in ids]
        assert len(set(chosen)) == 30
        np.testing.assert_allclose(distances.numpy(), np.sort(line)[:30], rtol=1e-5, atol=1e-37)
        assert line[chosen].max() <= np.delete(line, chosen).min() * (1 + 1e-9)  # nothing nearer was left out
        assert (np.diff(line[chosen]) >= -1e-9 * line[chosen][1:]).all()
        copies = [n for n in chosen if (g.s[n] == g.s[place["800"]]).all() and (g.u[n] == g.u[place["800"]]).all()]
        all_copies = [place["5"], *(place[str(n)] for n in range(800, 860))]
        assert copies == all_copies[: len(copies)]  # in the order in which they were added


def test_uncertainties_that_cancel_out(tmp_path):
    """u + v is far smaller than either, so that ‖u‖² + ‖v‖² + 2u·v loses its digits."""
    torch.manual_seed(2)
    metric, centre, u = IntrospectiveMetric(tau=0.5), torch.randn(1, 64), 30 * torch.randn(1, 64)
    s = centre + 0.05 * torch.randn(500, 64)
    v = -u + 0.01 * torch.randn(500, 64)
    with SqliteEngine.create(tmp_path, Properties("m", 64, 64)) as engine:
        engine.add([Item(path="", checksum="0" * 64, id=str(n)) for n in range(500)], Embeddings(s, v))
        queries = Embeddings(centre + 0.05 * torch.randn(9, 64), u.expand(9, -1))
        found = engine.search(queries, 8, metric)
        stored = engine.embeddings()
    q = RowVectors.of(queries.unit.numpy(), queries.uncertainty.numpy())
    expected = keys(q, RowVectors.of(stored.semantic.numpy(), stored.uncertainty.numpy()), metric)
    assert found.ids == [[str(n) for n in line] for line in np.argsort(expected, axis=1)[:, :8]]


def test_many_copies_and_more_results_than_items(tmp_path):
    e = Embeddings(torch.ones(50, D), torch.ones(50, U))
    items = [Item(path="", checksum="0" * 64, id=str(n)) for n in range(50)]
    with SqliteEngine.create(tmp_path, Properties("m", D, U)) as engine:
        engine.add(items, e)
        engine.remove(["3"])
        left = [str(n) for n in range(50) if n != 3]
        for metric in METRICS:
            assert engine.search(e[:2], 5, metric).ids == [left[:5]] * 2
            found = engine.search(e[:1], 99, metric)
            assert found.ids == [left]
            assert found.distances.tolist() == [[0.0] * 49]
        engine.compact()
        assert engine.search(e[:2], 5).ids == [left[:5]] * 2
        engine.add([Item(path="z", checksum="0" * 64, id="0")], e[0])  # replaced: the youngest now
        assert engine.search(e[:1], 60).ids == [[*left[1:], "0"]]


def test_a_vector_without_direction(tmp_path):
    with SqliteEngine.create(tmp_path, Properties("m", 2)) as engine:
        s = torch.tensor([[0.0, 0.0], [4.0, 0.0], [-1.0, 0.0]])
        engine.add([Item(path="", checksum="0" * 64, id=str(n)) for n in range(3)], Embeddings.certain(s))
        found = engine.search(Embeddings.certain(s), 3)
        assert found.ids == [["0", "1", "2"], ["1", "0", "2"], ["2", "0", "1"]]
        assert found.distances[0].tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_share_the_rows_of_few_queries(monkeypatch, threads):
    """Also more threads than rows are worth, and rows that do not divide evenly."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(exact, "_SHARE", 20)
    noise = np.random.default_rng(threads)
    for queries, rows in [(1, 1), (1, 50), (2, 7), (3, 101)]:
        q, g = (RowVectors.of(lattice(noise, m, 8), lattice(noise, m, 0)) for m in (queries, rows))
        found, distances = ExactSearch(q, g, None).top(5)
        expected = keys(q, g, None)
        order = np.argsort(expected.round(12), axis=1, kind="stable")[:, :5]
        assert found.tolist() == order.tolist()
        np.testing.assert_allclose(distances.numpy(), np.take_along_axis(expected, order, 1), rtol=1e-6)


def test_memory_stays_bounded(monkeypatch):
    """No product is larger than the chunk, however many queries and items there are."""
    monkeypatch.setattr(exact, "_CHUNK", 4096)
    sizes, product = [], ExactSearch._product
    monkeypatch.setattr(
        ExactSearch,
        "_product",
        staticmethod(lambda room, a, b: (sizes.append(len(a) * len(b)), product(room, a, b))[1]),
    )
    noise = np.random.default_rng(0)
    q, g = (RowVectors.of(noise.normal(size=(m, 8)).astype(np.float32), lattice(noise, m, 2)) for m in (600, 3000))
    rows, _ = ExactSearch(q, g, None).top(4)
    assert max(sizes) <= 4096
    assert rows.tolist() == np.argsort(keys(q, g, None), axis=1)[:, :4].tolist()

"""Exact neighbours against explicit loops, and the lowest numbers of rows against a full sort."""

import math
from fractions import Fraction

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from idml import Embeddings, IntrospectiveMetric
from idml.evaluation import distance_bounds as pairs
from idml.evaluation import evaluate_retrieval, retrieval
from idml.evaluation import knn as neighbours
from idml.evaluation.knn import Search, _by_groups, lowest, nearest


def loops(queries, k, gallery=None, query_ids=None, gallery_ids=None):
    """Top-k by rational arithmetic, squares compared to 40 bits, ties by the smaller index, same ids left out."""
    same = gallery is None
    gallery = queries if same else gallery
    if same:
        query_ids = gallery_ids = list(range(len(queries))) if query_ids is None else query_ids
    rows = [[Fraction(v) for v in x.tolist()] for x in gallery]
    out = []
    for i, q in enumerate([Fraction(v) for v in x.tolist()] for x in queries):
        order = sorted(
            (to_40_bits(sum((a - b) ** 2 for a, b in zip(q, row, strict=True))), j)
            for j, row in enumerate(rows)
            if query_ids is None or query_ids[i] != gallery_ids[j]
        )
        out.append([j for _, j in order[:k]])
    return out


def to_40_bits(x):
    if x == 0:
        return x
    place = Fraction(2) ** (40 - (x.numerator.bit_length() - x.denominator.bit_length()))
    place = place * 2 if x * place < 2**39 else place / 2 if x * place >= 2**40 else place
    return round(x * place) / place


def lists(found):
    return [[j for j in row if j >= 0] for row in found.indices.tolist()]


def clustered(n, d, g=0, noise=0.3):
    g = torch.Generator().manual_seed(g)
    centres = torch.randn(max(2, n // 6), d, generator=g)
    return centres[torch.randint(len(centres), (n,), generator=g)] + noise * torch.randn(n, d, generator=g)


def scales(n, d):
    """Rows of very different length, the same to the last bit on every processor.

    Where the square of a far pair lies half-way between two numbers of 40 bits, the float64 sum and the rational one
    may round apart. Rows made by logspace and randn differ between processors: one of them met such a pair.
    """
    whole = torch.randint(-(2**24), 2**24, (n, d), generator=torch.Generator().manual_seed(5))
    return whole.float() * 2.0 ** (3.0 * torch.arange(n) - 80).unsqueeze(1)


HARD = {
    "random": torch.randn(40, 7, generator=torch.Generator().manual_seed(1)),
    "clustered": clustered(40, 9),
    "duplicates": clustered(12, 5)[torch.randint(12, (45,), generator=torch.Generator().manual_seed(2))],
    "collapsed": torch.full((30, 4), 0.1),
    "grid": torch.cartesian_prod(*[torch.arange(3.0)] * 3),
    "binary": (torch.randn(50, 6, generator=torch.Generator().manual_seed(3)) > 0).float(),
    "far from the origin": 1000 + 1e-3 * torch.randn(40, 6, generator=torch.Generator().manual_seed(4)),
    "one far point": torch.cat([torch.full((1, 5), 1e12), 1e-2 * clustered(40, 5)]),
    "huge": 1e30 * clustered(40, 5),
    "tiny": 1e-30 * clustered(40, 5),
    "float64": clustered(40, 5).double() * 1e200,
    "float64, last bits": 1 + 1e-13 * clustered(40, 5).double(),
    "scales": scales(40, 4),
    "zeros": torch.zeros(25, 3),
    "one row": torch.ones(1, 3),
    "one dimension": torch.randint(5, (40, 1)).float(),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize(("k", "long"), [(1, 32), (5, 32), (5, 1000), (100, 32), (100, 0), (7, 5)])
def test_neighbours_are_those_of_exact_loops(monkeypatch, name, k, long):
    monkeypatch.setattr(neighbours, "_LONG", long)  # which lists are measured by float64 products first
    x = HARD[name]
    before = x.clone()
    found = nearest(x, k)
    assert torch.equal(x, before)
    assert lists(found) == loops(x, k)
    assert torch.equal(Search(x).ranked(k), found.indices)
    assert found.indices.shape == found.distances.shape == (len(x), min(k, len(x) - 1))
    assert found.distances.dtype == x.dtype
    assert (found.distances.diff(dim=1) >= 0).all()


@pytest.mark.parametrize("name", ["clustered", "duplicates", "grid", "one far point", "scales"])
def test_neighbours_between_two_sets_are_those_of_exact_loops(name):
    x = HARD[name]
    assert lists(nearest(x[:15], 4, gallery=x[5:])) == loops(x[:15], 4, x[5:])  # no ids: nothing is left out
    ids, others = [f"i{j % 9}" for j in range(15)], [f"i{j}" for j in range(5, len(x))]
    found = nearest(x[:15], 4, gallery=x[5:], query_ids=ids, gallery_ids=others)
    assert lists(found) == loops(x[:15], 4, x[5:], ids, others)


def test_distances_are_those_of_differences():
    x = 100 + clustered(60, 16)
    found = nearest(x, 6)
    wanted = (x.double().unsqueeze(1) - x.double()[found.indices]).square().sum(2).sqrt()
    torch.testing.assert_close(found.distances, wanted.float(), rtol=1e-6, atol=0)


def test_a_duplicate_is_found_and_the_query_is_not():
    x = torch.randn(20, 8)
    x[17] = x[3]
    found = nearest(x, 1)
    assert found.indices[3].item() == 17
    assert found.indices[17].item() == 3
    assert found.distances[3].item() == 0.0
    every = nearest(x, 19)
    assert every.distances[3, 0].item() == 0.0
    assert not (every.indices == torch.arange(20).unsqueeze(1)).any()


def test_images_sharing_an_id_do_not_find_each_other():
    x = clustered(30, 4)
    ids = [j // 3 for j in range(30)]
    found = nearest(x, 28, query_ids=ids)
    assert found.indices.shape == (30, 27)
    assert lists(found) == loops(x, 28, query_ids=ids)


def test_rows_with_fewer_neighbours_end_in_minus_one():
    found = nearest(torch.zeros(2, 1), 9, gallery=torch.ones(3, 1), query_ids=[7, 8], gallery_ids=[7, 1, 7])
    assert found.indices.tolist() == [[1, -1, -1], [0, 1, 2]]
    assert found.distances.tolist() == [[1.0, math.inf, math.inf], [1.0, 1.0, 1.0]]
    nothing = nearest(torch.zeros(1, 1), 2, gallery=torch.ones(1, 1), query_ids=["a"], gallery_ids=["a"])
    assert nothing.indices.shape == (1, 0)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (700, 60, 33), (1 << 12, 1 << 9, 1 << 8)])
@pytest.mark.parametrize("metric", [None, IntrospectiveMetric()])
def test_chunk_sizes_do_not_change_the_neighbours(monkeypatch, sizes, metric):
    rows = torch.randint(90, (130,))
    e = Embeddings(clustered(90, 33)[rows], 0.3 * torch.randn(90, 33)[rows])
    whole = nearest(e, 7, metric=metric)
    for name, size in zip(("_CHUNK", "_LIST", "_EXACT"), sizes, strict=True):
        monkeypatch.setattr(pairs if name == "_EXACT" else neighbours, name, size)
    parts = nearest(e, 7, metric=metric)
    assert torch.equal(whole.indices, parts.indices)
    assert torch.equal(whole.distances, parts.distances)


def test_equal_rows_come_in_the_order_of_their_indices():
    rows = torch.arange(300) % 7
    x = torch.randn(7, 61)[rows]
    found = nearest(x, 80).indices
    for i in range(300):
        twins = [j for j in range(300) if j % 7 == i % 7 and j != i]
        assert found[i, : len(twins)].tolist() == twins


@pytest.mark.parametrize("metric", [IntrospectiveMetric(), IntrospectiveMetric(tau=0.5, gamma=3.0)])
@pytest.mark.parametrize("level", [0.0, 0.05, 2.0])
@pytest.mark.parametrize("long", [5, 32, 1000])
def test_introspective_order_is_that_of_the_metric(monkeypatch, metric, level, long):
    monkeypatch.setattr(neighbours, "_LONG", long)
    e = Embeddings(clustered(80, 12), level * torch.rand(80, 1) * torch.randn(80, 6)).to(torch.float64)
    wanted = metric.distances(e).fill_diagonal_(math.inf).sort(dim=1, stable=True)
    for given in (e, e.to(torch.float32)):
        found = nearest(given, 79, metric=metric)
        assert torch.equal(found.indices, wanted.indices[:, :79])
        torch.testing.assert_close(found.distances.double(), wanted.values[:, :79], rtol=1e-4, atol=1e-6)
    other = Embeddings(clustered(50, 12, g=1), level * torch.randn(50, 6)).to(torch.float64)
    wanted = metric.distances(e, other).sort(dim=1, stable=True)
    assert torch.equal(nearest(e, 5, gallery=other, metric=metric).indices, wanted.indices[:, :5])
    sure = Embeddings.certain(other.semantic)
    wanted = metric.distances(e, sure).sort(dim=1, stable=True)
    assert torch.equal(nearest(e, 5, gallery=sure, metric=metric).indices, wanted.indices[:, :5])


def test_introspective_duplicates_tie_at_zero_and_cancelling_uncertainties_count():
    s, u = clustered(20, 6), torch.randn(20, 6)
    e = Embeddings(s[[0, 0, 0, *range(1, 20)]], u[[0, 1, 0, *range(1, 20)]])
    found = nearest(e, 2, metric=IntrospectiveMetric())
    assert found.indices[:3].tolist() == [[1, 2], [0, 2], [0, 1]]  # α = 0: D = 0, whatever β
    assert (found.distances[:3] == 0).all()
    s = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    opposed = Embeddings(s, torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.5, 0.0]]))
    assert nearest(opposed, 2, metric=IntrospectiveMetric()).indices[0].tolist() == [2, 1]  # β = 1.5 softens, 0 not


def test_the_introspective_order_is_right_if_distances_underflow():
    s = torch.tensor([[1.0, 0.0], [1.0, 3e-4], [1.0, 2e-4], [1.0, 1e-4]], dtype=torch.float64)
    e = Embeddings(s, torch.ones(4, 2, dtype=torch.float64))
    assert nearest(e, 3, metric=IntrospectiveMetric()).indices[0].tolist() == [3, 2, 1]


def test_embeddings_are_compared_by_their_unit_part():
    e = Embeddings(clustered(40, 5) * torch.rand(40, 1), torch.randn(40, 2))
    wanted = nearest(e.unit, 6).indices
    assert torch.equal(nearest(e, 6).indices, wanted)
    assert torch.equal(nearest(e, 6, metric=IntrospectiveMetric(rule="off")).indices, wanted)
    assert torch.equal(nearest(e.semantic, 6, metric=IntrospectiveMetric(rule="off")).indices, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    x = clustered(60, 8).to(dtype)
    found = nearest(x, 5)
    assert torch.equal(found.indices, nearest(x.float(), 5).indices)
    assert found.distances.dtype == torch.float32


def test_reduced_precision_elsewhere_does_not_matter():
    x = clustered(300, 64)
    wanted = nearest(x, 5)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = nearest(x.requires_grad_(), 5)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found.indices, wanted.indices)
    assert not found.distances.requires_grad


@pytest.mark.parametrize("metric", [None, IntrospectiveMetric()])
@pytest.mark.parametrize("distinct", [40, 400])
def test_long_lists_are_those_of_pairs(monkeypatch, metric, distinct):
    rows = torch.randint(distinct, (400,))
    e = Embeddings(clustered(distinct, 24)[rows], 0.2 * torch.randn(distinct, 24)[rows])
    by_products = nearest(e, 399, metric=metric)
    monkeypatch.setattr(neighbours, "_LONG", 1000)
    by_pairs = nearest(e, 399, metric=metric)
    assert torch.equal(by_products.indices, by_pairs.indices)
    torch.testing.assert_close(by_products.distances, by_pairs.distances)


@pytest.mark.parametrize("metric", [None, IntrospectiveMetric()])
@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_bounds_are_below_the_keys(metric, shift):
    e = Embeddings(clustered(200, 96) + shift, torch.randn(200, 40))
    search = Search(e if metric else e.semantic, None, metric)
    rows = torch.arange(200)
    bounds, constant = search.pairs.bounds(rows)
    keys = search.pairs.keys(rows, rows.expand(200, -1))
    assert (bounds.double() + constant.unsqueeze(1) < keys).sum() >= 200 * 199
    assert (bounds.double() + constant.unsqueeze(1) <= keys).all()


@pytest.mark.parametrize("metric", [None, IntrospectiveMetric(), IntrospectiveMetric(tau=0.5, gamma=3.0)])
def test_a_larger_gallery_with_duplicates_equals_a_full_sort(metric):
    rows = torch.randint(900, (1003,))
    e = Embeddings(clustered(900, 24)[rows], 0.3 * torch.randn(900, 24)[rows]).to(torch.float64)
    search = Search(e, None, metric)
    keys = search.pairs.keys(torch.arange(1003), torch.arange(1003).expand(1003, -1)).fill_diagonal_(math.inf)
    assert torch.equal(search.top(9).indices, keys.sort(dim=1, stable=True).indices[:, :9])


def test_uncertainties_of_any_size_are_ranked():
    s, u = clustered(40, 6).double(), torch.rand(40, 3).double()
    for size in (1e-200, 1e-20, 1e20, 1e200):
        found = nearest(Embeddings(s, size * u), 3, metric=IntrospectiveMetric(tau=max(1.0, size)))
        tau = max(1.0, size) / size
        wanted = nearest(Embeddings(s, u), 3, metric=IntrospectiveMetric(tau=tau) if tau < 1e9 else None)
        assert torch.equal(found.indices, wanted.indices)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().size())
        return out


@pytest.mark.parametrize("metric", [None, IntrospectiveMetric()])
def test_no_tensor_is_larger_than_a_chunk(metric):
    n, d = 20_000, 128
    e = Embeddings(torch.randn(n, d), 0.1 * torch.randn(n, 8))
    search = Search(e, None, metric)
    with Largest() as largest:
        search.top(8, torch.arange(0, n, 8))
    assert largest.bytes <= 4 * neighbours._CHUNK < 0.05 * 4 * n * n
    labels = torch.arange(n) // 5000  # R = 4,999
    relevant = torch.where(torch.arange(n) % 500 == 0, 4999, 0)
    with Largest() as largest:
        retrieval._query_figures(search, labels, labels, relevant, (1,))
    assert largest.bytes <= 4 * neighbours._CHUNK


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": torch.zeros(0, 3)}, "there are no query embeddings"),
        ({"gallery": torch.zeros(0, 3)}, "there are no gallery embeddings"),
        ({"queries": torch.zeros(3)}, r"floats \[images, dimensions\]"),
        ({"queries": torch.zeros(3, 0)}, r"floats \[images, dimensions\]"),
        ({"queries": torch.zeros(3, 3, dtype=torch.long)}, "got torch.int64"),
        ({"queries": [[1.0]]}, "must be a tensor or Embeddings, got list"),
        ({"queries": torch.tensor([[1.0], [math.nan], [math.inf]])}, r"in 2 of 3 rows \(first: row 1\)"),
        ({"gallery": torch.full((2, 3), -math.inf)}, "the gallery embeddings hold NaN or infinity in 2 of 2"),
        ({"gallery": torch.zeros(5, 4)}, "queries have 3 dimensions but the gallery has 4"),
        ({"k": 0}, "k must be a whole number above 0, got 0"),
        ({"k": 1.5}, "k must be a whole number"),
        ({"k": True}, "k must be a whole number"),
        ({"query_ids": [1, 2]}, "2 query ids for 4 query images"),
        ({"gallery_ids": [1, 2]}, "gallery_ids need a gallery"),
        ({"gallery": torch.zeros(2, 3), "gallery_ids": [1, 2]}, "go together"),
        ({"gallery": torch.zeros(1, 3), "query_ids": [1, 2, 3, 4], "gallery_ids": ["1"]}, "all strings"),
        ({"query_ids": [1, "2", 3, 4]}, "all whole numbers or all strings"),
        ({"query_ids": torch.rand(4)}, "all whole numbers or all strings"),
        ({"metric": IntrospectiveMetric()}, "needs Embeddings"),
        ({"metric": IntrospectiveMetric(rule="strict")}, "rules that do: 'similar', 'off'"),
        ({"metric": IntrospectiveMetric(rule="release")}, "rule 'release' does not rank"),
        ({"metric": IntrospectiveMetric(rule="dissimilar")}, "rule 'dissimilar' does not rank"),
    ],
)
def test_bad_input_gives_one_line(arguments, message):
    arguments = {"queries": torch.zeros(4, 3), "k": 2} | arguments
    with pytest.raises(ValueError, match=message) as error:
        nearest(**arguments)
    assert "\n" not in str(error.value)


def test_bad_uncertainty_is_named():
    e = Embeddings(torch.ones(3, 2), torch.tensor([[0.0], [math.nan], [0.0]]))
    with pytest.raises(ValueError, match="query uncertainty embeddings hold NaN or infinity in 1 of 3"):
        nearest(e, 1, metric=IntrospectiveMetric())
    assert nearest(e, 1).indices.tolist() == [[1], [0], [0]]  # plain comparison does not read it
    with pytest.raises(ValueError, match="uncertainty dimensions"):
        nearest(
            Embeddings(torch.ones(3, 2), torch.ones(3, 2)),
            1,
            gallery=Embeddings(torch.ones(3, 2), torch.ones(3, 3)),
            metric=IntrospectiveMetric(),
        )


@pytest.mark.parametrize("columns", [1, 300, 1000, 1007])
@pytest.mark.parametrize("count", [1, 9, 31, 32, 200])
@pytest.mark.parametrize("ties", [True, False])
def test_the_lowest_numbers_are_those_of_a_full_sort(columns, count, ties):
    matrix = torch.randn(7, columns)
    if ties:
        matrix = (matrix * 100).round()
        matrix[1] = math.inf
        matrix[2, 5:] = math.inf
        matrix[3] = -math.inf
    matrix[4] = torch.arange(columns).flip(0)  # the lowest stand at the end
    count = min(count, columns)
    index, values, rest = lowest(matrix, count)
    for row in range(7):
        real = values[row] < math.inf
        chosen = index[row][real].tolist()
        assert chosen == sorted(set(chosen))
        assert torch.equal(matrix[row, chosen], values[row][real])
        wanted = matrix[row].sort().values[:count]
        assert torch.equal(values[row].sort().values[:count], wanted)
        left_out = matrix[row].clone()
        left_out[chosen] = math.inf
        assert left_out.min() >= rest[row]


def test_rows_with_many_equal_numbers_are_sorted_instead():
    matrix = torch.randn(4, 900)
    matrix[2] = 1.0
    assert _by_groups(matrix, 5, 8) is None
    matrix[2] = torch.randn(900)
    index, values, _ = _by_groups(matrix, 5, 8)
    assert torch.equal(values.sort(dim=1).values[:, :5], matrix.sort(dim=1).values[:, :5])
    assert index.shape == values.shape


@pytest.mark.parametrize("metric", [None, IntrospectiveMetric()])
def test_several_threads_find_the_same_as_one(metric, monkeypatch):
    e = Embeddings(torch.randn(700, 16), 0.2 * torch.randn(700, 8))
    labels = torch.arange(700) % 50
    monkeypatch.setattr("idml.evaluation.knn._ROWS", 64)
    wanted = Search(e, None, metric).top(9), evaluate_retrieval(e, labels, metric=metric)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = Search(e, None, metric).top(9), evaluate_retrieval(e, labels, metric=metric)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0].indices, wanted[0].indices)
    assert torch.equal(found[0].distances, wanted[0].distances)
    assert found[1] == wanted[1]

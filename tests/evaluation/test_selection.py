"""The lowest numbers of rows against a full sort; products in blocks and parts on threads against the whole."""

import math
import threading

import pytest
import torch

from idml.embeddings import Embeddings
from idml.evaluation import distance_bounds as products
from idml.evaluation import evaluate_retrieval
from idml.evaluation.distance_bounds import add_product, in_parts
from idml.evaluation.knn import Search, _by_groups, lowest
from idml.metric import IntrospectiveMetric


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3  # as it was before the test's work
    torch.set_num_threads(before)


@pytest.mark.parametrize("columns", [1, 300, 1000, 1007])
@pytest.mark.parametrize("count", [1, 9, 31, 32, 200])
@pytest.mark.parametrize("ties", [True, False])
def test_the_lowest_are_those_of_a_full_sort(columns, count, ties):
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


def test_lists_that_equal_numbers_make_long_are_ranked_instead():
    matrix = torch.randn(4, 900)
    matrix[2] = 1.0
    assert _by_groups(matrix, 5, 8) is None
    matrix[2] = torch.randn(900)
    index, values, _ = _by_groups(matrix, 5, 8)
    assert torch.equal(values.sort(dim=1).values[:, :5], matrix.sort(dim=1).values[:, :5])
    assert index.shape == values.shape


@pytest.mark.parametrize(("rows", "columns"), [(7, 9), (300, 1030), (256, 1024), (1, 2049)])
def test_blocks_make_the_whole_product(rows, columns):
    a, b, start = torch.randn(rows, 5), torch.randn(columns, 5), torch.randn(columns)
    out = torch.full((rows, columns), math.nan)
    assert add_product(start, a, b, -2.0, out) is out
    torch.testing.assert_close(out, start - 2 * a @ b.T)


@pytest.mark.parametrize("metric", [None, IntrospectiveMetric()])
def test_threads_find_what_one_finds(metric, monkeypatch):
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


def test_every_part_runs_once_on_threads_of_its_own(three_threads):
    seen, threads = [], set()
    meeting = threading.Barrier(3, timeout=20)

    def work(start):
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()
        meeting.wait()  # three at a time, or it breaks
        seen.append(start)
        threads.add(threading.get_ident())

    in_parts(work, range(0, 60, 10), "cpu")
    assert sorted(seen) == [0, 10, 20, 30, 40, 50]
    assert threading.get_ident() not in threads


def test_a_failing_part_ends_the_work(three_threads):
    done = []

    def work(start):
        if start == 2:
            raise ValueError("this one")
        done.append(start)

    with pytest.raises(ValueError, match="this one"):
        in_parts(work, range(10_000), "cpu")
    assert len(done) < 10_000
    in_parts(done.append, range(3), "cpu")  # and the next one can begin


def test_a_search_within_a_search_runs_on_its_own_thread(three_threads):
    inner = []

    def work(start):
        in_parts(lambda i: inner.append((start, i)), range(4), "cpu")

    in_parts(work, range(5), "cpu")
    assert sorted(inner) == [(i, j) for i in range(5) for j in range(4)]
    assert not products._alone.locked()


def test_products_are_full_float32_whatever_is_allowed_elsewhere():
    told = []
    torch.set_float32_matmul_precision("medium")
    try:
        in_parts(lambda _: told.append(torch.get_float32_matmul_precision()), range(2), "cpu")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert told == ["highest", "highest"]

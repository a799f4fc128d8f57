"""Parts of a search on threads: each once, in full float32, and nothing is left over."""

import threading

import pytest
import torch

from idml.evaluation import knn
from idml.evaluation.knn import in_parts


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3  # as it was before the test's work
    torch.set_num_threads(before)


def test_every_part_runs_once_on_threads_of_its_own(three_threads):
    seen, threads = [], set()
    meeting = threading.Barrier(3, timeout=300)

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


def test_parts_within_a_part_run_on_its_own_thread(three_threads):
    inner = []

    def work(start):
        in_parts(lambda i: inner.append((start, i)), range(4), "cpu")

    in_parts(work, range(5), "cpu")
    assert sorted(inner) == [(i, j) for i in range(5) for j in range(4)]
    assert not knn._alone.locked()


def test_products_are_full_float32_even_if_less_is_allowed_elsewhere():
    precisions = []
    torch.set_float32_matmul_precision("medium")
    try:
        in_parts(lambda _: precisions.append(torch.get_float32_matmul_precision()), range(2), "cpu")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert precisions == ["highest", "highest"]

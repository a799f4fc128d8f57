import threading
from contextlib import closing

import pytest
import torch

from idml.parallel import run_in_threads, run_on_cores


def test_results_come_in_order_although_later_jobs_end_first():
    second_done = threading.Event()

    def first():
        assert second_done.wait(60)
        return 1

    def second():
        second_done.set()
        return 2

    assert list(run_in_threads([first, second], threads=2)) == [1, 2]


def test_only_a_few_jobs_are_ahead():
    made = []

    def jobs():
        for i in range(100):
            made.append(i)
            yield lambda i=i: i

    with closing(run_in_threads(jobs(), threads=2)) as results:
        assert next(results) == 0
        assert len(made) == 5  # four ahead
    assert len(made) == 5


def test_an_error_ends_the_work():
    done = []

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        list(run_in_threads([fail, *(lambda i=i: done.append(i) for i in range(50))], threads=1))
    assert len(done) < 5


@pytest.mark.parametrize("end", ["done", "error", "closed"])
def test_torch_has_one_thread_within_jobs_and_all_of_them_afterwards(end):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        if end == "error":
            with pytest.raises(ZeroDivisionError):
                list(run_on_cores([lambda: 1 // 0], threads=2))
        else:
            with closing(run_on_cores([torch.get_num_threads] * 9, threads=2)) as found:
                assert next(found) == 1
                assert end == "closed" or set(found) == {1}
        assert torch.get_num_threads() == 3
        assert list(run_in_threads([torch.get_num_threads], threads=1)) == [3]
    finally:
        torch.set_num_threads(before)

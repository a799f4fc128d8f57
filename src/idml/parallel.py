"""Work in threads: on the CPU, decoders, resizing and ONNX Runtime let other threads run beside them."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def run_in_threads(jobs: Iterable[Callable[[], T]], threads: int) -> Generator[T, None, None]:
    """Run jobs in threads and yield their results in the order of the jobs; only a few are ahead of what was yielded.

    A job that raises ends the work with its error. A caller that may stop early closes the iterator
    (``contextlib.closing``): jobs that have not begun are then dropped.

    >>> list(run_in_threads([lambda: 1, lambda: 2, lambda: 3], threads=2))
    [1, 2, 3]
    """
    ahead: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for job in jobs:
                ahead.append(pool.submit(job))
                if len(ahead) > 2 * threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def run_on_cores(jobs: Iterable[Callable[[], T]], threads: int) -> Generator[T, None, None]:
    """Run jobs as `run_in_threads`, where torch uses one thread for each: their tensors are too small for more.

    The number of threads is one for the whole process. So until the last job is done, torch has one thread in all of
    it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # for the threads that start now
    try:
        yield from run_in_threads(jobs, threads)
    finally:
        torch.set_num_threads(before)

"""Large float32 products on the CPU, by whichever BLAS is faster here.

torch brings one BLAS (often MKL) and scipy another (OpenBLAS). Which is faster depends on the processor: on an AMD EPYC
scipy's took two thirds of the time of torch's, elsewhere it may be the other way round. So both are tried once.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_LARGE = 1 << 29  # multiplications that are worth a thought


def add_product(start: Tensor, a: Tensor, b: Tensor, factor: float, out: Tensor) -> Tensor:
    """start + factor·a·bᵀ, from a start [m] (or a number), a [n, d] and b [m, d], written to ``out`` [n, m].

    >>> a, b = torch.eye(2), torch.tensor([[1.0, 2.0]])
    >>> add_product(torch.tensor([5.0]), a, b, -1.0, torch.empty(2, 1))
    tensor([[4.],
            [3.]])
    """
    rows = all(x.is_contiguous() and x.dtype == torch.float32 and x.device.type == "cpu" for x in (a, b, out))
    if rows and a.shape[1] and out.numel() * a.shape[1] >= _LARGE and _scipy_is_faster():
        return _by_scipy(start, a, b, factor, out)
    return torch.addmm(start, a, b.T, alpha=factor, out=out)


def _by_scipy(start: Tensor, a: Tensor, b: Tensor, factor: float, out: Tensor) -> Tensor:
    from scipy.linalg.blas import sgemm

    out.copy_(start.expand_as(out))
    # its matrices go by columns: outᵀ += factor·b·aᵀ, with bᵀ and aᵀ as they lie in memory
    sgemm(factor, b.numpy().T, a.numpy().T, beta=1.0, c=out.numpy().T, trans_a=1, overwrite_c=1)
    return out


@cache
def _scipy_is_faster() -> bool:
    """Both multiply 512 × 512 by 512 × 4,096 three times; the best time counts."""
    try:
        import scipy.linalg.blas  # noqa: F401
    except ImportError:
        return False
    a, b, zero = torch.rand(512, 512), torch.rand(4096, 512), torch.zeros(())
    out = torch.empty(512, 4096)
    best = []
    for multiply in (lambda: torch.addmm(zero, a, b.T, out=out), lambda: _by_scipy(zero, a, b, 1.0, out)):
        taken = []
        for _ in range(4):  # the first one warms up
            started = time.perf_counter()
            multiply()
            taken.append(time.perf_counter() - started)
        best.append(min(taken[1:]))
    return best[1] < 0.9 * best[0]


@contextmanager
def full_float32(device: str) -> Iterator[None]:
    """Products in true float32, whatever the session allows elsewhere, with torch's number of threads."""
    from threadpoolctl import threadpool_limits

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device, enabled=False), threadpool_limits(torch.get_num_threads(), user_api="blas"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)

"""Keeping freed memory: large tensors come and go at every step, and handing each back to the system costs time."""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # the numbers of mallopt(3)


def keep_memory() -> bool:
    """Ask the C library to keep what this process frees for its next tensors; whether it agreed.

    By default glibc maps every large block anew and unmaps it when it is freed, and the system fills each page with
    zeros first: a third of the time of a training step on a CPU (`benchmarks/allocator.py`). The price is that the
    process stays as large as it ever was. Elsewhere than with glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))

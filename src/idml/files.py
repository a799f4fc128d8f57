"""How a file is written, and where files go that can be made again."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_whole(path: Path, data: bytes) -> None:
    """Write a file under a temporary name and rename it: a kill at any moment leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where caches go: $IDML_CACHE, else idml in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("IDML_CACHE"):
        return Path(own)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "idml"
    try:
        return Path.home() / ".cache" / "idml"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "idml"


def cached_array(
    path: Path,
    shape: tuple[int, ...],
    dtype: type[np.generic],
    fill: Callable[[NDArray[Any]], None],
    beside: Path | None = None,
) -> NDArray[Any]:
    """The memory-mapped array in ``path``, an ordinary .npy; if it is not there, made by ``fill`` first.

    It is made under a temporary name and renamed, under a lock: a kill leaves nothing half-made, and a second process
    waits for the first and then uses its file. ``fill`` may write another file ``beside`` it, without which the array
    counts as absent.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        if not (path.exists() and (beside is None or beside.exists())):
            temporary = path.with_suffix(".part")  # the lock's holder is alone, so a leftover may be overwritten
            try:
                array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
                with temporary.open("r+b") as file:  # a disk that is full says so now, not by a bus error later
                    os.posix_fallocate(file.fileno(), 0, temporary.stat().st_size)
                fill(array)
                array.flush()
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if found.shape != shape or found.dtype != dtype:
        raise ValueError(f"the cache {path.name} is not what it should be; delete it")
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

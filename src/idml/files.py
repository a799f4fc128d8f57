"""Files: atomic writes, locks and the cache folder."""

import errno
import fcntl
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
_held: weakref.WeakSet[BinaryIO] = weakref.WeakSet()  # the open lock files of this process


# -------------------- durable writes --------------------


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, force it to disk and rename it.

    If the process is killed at any moment, the old file or the new one is there, never a part of it. Several processes
    and threads may write the same file: each waits for the one before.
    """
    temporary = path.with_name(f".{path.name}.part")
    with _lock_name(temporary) as file:
        try:
            file.truncate(0)  # what a kill left
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
            temporary.replace(path)  # from here on the temporary name belongs to the next one
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def _lock_name(path: Path) -> BinaryIO:
    """Lock the file that has this name when the lock is held: the one before may have renamed or deleted it."""
    while True:
        file = lock_file(path)
        try:
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        file.close()


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk, so that a new file is still there after a power failure.

    A folder that may not be read, or a network drive that cannot do this, is passed over.
    """
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(file)


# -------------------- locks --------------------


def lock_file(path: Path, *, wait: bool = True) -> BinaryIO:
    """Open a file and hold an exclusive lock on it until the returned file is closed; create it if necessary.

    Without ``wait``, a lock that somebody else holds is a ``BlockingIOError``. A forked child does not keep the lock.
    """
    file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    _held.add(file)
    return file


def _close_inherited_locks() -> None:
    for file in list(_held):
        file.close()


os.register_at_fork(after_in_child=_close_inherited_locks)


# -------------------- caches --------------------


def cache_folder() -> Path:
    """Return the folder for caches: $IDML_CACHE, else idml in $XDG_CACHE_HOME or ~/.cache."""
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
    """Return the memory-mapped array in ``path``, an ordinary .npy file; if it is not there, ``fill`` makes it first.

    It is made under a temporary name and renamed, under a lock: a kill leaves no incomplete file, and a second process
    waits for the first and then uses its file. ``fill`` may write another file ``beside`` it; without that file the
    array counts as absent.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(path.with_suffix(".lock")):
        if not (path.exists() and (beside is None or beside.exists())):
            temporary = path.with_suffix(".part")  # only the holder of the lock writes it: overwrite what a kill left
            try:
                array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
                with temporary.open("r+b") as file:  # a full disk is an error here, instead of a bus error later
                    os.posix_fallocate(file.fileno(), 0, temporary.stat().st_size)
                fill(array)
                array.flush()
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    if found.shape != shape or found.dtype != dtype:
        raise ValueError(f"the cache file {path} is damaged; delete it")
    return found

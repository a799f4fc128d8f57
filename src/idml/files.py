"""Files: atomic writes, locks, the cache folder, and records (dataclasses in checked JSON files)."""

import errno
import fcntl
import hashlib
import json
import math
import os
import tempfile
import types
import weakref
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
_held: weakref.WeakSet[BinaryIO] = weakref.WeakSet()  # the open lock files of this process


# -------------------- durable writes --------------------


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, force it to disk and rename it.

    If the process is killed at any moment, the old file or the new one is there, never a part of it.
    """
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


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


# -------------------- records --------------------


def write_record(path: Path, record: object, *, kind: str, version: int) -> None:
    """Write ``record``, made of dataclasses, tuples, dicts, numbers and strings, with its kind and a checksum."""
    content = asdict(record)  # type: ignore[call-overload]
    whole = {"format": kind, "version": version, "checksum": _checksum(content), "content": content}
    write_atomic(path, (json.dumps(whole, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_record(path: Path, record: type[T], *, kind: str, version: int) -> T:
    """Read a record; a damaged file, or one of another kind or version, is a ``ValueError``."""
    try:
        whole = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} is damaged, or not a {kind}: it is not JSON") from None
    if not isinstance(whole, dict) or whole.get("format") != kind:
        raise ValueError(f"{path} is not a file of kind {kind!r}")
    if whole.get("version") != version:
        raise ValueError(
            f"{path} has version {whole.get('version')!r} of {kind!r}; this program reads {version}: make it again"
        )
    if whole.get("checksum") != _checksum(whole.get("content")):
        raise ValueError(f"{path} is damaged: its checksum does not fit its content")
    try:
        value: T = _parse_value(record, whole["content"], "content")
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return value


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _parse_value(kind: Any, x: Any, place: str) -> Any:
    """Convert ``x`` to a value of type ``kind``; a ``ValueError`` names the place that does not fit."""
    if is_dataclass(kind):
        names = {f.name for f in fields(kind)}
        if not isinstance(x, dict) or set(x) != names:
            raise ValueError(f"{place} should hold {', '.join(sorted(names))}")
        hints = get_type_hints(kind)
        values = {name: _parse_value(hints[name], x[name], f"{place}.{name}") for name in names}
        return kind(**values)  # type: ignore[operator]
    origin, inside = get_origin(kind), get_args(kind)
    if origin is types.UnionType:  # only "… | None"
        return None if x is None else _parse_value(inside[0], x, place)
    if origin is tuple and isinstance(x, list) and (inside[-1] is ... or len(inside) == len(x)):
        kinds = [inside[0]] * len(x) if inside[-1] is ... else inside
        return tuple(_parse_value(k, v, place) for k, v in zip(kinds, x, strict=True))
    if origin is dict and isinstance(x, dict):
        return {name: _parse_value(inside[1], v, f"{place}.{name}") for name, v in x.items()}
    if kind is float and type(x) in (int, float) and math.isfinite(x):
        return float(x)
    if kind in (int, str, bool) and type(x) is kind:
        return x
    raise ValueError(f"{place} is not {getattr(kind, '__name__', kind)}")

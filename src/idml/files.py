"""How a file is written, and where files go that can be made again."""

import fcntl
import hashlib
import json
import math
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

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


# -------------------- records --------------------
# Frozen dataclasses in JSON files that say what they are, carry a checksum, and are read back strictly.


T = TypeVar("T")


def write_record(path: Path, record: object, *, kind: str, version: int) -> None:
    """Write ``record``, made of dataclasses, tuples, dicts, numbers and strings."""
    content = asdict(record)  # type: ignore[call-overload]
    whole = {"format": kind, "version": version, "checksum": _checksum(content), "content": content}
    write_whole(path, (json.dumps(whole, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_record(path: Path, record: type[T], *, kind: str, version: int) -> T:
    """Read it back; a file that is damaged, or is something else, is a ``ValueError`` that says so."""
    try:
        whole = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} is damaged, or no {kind}: it is not JSON") from None
    if not isinstance(whole, dict) or whole.get("format") != kind:
        raise ValueError(f"{path} is not a file of kind {kind!r}")
    if whole.get("version") != version:
        raise ValueError(
            f"{path} has version {whole.get('version')!r} of {kind!r}; this program reads {version}: make it anew"
        )
    if whole.get("checksum") != _checksum(whole.get("content")):
        raise ValueError(f"{path} is damaged: its checksum does not fit its content")
    try:
        built: T = _built(record, whole["content"], "content")
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return built


def _checksum(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _built(kind: Any, x: Any, place: str) -> Any:
    """``x`` as a value of type ``kind``, or a ValueError that names the place."""
    if is_dataclass(kind):
        names = {f.name for f in fields(kind)}
        if not isinstance(x, dict) or set(x) != names:
            raise ValueError(f"{place} should hold {', '.join(sorted(names))}")
        hints = get_type_hints(kind)
        return kind(**{name: _built(hints[name], x[name], f"{place}.{name}") for name in names})  # type: ignore[operator]
    origin, inside = get_origin(kind), get_args(kind)
    if origin is types.UnionType:  # only "… | None"
        return None if x is None else _built(inside[0], x, place)
    if origin is tuple and isinstance(x, list) and (inside[-1] is ... or len(inside) == len(x)):
        kinds = [inside[0]] * len(x) if inside[-1] is ... else inside
        return tuple(_built(k, v, place) for k, v in zip(kinds, x, strict=True))
    if origin is dict and isinstance(x, dict):
        return {name: _built(inside[1], v, f"{place}.{name}") for name, v in x.items()}
    if kind is float and type(x) in (int, float) and math.isfinite(x):
        return float(x)
    if kind in (int, str, bool) and type(x) is kind:
        return x
    raise ValueError(f"{place} is not {getattr(kind, '__name__', kind)}")

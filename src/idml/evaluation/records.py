"""Frozen dataclasses in JSON files that say what they are, carry a checksum, and are read back strictly."""

import hashlib
import json
import math
import types
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from idml.files import write_whole

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

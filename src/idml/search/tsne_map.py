"""A map of a gallery: a t-SNE of its items, in which similar images are close together."""

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from heapq import nsmallest
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from idml.files import cache_folder, write_atomic
from idml.report_html import tsne_positions
from idml.search.engines import Item
from idml.search.gallery import Gallery

MAP = "map.json"
_VERSION = 1  # increase it when maps are computed differently
_computing = threading.Lock()  # one map at a time: it uses all cores


class Point(NamedTuple):
    """An item on the map; x and y are in 0 … 1."""

    id: str
    x: float
    y: float
    label: str | None
    level: float


def gallery_map(gallery: Gallery, limit: int = 3000, check: Callable[[], None] = lambda: None) -> list[Point]:
    """Compute the map of up to ``limit`` items, chosen at random.

    The map is stored in the gallery's folder, or in the cache for Milvus, until one of these items changes. Labels are
    always the current ones. ``check`` is called now and then: an error that it raises ends the work.
    """
    if limit < 1:
        raise ValueError(f"a map needs at least one item, got limit={limit}")
    with _computing:
        with gallery.write_lock:
            chosen = nsmallest(limit, gallery.items(), key=_sampling_key)
            ids = [item.id for item in chosen]
            levels, units = gallery.engine.levels(ids).tolist(), gallery.engine.embeddings(ids).unit
        version = _version_of(chosen)
        path = (cache_folder() / f"map-{version}.json") if gallery.roots is None else gallery.roots.folder / MAP
        coordinates = _read(path, version, len(ids))
        if coordinates is None:
            coordinates = _compute(units, check) if ids else []
            _store(path, version, coordinates)
    return [
        Point(item.id, x, y, item.label, level) for item, (x, y), level in zip(chosen, coordinates, levels, strict=True)
    ]


def _sampling_key(item: Item) -> bytes:
    """Return a random but fixed sort key, so that adding or removing an item leaves the rest of the sample as it is."""
    return hashlib.sha256(item.id.encode("utf-8", "surrogateescape")).digest()


def _version_of(items: Sequence[Item]) -> str:
    digest = hashlib.sha256(str(_VERSION).encode())
    for item in items:
        digest.update(f"\n{len(item.id)} {item.id} {item.checksum}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _read(path: Path, version: str, items: int) -> list[tuple[float, float]] | None:
    """Read a stored map; None if it is missing, outdated or damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        stored = json.loads(path.read_bytes())
        if stored["key"] == version and len(stored["places"]) == items:
            return [(float(x), float(y)) for x, y in stored["places"]]
    return None


def _store(path: Path, version: str, coordinates: Sequence[tuple[float, float]]) -> None:
    with suppress(OSError):  # a reader may have no right to write here, or another process is writing
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"key": version, "places": coordinates}).encode())


def _compute(units: Tensor, check: Callable[[], None]) -> list[tuple[float, float]]:
    different = len(units.unique(dim=0))
    xy = _circle(len(units)) if len(units) < 4 or different < 2 else tsne_positions(units.numpy(), check)
    if not np.isfinite(xy).all():
        xy = _circle(len(units))
    low, high = xy.min(axis=0), xy.max(axis=0)
    scale = float((high - low).max()) or 1.0  # the same for x and y, so the map is not stretched
    scaled = 0.5 + (xy - (low + high) / 2) / scale
    return [(x, y) for x, y in scaled.clip(0, 1).round(5).tolist()]


def _circle(items: int) -> NDArray[np.float64]:
    """Place items on a circle, where t-SNE is not possible."""
    angle = 2 * np.pi * np.arange(items) / items
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)

"""A map of a gallery: a t-SNE of its items, in which near means alike."""

import hashlib
import json
import threading
from collections.abc import Sequence
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
_VERSION = 1  # goes up when a map is drawn in another way
_drawing = threading.Lock()  # one map at a time: it takes all cores


class Point(NamedTuple):
    """An item on the map, x and y in 0 … 1."""

    id: str
    x: float
    y: float
    label: str | None
    level: float


def gallery_map(gallery: Gallery, limit: int = 3000) -> list[Point]:
    """The places of up to ``limit`` items, drawn by lot, in the plane.

    The map is kept (in a gallery's folder, or in the cache) until one of these items changes; labels are those of now.
    """
    if limit < 1:
        raise ValueError(f"a map needs at least one item, got limit={limit}")
    with _drawing:
        with gallery.still:
            chosen = nsmallest(limit, gallery.items(), key=_lot)
            ids = [item.id for item in chosen]
            levels, units = gallery.engine.levels(ids).tolist(), gallery.engine.embeddings(ids).unit
        key = _key(chosen)
        path = (cache_folder() / f"map-{key}.json") if gallery.roots is None else gallery.roots.folder / MAP
        places = _read(path, key, len(ids))
        if places is None:
            places = _draw(units) if ids else []
            _keep(path, key, places)
    return [Point(item.id, x, y, item.label, level) for item, (x, y), level in zip(chosen, places, levels, strict=True)]


def _lot(item: Item) -> bytes:
    """The order in which items come onto the map: by chance, but one that comes or goes changes nothing else."""
    return hashlib.sha256(item.id.encode("utf-8", "surrogateescape")).digest()


def _key(items: Sequence[Item]) -> str:
    digest = hashlib.sha256(str(_VERSION).encode())
    for item in items:
        digest.update(f"\n{len(item.id)} {item.id} {item.checksum}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _read(path: Path, key: str, items: int) -> list[tuple[float, float]] | None:
    """A map that was kept; one that is old or damaged counts as absent."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        kept = json.loads(path.read_bytes())
        if kept["key"] == key and len(kept["places"]) == items:
            return [(float(x), float(y)) for x, y in kept["places"]]
    return None


def _keep(path: Path, key: str, places: Sequence[tuple[float, float]]) -> None:
    with suppress(OSError):  # a reader may not be allowed to write here, or another one is at it
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"key": key, "places": places}).encode())


def _draw(units: Tensor) -> list[tuple[float, float]]:
    different = len(units.unique(dim=0))
    xy = _circle(len(units)) if len(units) < 4 or different < 2 else tsne_positions(units.numpy())
    if not np.isfinite(xy).all():
        xy = _circle(len(units))
    low, high = xy.min(axis=0), xy.max(axis=0)
    scale = float((high - low).max()) or 1.0  # one for both: the map is not stretched
    placed = 0.5 + (xy - (low + high) / 2) / scale
    return [(x, y) for x, y in placed.clip(0, 1).round(5).tolist()]


def _circle(items: int) -> NDArray[np.float64]:
    """For items that no map can tell apart."""
    angle = 2 * np.pi * np.arange(items) / items
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)

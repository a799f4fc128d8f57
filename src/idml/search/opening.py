"""Engines by the place of a gallery: a folder, or milvus://host:port/collection (milvuss:// for TLS)."""

from pathlib import Path
from typing import TYPE_CHECKING

from idml.model.model import fingerprint_of
from idml.search.engines import Engine, Properties
from idml.search.engines.embedded import EmbeddedEngine
from idml.search.engines.generations import CURRENT

if TYPE_CHECKING:
    from idml.search.engines.milvus import MilvusEngine

Place = str | Path


def is_milvus(place: Place) -> bool:
    """Whether a gallery is in Milvus; else it is in a folder.

    >>> is_milvus("milvus://localhost:19530/birds"), is_milvus("birds")
    (True, False)
    """
    return str(place).startswith(("milvus://", "milvuss://"))


def is_made(place: Place) -> bool:
    """Whether there is a gallery at this place."""
    if not is_milvus(place):
        return (Path(place) / CURRENT).exists()
    try:
        open_engine(place).close()
    except FileNotFoundError:
        return False
    return True


def create_engine(place: Place, properties: Properties) -> Engine:
    """An empty gallery, open for writing."""
    return _milvus().create(str(place), properties) if is_milvus(place) else EmbeddedEngine.create(place, properties)


def open_engine(place: Place, *, run: Place | None = None, write: bool = False, salvage: bool = False) -> Engine:
    """The engine of a gallery alone, for what needs no model; if a ``run`` is named, it must be the gallery's.

    ``salvage`` is for damaged galleries in folders, see `EmbeddedEngine.open`.
    """
    model = None if run is None else fingerprint_of(run)
    if is_milvus(place):
        return _milvus().open(str(place), model=model, write=write)
    return EmbeddedEngine.open(place, model=model, write=write, salvage=salvage)


def _milvus() -> "type[MilvusEngine]":
    from idml.search.engines.milvus import MilvusEngine

    return MilvusEngine

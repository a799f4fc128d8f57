"""Storage engines of galleries: `base` is their contract, `sqlite` a folder, `milvus` a Milvus collection."""

from idml.search.engines.base import (
    Added,
    DamagedGallery,
    Engine,
    Found,
    Item,
    Problem,
    Properties,
    check_text,
)

__all__ = [
    "Added",
    "DamagedGallery",
    "Engine",
    "Found",
    "Item",
    "Problem",
    "Properties",
    "check_text",
]

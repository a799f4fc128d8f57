"""idml: image search that knows when it does not know.

An implementation of *Introspective Deep Metric Learning for Image Retrieval*. The names below are
resolved on first use, so that ``import idml`` stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from idml.embeddings import Embeddings
    from idml.labels import LabelSets
    from idml.metric import IntrospectiveMetric

__version__ = "0.1.0"
__all__ = ["Embeddings", "IntrospectiveMetric", "LabelSets", "__version__"]

_HOME = {
    "Embeddings": "idml.embeddings",
    "IntrospectiveMetric": "idml.metric",
    "LabelSets": "idml.labels",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'idml' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""idml: image search that knows when it does not know.

An implementation of *Introspective Deep Metric Learning for Image Retrieval*. The names below are imported on first
use, so ``import idml`` is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from idml.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from idml.embeddings import Embeddings
    from idml.evaluation.evaluate import evaluate_run as evaluate
    from idml.labels import LabelSets
    from idml.metric import IntrospectiveMetric
    from idml.model.model import load_model
    from idml.search.gallery import Gallery
    from idml.search.indexing import Indexed

__all__ = [
    "Embeddings",
    "Gallery",
    "IntrospectiveMetric",
    "LabelSets",
    "__version__",
    "audit",
    "calibrate",
    "evaluate",
    "index",
    "load_model",
    "train",
]

_HOMES = {
    "Embeddings": ("idml.embeddings", "Embeddings"),
    "Gallery": ("idml.search.gallery", "Gallery"),
    "IntrospectiveMetric": ("idml.metric", "IntrospectiveMetric"),
    "LabelSets": ("idml.labels", "LabelSets"),
    "evaluate": ("idml.evaluation.evaluate", "evaluate_run"),
    "load_model": ("idml.model.model", "load_model"),
}


def train(*, resume: bool = False, **options: Any) -> dict[str, Any]:
    """Train a model and return its figures.

    The keywords are the options of ``idml train``: ``idml.train(data="glyphs", out="runs/glyphs", method="idml")``.
    With ``resume`` the run in ``out`` continues.
    """
    from idml.training.config import from_dict
    from idml.training.loop import train as train_config

    return train_config(from_dict(options), resume=resume)


def index(images: "str | Path", to: "str | Path", *, model: "str | Path | None" = None) -> "Indexed":
    """Add a folder of images to the gallery ``to``, and bring it up to date; labels come from the sub-folders.

    A new gallery uses the pretrained trunk, or the run that ``model`` names. An existing one keeps its model.
    """
    from pathlib import Path

    from idml.search.gallery import open_or_create
    from idml.search.indexing import index_folder

    with open_or_create(to, model) as gallery:
        return index_folder(gallery, Path(images))


def calibrate(gallery: "str | Path", **options: Any) -> dict[str, Any]:
    """Calibrate a gallery on itself and store what may be promised in it; see `calibrate_gallery`."""
    from idml.search.gallery_calibration import calibrate_gallery
    from idml.training.refit import assign_folds, refit_heads

    return calibrate_gallery(gallery, refit=refit_heads, assign_folds=assign_folds, **options)


def __getattr__(name: str) -> Any:
    if name == "audit":  # a package that can be called
        return import_module("idml.audit")
    if name not in _HOMES:
        raise AttributeError(f"module 'idml' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)

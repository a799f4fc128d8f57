"""idml: image search that knows when it does not know.

An implementation of *Introspective Deep Metric Learning for Image Retrieval*. The names below are imported on first
use, so ``import idml`` is cheap.

    train, evaluate, audit         train a model, measure it, look for label errors with it
    load_model, embed              embed images; write embeddings to a file
    index, Gallery, calibrate      a collection of images to search, and what its answers may promise
    Embeddings, LabelSets, IntrospectiveMetric, build_loss
                                   the parts of the method, for your own training loop
    evaluate_retrieval, evaluate_uncertainty
                                   figures of embeddings and of scores
"""

from importlib import import_module
from inspect import Parameter, Signature
from sys import modules
from typing import TYPE_CHECKING, Any, Unpack

from idml.training.keywords import TrainOptions
from idml.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from idml.audit.run import audit_run as audit
    from idml.embeddings import Embeddings
    from idml.evaluation.evaluate import evaluate_run as evaluate
    from idml.evaluation.retrieval import evaluate_retrieval
    from idml.evaluation.uncertainty import evaluate_uncertainty
    from idml.labels import LabelSets
    from idml.losses import build_loss
    from idml.metric import IntrospectiveMetric
    from idml.model.model import load_model
    from idml.progress import Note, Progress
    from idml.search.embed import embed_images as embed
    from idml.search.embedder import Runtime
    from idml.search.gallery import Gallery
    from idml.search.gallery_calibration import CalibrationResult
    from idml.search.indexing import Indexed
    from idml.training.loop import TrainResult

__all__ = [
    "Embeddings",
    "Gallery",
    "IntrospectiveMetric",
    "LabelSets",
    "__version__",
    "audit",
    "build_loss",
    "calibrate",
    "embed",
    "evaluate",
    "evaluate_retrieval",
    "evaluate_uncertainty",
    "index",
    "load_model",
    "train",
]

_HOMES = {
    "Embeddings": ("idml.embeddings", "Embeddings"),
    "Gallery": ("idml.search.gallery", "Gallery"),
    "IntrospectiveMetric": ("idml.metric", "IntrospectiveMetric"),
    "LabelSets": ("idml.labels", "LabelSets"),
    "build_loss": ("idml.losses", "build_loss"),
    "embed": ("idml.search.embed", "embed_images"),
    "evaluate": ("idml.evaluation.evaluate", "evaluate_run"),
    "evaluate_retrieval": ("idml.evaluation.retrieval", "evaluate_retrieval"),
    "evaluate_uncertainty": ("idml.evaluation.uncertainty", "evaluate_uncertainty"),
    "load_model": ("idml.model.model", "load_model"),
}


def train(
    *,
    resume: bool = False,
    report: "Progress | None" = None,
    note: "Note | None" = None,
    **options: Unpack[TrainOptions],
) -> "TrainResult":
    """Train a model, leave it in the directory ``out``, and return its figures on the test classes.

    The keywords are the options of ``idml train``: ``idml.train(data="folder:photos", out="runs/photos",
    method="idml", epochs=20)``. ``data`` and ``out`` are required; `idml train --help` explains the others.

    Args:
        resume: continue the run in ``out``.
        report: called with every row of the log, a dictionary.
        note: called with lines that a person should see.
        **options: see `idml.training.keywords.TrainOptions`.
    """
    from pathlib import Path

    from idml.progress import silent
    from idml.training.checkpoint import check_resumable
    from idml.training.config import from_dict
    from idml.training.loop import train as train_config

    config = from_dict(options)
    if resume:
        check_resumable(Path(config.out), note or silent)
    return train_config(config, resume=resume, report=report or silent, note=note or silent)


_named = [*Signature.from_callable(train).parameters.values()][:-1]  # editors complete the options by their names
_named += [
    Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in TrainOptions.__annotations__.items()
]
train.__signature__ = Signature(_named, return_annotation="TrainResult")  # type: ignore[attr-defined]
del _named


def index(
    images: "str | Path", to: "str | Path", *, model: "str | Path | None" = None, maps: bool = False
) -> "Indexed":
    """Add a folder of images to the gallery ``to``, and bring it up to date; labels come from the sub-folders.

    A new gallery uses the pretrained trunk, or the run that ``model`` names. An existing one keeps its model. With
    ``maps``, position maps of all its images are stored too, for ``Gallery.search(…, rerank="diml")``.
    """
    from pathlib import Path

    from idml.search.gallery import gallery_exists, open_or_create
    from idml.search.indexing import add_maps, check_folder, index_folder

    if not gallery_exists(to):
        check_folder(Path(images))  # before a gallery is made for nothing
    with open_or_create(to, model) as gallery:
        if maps:
            gallery.require_folder()  # before the images are embedded
        done = index_folder(gallery, Path(images))
        if maps:
            add_maps(gallery)
        return done


def calibrate(
    gallery: "str | Path",
    *,
    queries: "str | Path | None" = None,
    unknown: float = 0.25,
    keep_copies: bool = False,
    run: "str | Path | None" = None,
    runtime: "Runtime" = "auto",
    seed: int = 0,
    progress: "Progress | None" = None,
    note: "Note | None" = None,
) -> "CalibrationResult":
    """Calibrate a gallery on itself, or on your queries, and store what may be promised in it.

    Args:
        gallery: a folder, or milvus://host:port/collection.
        queries: a folder of images with one sub-folder for each label; by default the gallery's own images.
        unknown: the share of queries that show nothing of the gallery. The promises hold for this share or less.
        keep_copies: a query may find other images with the same bytes, because new pictures will find such images too.
        run: the run of a Milvus gallery.
        runtime: the library that runs the model.
        seed: of the draws.
        progress: called with rows of how many images are done.
        note: called with lines for the user.
    """
    from idml.progress import silent
    from idml.search.gallery_calibration import calibrate_gallery
    from idml.training.refit import assign_folds, refit_heads

    return calibrate_gallery(
        gallery,
        queries=queries,
        unknown=unknown,
        keep_copies=keep_copies,
        run=run,
        runtime=runtime,
        seed=seed,
        refit=refit_heads,
        assign_folds=assign_folds,
        progress=progress or silent,
        note=note or silent,
    )


def __getattr__(name: str) -> Any:
    if name == "audit":  # a package that can be called
        return import_module("idml.audit")
    if name not in _HOMES:
        raise AttributeError(f"module 'idml' has no attribute {name!r}", name=name, obj=modules[__name__])
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)

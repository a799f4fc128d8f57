"""Embedders: the model of a run, or the pretrained trunk, run by ONNX Runtime or by torch."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
from PIL import Image
from torch import Tensor

from idml.data.images import crop_for_test
from idml.embeddings import Embeddings
from idml.files import cache_folder
from idml.model.inference import export_pays
from idml.model.model import (
    FILE,
    PRETRAINED,
    Model,
    best_device,
    fingerprint,
    fingerprint_of,
    load_model,
    pretrained_trunk,
    resolve_model,
)
from idml.model.onnx import BATCH as ONNX_BATCH
from idml.model.onnx import FORMAT, ONNX, OnnxFile, export_model, export_once, find_onnx, open_session, run_session

BATCH = 64
MANY = 10_000  # the images that an index or a service is expected to embed
Runtime = Literal["auto", "torch", "onnx"]
_log = logging.getLogger(__name__)


class Embedder(Protocol):
    """What a gallery needs from a model. Threads may share one."""

    fingerprint: str
    """The fingerprint of the model; a gallery is bound to it."""
    dimensions: int
    """Dimensions of s."""
    uncertainty: int
    """Dimensions of u; 0 if the model has no u."""
    batch: int
    """How many images are best embedded together."""

    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """Embed one or more RGB images, as `decode_image` returns them; the result is on the CPU."""
        ...


def open_embedder(run: str | Path, *, runtime: Runtime = "auto", images: int = 0) -> Embedder:
    """Open the embedder of a run folder, a model.safetensors, ``pretrained`` (only the default trunk) or ``timm:NAME``.

    Args:
        run: the model.
        runtime: the library that runs the model. "auto" means ONNX Runtime on a CPU if there is an exported model or an
            export pays (see `idml.model.inference`), and torch otherwise.
        images: about how many images will be embedded; with 0, the model is not exported for them.
    """
    if runtime not in get_args(Runtime):
        raise ValueError(f"unknown runtime {runtime!r}; use {', '.join(get_args(Runtime))}")
    run = resolve_model(run)
    if runtime == "onnx":
        return OnnxEmbedder(run)
    if runtime == "torch" or best_device() != "cpu":
        return _open_torch(run)
    file = _find_exported(run, fingerprint_of(run))
    by_torch = _open_torch(run) if file is None else None
    if by_torch is None or (images and export_pays(by_torch.trunk, images)):
        try:
            return OnnxEmbedder(run, file)
        except ValueError as reason:
            _log.warning("torch runs the model: %s", reason)
    return by_torch or _open_torch(run)


def prepare_image(image: Image.Image, size: int, *, grey: bool = False) -> Tensor:
    """Convert an RGB image to uint8 [3, size, size] (or [1, …]), exactly as the evaluation does with test images.

    >>> prepare_image(Image.new("RGB", (640, 480), "white"), 28).shape
    torch.Size([3, 28, 28])
    """
    if image.mode != "RGB":
        raise ValueError(f"images must be RGB, as decode_image returns them; this one is {image.mode}")
    return crop_for_test(image, size, grey=grey)


# -------------------- torch --------------------


def _open_torch(run: str | Path) -> "_RunEmbedder | _PretrainedEmbedder":
    return _PretrainedEmbedder() if str(run) == PRETRAINED else _RunEmbedder(Path(run))


class _RunEmbedder:
    """The model of a run, run by torch."""

    batch = BATCH

    def __init__(self, run: Path) -> None:
        path = run / FILE if run.is_dir() else run
        self.fingerprint = fingerprint(path)
        self._lock = threading.Lock()  # torch uses all cores for one batch: two at once are slower
        self._model: Model = load_model(path)
        self.trunk = self._model.trunk
        self.dimensions = self._model.config.embedding_dim
        self.uncertainty = 0 if self._model.config.head == "none" else self.dimensions
        self._model.to(best_device())
        grey, size = self._model.config.in_chans == 1, self._model.trunk.image_size
        self._prepare: Callable[[Image.Image], Tensor] = lambda image: prepare_image(image, size, grey=grey)
        # An untrained model sets the scale of u from the first image it sees. Use the same image in every process.
        self.embed([Image.new("RGB", (size, size), "grey")])

    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """Embed RGB images."""
        batches = _batches(images, self._prepare)
        with self._lock:
            return Embeddings.cat([self._model.embed(batch) for batch in batches])


class _PretrainedEmbedder:
    """The default trunk: its features are s, and there is no u."""

    batch = BATCH

    def __init__(self) -> None:
        self.trunk, self.fingerprint = pretrained_trunk(), fingerprint_of(PRETRAINED)
        self._lock = threading.Lock()  # as in `_RunEmbedder`
        self.dimensions, self.uncertainty = self.trunk.width, 0

    @torch.no_grad()
    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """Compute the features of RGB images."""
        device, size = self.trunk.mean.device, self.trunk.image_size
        batches = _batches(images, lambda image: prepare_image(image, size))
        with self._lock:
            return Embeddings.certain(torch.cat([self.trunk(batch.to(device) / 255).cpu() for batch in batches]))


def _batches(images: Sequence[Image.Image], prepare: Callable[[Image.Image], Tensor]) -> list[Tensor]:
    if len(images) == 0:
        raise ValueError("there is no image to embed")
    stacked = torch.stack([prepare(image) for image in images])
    return list(stacked.split(BATCH))


# -------------------- ONNX Runtime --------------------


class OnnxEmbedder:
    """An embedder that runs the exported model with ONNX Runtime.

    ``run`` is a run folder, a model.safetensors or ``pretrained``; ``file`` is its exported model, if that is known.
    Otherwise a stored one is used if it was exported from this model, or the model is exported now. The fingerprint is
    that of the torch embedder, so both can search the same galleries. ``threads`` is as in `open_session`.
    """

    batch = ONNX_BATCH

    def __init__(self, run: str | Path, file: OnnxFile | None = None, *, threads: int | None = None) -> None:
        self.run, self.fingerprint = run, fingerprint_of(run)
        file = file or _find_exported(run, self.fingerprint)
        if file is None:
            file = export_once(_places(run, self.fingerprint), self.fingerprint, lambda: export_model(run))
        self._session = open_session(file.data, threads)
        widths = {output.name: int(output.shape[1]) for output in self._session.get_outputs()}
        self.dimensions, self.uncertainty = widths["semantic"], widths.get("uncertainty", 0)
        self._size, self._grey = int(file.config.image_size or 0), file.config.in_chans == 1

    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """Embed RGB images."""
        if len(images) == 0:
            raise ValueError("there is no image to embed")
        starts = range(0, len(images), ONNX_BATCH)
        return Embeddings.cat([self._embed_batch(images[i : i + ONNX_BATCH]) for i in starts])

    def _embed_batch(self, images: Sequence[Image.Image]) -> Embeddings:
        batch = torch.stack([prepare_image(image, self._size, grey=self._grey) for image in images])
        outputs = run_session(self._session, batch)
        return Embeddings(**outputs) if self.uncertainty else Embeddings.certain(outputs["semantic"])


def share_cores(embedder: Embedder, callers: int) -> Embedder:
    """An embedder for so many callers, each in a thread: with ONNX Runtime each has its share of the cores."""
    if callers > 1 and type(embedder) is OnnxEmbedder:
        return OnnxEmbedder(embedder.run, threads=max(1, torch.get_num_threads() // callers))
    return embedder


def _find_exported(run: str | Path, fingerprint: str) -> OnnxFile | None:
    """Return a stored export of the model of ``run``, if there is one that fits."""
    places = [place for place in _places(run, fingerprint) if place.is_file()]
    return find_onnx(places, fingerprint) if places else None


def _places(run: str | Path, fingerprint: str) -> list[Path]:
    """Return where an exported model may be: beside the model; in the cache if the run cannot be written."""
    path = Path(run)
    folder = path if path.is_dir() else path.parent
    beside = [] if str(run) == PRETRAINED else [folder / ONNX]
    if beside and os.access(folder, os.W_OK):
        return beside
    return [*beside, cache_folder() / f"model-{fingerprint}-v{FORMAT}.onnx"]

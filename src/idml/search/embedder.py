"""What turns images into embeddings for a gallery: the model of a run, or the pretrained trunk as it is."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from PIL import Image
from torch import Tensor

from idml.data.images import as_tested
from idml.embeddings import Embeddings
from idml.files import cache_folder, lock_file
from idml.model.model import (
    FILE,
    PRETRAINED,
    Model,
    best_device,
    fingerprint,
    fingerprint_of,
    load_model,
    pretrained_trunk,
)
from idml.model.onnx import FORMAT, OnnxFile, export_onnx, open_session, read_onnx, require, run_session

ONNX = "model.onnx"  # beside a model: what `idml export` made of it
BATCH = 64
Runtime = Literal["torch", "onnx"]


class Embedder(Protocol):
    """What a gallery asks of a model. Threads may share one."""

    fingerprint: str
    """Of the model: a gallery is bound to it."""
    dimensions: int
    """Of s."""
    uncertainty: int
    """Dimensions of u; 0 where the model has none."""

    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """The embeddings, on the CPU, of one or more RGB images as `decode_image` gives them."""
        ...


def open_embedder(run: str | Path, *, runtime: Runtime = "torch") -> Embedder:
    """The embedder of a run folder, of a model.safetensors, or of the word ``pretrained``: the default trunk alone.

    With ``runtime="onnx"`` ONNX Runtime runs it, on the CPU: the exported model of the run, or one exported now.
    """
    if runtime not in ("torch", "onnx"):
        raise ValueError(f"unknown runtime {runtime!r}; known are torch and onnx")
    if runtime == "onnx":
        return OnnxEmbedder(run)
    return _PretrainedEmbedder() if str(run) == PRETRAINED else _RunEmbedder(Path(run))


def prepared(image: Image.Image, size: int, *, grey: bool = False) -> Tensor:
    """An RGB image as uint8 [3, size, size] (or [1, …]), exactly as the evaluation sees the images of a test.

    >>> prepared(Image.new("RGB", (640, 480), "white"), 28).shape
    torch.Size([3, 28, 28])
    """
    if image.mode != "RGB":
        raise ValueError(f"images must be RGB, as decode_image gives them; this one is {image.mode}")
    return as_tested(image, size, grey=grey)


class _RunEmbedder:
    """The model of a run, by torch."""

    def __init__(self, run: Path) -> None:
        path = run / FILE if run.is_dir() else run
        self.fingerprint = fingerprint(path)
        self._model: Model = load_model(path)
        self.dimensions = self.uncertainty = self._model.config.embedding_dim
        self._model.to(best_device())
        grey, size = self._model.config.in_chans == 1, self._model.trunk.image_size
        self._prepare: Callable[[Image.Image], Tensor] = lambda image: prepared(image, size, grey=grey)
        # A model that was never trained fixes the scale of u on the first image it sees: let that be the same one in
        # every process.
        self.embed([Image.new("RGB", (size, size), "grey")])

    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """The embeddings of RGB images."""
        return Embeddings.cat([self._model.embed(batch) for batch in _batches(images, self._prepare)])


class _PretrainedEmbedder:
    """The default trunk: its features are s, and there is no u."""

    def __init__(self) -> None:
        self._trunk, self.fingerprint = pretrained_trunk()
        self.dimensions, self.uncertainty = self._trunk.width, 0

    @torch.no_grad()
    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """The features of RGB images."""
        device, size = self._trunk.mean.device, self._trunk.image_size
        batches = _batches(images, lambda image: prepared(image, size))
        return Embeddings.certain(torch.cat([self._trunk(batch.to(device) / 255).cpu() for batch in batches]))


def _batches(images: Sequence[Image.Image], prepare: Callable[[Image.Image], Tensor]) -> "list[Tensor]":
    if len(images) == 0:
        raise ValueError("there is no image to embed")
    stacked = torch.stack([prepare(image) for image in images])
    return list(stacked.split(BATCH))


# -------------------- onnx_embedder --------------------
# Embeddings by ONNX Runtime, which needs less time on a CPU than torch (docs/export.md has the figures).


ONNX_BATCH = 16  # images at once: 64 were at most 5 % faster (lite0 at 112 px, conv4)
_log = logging.getLogger(__name__)


class OnnxEmbedder:
    """An `idml.search.embedder.Embedder` that runs the exported model.

    ``run`` is a run folder, a model.safetensors or ``pretrained``. The model.onnx beside the model is used if it was
    made from it; if there is none, or it is damaged or of another model, which a logged line says, the model is
    exported into the cache once. ``fingerprint`` is the torch embedder's, so galleries of one can be searched with the
    other.
    """

    def __init__(self, run: str | Path) -> None:
        require("onnx", "onnxruntime")
        self.fingerprint = fingerprint_of(run)
        file = _exported(run, self.fingerprint)
        self._session = open_session(file.data)
        widths = {output.name: int(output.shape[1]) for output in self._session.get_outputs()}
        self.dimensions, self.uncertainty = widths["semantic"], widths.get("uncertainty", 0)
        self._size, self._grey = int(file.config.image_size or 0), file.config.in_chans == 1

    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """The embeddings of RGB images, as the test protocol sees them."""
        if len(images) == 0:
            raise ValueError("there is no image to embed")
        return Embeddings.cat([self._embedded(images[i : i + ONNX_BATCH]) for i in range(0, len(images), ONNX_BATCH)])

    def _embedded(self, images: Sequence[Image.Image]) -> Embeddings:
        batch = torch.stack([prepared(image, self._size, grey=self._grey) for image in images])
        found = run_session(self._session, batch)
        return Embeddings(**found) if self.uncertainty else Embeddings.certain(found["semantic"])


def _exported(run: str | Path, fingerprint: str) -> OnnxFile:
    """The file beside the model, else the cached one, else a new one in the cache."""
    path = Path(run)
    beside = (path if path.is_dir() else path.parent) / ONNX
    file = None if str(run) == PRETRAINED else _fitting(beside, fingerprint)
    if file is not None:
        return file
    cached = cache_folder() / f"model-{fingerprint}-v{FORMAT}.onnx"
    cached.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(cached.with_suffix(".lock")):  # a second process waits for the first and uses its file
        file = _fitting(cached, fingerprint)
        if file is None:
            export_onnx(run, cached)
            file = read_onnx(cached)
    if file.fingerprint != fingerprint:
        raise ValueError(f"the model of {run} changed while it was exported; try again")
    return file


def _fitting(path: Path, fingerprint: str) -> OnnxFile | None:
    """The file if it is there, sound, and made from the model with this fingerprint; why it is not used is logged."""
    if not path.is_file():
        return None
    try:
        file = read_onnx(path)
        if file.fingerprint == fingerprint:
            return file
        reason = f"{path} was made from another model ({file.fingerprint}, not {fingerprint})"
    except (ValueError, OSError) as error:
        reason = str(error)
    _log.warning("%s: the model is exported anew into the cache", reason)
    return None

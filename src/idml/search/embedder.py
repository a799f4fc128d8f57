"""Embedders: the model of a run, or the pretrained trunk, run by torch or by ONNX Runtime.

ONNX Runtime needs less time on a CPU (docs/export.md has the figures).
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from PIL import Image
from torch import Tensor

from idml.data.images import crop_for_test
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

ONNX = "model.onnx"  # the file beside a model that `idml export` writes
BATCH = 64
ONNX_BATCH = 16  # batches of 64 were at most 5 % faster (lite0 at 112 px, conv4)
Runtime = Literal["torch", "onnx"]
_log = logging.getLogger(__name__)


class Embedder(Protocol):
    """What a gallery needs from a model. Threads may share one."""

    fingerprint: str
    """The fingerprint of the model; a gallery is bound to it."""
    dimensions: int
    """Dimensions of s."""
    uncertainty: int
    """Dimensions of u; 0 if the model has no u."""

    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """Embed one or more RGB images, as `decode_image` returns them; the result is on the CPU."""
        ...


def open_embedder(run: str | Path, *, runtime: Runtime = "torch") -> Embedder:
    """Open the embedder of a run folder, of a model.safetensors, or of ``pretrained`` (only the default trunk).

    With ``runtime="onnx"``, ONNX Runtime runs the model on the CPU: the exported model of the run, or one exported now.
    """
    if runtime not in ("torch", "onnx"):
        raise ValueError(f"unknown runtime {runtime!r}; use torch or onnx")
    if runtime == "onnx":
        return OnnxEmbedder(run)
    return _PretrainedEmbedder() if str(run) == PRETRAINED else _RunEmbedder(Path(run))


def prepare_image(image: Image.Image, size: int, *, grey: bool = False) -> Tensor:
    """Convert an RGB image to uint8 [3, size, size] (or [1, …]), exactly as the evaluation does with test images.

    >>> prepare_image(Image.new("RGB", (640, 480), "white"), 28).shape
    torch.Size([3, 28, 28])
    """
    if image.mode != "RGB":
        raise ValueError(f"images must be RGB, as decode_image returns them; this one is {image.mode}")
    return crop_for_test(image, size, grey=grey)


# -------------------- torch --------------------


class _RunEmbedder:
    """The model of a run, run by torch."""

    def __init__(self, run: Path) -> None:
        path = run / FILE if run.is_dir() else run
        self.fingerprint = fingerprint(path)
        self._model: Model = load_model(path)
        self.dimensions = self.uncertainty = self._model.config.embedding_dim
        self._model.to(best_device())
        grey, size = self._model.config.in_chans == 1, self._model.trunk.image_size
        self._prepare: Callable[[Image.Image], Tensor] = lambda image: prepare_image(image, size, grey=grey)
        # An untrained model sets the scale of u from the first image it sees. Use the same image in every process.
        self.embed([Image.new("RGB", (size, size), "grey")])

    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """Embed RGB images."""
        return Embeddings.cat([self._model.embed(batch) for batch in _batches(images, self._prepare)])


class _PretrainedEmbedder:
    """The default trunk: its features are s, and there is no u."""

    def __init__(self) -> None:
        self._trunk, self.fingerprint = pretrained_trunk()
        self.dimensions, self.uncertainty = self._trunk.width, 0

    @torch.no_grad()
    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """Compute the features of RGB images."""
        device, size = self._trunk.mean.device, self._trunk.image_size
        batches = _batches(images, lambda image: prepare_image(image, size))
        return Embeddings.certain(torch.cat([self._trunk(batch.to(device) / 255).cpu() for batch in batches]))


def _batches(images: Sequence[Image.Image], prepare: Callable[[Image.Image], Tensor]) -> list[Tensor]:
    if len(images) == 0:
        raise ValueError("there is no image to embed")
    stacked = torch.stack([prepare(image) for image in images])
    return list(stacked.split(BATCH))


# -------------------- ONNX Runtime --------------------


class OnnxEmbedder:
    """An embedder that runs the exported model with ONNX Runtime.

    ``run`` is a run folder, a model.safetensors or ``pretrained``. The model.onnx beside the model is used if it was
    exported from this model. If it is missing, damaged or from another model, the model is exported once into the
    cache, and the log says why. The fingerprint is that of the torch embedder, so both can search the same galleries.
    """

    def __init__(self, run: str | Path) -> None:
        require("onnx", "onnxruntime")
        self.fingerprint = fingerprint_of(run)
        file = _find_or_export(run, self.fingerprint)
        self._session = open_session(file.data)
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


def _find_or_export(run: str | Path, fingerprint: str) -> OnnxFile:
    """Return the file beside the model, else the cached one, else export the model into the cache."""
    path = Path(run)
    beside = (path if path.is_dir() else path.parent) / ONNX
    file = None if str(run) == PRETRAINED else _read_matching(beside, fingerprint)
    if file is not None:
        return file
    cached = cache_folder() / f"model-{fingerprint}-v{FORMAT}.onnx"
    cached.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(cached.with_suffix(".lock")):  # a second process waits for the first and uses its file
        file = _read_matching(cached, fingerprint)
        if file is None:
            export_onnx(run, cached)
            file = read_onnx(cached)
    if file.fingerprint != fingerprint:
        raise ValueError(f"the model of {run} changed during the export; try again")
    return file


def _read_matching(path: Path, fingerprint: str) -> OnnxFile | None:
    """Read the file if it exists, is undamaged and was exported from this model; otherwise log why it is not used."""
    if not path.is_file():
        return None
    try:
        file = read_onnx(path)
        if file.fingerprint == fingerprint:
            return file
        reason = f"{path} was made from another model ({file.fingerprint}, not {fingerprint})"
    except (ValueError, OSError) as error:
        reason = str(error)
    _log.warning("%s: exporting the model again into the cache", reason)
    return None

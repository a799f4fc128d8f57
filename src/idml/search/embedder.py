"""What turns images into embeddings for a gallery: the model of a run, or the pretrained trunk as it is."""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol

import torch
from PIL import Image
from torch import Tensor

from idml.data.images import as_tested
from idml.embeddings import Embeddings
from idml.model.backbones import PACKAGED, Trunk, build_trunk
from idml.model.model import FILE, Model, fingerprint, load_model

PRETRAINED = "pretrained"
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
        from idml.search.onnx_embedder import OnnxEmbedder

        return OnnxEmbedder(run)
    return _PretrainedEmbedder() if str(run) == PRETRAINED else _RunEmbedder(Path(run))


def fingerprint_of(run: str | Path) -> str:
    """The fingerprint that the embedder of ``run`` has."""
    return _pretrained()[1] if str(run) == PRETRAINED else fingerprint(run)


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
        self._model.to(_device())
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
        self._trunk, self.fingerprint = _pretrained()
        self.dimensions, self.uncertainty = self._trunk.width, 0

    @torch.no_grad()
    def embed(self, images: Sequence[Image.Image]) -> Embeddings:
        """The features of RGB images."""
        device, size = self._trunk.mean.device, self._trunk.image_size
        batches = _batches(images, lambda image: prepared(image, size))
        return Embeddings.certain(torch.cat([self._trunk(batch.to(device) / 255).cpu() for batch in batches]))


@lru_cache(maxsize=1)
def _pretrained() -> tuple[Trunk, str]:
    """The trunk, and a hash of its name and weights."""
    trunk = build_trunk(PACKAGED, pretrained=True).eval()
    digest = hashlib.sha256(PACKAGED.encode())
    for name, tensor in trunk.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return trunk.to(_device()), digest.hexdigest()[:16]


def _batches(images: Sequence[Image.Image], prepare: Callable[[Image.Image], Tensor]) -> "list[Tensor]":
    if len(images) == 0:
        raise ValueError("there is no image to embed")
    stacked = torch.stack([prepare(image) for image in images])
    return list(stacked.split(BATCH))


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"

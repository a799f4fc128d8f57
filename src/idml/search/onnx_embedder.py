"""Embeddings by ONNX Runtime, which needs less time on a CPU than torch (docs/export.md has the figures)."""

import fcntl
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from idml.embeddings import Embeddings
from idml.files import cache_folder
from idml.model.onnx import FORMAT, OnnxFile, export_onnx, open_session, read_onnx, require, run_session
from idml.search.embedder import ONNX, PRETRAINED, fingerprint_of, prepared

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
    with cached.with_suffix(".lock").open("w") as lock:  # a second process waits for the first and uses its file
        fcntl.flock(lock, fcntl.LOCK_EX)
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

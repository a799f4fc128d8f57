"""A cache of what a trunk computes from the images of a data set: computed once for each trunk, view and runtime."""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.data.augment import CLEAN, View
from idml.data.pixel_cache import Pixels
from idml.embeddings import Embeddings
from idml.files import cache_folder, cached_array
from idml.model.inference import TrunkSession, export_pays
from idml.model.model import Model, evaluation_mode, hash_weights
from idml.parallel import run_in_threads, run_on_cores
from idml.progress import Count, silent

VERSION = 2
_log = logging.getLogger(__name__)


class FeatureCache:
    """Rows that are computed once for every image: the trunk's features, or (``last``) the input of its last stage.

    ONNX Runtime computes the features if ``images``, the number of images ahead, is large enough. Rows of the two
    runtimes differ in the last bits and are stored in files of their own. With ``keep`` the exported trunk is stored
    too. Activations come from torch and are stored in float16, half the size; docs/training.md says what that costs.
    With ``grid`` the pooled features are followed by those of a map of grid × grid positions, as activations are.
    """

    def __init__(self, model: Model, *, images: int, last: bool = False, keep: bool = True, grid: int = 0) -> None:
        self.model, self.last, self.keep, self.grid = model, last, keep, 0 if last else grid
        self.name = "activations-" if last else "maps-" if self.grid else ""
        self.dtype: type[np.generic] = np.float16 if last or self.grid else np.float32
        size = model.trunk.image_size
        probe = torch.zeros(1, model.config.in_chans, size, size, device=model.device)
        exportable = not last and not self.grid and model.config.branching == "none"
        self.runtime = "onnx" if exportable and export_pays(model.trunk, images) else "torch"
        self.session: TrunkSession | None = None
        width = model.trunk.width * (1 + self.grid**2)
        self.shape: tuple[int, ...] = self.compute(probe).shape[1:] if last else (width,)

    @torch.no_grad()
    def compute(self, images: Tensor) -> NDArray[Any]:
        """Compute the rows of a batch of images, with the trunk in evaluation mode."""
        self._open()
        if self.session is not None:
            return self.session.features(images).numpy()
        images = images.to(self.model.device)
        with evaluation_mode(self.model.trunk):
            if self.last:
                out = self.model.stages.activations(images)
            else:
                out = self.model.features_with_map(images, self.grid) if self.grid else self.model.features(images)
        rows = out.float().cpu().numpy().astype(self.dtype, copy=False)
        if self.dtype == np.float16 and not np.isfinite(rows).all():
            what = "activations before the trunk's last stage" if self.last else "features of the trunk's positions"
            raise ValueError(f"the {what} do not fit float16")
        return rows

    def compute_all(self, batches: Iterable[Callable[[], Tensor]]) -> Iterator[NDArray[Any]]:
        """Yield the rows of batches of images, each made by a function.

        With ONNX Runtime, threads make batches and compute rows, one thread for each core: no core waits while another
        one prepares images. With torch, one thread does: the trunk is set to evaluation mode meanwhile.
        """
        self._open()
        jobs = (partial(self._compute_batch, batch) for batch in batches)
        return run_in_threads(jobs, 1) if self.session is None else run_on_cores(jobs, torch.get_num_threads())

    def _compute_batch(self, batch: Callable[[], Tensor]) -> NDArray[Any]:
        return self.compute(batch())

    def load_rows(
        self,
        name: str,
        pixels: Pixels,
        what: tuple[object, ...],
        shape: tuple[int, ...],
        fill: Callable[[NDArray[Any]], None],
    ) -> NDArray[Any]:
        """Return stored rows, an array of ``shape`` and the shape of a row; if they are not stored, ``fill`` them.

        ``name`` begins the name of the file; ``what`` is all that the rows depend on beside the trunk and the images.
        """
        path = self._path(name, pixels, what)
        if not path.exists():
            self._open()
            path = self._path(name, pixels, what)  # of torch, if the trunk cannot be exported
        return cached_array(path, (*shape, *self.shape), self.dtype, fill)

    def load_view(self, pixels: Pixels, view: View = CLEAN, progress: Count = silent) -> NDArray[Any]:
        """Return the rows of the usable images in a view, from the cache or computed now."""
        usable, size = pixels.usable, self.model.trunk.image_size

        def fill(array: NDArray[Any]) -> None:
            parts = torch.arange(len(usable)).split(64)
            batches = (partial(view.images, pixels, usable[part], size) for part in parts)
            for part, rows in zip(parts, self.compute_all(batches), strict=True):
                array[part.numpy()] = rows
                progress(int(part[-1]) + 1, len(usable))

        return self.load_rows("features", pixels, (size, view), (len(usable),), fill)

    def _open(self) -> None:
        """Open the trunk in ONNX Runtime, if that is the runtime; one that cannot be exported is left to torch."""
        if self.runtime == "onnx" and self.session is None:
            try:
                self.session = TrunkSession(self.model, keep=self.keep)
            except ValueError as reason:
                _log.warning("torch computes the features: %s", reason)
                self.runtime = "torch"

    def _path(self, name: str, pixels: Pixels, what: tuple[object, ...]) -> Path:
        key = self._key(pixels, (*what, self.runtime))
        return cache_folder() / f"{self.name}{name}-{key}-v{VERSION}.npy"

    def _key(self, pixels: Pixels, what: tuple[object, ...]) -> str:
        """Return a hash of the part of the trunk that is not trained, the images and all else the rows depend on."""
        part = self.model.stages.below if self.last else self.model.trunk
        stored = ("before the last stage", *self.model.stages.stored) if self.last else ()
        what = (*stored, *what) if self.last else ("maps", self.grid, *what) if self.grid else what
        return hash_weights(part, repr((self.model.config.network, pixels.images.version, pixels.side, what)))


def compute_features(model: Model, images: Tensor) -> Tensor:
    """Compute the trunk's features of images, without a cache."""
    cache = FeatureCache(model, images=len(images))
    parts = (partial(images.__getitem__, slice(i, i + 64)) for i in range(0, len(images), 64))
    return torch.cat([torch.from_numpy(rows) for rows in cache.compute_all(parts)])


def load_features(
    model: Model, pixels: Pixels, view: View = CLEAN, *, images: int = 0, progress: Count = silent
) -> Tensor:
    """Return the trunk's features of the usable images in a view [n, width], from the cache or computed now.

    ``images`` is the number of images ahead for this trunk, if there are more than these.
    """
    cache = FeatureCache(model, images=max(images, len(pixels.usable)))
    return torch.from_numpy(cache.load_view(pixels, view, progress).copy())


def embed_view(
    model: Model,
    pixels: Pixels,
    view: View = CLEAN,
    *,
    keep: bool,
    last: bool = False,
    outputs: bool = False,
    images: int = 0,
    progress: Count = silent,
) -> Embeddings:
    """Embed the usable images in a view.

    With ``keep`` the trunk's features are stored in the cache; with ``last`` too, the inputs of its last stage. Without
    ``keep``, a model in training mode is not exported: its weights change with the next step. With ``outputs`` the
    result is what a loss reads (`Model.outputs`) instead of the embeddings. ``images`` is as in `load_features`.
    """
    count, size = len(pixels.usable), model.trunk.image_size
    images = max(images, count)
    if keep and last:
        rows = FeatureCache(model, images=images, last=True).load_view(pixels, view, progress)
        activations = (torch.from_numpy(rows[i : i + 256].copy()) for i in range(0, len(rows), 256))
        return model.embed_activations(activations, outputs=outputs)
    if keep and not (outputs and model.config.maps):
        features = load_features(model, pixels, view, images=images, progress=progress)
        return model.embed_features(features, outputs=outputs)
    grid = model.config.maps if outputs else 0
    cache, parts = FeatureCache(model, images=0 if model.training else images, keep=False, grid=grid), []
    batches = (partial(view.images, pixels, numbers, size) for numbers in pixels.usable.split(64))
    for found in cache.compute_all(batches):
        parts.append(model.embed_features(torch.from_numpy(found).float(), outputs=outputs))
        progress(sum(map(len, parts)), count)
    return Embeddings.cat(parts)

"""A cache of what a trunk computes from the images of a data set: computed once for each trunk and view."""

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from idml.data.augment import CLEAN, View
from idml.data.pixel_cache import Pixels
from idml.embeddings import Embeddings
from idml.files import cache_folder, cached_array
from idml.model.model import Model
from idml.progress import Count, silent

VERSION = 1


class FeatureCache:
    """Rows that are computed once for every image: the trunk's features, or (``last``) the input of its last stage.

    Activations are stored in float16, half the size; docs/training.md says what that costs.
    """

    def __init__(self, model: Model, *, last: bool = False) -> None:
        self.model, self.last = model, last
        self.name = "activations-" if last else ""
        self.dtype: type[np.generic] = np.float16 if last else np.float32
        size = model.trunk.image_size
        probe = torch.zeros(1, model.config.in_chans, size, size, device=model.semantic.weight.device)
        self.shape: tuple[int, ...] = self.compute(probe).shape[1:] if last else (model.trunk.width,)

    @torch.no_grad()
    def compute(self, images: Tensor) -> NDArray[Any]:
        """Compute the rows of a batch of images, with the trunk in evaluation mode."""
        training = self.model.trunk.training
        self.model.trunk.eval()
        out = self.model.stages.activations(images) if self.last else self.model.features(images)
        self.model.trunk.train(training)
        rows = out.float().cpu().numpy().astype(self.dtype, copy=False)
        if self.last and not np.isfinite(rows).all():
            raise ValueError("the activations before the trunk's last stage do not fit float16")
        return rows

    def key(self, pixels: Pixels, *what: object) -> str:
        """Return a hash of the part of the trunk that is not trained, the images and all else the rows depend on."""
        part: nn.Module = self.model.stages.below if self.last else self.model.trunk
        what = ("before the last stage", *what) if self.last else what
        digest = hashlib.sha256(repr((self.model.config.network, pixels.images.version, pixels.side, what)).encode())
        for name, tensor in part.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def load_view(self, pixels: Pixels, view: View, progress: Count) -> NDArray[Any]:
        """Return the rows of the usable images in a view, from the cache or computed now."""
        usable, size, device = pixels.usable, self.model.trunk.image_size, self.model.semantic.weight.device

        def fill(array: NDArray[Any]) -> None:
            for part in torch.arange(len(usable)).split(64):
                array[part.numpy()] = self.compute(view.images(pixels, usable[part], size).to(device))
                progress(int(part[-1]) + 1, len(usable))

        path = cache_folder() / f"{self.name}features-{self.key(pixels, size, view)}-v{VERSION}.npy"
        return cached_array(path, (len(usable), *self.shape), self.dtype, fill)


def compute_features(model: Model, images: Tensor) -> NDArray[np.float32]:
    """Compute the trunk's features of a batch of images, without a cache."""
    return FeatureCache(model).compute(images)


def load_features(model: Model, pixels: Pixels, view: View = CLEAN, *, progress: Count = silent) -> Tensor:
    """Return the trunk's features of the usable images in a view [n, width], from the cache or computed now."""
    return torch.from_numpy(FeatureCache(model).load_view(pixels, view, progress).copy())


def embed_view(
    model: Model,
    pixels: Pixels,
    view: View = CLEAN,
    *,
    keep: bool,
    last: bool = False,
    progress: Count = silent,
) -> Embeddings:
    """Embed the usable images in a view.

    With ``keep`` the trunk's features are stored in the cache; with ``last`` too, the inputs of its last stage.
    """
    if keep and last:
        rows = FeatureCache(model, last=True).load_view(pixels, view, progress)
        return model.embed_activations(torch.from_numpy(rows[i : i + 256].copy()) for i in range(0, len(rows), 256))
    if keep:
        return model.embed_features(load_features(model, pixels, view, progress=progress))
    size, parts = model.trunk.image_size, []
    for numbers in pixels.usable.split(256):
        parts.append(model.embed(view.images(pixels, numbers, size)))
        progress(sum(map(len, parts)), len(pixels.usable))
    return Embeddings.cat(parts)

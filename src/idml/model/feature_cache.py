"""What a trunk makes of the images of a test, computed once for each trunk and view, and kept."""

import hashlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from idml.data.augment import View
from idml.data.pixel_cache import Pixels
from idml.embeddings import Embeddings
from idml.files import cache_folder, cached_array
from idml.model import Model
from idml.progress import Count, silent

VERSION = 1
CLEAN = View()


class Kept:
    """What is computed once of every image: the trunk's features, or (``last``) what its last stage sees.

    Activations are kept in float16, half the size; docs/training.md says what that costs.
    """

    def __init__(self, model: Model, *, last: bool = False) -> None:
        self.model, self.last = model, last
        self.name = "activations-" if last else ""
        self.dtype: type[np.generic] = np.float16 if last else np.float32
        size = model.trunk.image_size
        probe = torch.zeros(1, model.config.in_chans, size, size, device=model.semantic.weight.device)
        self.shape: tuple[int, ...] = self.of(probe).shape[1:] if last else (model.trunk.width,)

    @torch.no_grad()
    def of(self, images: Tensor) -> NDArray[Any]:
        """A batch of images as it is kept, computed as in a test."""
        training = self.model.trunk.training
        self.model.trunk.eval()
        out = self.model.stages.activations(images) if self.last else self.model.features(images)
        self.model.trunk.train(training)
        kept = out.float().cpu().numpy().astype(self.dtype, copy=False)
        if self.last and not np.isfinite(kept).all():
            raise ValueError("the activations before the trunk's last stage do not fit float16")
        return kept

    def key(self, pixels: Pixels, *what: object) -> str:
        """A hash of the part of the trunk that is not trained, the images and whatever else the rows depend on."""
        part: nn.Module = self.model.stages.below if self.last else self.model.trunk
        what = ("before the last stage", *what) if self.last else what
        digest = hashlib.sha256(repr((self.model.config.trunk, pixels.images.version, pixels.side, what)).encode())
        for name, tensor in part.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def view(self, pixels: Pixels, view: View, progress: Count) -> NDArray[Any]:
        """The rows of the usable images in a view, from the cache or computed now."""
        usable, size, device = pixels.usable, self.model.trunk.image_size, self.model.semantic.weight.device

        def fill(array: NDArray[Any]) -> None:
            for part in torch.arange(len(usable)).split(64):
                array[part.numpy()] = self.of(view.images(pixels, usable[part], size).to(device))
                progress(int(part[-1]) + 1, len(usable))

        path = cache_folder() / f"{self.name}features-{self.key(pixels, size, view)}-v{VERSION}.npy"
        return cached_array(path, (len(usable), *self.shape), self.dtype, fill)


def features_of(model: Model, images: Tensor) -> NDArray[np.float32]:
    """What the trunk, as in a test, makes of a batch of images."""
    return Kept(model).of(images)


def view_features(model: Model, pixels: Pixels, view: View = CLEAN, *, progress: Count = silent) -> Tensor:
    """The features of the usable images in a view [n, width], from the cache or computed now."""
    return torch.from_numpy(Kept(model).view(pixels, view, progress).copy())


def embed_view(
    model: Model,
    pixels: Pixels,
    view: View = CLEAN,
    *,
    keep: bool,
    last: bool = False,
    progress: Count = silent,
) -> Embeddings:
    """The embeddings of the usable images in a view.

    ``keep`` says whether what the trunk makes of them is worth a file: its features, or with ``last`` what its last
    stage sees.
    """
    if keep and last:
        rows = Kept(model, last=True).view(pixels, view, progress)
        return model.embed_activations(torch.from_numpy(rows[i : i + 256].copy()) for i in range(0, len(rows), 256))
    if keep:
        return model.embed_features(view_features(model, pixels, view, progress=progress))
    size, parts = model.trunk.image_size, []
    for numbers in pixels.usable.split(256):
        parts.append(model.embed(view.images(pixels, numbers, size)))
        progress(sum(map(len, parts)), len(pixels.usable))
    return Embeddings.cat(parts)

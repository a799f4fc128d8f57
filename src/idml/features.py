"""What a trunk makes of the images of a test, computed once for each trunk and view, and kept."""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.data.pixels import Pixels
from idml.data.views import View
from idml.embeddings import Embeddings
from idml.files import cache_folder, cached_array
from idml.model import Model

Progress = Callable[[int, int], None]
VERSION = 1
CLEAN = View()


def view_features(
    model: Model, pixels: Pixels, view: View = CLEAN, *, progress: Progress = lambda done, total: None
) -> Tensor:
    """The features of the usable images in a view [n, width], from the cache or computed now."""
    usable, size, device = pixels.usable, model.trunk.image_size, model.semantic.weight.device

    def fill(array: NDArray[np.float32]) -> None:
        for part in torch.arange(len(usable)).split(64):
            array[part.numpy()] = features_of(model, view.images(pixels, usable[part], size).to(device))
            progress(int(part[-1]) + 1, len(usable))

    path = cache_folder() / f"features-{features_key(model, pixels, size, view)}-v{VERSION}.npy"
    return torch.from_numpy(cached_array(path, (len(usable), model.trunk.width), np.float32, fill).copy())


def embed_view(
    model: Model,
    pixels: Pixels,
    view: View = CLEAN,
    *,
    keep: bool,
    progress: Progress = lambda done, total: None,
) -> Embeddings:
    """The embeddings of the usable images in a view; ``keep`` says whether the trunk's features are worth a file."""
    if keep:
        return model.embed_features(view_features(model, pixels, view, progress=progress))
    size, parts = model.trunk.image_size, []
    for numbers in pixels.usable.split(256):
        parts.append(model.embed(view.images(pixels, numbers, size)))
        progress(sum(map(len, parts)), len(pixels.usable))
    return Embeddings.cat(parts)


@torch.no_grad()
def features_of(model: Model, images: Tensor) -> NDArray[np.float32]:
    """What the trunk, as in a test, makes of a batch of images."""
    training = model.trunk.training
    model.trunk.eval()
    features: NDArray[np.float32] = model.features(images).float().cpu().numpy()
    model.trunk.train(training)
    return features


def features_key(model: Model, pixels: Pixels, *what: object) -> str:
    """A hash of the trunk, its weights, the images and whatever else the features depend on."""
    digest = hashlib.sha256(repr((model.config.trunk, pixels.images.version, pixels.side, what)).encode())
    for name, tensor in model.trunk.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]

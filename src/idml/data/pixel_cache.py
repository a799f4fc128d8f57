"""A cache of decoded and resized images in one memory-mapped file: decoded once, read by every later run.

The file is an ordinary .npy of uint8 [images, side, side, 3]; a JSON file beside it has a hash of all pixels, and lists
the images that could not be read. It is complete or absent, and several processes may ask for it at once
(`idml.files.cached_array`).
"""

import hashlib
import json
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from idml.data.datasets import ImageSet
from idml.data.sources import Source
from idml.files import cache_folder, cached_array, write_atomic
from idml.parallel import run_in_threads
from idml.progress import Count

_VERSION = 3
_MAX_THREADS = 8  # each may hold a decoded image of 200 MB


@dataclass(frozen=True, eq=False)
class Pixels:
    """The images of a set as squares of ``side`` pixels; ``broken`` maps those that could not be read to the reason.

    A broken image is black and is not used: `usable` lists the others. ``digest`` is a short hash of all pixels: it
    changes when an image is replaced by another one of the same name, and not when the images are copied.
    """

    images: ImageSet
    array: NDArray[np.uint8]
    broken: dict[int, str]
    digest: str

    @property
    def side(self) -> int:
        """Pixels along each side."""
        return int(self.array.shape[1])

    @property
    def usable(self) -> Tensor:
        """The numbers of the images that could be read [n]."""
        sound = torch.ones(len(self.images), dtype=torch.bool)
        sound[list(self.broken)] = False
        return sound.nonzero().squeeze(1)

    def batch(self, numbers: Tensor) -> Tensor:
        """Return the chosen images as uint8 [n, 3, side, side]."""
        return torch.from_numpy(self.array[numbers.numpy()]).permute(0, 3, 1, 2).contiguous()


def load_pixels(
    images: ImageSet, side: int, *, folder: Path | None = None, max_broken: int = 100, progress: Count | None = None
) -> Pixels:
    """Return images resized to ``side`` × ``side``, from the cache or decoded now.

    More than ``max_broken`` unreadable images are an error that names the first.
    """
    if side < 1:
        raise ValueError(f"the image size must be 1 or larger, got {side}")
    if len(images) == 0:
        raise ValueError(f"{images.name} holds no image")
    path = (cache_folder() if folder is None else folder) / f"pixels-{images.version}-{side}-v{_VERSION}.npy"
    notes = path.with_suffix(".json")

    def fill(array: NDArray[np.uint8]) -> None:
        write_atomic(notes, json.dumps(_decode(images, array, max_broken, progress)).encode())

    array = cached_array(path, (len(images), side, side, 3), np.uint8, fill, beside=notes)
    noted = json.loads(notes.read_text())
    broken = {int(i): reason for i, reason in noted["broken"].items()}
    _require_few(broken, max_broken, images)
    return Pixels(images, array, broken, noted["digest"])


def _decode(images: ImageSet, array: NDArray[np.uint8], max_broken: int, progress: Count | None) -> dict[str, object]:
    """Fill the array; return a hash of all pixels, which images could not be read, and why."""
    side = array.shape[1]
    broken: dict[int, str] = {}
    digest = hashlib.blake2b(digest_size=8)

    def decode(source: Source) -> Image.Image | str:
        try:
            return source.decode(min_side=side).resize((side, side), Image.Resampling.BILINEAR)
        except (ValueError, OSError) as error:
            return str(error)

    threads = min(_MAX_THREADS, torch.get_num_threads())
    with closing(run_in_threads((partial(decode, source) for source in images.sources), threads)) as decoded:
        for i, image in enumerate(decoded):
            if isinstance(image, str):
                broken[i] = image
                _require_few(broken, max_broken, images)
            else:
                array[i] = np.asarray(image)
            digest.update(array[i].tobytes())
            if progress is not None:
                progress(i + 1, len(images))
    return {"digest": digest.hexdigest(), "broken": broken}


def _require_few(broken: dict[int, str], limit: int, images: ImageSet) -> None:
    if len(broken) > limit or len(broken) == len(images):
        first = next(iter(broken.values()))
        raise ValueError(f"{images.name}: {len(broken)} of {len(images)} images cannot be read (first: {first})")

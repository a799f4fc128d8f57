"""Laptop mode: the trunk stays as it is, so its features are computed once and kept; the heads train in seconds.

The batches of ``crops`` epochs are planned as they would be without freezing (the same images, crops, λ and partners)
and the trunk sees them once: the pixels are mixed, and both parents of a mixture are in its batch. Epoch e then trains
on the plan e mod ``crops``, its batches in an order of their own. The features of the originals and of the mixtures lie
in two files, so that methods with and without mixtures share the first.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.data.ambiguity import IN_PLACE, MIXTURES, Batch, apply_ambiguity
from idml.data.sampling import random_stream
from idml.features import VERSION, Progress, features_key, features_of
from idml.files import cache_folder, cached_array
from idml.model import Model
from idml.training.stream import Stream


class FrozenStream:
    """Batches of features instead of images: ``Batch.images`` is [n, width]."""

    def __init__(self, stream: Stream, model: Model, progress: Progress) -> None:
        self.stream, self.crops = stream, stream.config.crops
        self.plans = [stream.plan(epoch) for epoch in range(self.crops)]
        self.steps = len(self.plans[0])
        config = stream.config
        in_place = [kind for kind in config.kinds if kind in IN_PLACE]
        mixtures = [kind for kind in config.kinds if kind in MIXTURES]
        key = (config.seed, config.batch_size, config.per_class, self.crops, stream.size, in_place)
        self.originals = self._features(model, key, False, progress)
        self.mixtures = self._features(model, (*key, mixtures), True, progress) if mixtures else None

    def plan(self, epoch: int) -> list[Tensor]:
        """The numbers of the images of each batch of an epoch."""
        return [self.plans[epoch % self.crops][i] for i in self._order(epoch)]

    def batches(self, epoch: int, step: int, skip: int = 0) -> Iterator[tuple[Tensor, Batch]]:
        """Image numbers and batches of an epoch, without the first ``skip``."""
        planned = epoch % self.crops
        for i in self._order(epoch)[skip:]:
            numbers, row = self.plans[planned][i], planned * self.steps + i
            features = [torch.from_numpy(self.originals[row].copy())]
            if self.mixtures is not None:
                features.append(torch.from_numpy(self.mixtures[row].copy()))
            yield numbers, self._labelled(torch.cat(features).to(self.stream.device), numbers, planned, row)

    def features(self, model: Model) -> Tensor:
        """The features of one crop of every image."""
        return torch.from_numpy(self.originals[: self.steps].copy()).flatten(0, 1)

    def _order(self, epoch: int) -> list[int]:
        generator = random_stream("order of frozen batches", self.stream.config.seed, epoch)
        order: list[int] = torch.randperm(self.steps, generator=generator).tolist()
        return order

    def _labelled(self, features: Tensor, numbers: Tensor, planned: int, row: int) -> Batch:
        """λ and the label sets follow from the same draws as the pixels did, whatever the pixels are."""
        config = self.stream.config
        labels = self.stream.pixels.images.labels[numbers].to(features.device)
        kinds = [kind for kind in config.kinds if kind in MIXTURES]
        dots = torch.zeros(len(numbers), 1, 1, 1, device=features.device)
        drawn = apply_ambiguity(dots, labels, kinds, seed=config.seed, epoch=planned, step=row)
        return Batch(features, drawn.labels, drawn.mixed, drawn.lam)

    def _features(self, model: Model, key: tuple[Any, ...], mixed: bool, progress: Progress) -> NDArray[np.float32]:
        name = features_key(model, self.stream.pixels, *key)
        rows = self.crops * self.steps

        def fill(array: NDArray[np.float32]) -> None:
            for row in range(rows):
                planned, i = divmod(row, self.steps)
                numbers = self.plans[planned][i]
                batch = self.stream.prepare(numbers, self.stream.pixels.batch(numbers), planned, row)
                array[row] = features_of(model, batch.images[batch.mixed == mixed])
                progress((row + 1) * len(numbers), rows * len(numbers))

        shape = (rows, self.stream.config.batch_size, model.trunk.width)
        kind = "mixtures" if mixed else "crops"
        return cached_array(cache_folder() / f"{kind}-{name}-v{VERSION}.npy", shape, np.float32, fill)

"""The batches of a run: which images, their crops, their ambiguity. A pure function of (seed, epoch, step)."""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from idml.data.augment import IN_PLACE, MIXTURES, Batch, Degradations, apply_ambiguity, centre_crop, crop_and_flip
from idml.data.pixel_cache import Pixels
from idml.data.sampling import class_batches, random_batches, random_stream
from idml.files import cache_folder, cached_array
from idml.model import Model
from idml.model.feature_cache import VERSION, Kept
from idml.progress import Count
from idml.training.config import TrainConfig


class Stream:
    """Batches of images, cropped and made ambiguous on their device."""

    def __init__(self, pixels: Pixels, config: TrainConfig, size: int, device: torch.device) -> None:
        self.pixels, self.config, self.size, self.device = pixels, config, size, device
        self.usable = pixels.usable

    def plan(self, epoch: int) -> list[Tensor]:
        """The numbers of the images of each batch of an epoch."""
        config, labels = self.config, self.pixels.images.labels[self.usable]
        if config.per_class:
            batches = class_batches(labels, config.batch_size, config.per_class, seed=config.seed, epoch=epoch)
        else:
            batches = random_batches(labels, config.batch_size, seed=config.seed, epoch=epoch)
        return [self.usable[batch] for batch in batches]

    def batches(self, epoch: int, step: int, skip: int = 0) -> Iterator[tuple[Tensor, Batch]]:
        """Image numbers and batches of an epoch that begins with ``step``, without the first ``skip``."""
        rows = _Rows(self.pixels, self.plan(epoch)[skip:])
        loader = DataLoader(rows, batch_size=None, shuffle=False, num_workers=self.config.workers)
        for i, (numbers, images) in enumerate(loader, start=step + skip):
            yield numbers, self.prepare(numbers, images, epoch, i)

    def prepare(self, numbers: Tensor, images: Tensor, epoch: int, step: int) -> Batch:
        """Decoded images as the model sees them at this step."""
        seed = self.config.seed
        crops = crop_and_flip(images.to(self.device), self.size, random_stream("crop", seed, epoch, step))
        labels = self.pixels.images.labels[numbers].to(self.device)
        kinds, mixed = self.config.kinds, self.config.mixed_images
        batch = apply_ambiguity(crops, labels, kinds, seed=seed, epoch=epoch, step=step, mixtures=mixed)
        degraded = self.degradations(len(numbers), epoch, step)
        if degraded is None:
            return batch
        return replace(batch, images=torch.cat([batch.images, degraded.of(crops)]), degraded=degraded)

    def degradations(self, n: int, epoch: int, step: int) -> Degradations | None:
        """How copies of the images of a step are degraded, if the run learns from such copies."""
        if self.config.introspection != "graded":
            return None
        return Degradations.draw(n, random_stream("degradations", self.config.seed, epoch, step)).to(self.device)

    @torch.no_grad()
    def features(self, model: Model, most: int = 4096) -> Tensor:
        """The trunk's features of the images, or of ``most`` of them spread evenly, seen as in a test."""
        model.trunk.eval()
        numbers = self.usable[torch.linspace(0, len(self.usable) - 1, min(most, len(self.usable))).long()]
        parts = (centre_crop(self.pixels.batch(n).to(self.device), self.size) for n in numbers.split(128))
        return torch.cat([model.features(part) for part in parts])


class _Rows(Dataset[tuple[Tensor, Tensor]]):
    """Batches by number, so that worker processes can prepare them."""

    def __init__(self, pixels: Pixels, plan: list[Tensor]) -> None:
        self.pixels, self.plan = pixels, plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = self.plan[index]
        return numbers, self.pixels.batch(numbers)


# -------------------- frozen --------------------
# Laptop mode: what does not learn is computed once and kept, and the rest trains in seconds (heads) or minutes (last).
#
# The batches of ``crops`` epochs are planned as they would be without freezing (the same images, crops, λ and partners)
# and the trunk sees them once: the pixels are mixed, and both parents of a mixture are in its batch. Epoch e then
# trains
# on the plan e mod ``crops``, its batches in an order of their own. The rows of the originals, of the mixtures and of
# degraded copies lie in files of their own, so that methods share what they have in common.


class FrozenStream:
    """Batches of features [n, width] instead of images, or of what the last stage sees [n, c, h, w]."""

    def __init__(self, stream: Stream, model: Model, progress: Count) -> None:
        self.stream, self.crops = stream, stream.config.crops
        self.plans = [stream.plan(epoch) for epoch in range(self.crops)]
        self.steps = len(self.plans[0])
        config = stream.config
        self.kept = Kept(model, last=config.part == "last")
        in_place = [kind for kind in config.kinds if kind in IN_PLACE]
        mixtures = [kind for kind in config.kinds if kind in MIXTURES]
        key = (config.seed, config.batch_size, config.per_class, self.crops, stream.size, in_place)
        self.parts = {"crops": self._rows("crops", key, progress)}
        if mixtures:
            self.parts["mixtures"] = self._rows("mixtures", (*key, mixtures), progress)
        if config.introspection == "graded":
            self.parts["degraded"] = self._rows("degraded", key, progress)

    def plan(self, epoch: int) -> list[Tensor]:
        """The numbers of the images of each batch of an epoch."""
        return [self.plans[epoch % self.crops][i] for i in self._order(epoch)]

    def batches(self, epoch: int, step: int, skip: int = 0) -> Iterator[tuple[Tensor, Batch]]:
        """Image numbers and batches of an epoch, without the first ``skip``."""
        planned = epoch % self.crops
        for i in self._order(epoch)[skip:]:
            numbers, row = self.plans[planned][i], planned * self.steps + i
            yield numbers, self._batch(numbers, planned, row)

    @torch.no_grad()
    def features(self, model: Model) -> Tensor:
        """The trunk's features of one crop of every image."""
        if not self.kept.last:
            return torch.from_numpy(self.parts["crops"][: self.steps].copy()).flatten(0, 1)
        model.trunk.eval()
        rows = (torch.from_numpy(self.parts["crops"][i].copy()).to(self.stream.device) for i in range(self.steps))
        return torch.cat([model.stages.features(batch) for batch in rows])

    def _order(self, epoch: int) -> list[int]:
        generator = random_stream("order of frozen batches", self.stream.config.seed, epoch)
        order: list[int] = torch.randperm(self.steps, generator=generator).tolist()
        return order

    def _batch(self, numbers: Tensor, planned: int, row: int) -> Batch:
        """λ and the label sets follow from the same draws as the pixels did, whatever the pixels are."""
        config, device = self.stream.config, self.stream.device
        labels = self.stream.pixels.images.labels[numbers].to(device)
        kinds = [kind for kind in config.kinds if kind in MIXTURES]
        dots, mixed = torch.zeros(len(numbers), 1, 1, 1, device=device), config.mixed_images
        drawn = apply_ambiguity(dots, labels, kinds, seed=config.seed, epoch=planned, step=row, mixtures=mixed)
        wanted = {"mixtures": mixed}  # of the others all
        rows = [torch.from_numpy(part[row, : wanted.get(name)].copy()) for name, part in self.parts.items()]
        degraded = self.stream.degradations(len(numbers), planned, row)
        return Batch(torch.cat(rows).to(device), drawn.labels, drawn.mixed, drawn.lam, degraded)

    def _rows(self, name: str, key: tuple[Any, ...], progress: Count) -> NDArray[Any]:
        count, size = self.crops * self.steps, self.stream.config.batch_size
        stream = copy(self.stream)
        stream.config = replace(stream.config, mixtures=1.0)  # for all runs, however many mixtures they want

        def fill(array: NDArray[Any]) -> None:
            for row in range(count):
                planned, i = divmod(row, self.steps)
                numbers = self.plans[planned][i]
                batch = stream.prepare(numbers, stream.pixels.batch(numbers), planned, row)
                rows = {"crops": slice(size), "mixtures": slice(size, 2 * size), "degraded": slice(-size, None)}[name]
                array[row] = self.kept.of(batch.images[rows])
                progress((row + 1) * len(numbers), count * len(numbers))

        shape = (count, size, *self.kept.shape)
        path = cache_folder() / f"{self.kept.name}{name}-{self.kept.key(self.stream.pixels, *key)}-v{VERSION}.npy"
        return cached_array(path, shape, self.kept.dtype, fill)

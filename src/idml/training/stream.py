"""The batches of a run: which images, their crops, their ambiguity. A pure function of (seed, epoch, step)."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from idml.data.augment import Batch, Degradations, apply_ambiguity, centre_crop, crop_and_flip
from idml.data.pixel_cache import Pixels
from idml.data.sampling import class_batches, random_batches, random_stream
from idml.model import Model
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

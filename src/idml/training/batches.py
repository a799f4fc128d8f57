"""The batches of a run: which images, their crops, their ambiguity. A pure function of (seed, epoch, step)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from traceback import clear_frames
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from idml.data.augment import IN_PLACE, Batch, apply_ambiguity, centre_crop, crop_and_flip, resized_crop_and_flip
from idml.data.pixel_cache import Pixels
from idml.data.sampling import random_stream
from idml.labels import LabelSets
from idml.methods.base import Method
from idml.model import Model
from idml.model.feature_cache import FeatureCache
from idml.progress import Count
from idml.training.config import TrainConfig


class Stream:
    """Batches of images, cropped, made ambiguous and extended by the method on their device."""

    def __init__(self, pixels: Pixels, config: TrainConfig, method: Method, size: int, device: torch.device) -> None:
        self.pixels, self.config, self.method, self.size, self.device = pixels, config, method, size, device
        self.in_place = [kind for kind in config.ambiguity if kind in IN_PLACE]

    def plan(self, epoch: int) -> list[Tensor]:
        """The numbers of the images of each batch of an epoch."""
        size, per_class = self.config.batch_size, self.config.per_class
        return self.method.plan(self.pixels.usable, batch_size=size, per_class=per_class, epoch=epoch)

    def batches(self, epoch: int, step: int, skip: int = 0) -> Iterator[tuple[Tensor, Batch]]:
        """Image numbers and batches of an epoch that begins with ``step``, without the first ``skip``."""
        rows = _PlannedBatches(self.pixels, self.plan(epoch)[skip:])
        loader = DataLoader(rows, batch_size=None, shuffle=False, num_workers=self.config.workers)
        for i, (numbers, images) in enumerate(loader, start=step + skip):
            yield numbers, self.prepare(numbers, images, epoch, i)

    def prepare(self, numbers: Tensor, images: Tensor, epoch: int, step: int) -> Batch:
        """Decoded images as the model sees them at this step, and what the method adds."""
        seed = self.config.seed
        crop = resized_crop_and_flip if self.config.crop == "resized" else crop_and_flip
        crops = crop(images.to(self.device), self.size, random_stream("crop", seed, epoch, step))
        labels = self.pixels.images.labels[numbers].to(self.device)
        seen = apply_ambiguity(crops, labels, self.in_place, seed=seed, epoch=epoch, step=step).images
        return self.method.add_images(seen, labels, seed=seed, epoch=epoch, step=step)

    @torch.no_grad()
    def features(self, model: Model, most: int = 4096) -> Tensor:
        """The trunk's features of the images, or of ``most`` of them spread evenly, seen as in a test."""
        usable = self.pixels.usable
        numbers = usable[torch.linspace(0, len(usable) - 1, min(most, len(usable))).long()]
        cache = FeatureCache(model, images=len(numbers))

        def see(part: Tensor) -> Tensor:
            return centre_crop(self.pixels.batch(part).to(self.device), self.size)

        rows = cache.compute_all(partial(see, part) for part in numbers.split(128))
        return torch.cat([torch.from_numpy(found) for found in rows])


@contextmanager
def explain_killed_workers() -> Iterator[None]:
    """Say in one line that a worker process was killed, by the system for want of memory for example.

    torch raises its error in whatever the main thread does at that moment.
    The connection to the process may break before that; then torch would raise the error again in the next run of this
    process, if the error kept the loader alive.
    """
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
            raise
        clear_frames(error.__traceback__)
        raise OSError("a process that prepares batches was killed; continue with --resume") from None


class _PlannedBatches(Dataset[tuple[Tensor, Tensor]]):
    """Batches by number, so that worker processes can prepare them."""

    def __init__(self, pixels: Pixels, plan: list[Tensor]) -> None:
        self.pixels, self.plan = pixels, plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = self.plan[index]
        return numbers, self.pixels.batch(numbers)


# ---- a frozen trunk: what does not learn is computed once and kept ----


class FrozenStream:
    """Batches of features [n, width] instead of images, or of what the last stage sees [n, c, h, w].

    The batches of ``crops`` epochs are planned as they would be without freezing (the same images, crops, λ and
    partners), and the trunk sees them once. Epoch e then trains on the plan e mod ``crops``, its batches in an order
    of their own. The rows of the originals and of what the method adds lie in files of their own, so that methods
    share what they have in common.
    """

    def __init__(self, stream: Stream, model: Model, progress: Count) -> None:
        self.stream, self.crops = stream, stream.config.crops
        self.plans = [stream.plan(epoch) for epoch in range(self.crops)]
        self.steps = len(self.plans[0])
        config, added = stream.config, stream.method.added_key()
        images = self.crops * self.steps * config.batch_size  # the originals alone: methods share their rows
        self.cache = FeatureCache(model, images=images, last=config.train == "last", grid=model.config.maps)
        key = (config.seed, config.batch_size, config.per_class, self.crops, stream.size, stream.in_place, config.crop)
        originals = slice(config.batch_size)
        self.parts = [self._keep_rows("crops", originals, config.batch_size, key, progress)]
        if added:
            rows = slice(config.batch_size, None)
            self.parts.append(self._keep_rows("added", rows, config.added_images, (*key, added), progress))

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
        originals = self.parts[0]
        if not self.cache.last:
            rows = torch.from_numpy(originals[: self.steps].copy()).flatten(0, 1)
            return rows[:, : model.trunk.width].float()
        model.trunk.eval()
        batches = (torch.from_numpy(originals[i].copy()).to(self.stream.device) for i in range(self.steps))
        return torch.cat([model.stages.features(batch) for batch in batches])

    def _order(self, epoch: int) -> list[int]:
        generator = random_stream("order of frozen batches", self.stream.config.seed, epoch)
        order: list[int] = torch.randperm(self.steps, generator=generator).tolist()
        return order

    def _batch(self, numbers: Tensor, planned: int, row: int) -> Batch:
        """λ and the label sets follow from the same draws as the pixels did; here they are drawn with empty images."""
        stream = self.stream
        labels = stream.pixels.images.labels[numbers].to(stream.device)
        empty = torch.zeros(len(numbers), 1, 1, 1, device=stream.device)
        drawn = stream.method.add_images(empty, labels, seed=stream.config.seed, epoch=planned, step=row)
        rows = torch.cat([torch.from_numpy(part[row].copy()) for part in self.parts])
        if self.cache.grid:
            rows = rows.float()
        return Batch(rows.to(stream.device), drawn.labels, drawn.mixed, drawn.lam)

    def _keep_rows(self, name: str, rows: slice, size: int, key: tuple[Any, ...], progress: Count) -> NDArray[Any]:
        """What the trunk makes of the given rows of every batch, ``size`` of them, from the cache if it is there."""
        count, stream = self.crops * self.steps, self.stream

        def fill(array: NDArray[Any]) -> None:
            def prepare(row: int) -> Tensor:
                planned, i = divmod(row, self.steps)
                numbers = self.plans[planned][i]
                return stream.prepare(numbers, stream.pixels.batch(numbers), planned, row).images[rows]

            for row, found in enumerate(self.cache.compute_all(partial(prepare, row) for row in range(count))):
                array[row] = found
                progress((row + 1) * size, count * size)

        return self.cache.load_rows(name, stream.pixels, key, (count, size), fill)


class FrozenImages:
    """The same for a method that plans its batches by its state: what the trunk makes of ``crops`` crops of each image.

    Epoch e uses the crop e mod ``crops`` of every image. Mixtures would depend on the plan, so there are none.
    """

    def __init__(self, stream: Stream, model: Model, progress: Count) -> None:
        self.stream, self.crops, config = stream, stream.config.crops, stream.config
        images, last = self.crops * len(stream.pixels.usable), config.train == "last"
        self.cache = FeatureCache(model, images=images, last=last, grid=model.config.maps)
        numbers = stream.pixels.usable.split(64)

        def fill(array: NDArray[Any]) -> None:
            def prepare(crop: int, i: int) -> Tensor:
                return stream.prepare(numbers[i], stream.pixels.batch(numbers[i]), crop, i).images

            places = [(crop, i) for crop in range(self.crops) for i in range(len(numbers))]
            found = self.cache.compute_all(partial(prepare, *place) for place in places)
            for done, ((crop, i), rows) in enumerate(zip(places, found, strict=True), start=1):
                array[crop, numbers[i].numpy()] = rows
                progress(min(64 * done, images), images)

        key = (config.seed, self.crops, stream.size, stream.in_place, config.crop)
        shape = (self.crops, len(stream.pixels.images))
        self.rows = self.cache.load_rows("images", stream.pixels, key, shape, fill)

    def plan(self, epoch: int) -> list[Tensor]:
        """The numbers of the images of each batch of an epoch."""
        return self.stream.plan(epoch)

    def batches(self, epoch: int, step: int, skip: int = 0) -> Iterator[tuple[Tensor, Batch]]:
        """Image numbers and batches of an epoch, without the first ``skip``."""
        stream = self.stream
        for numbers in self.plan(epoch)[skip:]:
            rows = torch.from_numpy(self.rows[epoch % self.crops, numbers.numpy()]).to(stream.device)
            labels = stream.pixels.images.labels[numbers].to(stream.device)
            unmixed = torch.zeros(len(numbers), dtype=torch.bool, device=stream.device)
            yield numbers, Batch(rows.float() if self.cache.grid else rows, LabelSets(labels), unmixed)

    @torch.no_grad()
    def features(self, model: Model) -> Tensor:
        """The trunk's features of one crop of every image."""
        numbers = self.stream.pixels.usable
        if not self.cache.last:
            return torch.from_numpy(self.rows[0, numbers.numpy()])[:, : model.trunk.width].float()
        model.trunk.eval()
        batches = (torch.from_numpy(self.rows[0, part.numpy()]).to(self.stream.device) for part in numbers.split(128))
        return torch.cat([model.stages.features(batch) for batch in batches])

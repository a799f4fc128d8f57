"""Wrong labels, on purpose: what a loss makes of them, and whether ‖u‖ finds them."""

import dataclasses

from torch import Tensor

from idml.data.datasets import Dataset, ImageSet, hold_out, load_dataset
from idml.data.sampling import noisy_labels
from idml.training.config import TrainConfig


def with_label_noise(images: ImageSet, config: TrainConfig) -> ImageSet:
    """The images a run learns from with a share ``label_noise`` of their labels wrong, drawn by the seed alone."""
    if not config.label_noise:
        return images
    labels = noisy_labels(images.labels, config.label_noise, classes=len(images.classes), seed=config.seed)
    return dataclasses.replace(images, labels=labels)


def noisy_images(config: TrainConfig, dataset: Dataset | None = None) -> tuple[ImageSet, Tensor]:
    """The images a run learned from, with their right labels, and which of them it saw with a wrong one [n].

    ``dataset`` is what ``config.data`` names, if it is at hand.
    """
    if dataset is None:
        dataset = load_dataset(config.data, split=config.split, strict=config.strict_data)
    seen, _ = hold_out(dataset.train, config.holdout)
    return seen, with_label_noise(seen, config).labels != seen.labels

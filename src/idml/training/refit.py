"""Cross-fitting: the heads of a run with a frozen trunk are trained again without some of the classes.

A model knows the classes that it has learned from too well to be calibrated on them. So these classes are put into two
folds. For each fold the heads are trained as the run's were, without the fold's classes, and embed all images. Then
every class is met by heads that have not learned from it. The options are those of the run, with one crop of each
image, no held-out classes (the last epoch is taken), and smaller batches where fewer classes cannot fill them.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from torch import Tensor

from idml.data.datasets import Dataset, ImageSet
from idml.data.images import resized_side
from idml.data.pixel_cache import load_pixels
from idml.data.sources import FileSource
from idml.embeddings import Embeddings
from idml.model import load_model
from idml.model.feature_cache import load_features
from idml.progress import Progress, image_counter, silent
from idml.training.config import TrainConfig, fit_batch_size, from_stored
from idml.training.loop import train


def refit_heads(
    model: Path, files: Sequence[Path], labels: Tensor, learned: Tensor, folds: Tensor, progress: Progress = silent
) -> Iterator[Embeddings]:
    """Yield the embeddings of all images by the heads of each fold.

    Args:
        model: a folder with the model and the config.yaml of its run.
        files: all images [n].
        labels: their classes [n].
        learned: bool [n], the run has learned from this image.
        folds: the fold of each image [n], 0 … ; −1 for images that are in none.
        progress: called with rows of how many images are done.
    """
    config = read_config(model)
    names = tuple(str(i) for i in range(int(labels.max()) + 1))
    everything = ImageSet("the gallery", [FileSource(file.parent, file.name) for file in files], labels, names)
    pixels = load_pixels(everything, resized_side(load_model(model).trunk.image_size))
    if pixels.broken:
        raise ValueError(f"cannot read an image of the gallery again: {next(iter(pixels.broken.values()))}")
    features: Tensor | None = None
    for fold in range(int(folds.max()) + 1):
        rest, held = learned & (folds != fold), folds == fold
        classes = labels[rest].unique()
        if len(classes) < 2:
            raise ValueError("too few classes to train the heads again without some of them: calibrate with --queries")
        subset = everything[rest].of_classes(classes.tolist())
        test = everything[held].of_classes(labels[held].unique().tolist())
        with tempfile.TemporaryDirectory() as out:
            own = fit_batch_size(replace(config, out=out, holdout=0.0, crops=1), subset.labels, chosen=True)
            train(own, dataset=Dataset("the gallery", subset, test), pages=False, report=progress)
            fitted = load_model(out)
        if features is None:  # the trunk is the same in all folds
            features = load_features(fitted, pixels, progress=image_counter(progress, "seen by the trunk"))
        yield fitted.embed_features(features)


def read_config(model: Path) -> TrainConfig:
    """Read the options of a run; ``ValueError`` if its heads cannot be trained again."""
    path = model / "config.yaml"
    if not path.is_file():
        raise ValueError(f"there is no {path}: index again with --model RUN, or calibrate with --queries")
    options = yaml.safe_load(path.read_text())
    config = from_stored({**options, "out": "unused"})
    if config.train != "heads":
        raise ValueError("only the heads of a run with a frozen trunk can be trained again")
    return config


def assign_folds(labels: Tensor, learned: Tensor, *, folds: int = 2, seed: int = 0) -> Tensor:
    """The fold of each image [n]: classes with a learned image are divided at random, the others are in none (−1).

    >>> assign_folds(torch.tensor([0, 0, 1, 2]), torch.tensor([True, False, True, False]))
    tensor([ 0,  0,  1, -1])
    """
    classes = labels[learned].unique()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed)) % folds
    place = torch.full((int(labels.max()) + 1,), -1)
    place[classes] = order
    out: Tensor = place[labels]
    return out

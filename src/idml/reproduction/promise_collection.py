"""Collections for the study of promises: a data set as folders, a model, and a gallery, made as a user would.

A fifth of the classes is kept out of the collection: their images are fresh unknown queries. A fifth of the images of
the other classes is kept out too: fresh known queries. The rest is `photos`. It is trained on (by the README's recipe)
and calibrated. What is there already is not made again.

    photos/CLASS/…      the collection            known/CLASS/…      unknown/CLASS/…

All three are indexed into one gallery, so that every image is embedded once; `Parts` divides its items again.

Photographs are trained with a frozen trunk on half of the classes of the collection, and all of it is indexed. Glyphs
are trained as in the demo, on their training classes; the collection is of their test classes, without characters that
nobody can tell apart.
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from idml.data.datasets import ImageSet, load_dataset
from idml.data.sampling import random_stream
from idml.data.sources import ArraySource, FileSource, Source, TarSource
from idml.demo import SETTINGS, find_twin_groups
from idml.files import write_atomic
from idml.model.model import PRETRAINED
from idml.progress import Note, Progress, image_counter
from idml.search.gallery import Gallery, open_or_create
from idml.search.gallery_calibration import GallerySource
from idml.search.indexing import index_folder
from idml.training.config import from_dict
from idml.training.loop import train

TRAINED, GLYPHS = "trained", "glyphs"
MODELS = (PRETRAINED, TRAINED)
PARTS = ("photos", "known", "unknown")
KEPT_OUT = 0.2  # the share of classes, and of images of the others, that are kept out


@dataclass(frozen=True)
class Collection:
    """The folders of a data set, and the gallery of one model with the images of all of them."""

    name: str
    folder: Path
    model: str

    @property
    def gallery(self) -> Path:
        """Where the gallery is."""
        return self.folder / f"gallery-{self.model}"

    @property
    def run(self) -> Path:
        """Where the trained model is."""
        return self.folder / "run"


def make_collection(data: str, model: str, folder: Path, *, report: Progress, note: Note) -> Collection:
    """Write the images of a data set to folders, train a model if asked for, and index them."""
    if model not in MODELS:
        raise ValueError(f"the study of promises has the models {' and '.join(MODELS)}, not {model!r}")
    name = data.partition(":")[0]
    collection = Collection(name, folder / name, model)
    done = collection.folder / "written.json"
    if not done.exists():
        counts = dict.fromkeys(PARTS, 0)
        for part, images in split_images(_load(data)).items():
            _write_images(images, collection.folder / part, name)
            counts[part] = len(images)
        write_atomic(done, json.dumps(counts).encode())
    photos, run = collection.folder / PARTS[0], None
    if model == TRAINED:
        run = collection.run
        if not (run / "metrics.json").exists():
            photographs = {"data": f"folder:{photos}", "freeze_trunk": True}
            options = {**(SETTINGS if data == GLYPHS else photographs), "out": str(run)}
            train(from_dict(options), resume=True, report=report, note=note)
    with open_or_create(collection.gallery, run or PRETRAINED) as gallery:
        for part in PARTS:
            index_folder(gallery, collection.folder / part, progress=image_counter(report, "indexed"), note=note)
    return collection


@dataclass(frozen=True, eq=False)
class Parts:
    """All images of a data set as one model embeds them, and which part each belongs to: a number of `PARTS` [n]."""

    everything: GallerySource
    part: Tensor

    @classmethod
    def read(cls, gallery: Gallery, note: Note, report: Progress) -> "Parts":
        """Read the gallery of a collection; images with the same bytes are as common among the fresh ones."""
        source = GallerySource.read(gallery, None, note, report, keep_copies=True)
        return cls(source, torch.tensor([PARTS.index(item.path.partition("/")[0]) for item in source.items]))

    @property
    def photos(self) -> GallerySource:
        """The collection, as if nothing else were in the gallery."""
        return take_items(self.everything, (self.part == 0).nonzero().flatten())

    @property
    def fresh(self) -> GallerySource:
        """The images that were kept out of it, those of its classes first."""
        return take_items(self.everything, torch.cat([(self.part == i).nonzero().flatten() for i in (1, 2)]))


def take_items(source: GallerySource, rows: Tensor) -> GallerySource:
    """Some items of a gallery, as if there were no others."""
    present, labels = source.labels[rows].unique(return_inverse=True)
    names = list(source.names)
    return replace(
        source,
        items=[source.items[row] for row in rows.tolist()],
        embeddings=source.embeddings[rows],
        labels=labels,
        names={names[label]: n for n, label in enumerate(present.tolist())},
    )


def split_images(images: ImageSet) -> dict[str, ImageSet]:
    """Divide images into the collection, fresh images of its classes, and images of other classes."""
    classes = len(images.classes)
    outside = torch.zeros(classes, dtype=torch.bool)
    outside[torch.randperm(classes, generator=random_stream("promises, classes"))[: round(KEPT_OUT * classes)]] = True
    unknown = outside[images.labels]
    fresh = torch.rand(len(images), generator=random_stream("promises, images")) < KEPT_OUT
    masks = {"photos": ~unknown & ~fresh, "known": ~unknown & fresh, "unknown": unknown}
    return {name: images[mask] for name, mask in masks.items()}


def _load(spec: str) -> ImageSet:
    """All images of a data set; of glyphs, the test classes that share no image with another one."""
    dataset = load_dataset(spec)
    if spec == GLYPHS:
        groups = find_twin_groups(dataset.test)
        alone = (groups.bincount()[groups] == 1).nonzero().flatten().tolist()
        return dataset.test.of_classes(alone)
    train, test = dataset.train, dataset.test
    labels: Tensor = torch.cat([train.labels, len(train.classes) + test.labels])
    return ImageSet(dataset.name, [*train.sources, *test.sources], labels, (*train.classes, *test.classes))


def _write_images(images: ImageSet, folder: Path, prefix: str) -> None:
    """Write each image to a folder of its class; bytes of photographs are copied as they are."""
    for number, (source, label) in enumerate(zip(images.sources, images.labels.tolist(), strict=True)):
        name = "".join(c if c.isalnum() or c in "+-_." else "_" for c in images.classes[label])
        place = folder / f"{prefix}-{label:04}-{name}"
        place.mkdir(parents=True, exist_ok=True)
        if isinstance(source, ArraySource):
            source.decode().save(place / f"{number:05}.png")
        else:
            (place / f"{number:05}{os.path.splitext(source.name)[1]}").write_bytes(_read(source))


def _read(source: Source) -> bytes:
    if isinstance(source, TarSource):
        with source.archive.open("rb") as file:
            file.seek(source.offset)
            return file.read(source.size)
    assert isinstance(source, FileSource)
    return (source.root / source.name).read_bytes()

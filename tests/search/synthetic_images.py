"""Made images, models and calibrations for the tests of galleries."""

import hashlib
import io
import os

import numpy as np
import torch
from PIL import Image

from idml import Embeddings
from idml.calibration.evidence import Profile
from idml.calibration.open_set import QueryPool
from idml.calibration.stored import Calibration
from idml.model import build_model, fingerprint, save_model
from idml.search.engines import Item

DIMENSIONS = 16


def save_run(folder, seed=0):
    """A tiny model that has seen a batch, in a run folder."""
    torch.manual_seed(seed)
    model = build_model("conv4", embedding_dim=DIMENSIONS, image_size=28)
    model(torch.rand(8, 3, 28, 28))
    model.uncertainty.scale *= 10
    save_model(model, folder)
    return folder


def picture(kind, number=0, size=(40, 30)):
    """A striped RGB image: ``kind`` gives its colours and stripes, ``number`` some noise."""
    own, noise = np.random.default_rng([7, kind]), np.random.default_rng([kind, number])
    tile = own.integers(0, 256, (4, 4, 3)).repeat(10, axis=0).repeat(10, axis=1)[: size[1], : size[0]]
    tile = np.resize(tile, (size[1], size[0], 3))
    return Image.fromarray((tile + noise.normal(0, 6, tile.shape)).clip(0, 255).astype(np.uint8))


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def write_picture(path, kind, number=0):
    """A file with a made image; the path may be bytes."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(encoded(picture(kind, number)))


def cloud(classes, images, noise=0.5, seed=0):
    """Embeddings around class centres, ‖u‖ growing with an image's own noise, and their labels."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, DIMENSIONS, generator=g)
    labels = torch.arange(classes).repeat_interleave(images)
    amount = noise * (0.5 + torch.rand(len(labels), 1, generator=g))
    semantic = centres[labels] + amount * torch.randn(len(labels), DIMENSIONS, generator=g)
    return Embeddings(semantic, amount * torch.randn(len(labels), DIMENSIONS, generator=g).abs()), labels


def as_items(labels, first=0):
    """An item for each label (None stays None)."""
    return [
        Item(f"made/{n}.jpg", hashlib.sha256(f"item {n}".encode()).hexdigest(), None if label is None else f"c{label}")
        for n, label in enumerate(labels, first)
    ]


def fit_calibrations(run, *, seed=0, gallery_classes=30, kinds=(True, False), **changes):
    """Fit both calibrations on a made world and save them in the run; returns the gallery and new queries.

    The gallery's embeddings and labels, and queries and labels of known and unknown classes.
    """
    everything, labels = cloud(gallery_classes + 10, 40, noise=0.9, seed=seed)
    stored = (torch.arange(len(labels)) % 2 == 0) & (labels < gallery_classes)
    gallery, theirs = everything[stored], labels[stored]
    queries, own = everything[~stored], labels[~stored]
    found = QueryPool(queries, own, gallery, theirs).search(listed=20)
    half = torch.rand(len(own), generator=torch.Generator().manual_seed(1)) < 0.7
    options = {
        "known": found.known[half],
        "distances": found.distances[half],
        "same_class": found.same_class[half],
        "profile": Profile.of(gallery),
        "model": fingerprint(run),
        **changes,
    }
    for labelled, name in ((True, "calibration.json"), (False, "calibration-unlabelled.json")):
        if labelled in kinds:
            made = Calibration.fit(found.evidence[half], found.correct[half], labelled=labelled, **options)
            made.save(run / name)
    return gallery, theirs, queries[~half], own[~half]

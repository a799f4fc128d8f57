"""Heads trained again without some classes, and what a run says it has learned from."""

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image

from idml import Embeddings, calibrate
from idml.model import load_model
from idml.search.gallery import Gallery, open_or_create
from idml.search.indexing import index_folder
from idml.training.config import from_dict
from idml.training.loop import train
from idml.training.refit import assign_folds, refit_heads


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Ten classes of eight noisy images, and a run with a frozen trunk that learned from the first eight."""
    tmp_path = tmp_path_factory.mktemp("refit")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("IDML_CACHE", str(tmp_path / "cache"))
        yield make_run(tmp_path)


def make_run(tmp_path):
    noise = np.random.default_rng(0)
    for c in range(10):
        (tmp_path / "photos" / f"c{c}").mkdir(parents=True)
        pattern = np.kron(noise.integers(40, 216, (4, 4, 3)), np.ones((8, 8, 1)))
        for n in range(8):
            pixels = (pattern + noise.normal(0, 30, pattern.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / f"c{c}" / f"{n}.png")
    options = {"data": "folder:photos", "out": "run", "image_size": 32}
    options |= {"batch_size": 32, "embedding_dim": 8, "epochs": 1, "train": "heads", "split": "0.8", "holdout": 0.0}
    train(from_dict(options), pages=False)
    return tmp_path


def test_a_run_says_which_images_it_learned_from(place):
    content = json.loads((place / "run" / "learned.json").read_text())
    files = sorted((place / "photos").glob("c[0-7]/*.png"))
    assert content["trunk"] == "frozen"
    assert content["images"] == sorted(hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files)


def test_heads_are_trained_again_without_a_fold(place):
    files = sorted((place / "photos").glob("*/*.png"))
    labels = torch.tensor([int(file.parent.name[1:]) for file in files])
    learned = labels < 8
    folds = assign_folds(labels, learned)
    assert {*folds[labels >= 8].tolist()} == {-1}
    assert [len(labels[folds == fold].unique()) for fold in (0, 1)] == [4, 4]
    found = list(refit_heads(place / "run", files, labels, learned, folds))
    assert [type(e) for e in found] == [Embeddings, Embeddings]
    assert [len(e) for e in found] == [80, 80]
    own = load_model(place / "run").embed(files)
    assert own.semantic.shape == found[0].semantic.shape
    for other in (found[1], own):  # other heads on the same trunk
        assert not torch.allclose(found[0].semantic, other.semantic, atol=1e-3)
    again = next(refit_heads(place / "run", files, labels, learned, folds))
    torch.testing.assert_close(again.semantic, found[0].semantic)


def test_a_gallery_of_learned_classes_is_cross_fitted(place):
    with open_or_create("g", "run") as gallery:
        index_folder(gallery, place / "photos")
    result = calibrate("g")
    assert "cross-fitted: 8 classes by heads that were trained again without them" in result["queries"]
    assert result["known_queries"] == 80
    with Gallery.open("g") as gallery:
        assert gallery.status().queries == result["queries"]

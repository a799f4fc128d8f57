"""The Python names of `import idml`."""

import inspect
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import idml


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Eight classes of four noisy images, each class of its own colour."""
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    noise = np.random.default_rng(0)
    for label in range(8):
        folder = tmp_path / "photos" / f"class {label}"
        folder.mkdir(parents=True)
        for n in range(4):
            pixels = noise.integers(0, 60, (30, 30, 3)) + 24 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{n}.png")
    return f"folder:{tmp_path / 'photos'}"


def test_train_evaluate_audit_and_load(photos, tmp_path):
    run = tmp_path / "run"
    options = {"trunk": "conv4", "pretrained": False, "image_size": 28, "embedding_dim": 8}
    metrics = idml.train(data=photos, out=str(run), epochs=1, batch_size=8, workers=0, **options)
    assert set(metrics["selected"]) >= {"recall@1", "r_precision", "map@r"}
    assert json.loads((run / "metrics.json").read_text())["steps"] == metrics["steps"]
    assert 0 <= idml.evaluate(run, photos)["recall@1"] <= 1
    assert idml.audit(run, photos, out=tmp_path / "audit")["report"] == str(tmp_path / "audit" / "report.html")
    image = next((tmp_path / "photos").glob("*/*.png"))
    assert isinstance(idml.load_model(run).embed(image), idml.Embeddings)


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(ValueError, match="unknown option 'epoch'; did you mean 'epochs'"):
        idml.train(data="glyphs", out="x", epoch=3)


def test_audit_is_a_package_and_a_function():
    code = "import idml.audit.run, idml; print(callable(idml.audit), idml.audit.run.audit_run.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "audit_run"]


def test_calibrate_and_gallery_are_those_of_the_commands():
    assert next(iter(inspect.signature(idml.calibrate).parameters)) == "gallery"
    assert {"open", "create"} <= set(dir(idml.Gallery))


def test_index_and_search_files(photos, tmp_path, tiny_run):
    added = idml.index(tmp_path / "photos", tmp_path / "gallery", model=tiny_run)
    assert added.new == 32
    assert idml.index(tmp_path / "photos", tmp_path / "gallery").unchanged == 32
    file = tmp_path / "photos" / "class 3" / "0.png"
    with idml.Gallery.open(tmp_path / "gallery") as gallery:
        (reply,) = gallery.search([file])
        (same,) = gallery.search([Image.open(file).convert("RGB")])
        with pytest.raises(ValueError, match="must be a list"):
            gallery.search(str(file))
    assert reply == same
    assert reply.results[0].label == "class 3"

"""`idml embed`: arrays that any program can read, no pickle, whole or not at all."""

import json
import os

import numpy as np
import pytest
from PIL import Image
from synthetic_images import encoded, picture

import idml
from idml import cli
from idml.data.images import read_image
from idml.model import build_model, save_model
from idml.search.embedder import open_embedder


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(build_model("conv4", embedding_dim=16, image_size=28), "run")
    for number, name in enumerate(("cats/0.png", "cats/1.png", "dogs/old/0.png", "loose.png")):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(encoded(picture(number)))
    return tmp_path


def test_arrays(place, capsys):
    (place / "photos" / "cats" / "broken.jpg").write_bytes(b"no image")
    (place / "photos" / "notes.txt").write_text("not one")
    assert cli.main(["embed", "photos", "--model", "run", "--to", "e.npz", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["images"], result["dimensions"], result["labelled"]) == (4, 16, 3)
    assert (result["broken"], result["skipped"]) == (1, 1)
    assert "cannot read the image 'cats/broken.jpg'" in err
    assert "1 file of other types left out ('notes.txt')" in err
    found = np.load("e.npz", allow_pickle=False)
    assert found["names"].tolist() == ["cats/0.png", "cats/1.png", "dogs/old/0.png", "loose.png"]
    assert found["labels"].tolist() == ["cats", "cats", "dogs", ""]
    embedder = open_embedder("run", runtime="torch")
    expected = embedder.embed([read_image(place / "photos" / name) for name in found["names"].tolist()])
    np.testing.assert_allclose(found["vectors"], expected.semantic, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["level"], expected.level, rtol=1e-4, atol=1e-6)
    assert found["vectors"].dtype == found["level"].dtype == np.float32
    assert str(found["model"]) == result["model"] == embedder.fingerprint


def test_from_python_and_one_image(place):
    seen = []
    result = idml.embed("photos/cats/1.png", to="e.npz", model="run", progress=lambda *counts: seen.append(counts))
    assert result["images"] == 1
    assert seen == [(1, 1)]
    assert np.load("e.npz", allow_pickle=False)["names"].tolist() == ["1.png"]


def test_many_images_in_order(place, monkeypatch):
    monkeypatch.setattr("idml.search.embed.BATCH", 2)
    written = idml.embed("photos", "e.npz", model="run")
    assert (written.file, written.images, written.dimensions) == ("e.npz", 4, 16)
    assert str(written) == "e.npz: 4 images, 16 dimensions; 0 broken, 0 skipped"
    idml.embed("photos/loose.png", to="one.npz", model="run")
    every, one = (np.load(name, allow_pickle=False) for name in ("e.npz", "one.npz"))
    np.testing.assert_allclose(every["vectors"][3], one["vectors"][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("photos --to e.csv", "ends in .npz"),
        ("photos --to nowhere/e.npz", "there is no folder"),
        ("photos --to folder.npz", "is a folder"),
        ("absent --to e.npz", "there is no folder 'absent'"),
        ("empty --to e.npz", "there is no image in 'empty'"),
        ("broken --to e.npz", "no image in 'broken' can be read (1 tried); nothing was written"),
        ("photos --to e.npz --model absent", "there is no model at absent"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(place, arguments, expected, capsys):
    for name in ("empty", "broken", "folder.npz"):
        (place / name).mkdir()
    (place / "broken" / "x.png").write_bytes(b"")
    (place / "e.npz").write_bytes(b"what was there")
    run = [] if "--model" in arguments else ["--model", "run"]
    assert cli.main(["embed", *arguments.split(), *run]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("idml embed: ")
    assert expected in line
    assert (place / "e.npz").read_bytes() == b"what was there"
    assert not [name for name in os.listdir(place) if name.endswith(".part")]


def test_unusual_names(place):
    name = os.fsdecode(b"caf\xe9.png")
    (place / "photos" / name).write_bytes(encoded(picture(1)))
    idml.embed("photos", to="e.npz", model="run")
    assert name in np.load("e.npz", allow_pickle=False)["names"].tolist()
    assert Image.open(place / "photos" / name).size

"""A malicious pickle offered as a model, to every command that takes one: never read, told in one line."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from idml import cli
from idml.model import build_model, save_model
from idml.search.gallery import Gallery


class Touch:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Some images, and ``bad``: a run whose model is a pickle, as is what else lies in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    for n in range(12):
        path = Path("images") / f"class {n % 4}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(n).integers(0, 256, (30, 30, 3), dtype=np.uint8)).save(path)
    save_model(build_model("conv4", embedding_dim=8, image_size=28), tmp_path / "good")
    for folder in (Path("bad"), Path("bad/checkpoints")):
        folder.mkdir()
    torch.save({"weight": Touch(tmp_path / "trace")}, "bad/model.safetensors")
    for name in ("checkpoints/last.safetensors", "model.onnx", "calibration.json", "model.pt"):
        shutil.copy("bad/model.safetensors", f"bad/{name}")
    torch.load("bad/model.pt", weights_only=False)
    (tmp_path / "trace").unlink()  # where it is trusted it does harm
    return tmp_path


COMMANDS = {
    "evaluate": "evaluate bad --data folder:images",
    "calibrate": "calibrate gallery",
    "index": "index images --model bad --to new",
    "index a file": "index images --model bad/model.pt --to new",
    "index by onnx": "index images --model bad --to new --runtime onnx",
    "search": "search gallery images/class_0.png",
    "search a named run": "search gallery images/class_0.png --model bad",
    "search by onnx": "search gallery images/class_0.png --runtime onnx",
    "serve": "serve gallery --port 0",
    "audit": "audit bad --data folder:images --out lists",
    "export": "export bad --out bad.onnx",
    "resume": "train --data folder:images --out bad --resume",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_malicious_pickle_is_refused_unread(place, capsys, command):
    Gallery.create("gallery", "good").close()
    shutil.copy("bad/model.safetensors", "gallery/model/model.safetensors")
    shutil.copy("images/class 0/0.png", "images/class_0.png")
    assert cli.main(command.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    told = said.err.splitlines()[-1]
    assert told.startswith(f"idml {command.split()[0]}: ")
    assert re.search("is a pickle|made with another model|is not a sound checkpoint", told)
    assert not (place / "trace").exists()


@pytest.mark.parametrize("name", ["model.onnx", "calibration.json", "checkpoints/last.safetensors"])
def test_beside_a_sound_model_it_is_not_read_either(place, capsys, name):
    shutil.copy("good/model.safetensors", "bad/model.safetensors")
    if name != "model.onnx":
        Path("bad/model.onnx").unlink()
    command = ["index", "images", "--model", "bad", "--to", "new"]
    assert cli.main([*command, *(["--runtime", "onnx"] if name == "model.onnx" else [])]) == 0  # or exported anew
    if name == "calibration.json":
        shutil.copy("bad/calibration.json", "new/calibration.json")
        assert cli.main(["search", "new", "images/class 0/0.png"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (place / "trace").exists()

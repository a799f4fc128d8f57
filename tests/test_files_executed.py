"""How many of our files a reader has to open: those of which a function runs for one search and one training step."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from idml import cli
from idml.model import build_model, save_model
from idml.training.config import from_dict
from idml.training.loop import train
from tracer import MOST_FOR_A_SEARCH, Tracer

MOST_FOR_A_STEP = 15


@pytest.fixture
def tracer():
    tracer = Tracer()
    yield tracer
    tracer.stop()


def test_a_function_called_is_counted_and_an_import_is_not(tracer):
    tracer.start()
    sys.modules.pop("idml.pml", None)
    import idml.pml

    idml.LabelSets(torch.tensor([0, 1])).matches(idml.LabelSets(torch.tensor([1])))
    tracer.stop()
    assert "labels.py" in tracer.files
    assert "pml.py" not in tracer.files


def save_images(folder, classes, each):
    """Noise as image files, one sub-folder a class."""
    noise = np.random.default_rng(0)
    for label in "abcdefgh"[:classes]:
        (folder / label).mkdir(parents=True)
        for number in range(each):
            Image.fromarray(noise.integers(0, 256, (32, 32, 3), np.uint8)).save(folder / label / f"{number}.png")


def test_a_search_runs_few_files(tracer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(build_model("conv4", embedding_dim=16, image_size=28), Path("run"))
    save_images(Path("photos"), classes=2, each=3)
    assert cli.main(["index", "photos", "--model", "run", "--to", "gallery"]) == 0
    tracer.start()
    assert cli.main(["search", "gallery", "photos/a/0.png"]) == 0
    tracer.stop()
    capsys.readouterr()
    assert "cli.py" in tracer.files
    assert len(tracer.files) <= MOST_FOR_A_SEARCH, sorted(tracer.files)


class EnoughTracedError(Exception):
    """Ends a run after its second step."""


@pytest.mark.parametrize("method", ["plain", "idml"])
def test_a_training_step_runs_few_files(tracer, tmp_path, method):
    def report(row):
        if row.get("step") == 1:
            tracer.start()
        elif row.get("step") == 2:
            tracer.stop()
            raise EnoughTracedError

    save_images(tmp_path / "photos", classes=8, each=6)
    options = {"data": f"folder:{tmp_path / 'photos'}", "split": "all", "trunk": "conv4", "loss": "proxy_anchor"}
    options |= {"method": method, "embedding_dim": 16, "image_size": 28, "batch_size": 8, "holdout": 0.0}
    with pytest.raises(EnoughTracedError):
        train(from_dict({**options, "out": str(tmp_path / "run")}), report=report, pages=False)
    beside = {file for file in tracer.files if not file.startswith(("methods/", "losses/"))}
    assert {"training/loop.py", "training/step.py"} & beside
    assert len(beside) <= MOST_FOR_A_STEP, sorted(beside)

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


def test_a_search_runs_few_files(tracer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(build_model("conv4", embedding_dim=16, image_size=28), Path("run"))
    noise = np.random.default_rng(0)
    for label in ("a", "b"):
        Path("photos", label).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(noise.integers(0, 256, (32, 32, 3), np.uint8)).save(f"photos/{label}/{number}.png")
    assert cli.main(["index", "run", "photos", "--to", "gallery"]) == 0
    tracer.start()
    assert cli.main(["search", "gallery", "photos/a/0.png"]) == 0
    tracer.stop()
    capsys.readouterr()
    assert "cli.py" in tracer.files
    assert len(tracer.files) <= MOST_FOR_A_SEARCH, sorted(tracer.files)


@pytest.mark.parametrize("method", ["plain", "idml"])
def test_a_training_step_runs_few_files(tracer, tmp_path, method):
    def report(row):
        if row.get("step") == 1:
            tracer.start()
        elif row.get("step") == 2:
            tracer.stop()

    options = {
        "data": "glyphs",
        "trunk": "conv4",
        "loss": "proxy_anchor",
        "epochs": 1,
        "batch_size": 64,
        "image_size": 28,
    }
    options |= {"method": method, "embedding_dim": 16, "out": str(tmp_path / "run")}
    train(from_dict(options), report=report, pages=False)
    beside = {file for file in tracer.files if not file.startswith(("methods/", "losses/"))}
    assert "training/loop.py" in beside or "training/step.py" in beside
    assert len(beside) <= MOST_FOR_A_STEP, sorted(beside)

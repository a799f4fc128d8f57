"""A small folder of pictures to train on in a second."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from idml.training.config import TrainConfig
from idml.training.loop import train

CLASSES, EACH = 12, 6


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Twelve classes of six noisy patterns, 24 pixels square."""
    root = tmp_path_factory.mktemp("pictures")
    noise = np.random.default_rng(0)
    for c in range(CLASSES):
        (root / f"class {c:02d}").mkdir()
        pattern = np.kron(noise.integers(40, 216, (4, 4, 3)), np.ones((6, 6, 1)))
        for i in range(EACH):
            pixels = (pattern + noise.normal(0, 25, pattern.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"class {c:02d}" / f"{i}.png")
    return root


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("IDML_CACHE", str(tmp_path_factory.getbasetemp() / "idml-cache"))


@pytest.fixture
def options(pictures):
    """Options of a run that takes a second."""
    return {
        "data": f"folder:{pictures}", "method": "idml", "trunk": "conv4", "pretrained": False, "image_size": 16,
        "embedding_dim": 8,
        "epochs": 3, "batch_size": 8, "per_class": 2, "lr": 1e-3, "holdout": 0.34, "checkpoint_every": 2,
    }  # fmt: skip


@pytest.fixture
def bit_identical_after_a_kill(tmp_path):
    """Check that a run that is killed after a step and resumed ends where a whole one does; the checkpoint."""

    class Killed(Exception):
        pass

    def check(config, step=4):
        def kill(row):
            if row.get("step") == step and "loss" in row:
                raise Killed

        config = {**config, "checkpoint_every": 1}
        train(TrainConfig(out=str(tmp_path / "whole"), **config))
        with pytest.raises(Killed):
            train(TrainConfig(out=str(tmp_path / "killed"), **config), report=kill)
        train(TrainConfig(out=str(tmp_path / "killed"), **config), resume=True)
        one, two = (load_file(tmp_path / run / "checkpoints/last.safetensors") for run in ("whole", "killed"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
        return one

    return check

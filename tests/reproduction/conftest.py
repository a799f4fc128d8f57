"""Small images, and a regime whose runs take a second."""

import numpy as np
import pytest
from PIL import Image

from idml.reproduction import regimes
from idml.reproduction.regimes import UNTAUGHT_U, Regime, Speed

SMALL = {
    "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8, "epochs": 1, "batch_size": 8,
    "per_class": 2, "holdout": 0.34, "checkpoint_every": 1, **UNTAUGHT_U,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_runs(monkeypatch):
    """Runs of a test lie in its own folder, whatever the environment says."""
    monkeypatch.delenv("IDML_RUNS", raising=False)


@pytest.fixture
def patterns(tmp_path, monkeypatch):
    """The SPEC of twelve classes of four noisy patterns."""
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    noise = np.random.default_rng(0)
    for c in "abcdefghijkl":
        (tmp_path / "data" / c).mkdir(parents=True)
        pattern = noise.integers(60, 196, (20, 20, 3))
        for i in range(4):
            image = Image.fromarray((pattern + noise.integers(-60, 60, (20, 20, 3))).astype(np.uint8))
            image.save(tmp_path / "data" / c / f"{i}.png")
    return f"folder:{tmp_path / 'data'}"


@pytest.fixture
def small(monkeypatch):
    """A regime in the place of ``frozen`` with two learning rates."""
    regime = Regime("frozen", SMALL, Speed(1000, 1, "a test"), rates=(1e-3, 1e-2), seeds=2)
    monkeypatch.setitem(regimes.LAPTOP, "frozen", regime)
    return regime

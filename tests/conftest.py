"""Settings of the whole test suite, and small training runs for the tests of methods and training."""

import os

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image
from safetensors.torch import load_file

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # its handlers sometimes break a child that is just starting
settings.register_profile("idml", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("idml")
torch.set_num_threads(1)  # the tests' tensors are small: a second thread costs more than it brings


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_progress_lines(monkeypatch):
    """On a slow machine a command writes lines of progress; tests read the lines that a command writes anyway."""
    monkeypatch.setattr("idml.progress.FIRST", float("inf"))


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A run with a small, untrained model."""
    from idml.model import build_model, save_model

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    save_model(build_model("conv4", embedding_dim=16, image_size=28), folder)
    return folder


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """With IDML_NO_SKIP set, a skipped test is a failed test."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("IDML_NO_SKIP"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but IDML_NO_SKIP is set: {report.longrepr}"


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


@pytest.fixture
def options(pictures, tmp_path_factory, monkeypatch):
    """Options of a training run that takes a second; the cache lies in a temporary folder."""
    monkeypatch.setenv("IDML_CACHE", str(tmp_path_factory.getbasetemp() / "idml-cache"))
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

        from idml.training.config import from_dict
        from idml.training.loop import train

        config = {**config, "checkpoint_every": 1}
        train(from_dict({"out": str(tmp_path / "whole"), **config}))
        with pytest.raises(Killed):
            train(from_dict({"out": str(tmp_path / "killed"), **config}), report=kill)
        train(from_dict({"out": str(tmp_path / "killed"), **config}), resume=True)
        one, two = (load_file(tmp_path / run / "checkpoints/last.safetensors") for run in ("whole", "killed"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
        return one

    return check

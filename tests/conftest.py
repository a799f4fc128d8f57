"""Settings of the whole test suite."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("idml", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("idml")
torch.set_num_threads(1)  # the tests' tensors are small: a second thread costs more than it brings


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


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

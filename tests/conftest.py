"""Settings of the whole test suite."""

import os

import pytest
from hypothesis import settings

settings.register_profile("idml", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("idml")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """With IDML_NO_SKIP set, a skipped test is a failed test."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("IDML_NO_SKIP"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but IDML_NO_SKIP is set: {report.longrepr}"

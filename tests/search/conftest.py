"""Galleries for the tests."""

import os

import milvus_server
import pytest
from milvus_server import milvus  # noqa: F401 (a fixture)
from synthetic_images import as_items, fit_calibrations, save_run

from idml.calibration.stored import Calibration
from idml.search.engines import sqlite_storage
from idml.search.gallery import Gallery


def pytest_runtest_teardown(item, nextitem):
    """Nothing but the modules about Milvus needs its server."""
    if "milvus" in item.path.name and (nextitem is None or "milvus" not in nextitem.path.name):
        milvus_server.stop()


@pytest.fixture
def _no_waiting(monkeypatch):
    """No fsync: a kill does not need it, only a power failure does, and it takes most of a test's time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(sqlite_storage, "SYNCHRONOUS", "OFF")


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A run with calibrations beside it, and the gallery and the queries of their world."""
    run = save_run(tmp_path_factory.mktemp("calibrated"))
    return run, *fit_calibrations(run)


@pytest.fixture
def gallery(run, tmp_path):
    with Gallery.create(tmp_path / "g", run) as made:
        yield made


@pytest.fixture
def shop(world, tmp_path):
    """A calibrated gallery, what it holds, and queries with their labels."""
    run, stored, labels, queries, own = world
    with Gallery.create(tmp_path / "shop", run) as made:
        made.add_embedded(as_items(labels.tolist()), stored)
        made.store_calibration(Calibration.load(run / "calibration.json"))
        yield made, stored, labels, queries, own

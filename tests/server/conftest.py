"""Galleries for the tests of the service."""

import os

import pytest

from idml.server.limits import Limits


@pytest.fixture
def gallery(tmp_path, tiny_run, monkeypatch):
    """Twelve images of four labels, open for writing."""
    from service_client import made_gallery

    monkeypatch.setattr(os, "fsync", lambda file: None)
    with made_gallery(tmp_path / "gallery", tiny_run) as gallery:
        yield gallery


@pytest.fixture
def client(gallery):
    """A client of the service that needs no key."""
    from service_client import client_of

    with client_of(gallery, limits=Limits(map_seconds=600)) as client:
        yield client


@pytest.fixture(scope="session")
def shared(tmp_path_factory, tiny_run):
    """A client of a service that a test leaves as it found it."""
    from service_client import client_of, made_gallery

    with client_of(
        made_gallery(tmp_path_factory.mktemp("shared") / "g", tiny_run), limits=Limits(rate=1e6, map_seconds=600)
    ) as client:
        yield client

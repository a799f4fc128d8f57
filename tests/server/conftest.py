"""A tiny model, and galleries made with it."""

import os

import pytest


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """A run whose model is small and untrained."""
    import torch

    from idml.model import build_model, save_model

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    save_model(build_model("conv4", embedding_dim=16, image_size=28), folder)
    return folder


@pytest.fixture
def gallery(tmp_path, tiny_run, monkeypatch):
    """Twelve images of four labels, open for writing."""
    from serving import made_gallery

    monkeypatch.setattr(os, "fsync", lambda file: None)
    with made_gallery(tmp_path / "gallery", tiny_run) as gallery:
        yield gallery


@pytest.fixture
def client(gallery):
    """A client of the service that needs no key."""
    from serving import client_of

    with client_of(gallery) as client:
        yield client


@pytest.fixture(scope="session")
def shared(tmp_path_factory, tiny_run):
    """A client of a service that a test leaves as it found it."""
    from serving import client_of, made_gallery

    from idml.server.limits import Limits

    with client_of(made_gallery(tmp_path_factory.mktemp("shared") / "g", tiny_run), limits=Limits(rate=1e6)) as client:
        yield client

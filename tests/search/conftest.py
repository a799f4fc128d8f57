"""Galleries for the tests."""

import os

import pytest


@pytest.fixture
def _no_waiting(monkeypatch):
    """No fsync: a kill does not need it, only a power failure does, and it takes most of a test's time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)

"""Runs and galleries that earlier versions have written: each opens and answers as it did then.

A format that is no longer read is listed in REFUSED with the words that say so.
"""

import json
import sys
import tarfile
from pathlib import Path

import pytest

from idml.model import load_model
from idml.search.engines.sqlite import SqliteEngine
from idml.search.gallery import Gallery
from idml.search.integrity import verify_folder

STORED = Path(__file__).parent / "stored_formats"
REFUSED: dict[str, str] = {}  # version: the words with which it is refused
sys.path.insert(0, str(STORED))


@pytest.mark.parametrize("file", sorted(STORED.glob("*.tar.xz")), ids=lambda file: file.name.removesuffix(".tar.xz"))
def test_a_stored_run_and_gallery_open_and_answer_as_then(file, tmp_path):
    from make import search

    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    version = file.name.removesuffix(".tar.xz")
    if version in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[version]):
            Gallery.open(tmp_path / "gallery")
        return
    expected = json.loads((tmp_path / "expected.json").read_text())
    assert load_model(tmp_path / "run").config.embedding_dim == 8
    with SqliteEngine.open(tmp_path / "gallery") as engine:
        assert verify_folder(engine, tmp_path / "gallery") == []
    with Gallery.open(tmp_path / "gallery", write=True) as gallery:
        found = search(gallery)
        distances, then = found.pop("distances"), expected.pop("distances")
        assert found == expected
        assert distances == [pytest.approx(row, abs=2e-3) for row in then]
        assert gallery.relabel({expected["items"][0][0]: "new"}) == 1  # and it can be changed


def test_the_current_version_is_stored():
    from idml import __version__

    assert (STORED / f"{__version__}.tar.xz").is_file()

"""A whole gallery in a real Milvus server: the answers are those of the same gallery in a folder."""

import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path
from unittest import mock

import pytest
from synthetic_images import as_items, encoded, fit_calibrations, picture, save_run, write_picture

from idml.calibration.stored import Calibration
from idml.search.engines import Added
from idml.search.engines.milvus_connection import Connection
from idml.search.gallery import Gallery, Upload, open_or_create
from idml.search.indexing import index_folder
from idml.search.tsne_map import gallery_map


def test_the_example(milvus, tmp_path):
    script = Path(__file__).parents[2] / "examples" / "milvus_gallery.py"
    words = [sys.executable, script, milvus.place("example")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Indexed(new=96, " in done.stdout
    assert "the first result is now 'renamed elsewhere'" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_gallery_in_a_real_server(milvus, tmp_path, monkeypatch):
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    run, place = save_run(tmp_path / "run"), milvus.place("whole_gallery")
    stored, labels, queries, _ = fit_calibrations(run)
    queries = queries[:20]
    with open_or_create(place, run) as gallery, Gallery.create(tmp_path / "g", run) as folder:
        assert gallery.search([picture(1)])[0].answer.reason == "the collection is empty"
        for own in (gallery, folder):
            own.add_embedded(as_items(labels.tolist()), stored)
            own.store_calibration(Calibration.load(run / "calibration.json"))
        with Gallery.open(place, run=run) as other:  # every client finds it in the metadata of the collection
            assert other.calibration == folder.calibration
        assert gallery.status() == folder.status()
        assert gallery.guarantees() == folder.guarantees()
        for found, expected in zip(
            gallery.search_embeddings(queries, 5), folder.search_embeddings(queries, 5), strict=True
        ):
            assert [r.id for r in found.results] == [r.id for r in expected.results]
            assert (found.answer.state, found.answer.reason) == (expected.answer.state, expected.answer.reason)
            assert found.answer.probability == pytest.approx(expected.answer.probability, abs=1e-5)
            assert found.notes == expected.notes == ()
        ids = [item.id for item in gallery.items()]
        several = [Upload(encoded(picture(n)), "c1") for n in range(9)]
        changes = (
            lambda: gallery.get_many(ids),
            lambda: gallery.search_embeddings(queries, 50),
            lambda: gallery.relabel(dict.fromkeys(ids[:90], "c3")),
            lambda: gallery.add(several),
            lambda: gallery.add(several),  # they are there
            lambda: gallery.remove([upload.id for upload in several]),
        )
        for change in changes:  # a few questions to the server, however many items are meant
            with mock.patch.object(Connection, "do", autospec=True, side_effect=Connection.do) as asked:
                change()
            assert 1 <= asked.call_count <= 9
        upload = Upload(encoded(picture(1)), "c1")
        assert [gallery.add([upload]), gallery.add([replace(upload, label="c2")])] == [Added(1, 0, 0), Added(0, 1, 0)]
        assert (gallery.get(upload.id).label, gallery.get(upload.id).path) == ("c2", "")
        assert gallery.image_file(upload.id) is None
        assert gallery.thumbnail(upload.id).startswith(b"\xff\xd8")
        assert gallery.search([picture(1)])[0].results[0].id == upload.id
        assert gallery.remove([upload.id, "unknown"]) == 1
    for n in range(4):
        write_picture(tmp_path / "photos" / f"c{n % 2}" / f"{n}.png", n)
    write_picture(bytes(tmp_path / "photos") + b"/caf\xe9/x.png", 5)
    with Gallery.open(place, run=run, write=True) as gallery:
        assert astuple(index_folder(gallery, tmp_path / "photos")) == (5, 0, 0, 0, 0, 0)
        (tmp_path / "photos" / "c0" / "0.png").unlink()
        assert astuple(index_folder(gallery, tmp_path / "photos")) == (0, 0, 4, 1, 0, 0)
        assert gallery.status().items == len(gallery) == 604
        assert len(gallery_map(gallery, limit=20)) == 20

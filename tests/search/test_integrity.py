"""`idml gallery verify` sees every flipped bit and every missing or changed file that a gallery needs."""

import json
import random
import shutil

import pytest
import torch
from PIL import Image

from idml import cli
from idml.calibration.evidence import Evidence
from idml.calibration.stored import Calibration
from idml.model import fingerprint
from idml.search.engines.sqlite import SqliteEngine
from idml.search.feedback import add_feedback
from idml.search.gallery import Gallery, Upload
from idml.search.indexing import index_folder
from idml.search.integrity import verify_folder


def saved(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 20), (number, 7 * number % 256, 90)).save(path)
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory, tiny_run):
    """A gallery with everything a gallery may have, and the folder that it indexes."""
    root = tmp_path_factory.mktemp("verify")
    shutil.copytree(tiny_run, root / "run")
    for name, content in (("learned.json", {"trunk": "frozen", "images": ["0" * 64]}), ("source.json", {"name": "x"})):
        (root / "run" / name).write_text(json.dumps(content))
    (root / "run" / "config.yaml").write_text("epochs: 3\n")
    evidence = Evidence(*torch.rand(5, 60))
    found = Calibration.fit(evidence, torch.rand(60) > 0.5, labelled=False, model=fingerprint(root / "run"))
    for number in range(3):
        saved(root / "photos" / "red" / f"{number}.png", number)
    with Gallery.create(root / "gallery", root / "run") as gallery:
        index_folder(gallery, root / "photos")
        gallery.add([Upload(saved(root / "upload.png", 200).read_bytes())])
        gallery.store_calibration(found)
        query = gallery.embedder.embed([Image.new("RGB", (20, 20), "red")])
        add_feedback(root / "gallery", gallery.engine.properties, query, query="q.png", right=True, found="red")
    return root


@pytest.fixture
def place(original, tmp_path):
    """A copy of the gallery; the indexed folder is that of the original."""
    shutil.copytree(original / "gallery", tmp_path / "gallery")
    return tmp_path / "gallery"


def problems(place):
    with SqliteEngine.open(place) as engine:
        return [str(problem) for problem in verify_folder(engine, place)]


def test_a_sound_gallery_has_no_problem(place, capsys):
    assert problems(place) == []
    assert cli.main(["gallery", "verify", str(place)]) == 0
    assert "all 4 items are sound" in capsys.readouterr().out


def test_a_flipped_bit_in_any_file_is_found(place):
    chance = random.Random(0)
    files = [file for folder in ("model", "uploads") for file in (place / folder).iterdir()]
    files += [place / name for name in ("roots.json", "calibration.json", "feedback.json")]
    beside = {"model.safetensors", "config.yaml", "learned.json", "source.json", "checksums.json"}
    assert beside <= {file.name for file in files}
    for file in files:
        content = file.read_bytes()
        for _ in range(12 if len(content) < 10_000 else 4):
            damaged = bytearray(content)
            damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            found = problems(place)
            assert found, file
            assert not any("\n" in line for line in found)
        file.write_bytes(content)
    assert problems(place) == []


def test_a_flipped_bit_in_a_root_does_not_double_the_gallery(place, original, capsys):
    roots = (place / "roots.json").read_bytes()
    (place / "roots.json").write_bytes(roots.replace(b'photos"', b'photns"'))
    assert cli.main(["index", str(original / "photos"), "--to", str(place), "--model", str(original / "run")]) == 2
    assert "its checksum does not fit" in capsys.readouterr().err
    with Gallery.open(place) as gallery:
        assert len(gallery) == 4
    folders = json.loads(roots)["folders"]
    (place / "roots.json").write_text(json.dumps(folders))  # as an older version wrote it, or corrected by hand
    assert cli.main(["index", str(original / "photos"), "--to", str(place), "--model", str(original / "run")]) == 0
    assert problems(place) == []


def test_missing_and_changed_originals_are_named(place, original, tmp_path, capsys):
    shutil.copytree(original / "photos", tmp_path / "photos")
    for file in (place / "uploads").iterdir():
        file.unlink()
    folders = {"photos": str(tmp_path / "photos")}
    (place / "roots.json").write_text(json.dumps(folders))
    saved(tmp_path / "photos" / "red" / "0.png", 99)
    (tmp_path / "photos" / "red" / "1.png").unlink()
    found = problems(place)
    assert len(found) == 3
    assert any("'photos/red/0.png' has changed since it was added" in line for line in found)
    assert any("'photos/red/1.png' is missing" in line for line in found)
    assert any("'uploads/" in line and "is missing" in line for line in found)
    assert cli.main(["gallery", "verify", str(place)]) == 2
    assert len(capsys.readouterr().out.splitlines()) == 3
    shutil.rmtree(tmp_path / "photos")
    assert sum("the images of the root 'photos' are missing" in line for line in problems(place)) == 1
    (place / "roots.json").unlink()
    assert any("not among the roots" in line for line in problems(place))


def test_a_missing_file_beside_the_model_is_named(place):
    for name in ("config.yaml", "learned.json"):
        (place / "model" / name).unlink()
        assert any(f"{name}: it is missing" in line for line in problems(place))
    (place / "model" / "checksums.json").unlink()  # as in a gallery of version 0.1.0
    assert problems(place) == []


def test_another_run_of_the_same_model_brings_its_own_files(place, original, tmp_path):
    shutil.copytree(original / "run", tmp_path / "run")
    (tmp_path / "run" / "learned.json").write_text('{"trunk": "frozen", "images": []}')
    Gallery.open(place, run=tmp_path / "run", write=True).close()
    assert (place / "model" / "learned.json").read_text() == '{"trunk": "frozen", "images": []}'
    assert problems(place) == []


def test_a_missing_or_foreign_model_is_named(place, original):
    (place / "model" / "model.onnx").write_bytes(b"cut")
    assert any("model.onnx is not a complete file" in line for line in problems(place))
    (place / "model" / "model.safetensors").unlink()
    assert any("contains no model" in line for line in problems(place))

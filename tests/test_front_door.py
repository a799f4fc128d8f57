"""The Python names of `import idml`."""

import inspect
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_type_hints

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import idml
from idml.evaluation.report import draw_histogram, draw_risk_coverage, draw_tsne
from idml.methods import METHODS
from idml.model import build_model, save_model
from idml.search.gallery import open_or_create
from idml.search.gallery_calibration import CalibrationResult, calibrate_gallery
from idml.search.indexing import index_folder
from idml.training.config import PRESETS, common_options, options_of
from idml.training.keywords import TrainOptions


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Eight classes of four noisy images, each class of its own colour."""
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    noise = np.random.default_rng(0)
    for label in range(8):
        folder = tmp_path / "photos" / f"class {label}"
        folder.mkdir(parents=True)
        for n in range(4):
            pixels = noise.integers(0, 60, (30, 30, 3)) + 24 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{n}.png")
    return f"folder:{tmp_path / 'photos'}"


def test_train_evaluate_audit_and_load(photos, tmp_path):
    run = tmp_path / "run"
    options = {"trunk": "conv4", "pretrained": False, "image_size": 28, "embedding_dim": 8}
    metrics = idml.train(data=photos, out=str(run), epochs=1, batch_size=8, workers=0, **options)
    assert set(metrics["selected"]) >= {"recall@1", "r_precision", "map@r"}
    assert json.loads((run / "metrics.json").read_text())["steps"] == metrics["steps"]
    assert metrics.selected == metrics["selected"]
    assert str(metrics).startswith("selected: recall@1 ")
    assert repr(metrics).startswith(f"TrainResult(steps={metrics.steps}, selected_step=")
    measured = idml.evaluate(run, photos)
    assert 0 <= measured.recall_at_1 == measured["recall@1"] <= 1
    assert str(measured).splitlines()[0].startswith("folder: recall@1 ")
    assert json.loads(json.dumps(measured)) == measured
    audited = idml.audit(run, photos, out=tmp_path / "audit")
    assert audited.report == audited["report"] == str(tmp_path / "audit" / "report.html")
    assert len(str(audited).splitlines()) == len(audited.counts)
    with pytest.raises(ValueError, match="there is no run 'nowhere' to continue"):
        idml.train(data=photos, out="nowhere", resume=True)
    image = next((tmp_path / "photos").glob("*/*.png"))
    assert isinstance(idml.load_model(run).embed(image), idml.Embeddings)


def test_an_unknown_keyword_names_the_nearest():
    with pytest.raises(ValueError, match="unknown option 'epoch'; did you mean 'epochs'"):
        idml.train(data="glyphs", out="x", epoch=3)


def test_a_misspelt_name_gets_a_suggestion():
    done = subprocess.run([sys.executable, "-c", "import idml; idml.evalute"], capture_output=True, text=True)
    assert "module 'idml' has no attribute 'evalute'" in done.stderr
    assert "Did you mean: 'evaluate'?" in done.stderr


def test_audit_is_a_package_and_a_function():
    code = "import idml.audit.run, idml; print(callable(idml.audit), idml.audit.run.audit_run.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "audit_run"]


def test_calibrate_and_gallery_are_those_of_the_commands():
    assert next(iter(inspect.signature(idml.calibrate).parameters)) == "gallery"
    assert {"open", "create"} <= set(dir(idml.Gallery))
    ours, theirs = (inspect.signature(f).parameters for f in (idml.calibrate, calibrate_gallery))
    assert {*theirs} - {*ours} == {"location", "refit", "assign_folds"}
    assert all(ours[name].default == theirs[name].default for name in ("queries", "unknown", "runtime", "seed"))


def test_the_keywords_of_train_are_the_options_of_a_run():
    options = {option.name: option.type for option in common_options()}
    options |= {name: option.type for method in METHODS for name, option in options_of(method).items()}
    keywords = get_type_hints(TrainOptions)
    assert keywords.pop("preset") == Literal[PRESETS]
    assert keywords.pop("freeze_trunk") is bool
    several = dict.fromkeys(("ambiguity", "loss_parameters"), Sequence[str])
    assert keywords == options | several
    assert TrainOptions.__required_keys__ == {"data", "out"}
    assert [*inspect.signature(idml.train).parameters][:3] == ["resume", "report", "note"]
    assert {*inspect.signature(idml.train).parameters} >= {"data", "out", "method", "tau", "epochs"}


def test_every_public_name_has_types_and_a_documentation():
    assert dir(idml) == sorted(idml.__all__)
    for name in {*idml.__all__} - {"__version__"}:
        found = getattr(idml, name)
        assert (inspect.getdoc(found) or "").strip(), name
        if inspect.isfunction(found):
            signature = inspect.signature(found)
            assert signature.return_annotation is not signature.empty, name
            assert all(given.annotation is not given.empty for given in signature.parameters.values()), name


def test_figures_come_back_as_figures():
    scores, correct = torch.tensor([0.1, 0.2, 0.7, 0.9]), torch.tensor([True, True, False, False])
    figure = draw_risk_coverage({"level": scores}, correct)
    assert isinstance(figure, Figure)
    assert figure.axes[0].get_xlabel() == "queries answered, %"
    bins = [{"probability": 0.9, "accuracy": 1.0, "interval": [0.5, 1.0], "count": 3}]
    drawn = CalibrationResult(bins=bins, counted=3, curve=[[0.05, 0.1], [0.1, 0.2]], words=["nothing"]).figure()
    assert isinstance(drawn, Figure)
    assert isinstance(draw_histogram({"clean": scores}, "u"), Figure)
    assert isinstance(draw_tsne(torch.randn(40, 8), torch.arange(40) % 4, torch.rand(40)), Figure)


def test_training_leaves_the_backend_of_matplotlib_alone():
    for path in Path(idml.__file__).parent.rglob("*.py"):
        assert "matplotlib.use(" not in path.read_text() or "reproduction" in path.parts, path


def test_a_gallery_takes_file_names_and_shows_itself(photos, tmp_path):
    torch.manual_seed(0)
    save_model(build_model("conv4", embedding_dim=8, image_size=28), tmp_path / "run")
    file = next((tmp_path / "photos").glob("*/*.png"))
    with open_or_create(tmp_path / "gallery", tmp_path / "run") as gallery:
        index_folder(gallery, tmp_path / "photos")
        assert repr(gallery) == f"Gallery({str(tmp_path / 'gallery')!r}, 32 images)"
        (first,), (second,) = gallery.search([file], k=2), gallery.search([str(file)], k=2)
        assert first == second
        assert str(first).splitlines()[1].startswith("  0.0000  class ")
        with pytest.raises(ValueError, match="must be a list"):
            gallery.search(str(file))


def test_index_and_search_files(photos, tmp_path, tiny_run):
    added = idml.index(tmp_path / "photos", tmp_path / "gallery", model=tiny_run)
    assert added.new == 32
    assert idml.index(tmp_path / "photos", tmp_path / "gallery").unchanged == 32
    file = tmp_path / "photos" / "class 3" / "0.png"
    with idml.Gallery.open(tmp_path / "gallery") as gallery:
        (reply,) = gallery.search([file])
        (same,) = gallery.search([Image.open(file).convert("RGB")])
        with pytest.raises(ValueError, match="must be a list"):
            gallery.search(str(file))
    assert reply == same
    assert reply.results[0].label == "class 3"

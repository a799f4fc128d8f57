"""`calibrate_run` end to end on runs that take seconds, against loops over all distances."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from idml import Embeddings
from idml.calibration.evidence import Profile, build_evidence
from idml.calibration.open_set import QueryPool, draw_unknown
from idml.calibration.report import build_page
from idml.calibration.risk_control import ERROR_RATES, upper_bound
from idml.calibration.score_comparison import compare_scores
from idml.calibration.stored import Calibration, split_queries
from idml.data.augment import View
from idml.data.datasets import Dataset, hold_out, load_dataset
from idml.data.pixel_cache import load_pixels
from idml.data.sampling import random_stream
from idml.evaluation import nearest
from idml.model import fingerprint, load_model, save_model
from idml.reproduction import run_calibration as room
from idml.reproduction.run_calibration import FILES, calibrate_run, load_unseen
from idml.training.config import from_dict
from idml.training.loop import train

OPTIONS = {
    "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8, "epochs": 1, "batch_size": 16,
    "per_class": 2, "lr": 1e-3, "holdout": 0.25,
}  # fmt: skip
CLASSES, EACH = 40, 8


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IDML_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("idml.calibration.calibrate.compare_scores", partial(compare_scores, rounds=100))
        yield


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Forty classes of eight patterns so noisy that some are mistaken; the last class has one image."""
    root = tmp_path_factory.mktemp("pictures")
    noise = np.random.default_rng(0)
    for c in range(CLASSES):
        (root / f"class {c:02d}").mkdir()
        pattern = np.kron(noise.integers(60, 196, (4, 4, 3)), np.ones((6, 6, 1)))
        for i in range(EACH if c < CLASSES - 1 else 1):
            pixels = (pattern + noise.normal(0, 45, pattern.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"class {c:02d}" / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def spec(pictures):
    return f"folder:{pictures}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, spec):
    folder = tmp_path_factory.mktemp("runs")
    for name, options in (
        ("idml", {"method": "idml"}),
        ("pel", {"method": "pel"}),
        ("all", {"split": "all", "teach_u": "none"}),
    ):
        train(from_dict({"data": spec, "out": str(folder / name), **{**OPTIONS, **options}}))
    return folder


@pytest.fixture(scope="module")
def result(runs, spec):
    return calibrate_run(runs / "idml", spec)


@pytest.fixture(scope="module")
def embedded(runs, spec):
    """The test images' embeddings, made without any cache, and their labels."""
    pixels = load_pixels(load_dataset(spec).test, 18)
    model = load_model(runs / "idml")
    return model.embed(View().images(pixels, pixels.usable, 16)), pixels.images.labels


@pytest.fixture(scope="module")
def asked(embedded):
    """Evidence, right answers and known queries by a search in the gallery of the known classes."""
    e, labels = embedded
    unknown = draw_unknown(labels, 0.25, random_stream("unknown classes", 0))
    rows = (~torch.isin(labels, unknown)).nonzero().flatten()
    ids = {"query_ids": torch.arange(len(e)), "gallery_ids": rows}
    indices, distances = nearest(e, 10, gallery=e[rows], **ids)
    first = rows[indices[:, 0]]
    evidence = build_evidence(e, distances, e.uncertainty[first], classes=labels[rows][indices])
    correct = labels[first] == labels
    known = torch.tensor([any(j != i and labels[j] == labels[i] for j in rows.tolist()) for i in range(len(e))])
    return evidence, correct, known, rows


@pytest.mark.parametrize("kind", FILES)
def test_the_stored_calibration_equals_a_fit_by_hand(result, runs, embedded, asked, kind):
    e, labels = embedded
    evidence, correct, known, rows = asked
    stored = Calibration.load(runs / "idml" / FILES[kind], model=fingerprint(runs / "idml"))
    assert stored.labelled == (kind == "labelled")
    assert stored.searched == "10 nearest, euclidean"
    profile = Profile.of(e[rows])
    assert stored.profile.size == profile.size == len(rows) == result["gallery"]
    assert stored.profile.nearest == pytest.approx(profile.nearest, abs=1e-6)
    by_hand = Calibration.fit(evidence, correct, labelled=stored.labelled, groups=labels, known=known)
    assert stored.confidence_model.name == by_hand.confidence_model.name == result[kind]["chosen"]
    torch.testing.assert_close(stored.probability(evidence), by_hand.probability(evidence), rtol=0, atol=1e-5)
    torch.testing.assert_close(stored.novelty(evidence), by_hand.novelty(evidence), rtol=0, atol=1e-5)
    assert stored.match_probability(torch.tensor([0.0, 2.0])).diff() < 0
    assert stored.sets is not None
    assert (result["queries"], result["right"]) == (len(e), int(correct.sum()))
    assert result["unknown_queries"] == int((~known).sum())
    assert stored.unknown == result["unknown_share"] == int((~known).sum()) / len(known)
    assert 0.2 < result["right"] / result["queries"] < 0.8  # there is something to rank


@pytest.mark.parametrize("kind", FILES)
def test_promises_count_the_queries_that_were_not_fitted(result, runs, asked, kind):
    evidence, correct, known, _ = asked
    stored = Calibration.load(runs / "idml" / FILES[kind])
    held, used = split_queries(len(evidence))
    assert sorted([*held.tolist(), *used.tolist()]) == list(range(len(evidence)))
    p = stored.probability(evidence)[held].tolist()
    right = correct[held].tolist()
    for promise in result[kind]["promises"]:
        if promise["possible"]:
            answered = [r for x, r in zip(p, right, strict=True) if x >= promise["threshold"]]
            assert abs(promise["answered"] - len(answered)) <= 1  # a threshold is one of these values
            assert promise["coverage"] == promise["answered"] / len(held)
            assert upper_bound(promise["wrong"], promise["answered"], 0.1) <= promise["max_error"]
        else:
            assert "cannot promise" in promise["reason"]
    assert [p["max_error"] for p in result[kind]["promises"]] == list(ERROR_RATES)
    assert result[kind]["promises"][-1]["possible"]
    coverage = [c for _, c in result[kind]["curve"]]
    assert coverage == sorted(coverage)
    novel = (stored.novelty(evidence)[held] <= 0.1) & (stored.probability(evidence)[held] < 0.5)
    novelty = result[kind]["novelty"]
    assert novelty["recognised"]["0.1"] == pytest.approx(float(novel[~known[held]].double().mean()))
    assert novelty["rejected"]["0.1"] <= 0.1
    assert novelty["unknown"] == int((~known[held]).sum())
    assert sum(b["count"] for b in result[kind]["bins"]) == len(held) == result[kind]["counted"]


def test_the_report_holds_every_score(result):
    text = Path(result["report"]).read_text()
    assert Path(result["report"]).name == "calibration.html"
    for kind in FILES:
        scores = set(result[kind]["scores"])
        assert {"P(right)", "mix", "mix without u", "level", "nearest", "pair"} <= scores
        assert ("margin" in scores) == (kind == "labelled")
        for name in scores:
            assert re.search(rf"<td[^>]*>{re.escape(name)}</td>", text)
    for words in ("What is promised, and what is not", "with labels", "without labels", "Expected calibration error"):
        assert words in text
    assert f"about {result['unknown_share']:.0%} of them or fewer show something that is not in the gallery" in text
    for line in result["words"]:
        assert line.strip().replace("'", "&#x27;") in text
    assert len(re.findall(r"<svg role='img' aria-label='[^']+reliability[^']+'", text)) == 2
    assert not re.search(r"""(src|href|url)[=(]['"]?http""", text)
    assert text.endswith("</html>")
    json.dumps(result, allow_nan=False)


def test_markup_in_names_is_escaped(result):
    parts = {"<i>part</i>": result["labelled"]}
    page = build_page("<b>data</b>", ["<script>x</script>"], result, parts).decode()
    assert "&lt;b&gt;data" in page
    assert not re.search("<b>|<script|<i>", page)


def test_the_seed_decides_the_files(result, runs, spec, tmp_path):
    kept = (runs / "idml" / "calibration.json").read_bytes()
    run = tmp_path / "run"
    shutil.copytree(runs / "idml", run)
    rows, notes = [], []
    again = calibrate_run(run, spec, progress=rows.append, note=notes.append)
    assert (run / "calibration.json").read_bytes() == kept
    assert {k: v for k, v in again.items() if k not in ("files", "report")} == {
        k: v for k, v in result.items() if k not in ("files", "report")
    }
    assert notes == result["notes"]
    assert rows
    assert all(set(row) == {"done", "images", "what"} and 0 < row["done"] <= row["images"] for row in rows)
    none = calibrate_run(run, spec, seed=1, unknown=0.0)
    assert none["unknown_queries"] == 1  # the only image of the last class
    assert none["unknown_classes"] == 0
    assert Calibration.load(run / "calibration.json").unknown == none["unknown_share"] == 1 / none["queries"]
    assert (run / "calibration.json").read_bytes() != kept


def test_a_run_on_all_classes_is_calibrated_on_the_held_out_ones(runs, spec):
    notes = []
    found = calibrate_run(runs / "all", spec, note=notes.append)
    held_out = hold_out(load_dataset(spec, split="all").train, 0.25)[1]
    assert found["split"] == "all"
    assert (found["classes"], found["queries"]) == (len(held_out.classes), len(held_out))
    assert any("30 of 40 classes left out: the run was trained on them" in line for line in notes)
    assert any("trained by plain" in line for line in notes)


@pytest.mark.parametrize(
    ("trained", "split", "left"),
    [
        ({"split": "official", "holdout": 0.25}, None, range(20, 40)),
        ({"split": "0.75", "holdout": 0.25}, None, range(30, 40)),
        ({"split": "0.75", "holdout": 0.0}, "official", range(30, 40)),
        ({"split": "official", "holdout": 0.0}, "all", range(20, 40)),
        ({"split": "official", "holdout": 0.1}, "all", [4, 14, *range(20, 40)]),
    ],
)
def test_no_class_of_the_training_is_used(spec, trained, split, left):
    dataset, _ = load_unseen(spec, split, {"data": spec, **trained})
    names = {dataset.test.classes[label] for label in dataset.test.labels.tolist()}
    assert names == {f"class {number:02d}" for number in left}
    assert {source.name.split("/")[0] for source in dataset.test.sources} == names


def test_a_note_says_if_the_training_data_cannot_be_checked(runs, spec, pictures, tmp_path):
    shutil.copytree(pictures, tmp_path / "copy")
    dataset, split = load_unseen(f"folder:{tmp_path / 'copy'}", "all", {"data": spec, "split": "all", "holdout": 0.0})
    assert len(dataset.test.classes) == CLASSES
    assert split == "all"
    assert any(
        "was trained on folder: it is assumed, not checked, that it has not seen the classes of folder" in x
        for x in dataset.notes
    )
    nothing_said, _ = load_unseen(spec, None, {})
    assert any("does not say what it was trained on" in line for line in nothing_said.notes)
    relative = f"folder:{pictures}/../{pictures.name}"
    assert len(load_unseen(relative, None, {"data": spec, "split": "0.75", "holdout": 0.0})[0].test.classes) == 10


def test_a_data_set_with_its_own_gallery(runs, spec, monkeypatch, tmp_path):
    data = load_dataset(spec)
    even = torch.arange(len(data.test)) % 2 == 0
    shop = Dataset("shop", data.train, data.test[even], data.test[~even])
    monkeypatch.setattr(room, "load_dataset", lambda spec, split: shop)
    run = tmp_path / "run"
    shutil.copytree(runs / "idml", run)
    found = calibrate_run(run, "inshop:nowhere")
    model = load_model(run)
    queries, gallery = (load_pixels(images, 18) for images in (shop.test, shop.gallery))
    e, g = (model.embed(View().images(pixels, pixels.usable, 16)) for pixels in (queries, gallery))
    unknown = draw_unknown(shop.test.labels, 0.25, random_stream("unknown classes", 0))
    rows = (~torch.isin(shop.gallery.labels, unknown)).nonzero().flatten()
    distances = torch.cdist(e.unit.double(), g.unit.double()[rows])
    right = shop.gallery.labels[rows][distances.argmin(dim=1)] == shop.test.labels
    assert (found["queries"], found["gallery"]) == (len(e), len(rows))
    assert found["right"] == int(right.sum())
    assert found["unknown_queries"] == int((~torch.isin(shop.test.labels, shop.gallery.labels[rows])).sum())


def test_the_score_of_a_gaussian_model_is_the_length_of_sigma(runs, spec):
    found = calibrate_run(runs / "pel", spec)
    assert found["score"] == "‖σ‖"
    assert any("‖σ‖ alone" in line for line in found["words"])
    assert found["labelled"]["scores"]["level"]["r_auroc"] is not None


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ("remove", {}, "there is no model at"),
        ("cut", {}, "not a sound safetensors file"),
        ("other size", {}, "the model needs"),
        ("pickle", {}, "is a pickle"),
        ("bad options", {}, "is not a YAML file"),
        ("bad holdout", {}, "says holdout: 'much'; it must be a number"),
        ("everything learned", {}, "the run was trained on every class of folder:"),
        ("infinite", {}, "hold NaN or infinity"),
        (None, {"data": "folder:nowhere"}, "nowhere"),
        (None, {"data": "folder:few", "split": "all"}, "needs 5 classes of two images or more and 50 images"),
        (
            None,
            {"data": "folder:few", "split": "all"},
            "there are 3 classes and 24 images: try another --split, or other images",
        ),
        (None, {"split": "2"}, "the split is"),
        (None, {"unknown": 1.0}, "the share of unknown queries must be at least 0 and below 1, got 1.0"),
        (None, {"run": "run/model.safetensors"}, "is a file; name the run directory"),
        (None, {"run": "pretrained"}, "there is no model at pretrained"),
    ],
)
def test_a_mistake_gives_one_line_and_stores_nothing(
    runs, spec, pictures, change, options, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    shutil.copytree(runs / "idml", run, ignore=shutil.ignore_patterns("calibration*"))
    for c in ("class 00", "class 01", "class 02"):
        shutil.copytree(pictures / c, Path("few") / c)
    file, config = run / "model.safetensors", run / "config.yaml"
    if change == "remove":
        file.unlink()
    elif change == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif change == "pickle":
        torch.save({}, file)
    elif change == "bad options":
        config.write_text("tau: [")
    elif change == "bad holdout":
        config.write_text(config.read_text().replace("holdout: 0.25", "holdout: much"))
    elif change == "everything learned":
        text = config.read_text().replace("split: official", "split: all")
        config.write_text(text.replace("holdout: 0.25", "holdout: 0.0"))
    elif change == "other size":
        file.write_bytes(file.read_bytes().replace(b'embedding_dim\\": 8', b'embedding_dim\\": 9'))
    elif change == "infinite":
        model = load_model(run)
        with torch.no_grad():
            model.semantic.weight.fill_(3e38)
        save_model(model, run)
    with pytest.raises((ValueError, OSError)) as error:
        calibrate_run(options.pop("run", run), options.pop("data", spec), **options)
    assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert not list(run.glob("calibration*"))


def test_a_model_without_uncertainty(embedded):
    """A model without u still gives evidence: ‖u‖ = 0 everywhere says nothing and breaks nothing."""
    e, labels = embedded
    trial = QueryPool(Embeddings.certain(e.semantic), labels).search(without=labels.unique()[:4])
    assert bool((trial.evidence.level == 0).all())
    found = compare_scores(trial, labelled=True, rounds=20)
    assert found["scores"]["level"]["r_auroc"] == 0.5

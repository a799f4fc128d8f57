"""Benchmarks at a tiny size: contenders find the same, a process reports what it took, goals are judged."""

from argparse import Namespace

import numpy as np
import pytest
from PIL import Image

import commands
from contenders import OURS, PEERS, Size, made
from evaluate import FIGURES, differences, line, measure
from idml.model import build_model, save_model
from idml.search.gallery import Gallery

TINY = Size(rows=260, dims=12, classes=20, smallest=5, largest=20)


def test_contenders_agree():
    given = made(TINY)
    results = {}
    for name, run in {"ours": OURS["ours"], **PEERS}.items():
        if name != "oml":  # needs a Python of its own
            figures = run(*given)
            results[name] = {"figures": figures() if callable(figures) else figures}
    assert all(0.1 < results["ours"]["figures"][key] <= 1 for key in FIGURES)
    assert differences(results) == []
    results["faiss"]["figures"]["map@r"] += 1e-5
    assert [what.split(":")[0] for what in differences(results)] == ["map@r"]


@pytest.mark.parametrize(
    ("name", "limit", "wanted"), [("introspective", 60, "recall@1"), ("nobody", 60, "no result: ")]
)
def test_a_contender_reports_from_its_own_process(name, limit, wanted):
    results = measure(TINY, [name], Namespace(json=True, limit=limit, oml_python=None))
    assert wanted in line(name, results[name])


@pytest.fixture
def few_photos(tmp_path):
    noise = np.random.default_rng(0)
    for n in range(12):
        (tmp_path / "photos" / f"class {n % 2}").mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(noise.integers(0, 256, (40, 50, 3), np.uint8))
        image.save(tmp_path / "photos" / f"class {n % 2}" / f"{n}.jpg")
    return tmp_path / "photos"


def test_index_and_search_are_measured_beside_the_bare_runtime(few_photos, tmp_path):
    save_model(build_model("conv4", embedding_dim=16, image_size=28), tmp_path / "run")
    found = commands.measure_index(few_photos, str(tmp_path / "run"), 28, 2, tmp_path / "gallery")
    assert found["images"] == 12
    assert all(value > 0 for value in found.values())
    assert found["index / bare and decoding, cpu"] > found["index / bare, cpu"]
    with Gallery.open(tmp_path / "gallery") as gallery:
        assert len(gallery) == 12
    took = commands.measure_search(tmp_path / "gallery", next(few_photos.rglob("*.jpg")), 1, tmp_path)
    assert min(took["search, cpu s"], took["import torch, cpu s"]) > 0


def test_goals_are_judged_at_their_limits():
    index = {f"index / {what}, {clock}": 0.9 for what in ("bare", "bare and decoding") for clock in ("wall", "cpu")}
    results = {
        "index": index,
        "train": {"forward, wall s": 100.0, "command, wall s": 150.0, "forward, cpu s": 100.0, "command, cpu s": 150.1},
        "evaluate": {"ratio, wall": 1.3, "ratio, cpu": 1.31},
        "search": {"beyond torch, wall s": 1.0, "beyond torch, cpu s": 1.01},
    }
    said = commands.verdict(results)
    assert [line.endswith(": met") for line in said] == [True] * 5 + [True] * 2 + [False] * 3
    assert [line.endswith(": missed") for line in said] == [False] * 7 + [True] * 3


def test_the_images_that_pass_a_trunk_are_counted():
    model, images = build_model("conv4", embedding_dim=16, image_size=28), np.zeros((5, 3, 28, 28), np.float32)
    compute = commands.FeatureCache.compute
    with commands.counted() as seen:
        commands.FeatureCache(model, images=5).compute(commands.torch.from_numpy(images))
    assert seen == [5]
    assert commands.FeatureCache.compute is compute

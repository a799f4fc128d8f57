"""The paper's scale: what its jobs are, and a few steps of one on real images with random weights."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from idml.cli import main
from idml.data.datasets import load_dataset
from idml.reproduction.arms import Arms
from idml.reproduction.regimes import regime_for
from idml.reproduction.store import open_store


def test_a_dry_run_says_the_jobs_the_settings_and_the_hours(tmp_path, capsys):
    command = ["reproduce", "table1", "--scale", "paper", "--dry-run", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    text = capsys.readouterr().out
    for words in (
        "table1 on cub, paper", "table1 on cars, paper", "table1 on sop, paper", "hours on one NVIDIA A100, assumed",
        "trunk resnet50, image_size 224, embedding_dim 512, batch_size 120, per_class 0, epochs 60, warmup_epochs 5",
        "proxy_anchor-idml-gamma=3-lr=0.00025-seed=0: ", "proxy_anchor-idml-lr=chosen-seed=4: ",
        "learning rates 1e-05, 0.0001, 0.0006", "all data sets: ",
    ):  # fmt: skip
        assert words in text
    assert main([*command, "--json", "--data", "cub:nowhere", "--seeds", "1"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(plan["jobs"]) == (7 * 4 + 1) * 3
    hours = {job["name"]: job["hours"] for job in plan["jobs"]}
    seen = 60 * 5864 * 0.9
    assert hours["contrastive-plain-lr=1e-05-seed=0"] == pytest.approx((seen / 400 + 300) / 3600)
    assert hours["contrastive-idml-lr=1e-05-seed=0"] == pytest.approx((2 * seen / 400 + 300) / 3600)
    assert plan["hours"] == pytest.approx(sum(hours.values()))
    assert not (tmp_path / "out").exists()


def test_a_few_steps_on_real_images_with_random_weights(tmp_path, monkeypatch):
    """ResNet-50 at 224 pixels in 512 dimensions, on photographs from matplotlib's and scikit-learn's own samples."""
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    from matplotlib import cbook
    from sklearn.datasets import load_sample_image

    photographs = [load_sample_image("china.jpg"), load_sample_image("flower.jpg")]
    with cbook.get_sample_data("grace_hopper.jpg") as file:
        photographs.append(np.asarray(Image.open(file).convert("RGB")))
    for c, photograph in enumerate([*photographs, photographs[0][:, ::-1]]):
        (tmp_path / "data" / f"{c}").mkdir(parents=True)
        for i in range(4):
            part = Image.fromarray(np.ascontiguousarray(photograph[20 * i : 300 + 20 * i, 20 * i : 300 + 20 * i]))
            part.save(tmp_path / "data" / f"{c}" / f"{i}.jpg")
    data = f"folder:{tmp_path / 'data'}"
    paper = regime_for(data, "paper")
    assert (paper.base["trunk"], paper.base["image_size"], paper.base["embedding_dim"]) == ("resnet50", 224, 512)
    small = {"batch_size": 4, "epochs": 1, "pretrained": False}  # two steps, no model hub
    regime = dataclasses.replace(paper, base={**paper.base, **small})
    dataset = load_dataset(data)
    store = open_store(tmp_path / "out", data, regime, dataset, print)
    arm = Arms(data, regime).arm("proxy_anchor", "idml")
    cell = store.cell(arm.loss, arm.options, 1e-5, 0)
    store.make(cell, dataset, lambda row: None)
    found = store.read(cell)
    assert found["steps"] == 2
    assert found["images_seen"] == 16
    assert sum(found["classes"]["queries"]) == 8

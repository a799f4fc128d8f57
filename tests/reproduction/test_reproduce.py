"""`idml reproduce` by command: tables, rows of other versions, bad input, and the paper's scale."""

import csv
import dataclasses
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from idml.cli import main
from idml.data.datasets import load_dataset
from idml.reproduction import regimes
from idml.reproduction.paper_tables import TABLES
from idml.reproduction.regimes import TWICE, Arms, regime_for
from idml.reproduction.reproduce import reproduce
from idml.reproduction.runner import Measures, Store, open_store

RESULTS = Path(__file__).parents[2] / "results"


def test_a_dry_run_says_the_jobs_the_settings_and_the_hours(tmp_path, capsys):
    command = ["reproduce", "table1", "--scale", "paper", "--dry-run", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    text = capsys.readouterr().out
    for words in (
        "table1 on cub, paper", "table1 on cars, paper", "table1 on sop, paper", "hours on one NVIDIA A100, assumed",
        "trunk resnet50, image_size 224, embedding_dim 512, batch_size 120, per_class 0, epochs 60, warmup_epochs 5",
        "proxy_anchor-idml-gamma=3-labels=sets-mixing=separate-lr=0.00025-seed=0: ",
        "proxy_anchor-idml-labels=sets-mixing=separate-lr=chosen-seed=4: ",
        "learning rates 1e-05, 0.0001, 0.0006", "all data sets: ",
    ):  # fmt: skip
        assert words in text
    assert main([*command, "--json", "--data", "cub", "--seeds", "1"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(plan["jobs"]) == (7 * 3 + 1) * 3
    hours = {job["name"]: job["hours"] for job in plan["jobs"]}
    seen = 60 * 5864 * 0.9
    assert hours["contrastive-plain-lr=1e-05-seed=0"] == pytest.approx((seen / 400 + 300) / 3600)
    assert hours["contrastive-idml-labels=sets-mixing=separate-lr=1e-05-seed=0"] == pytest.approx(
        (2 * seen / 400 + 300) / 3600
    )
    assert plan["hours"] == pytest.approx(sum(hours.values()))
    assert not (tmp_path / "out").exists()


def test_one_step_on_real_images_with_random_weights(tmp_path, monkeypatch):
    """ResNet-50 at 224 pixels in 512 dimensions, on photographs from matplotlib's and scikit-learn's own samples."""
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    from matplotlib import cbook
    from sklearn.datasets import load_sample_image

    photographs = [load_sample_image("china.jpg"), load_sample_image("flower.jpg")]
    with cbook.get_sample_data("grace_hopper.jpg") as file:
        photographs.append(np.asarray(Image.open(file).convert("RGB")))
    for c, photograph in enumerate([*photographs, photographs[0][:, ::-1]]):
        (tmp_path / "data" / f"{c}").mkdir(parents=True)
        for i in range(2):
            part = Image.fromarray(np.ascontiguousarray(photograph[20 * i : 300 + 20 * i, 20 * i : 300 + 20 * i]))
            part.save(tmp_path / "data" / f"{c}" / f"{i}.jpg")
    data = f"folder:{tmp_path / 'data'}"
    paper = regime_for(data, "paper")
    assert (paper.base["trunk"], paper.base["image_size"], paper.base["embedding_dim"]) == ("resnet50", 224, 512)
    small = {"batch_size": 4, "epochs": 1, "pretrained": False}  # one step, no model hub
    regime = dataclasses.replace(paper, base={**paper.base, **small})
    dataset = load_dataset(data)
    store = open_store(tmp_path / "out", data, regime, dataset, print)
    arm = Arms(data, regime).arm("proxy_anchor", "idml")
    cell = store.cell(arm.loss, arm.options, 1e-5, 0)
    store.make(cell, dataset, lambda row: None, Measures())
    found = store.read(cell)
    assert found["steps"] == 1
    assert found["images_seen"] == 8
    assert sum(found["classes"]["queries"]) == 4


def test_table1_by_command_twice_and_its_page(patterns, small, tmp_path, monkeypatch, capsys):
    """One learning rate and one loss; tuning is tested with the runner."""
    monkeypatch.setitem(regimes.LAPTOP, "frozen", dataclasses.replace(small, rates=(1e-3,)))
    whole = TABLES["table1"]

    def reduced(arms):
        made = whole(arms)
        arms = tuple(arm for arm in made.arms if arm.loss == "proxy_anchor")
        claims = tuple(claim for claim in made.claims if claim.arm[0] == "proxy_anchor")
        return dataclasses.replace(made, arms=arms, claims=claims)

    monkeypatch.setitem(TABLES, "table1", reduced)
    out = tmp_path / "out"
    command = ["reproduce", "table1", "--data", patterns, "--out", str(out), "--seeds", "2"]
    assert main([*command, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(plan["jobs"]) == 4 * 2  # four arms that can run, two seeds
    assert not out.exists()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    folder, cells = out / "tables" / "table1-folder-frozen", out / "cells" / "folder-frozen"
    rows = list(csv.DictReader((folder / "table.csv").open()))
    assert [row["arm"] for row in rows] == ["", "plain", TWICE, "idml", "release"]
    assert all("[" in row["R@1"] for row in rows)
    assert rows[3]["R@1 gain"][0] in "+-"
    assert rows[3]["over"] in ("raw features", "plain")
    assert int(rows[2]["images seen"]) == int(rows[3]["images seen"]) == 2 * int(rows[1]["images seen"])
    assert float(rows[3]["weight"]) <= 1
    held_out = [100 * json.loads(cell.read_text())["selected_score"] for cell in cells.glob("proxy_anchor-plain-lr=*")]
    assert len(held_out) == 2
    assert float(rows[1]["held-out"]) == pytest.approx(sum(held_out) / 2, abs=0.051)
    assert ("not introspective" in rows[3]["remark"]) == (float(rows[3]["weight"]) > 0.98)
    assert len(list(csv.DictReader((folder / "per_seed.csv").open()))) == 8
    asked = ("IDML improves", "IDML is above plain with as many images,")
    assert list(found["claims"]) == [f"{claim} ProxyAnchor" for claim in asked]
    assert sorted({cell.suffix for cell in cells.iterdir()}) == [".json"]  # no locks and runs are left
    assert len(list(cells.iterdir())) == 9

    def train(*_):
        raise AssertionError("nothing is left to make")

    monkeypatch.setattr(Store, "make", train)
    assert main(["reproduce", "collect", "--out", str(out)]) == 0
    assert "collected 9 into folder-frozen.jsonl" in capsys.readouterr().out
    assert main([*command]) == 0
    text = capsys.readouterr().out
    assert "IDML improves ProxyAnchor: **" in text
    assert re.search(r"Smallest difference in R@1 that it could have detected: \d+\.\d points", text)
    assert list(cells.iterdir()) == []
    assert list(csv.DictReader((folder / "table.csv").open())) == rows
    assert main([*command, "--dry-run"]) == 0
    assert "0 runs to do" in capsys.readouterr().out

    assert main(["reproduce", "results", "--out", str(out)]) == 0
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "| claim | folder, frozen |" in text
    assert re.search(r"[|] IDML improves ProxyAnchor [|] [a-z ]+: [-+]", text)
    theirs = text[text.index("## All claims of the paper: ") :].partition("\n## ")[0]
    ours = text[text.index("## Our own questions: ") :]
    assert "| IDML is above plain with as many images, ProxyAnchor |" in ours  # asked in Table 1, but not by the paper
    assert "with as many images" not in theirs
    counted = re.findall(r"(\d+) ([a-z ]+)", theirs.splitlines()[0])
    judged = Counter(line.split(" | ")[1].partition(":")[0] for line in theirs.splitlines()[4:] if " | " in line)
    assert judged == {word: int(count) for count, word in counted} != {}
    assert "Not run yet: table1 (cub, frozen)" in text
    assert "Smallest difference" in text
    assert "Table 5" in text  # its rows are shared with Table 1
    assert "idml reproduce table1 --data folder:PATH" in text
    page = (tmp_path / "docs" / "results.html").read_text()
    assert page.count("<svg") >= 3
    assert str(tmp_path) not in text + page


def test_rows_of_version_1_are_not_used_and_one_line_says_so(tmp_path, capsys):
    for path in RESULTS.glob("cub-f*"):
        shutil.copy(path, tmp_path)
    stored = tmp_path / "cub-frozen.jsonl"
    lines = stored.read_text().splitlines(keepends=True)
    stored.write_text("".join(line for line in lines if json.loads(line)["version"] == 1))
    assert main(["reproduce", "table5", "--data", "cub", "--out", str(tmp_path), "--dry-run", "--json"]) == 0
    text = capsys.readouterr()
    (line,) = text.err.splitlines()
    assert re.search(
        r"cub-frozen.jsonl holds \d+ rows of version 1 of the protocol, which version 2 does not use", line
    )
    assert len(json.loads(text.out)["jobs"]) == 2 * (3 + 2)
    assert main(["reproduce", "beta", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "beta is a table of version 1 of the protocol" in line
    assert "docs/results-v1.md" in line


def test_a_dry_run_counts_the_features_of_a_frozen_trunk_once(tmp_path):
    def plan(what):
        return reproduce(what, "cub", out=tmp_path, dry_run=True)

    each = 2 * 0.9 * 5864 / 100 / 3600  # two epochs of crops, 100 images a second
    assert plan("table5")["feature_hours"] == pytest.approx(3 * 2 * each)  # three seeds: originals, mixtures
    assert plan("tau")["feature_hours"] == pytest.approx(2 * each)  # one seed
    assert plan("finetune")["feature_hours"] == 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["tabel1"], "unknown table 'tabel1'; did you mean 'table1'?"),
        (["table1", "--seeds", "0"], "at least one seed"),
        (["table1", "--scale", "papre"], "unknown scale 'papre'; did you mean 'paper'?"),
        (["table1", "--regime", "frozn", "--data", "cub:x"], "did you mean 'frozen'?"),
        (["table1", "--regime", "full", "--scale", "paper"], "leave out the regime"),
        (["audit", "--scale", "paper"], "one scale only"),
        (["table1", "--data", "cub:/nowhere/at/all", "--dry-run"], "/nowhere/at/all"),
        (["uncertainty", "--data", "folder:/nowhere/at/all", "--dry-run"], "/nowhere/at/all"),
        (["first"], "unknown table 'first'"),
        (["table1", "--data", "cub:/nowhere/at/all"], "/nowhere/at/all"),
        (["live-u", "--data", "cub:x"], "`idml reproduce default-form` chooses it"),
        (["finetune-long", "--data", "cub:x"], "`idml reproduce default-form` chooses"),
        (["resnet50", "--data", "cub:x"], "name their file with --weights"),
        (["resnet50", "--data", "cub:x", "--weights", "/nowhere.safetensors"], "/nowhere.safetensors"),
        (["table1", "--data", "cub:x", "--weights", "x"], "--weights is for the regime resnet50"),
    ],
)
def test_bad_input_is_one_line(arguments, line, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(regimes, "CHOSEN_FORM", None)
    try:
        status = main(["reproduce", *arguments, "--out", str(tmp_path / "out")])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()

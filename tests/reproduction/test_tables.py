"""The tables as data, and one of them from the command to the page."""

import csv
import dataclasses
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from idml.cli import main
from idml.reproduction import protocol, tables
from idml.reproduction.arms import LOSSES, TWICE, Arms
from idml.reproduction.claims import DISGUISE
from idml.reproduction.paper import paper_figure, paper_numbers
from idml.reproduction.protocol import course, missing_cells, official_dataset
from idml.reproduction.regimes import regime_for
from idml.reproduction.reproduce import reproduce_table
from idml.reproduction.store import RAW, Store
from idml.reproduction.tables import TABLES
from idml.reproduction.tables_beyond import FOUND, MARGINS
from idml.training.config import TrainConfig


def table(what, data="cub:x", **regime):
    return TABLES[what](Arms(data, regime_for(data, **regime)))


def test_the_papers_numbers():
    numbers = paper_numbers()
    assert len(numbers) == 111
    assert numbers["cars", "proxy_anchor", "idml"] == {"R@1": 90.6, "NMI": 76.9, "RP": 42.6, "MAP@R": 33.8}
    assert numbers["sop", "margin_dw", "pel-mixup"]["MAP@R"] == 49.3
    assert numbers["cub", "proxy_anchor", "idml batch 40"] == {"R@1": 66.3, "NMI": 70.6}
    for data in ("cub", "cars", "sop"):  # every loss gains, and so does the metric in every form of ambiguity
        for loss in LOSSES:
            for figure in ("R@1", "NMI", "RP", "MAP@R"):
                assert paper_figure(data, (loss, "idml"), figure) >= paper_figure(data, (loss, "plain"), figure)
        for kind in ("low_resolution", "blur", "occlusion"):
            assert paper_figure(data, ("proxy_anchor", f"{kind}+ism"), "R@1") >= paper_figure(
                data, ("proxy_anchor", kind), "R@1"
            )


@pytest.mark.parametrize("what", TABLES)
@pytest.mark.parametrize("data", ["cub:x", "cars:x", "glyphs"])
def test_every_table_has_its_plain_rows_and_claims_about_its_rows(what, data, tmp_path):
    made = table(what, data)
    keys = [arm.key for arm in made.arms]
    assert len(set(keys)) == len(keys)
    for arm in made.arms:
        assert (arm.loss, arm.against) in keys
    for claim in made.claims:
        assert claim.arm in keys
        assert getattr(claim, "over", None) is None or claim.over in keys
    store = Store(tmp_path, data, regime_for(data))
    assert [course(store, arm, 2).refused for arm in made.arms] == [""] * len(keys)


def test_rows_of_the_papers_tables_find_the_papers_numbers():
    counts = {"table1": 14, "table2": 12, "table3": 10, "table4": 4, "table5": 3, "table6": 9}
    for what, count in counts.items():
        for data in ("cub:x", "cars:x", "sop:x"):
            rows = table(what, data).arms
            assert sum(paper_figure(data[:-2], arm.key, "R@1") is not None for arm in rows) == count


def test_the_same_images_the_release_and_gamma():
    arms = Arms("cub:x", regime_for("cub:x"))
    assert arms.twice("contrastive").options == {"method": "plain", "epochs": 24, "step_epochs": 10, "crops": 4}
    assert arms.release().options == {"method": "idml", "rule": "release", "gamma": 4.0, "labels": "weighted"}
    assert "gamma" not in arms.arm("contrastive", "idml").options
    assert arms.arm("contrastive", "constant").options["gamma"] == 1.0
    cars = Arms("cars:x", regime_for("cars:x"))
    assert cars.arm("contrastive", "idml").options["gamma"] == 3.0
    assert "gamma" not in cars.arm("contrastive", "mixup").options
    paper = Arms("cub:x", regime_for("cub:x", "paper"))
    assert paper.twice("contrastive").options == {"method": "plain", "epochs": 120, "step_epochs": 10}


def test_tuning_comes_first_then_the_other_seeds_at_the_best_rate(tmp_path, small):
    store, arm = Store(tmp_path, "folder:x", small), Arms("folder:x", small).plain("contrastive")
    assert [cell.name for cell in missing_cells(store, [arm, arm], 3)] == [
        RAW, "contrastive-plain-lr=0.001-seed=0", "contrastive-plain-lr=0.01-seed=0",
    ]  # fmt: skip
    scores = {}

    def read(cell):
        return scores.get(cell.name)

    store.read = read
    scores["contrastive-plain-lr=0.001-seed=0"] = {"selected_score": 0.3}
    assert course(store, arm, 3).left == 3
    scores["contrastive-plain-lr=0.01-seed=0"] = {"selected_score": 0.4}
    at = course(store, arm, 3)
    assert at.rate == 1e-2
    assert [cell.name for cell in at.missing] == [f"contrastive-plain-lr=0.01-seed={s}" for s in (1, 2)]
    scores["contrastive-plain-lr=0.01-seed=0"] = {"failed": "step 1: the loss is nan"}
    assert course(store, arm, 3).rate == 1e-3
    scores["contrastive-plain-lr=0.001-seed=0"] = {"failed": "step 1: the loss is nan"}
    assert course(store, arm, 3).refused == "training failed at every learning rate"


def test_table1_by_command_twice_and_its_page(patterns, small, tmp_path, monkeypatch, capsys):
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
    assert len(plan["jobs"]) == 5 * 3  # five arms, two rates and one further seed
    assert not out.exists()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    folder = out / "table1-folder-frozen"
    rows = list(csv.DictReader((folder / "table.csv").open()))
    assert [row["arm"] for row in rows] == ["", "plain", TWICE, "idml", "constant-mixup", "release"]
    assert all("[" in row["R@1"] for row in rows)
    assert rows[3]["R@1 gain"][0] in "+-"
    assert rows[3]["over"] in ("raw features", "plain")
    assert int(rows[2]["images seen"]) == int(rows[3]["images seen"]) == 2 * int(rows[1]["images seen"])
    assert float(rows[3]["weight"]) <= 1
    chosen = list((out / "cells-folder-frozen").glob(f"proxy_anchor-plain-lr={float(rows[1]['lr'])}-*"))
    held_out = [100 * json.loads(cell.read_text())["selected_score"] for cell in chosen]
    assert len(held_out) == 2
    assert float(rows[1]["held-out"]) == pytest.approx(sum(held_out) / 2, abs=0.051)
    assert ("plain in disguise" in rows[3]["remark"]) == (float(rows[3]["weight"]) > 0.98)
    assert len(list(csv.DictReader((folder / "per_seed.csv").open()))) == 10
    asked = ("IDML improves", "IDML is above plain with as many images,", "a learned u adds to a constant one,")
    assert list(found["claims"]) == [f"{claim} ProxyAnchor" for claim in asked]
    cells = sorted((out / "cells-folder-frozen").iterdir())
    assert [cell.suffix for cell in cells] == [".json"] * 16  # no locks and runs are left

    def train(*_):
        raise AssertionError("nothing is left to make")

    monkeypatch.setattr(Store, "make", train)
    before = [cell.read_bytes() for cell in cells]
    assert main([*command]) == 0
    assert "IDML improves ProxyAnchor: **" in capsys.readouterr().out
    assert [cell.read_bytes() for cell in cells] == before
    assert main([*command, "--dry-run"]) == 0
    assert "0 runs to do" in capsys.readouterr().out

    assert main(["reproduce", "results", "--out", str(out)]) == 0
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "| claim | folder, frozen |" in text
    assert re.search(r"[|] IDML improves ProxyAnchor [|] [a-z ]+: [-+]", text)
    theirs = text[text.index("## The paper's claims: ") :].partition("\n## ")[0]
    ours = text[text.index("## Questions of our own: ") :]
    assert "| a learned u adds to a constant one, ProxyAnchor |" in ours  # asked in Table 1, but not by the paper
    assert "adds to a constant one" not in theirs
    assert "with as many images" not in theirs
    counted = re.findall(r"(\d+) ([a-z ]+)", theirs.splitlines()[0])
    told = Counter(line.split(" | ")[1].partition(":")[0] for line in theirs.splitlines()[4:] if " | " in line)
    assert told == {word: int(count) for count, word in counted} != {}
    assert "Not run yet, or less than three quarters: table2 (folder, frozen)" in text
    assert "Table 5" in text  # its rows are shared with Table 1
    assert "idml reproduce table1 --data folder:PATH" in text
    page = (tmp_path / "docs" / "results.html").read_text()
    assert page.count("<svg") >= 3
    assert str(tmp_path) not in text + page


def test_the_settings_found_have_the_best_held_out_score():
    """From the stored cells: of the settings on CUB that are not plain in disguise."""
    regime = regime_for("cub")
    made = TABLES["settings"](Arms("cub", regime))
    store = Store(Path(__file__).parents[2] / "results", "cub", regime, lambda text: None)
    usual = {"plain", "mixup", "ism", "idml"}
    for loss, name in FOUND.items():
        scores = {}
        for arm in (arm for arm in made.arms if arm.loss == loss and arm.name not in usual):
            runs = course(store, arm, regime.seeds).runs
            assert len(runs) == regime.seeds, arm
            if sum(run["weight"] for run in runs.values()) / len(runs) <= DISGUISE:
                scores[arm.name] = sum(run["selected_score"] for run in runs.values())
        assert name == max(scores, key=scores.get), scores


def test_other_margins_of_contrastive_end_where_those_of_the_setting_found_do():
    assert FOUND["contrastive"] == "constant, γ = 4"
    far = max(push for _, push in MARGINS)
    assert far * math.exp(-4 / (TrainConfig.tau * far)) == pytest.approx(0.5, abs=0.005)  # the usual margin, of D
    words = [row.options.get("loss_parameters") for row in table("margins").arms]
    assert words == [None, None, *((f"positive_margin={a:g}", f"negative_margin={b:g}") for a, b in MARGINS)]
    assert len(table("margins", name="full").arms) == 4


def test_workers_wait_for_each_other(patterns, small, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "LOSSES", {})  # the release alone, and the raw features
    monkeypatch.setattr(protocol, "_PAUSE", 0.0)
    real, busy, lines = Store.taken, ["raw", "raw", "raw"], []

    from contextlib import contextmanager

    @contextmanager
    def taken(self, cell):
        if busy and cell.name == busy[-1]:
            busy.pop()
            yield False
            return
        with real(self, cell) as mine:
            yield mine

    monkeypatch.setattr(Store, "taken", taken)
    reproduce_table("table1", patterns, 1, tmp_path, note=lines.append)
    made = [line.partition(":")[0] for line in lines if " in " in line]
    assert made[0].startswith("proxy_anchor-idml")  # the next free cell
    assert made[-1] == "raw"
    assert sum("waiting for 1 cells" in line for line in lines) == 1
    assert not (Path(tmp_path) / "cells-folder-frozen" / "raw.lock").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["tabel1"], "unknown table 'tabel1'; did you mean 'table1'?"),
        (["table1", "--seeds", "0"], "at least one seed"),
        (["table1", "--scale", "papre"], "unknown scale 'papre'; did you mean 'paper'?"),
        (["table1", "--regime", "frozn", "--data", "cub:x"], "did you mean 'frozen'?"),
        (["table1", "--regime", "full", "--scale", "paper"], "leave out the regime"),
        (["first", "--scale", "paper"], "one scale only"),
        (["table1", "--data", "cub:/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_bad_input_is_one_line(arguments, line, tmp_path, capsys):
    assert main(["reproduce", *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def folder_with_list(tmp_path: Path, listed: int) -> str:
    """A CSV that lists an image more than there are."""
    rows = ["path,label"]
    for i in range(listed):
        rows.append(f"{i}.png,{'ab'[i % 2]}")
        if i < listed - 1:
            Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    return f"csv:{tmp_path / 'list.csv'}"


def test_one_image_in_a_thousand_may_be_missing_and_is_said(tmp_path):
    notes: list[str] = []
    dataset = official_dataset(folder_with_list(tmp_path, 1001), notes.append)
    assert len(dataset.train) + len(dataset.test) == 1000
    assert len([line for line in notes if "1 image missing" in line]) == 1
    assert dataset.notes == ()  # the runs do not say it again


def test_more_missing_images_are_refused(tmp_path):
    with pytest.raises(ValueError, match="1 image missing"):
        official_dataset(folder_with_list(tmp_path, 999), lambda line: None)

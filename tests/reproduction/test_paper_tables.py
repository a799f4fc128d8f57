"""The tables as data: their rows, their claims, and the protocol they follow."""

import pytest

from idml.reproduction import regimes
from idml.reproduction.claims import paper_figure
from idml.reproduction.paper_tables import TABLES
from idml.reproduction.regimes import TWICE, Arms, regime_for
from idml.reproduction.runner import Store, read_progress
from idml.training.config import preset


def table(what, data="cub:x", **regime):
    return TABLES[what](Arms(data, regime_for(data, **regime)))


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
    assert {read_progress(store, arm, 2).refused for arm in made.arms} == {""}


def test_rows_of_the_papers_tables_find_the_papers_numbers():
    counts = {"table1": 14, "table2": 12, "table3": 10, "table4": 4, "table5": 3, "table6": 9}
    for what, count in counts.items():
        for data in ("cub:x", "cars:x", "sop:x"):
            rows = table(what, data).arms
            assert sum(paper_figure(data[:-2], arm.key, "R@1") is not None for arm in rows) == count


def test_the_same_images_the_release_and_gamma():
    arms = Arms("cub:x", regime_for("cub:x"))
    assert arms.twice("contrastive").options == {"method": "plain", "epochs": 24, "step_epochs": 10, "crops": 4}
    release, given = arms.release().options, preset("release", "cub")
    assert release.items() >= {"method": "idml", "rule": "release", "gamma": 4.0, "labels": "weighted"}.items()
    assert all(given[key] == value for key, value in release.items())
    assert not {"lr", "epochs", "image_size", "trunk", "loss", "warmup_epochs"} & release.keys()
    assert "gamma" not in arms.arm("contrastive", "idml").options
    cars = Arms("cars:x", regime_for("cars:x"))
    assert cars.arm("contrastive", "idml").options["gamma"] == 3.0
    assert "gamma" not in cars.arm("contrastive", "mixup").options
    paper = Arms("cub:x", regime_for("cub:x", "paper"))
    assert paper.twice("contrastive").options == {"method": "plain", "epochs": 120, "step_epochs": 10}


def test_forms_of_mixtures_are_always_said():
    arms = Arms("cub:x", regime_for("cub:x"))
    for made in (build(arms) for build in TABLES.values()):
        for arm in made.arms:
            mixes = arm.options["method"] in ("mixup", "idml", "pel-mixup")
            assert ("mixing" in arm.options and "labels" in arm.options) == mixes or arm.name == "release", arm
    assert arms.arm("contrastive", "mixup").options == {"method": "mixup", "mixing": "separate", "labels": "weighted"}
    assert arms.arm("contrastive", "idml").options == {"method": "idml", "mixing": "separate", "labels": "sets"}
    forms = {arm.name: arm.options for arm in table("table2").arms if arm.loss == "proxy_anchor" and "idml" in arm.name}
    assert [(f["mixing"], f["labels"]) for f in forms.values()] == [
        ("separate", "sets"), ("joint", "sets"), ("separate", "weighted"), ("against-clean", "sets"),
    ]  # fmt: skip


def test_seeds_sizes_and_rates_of_the_protocol():
    one = {what for what in TABLES if table(what).seeds == 1}
    assert one == {"table6", "tau", "gamma", "embedding-size", "finetune-long"}
    assert regime_for("cub:x").base["image_size"] == 224
    assert regime_for("cars:x").base["image_size"] == 112
    assert regime_for("cub:x").seeds == regime_for("cars:x").seeds == regime_for("glyphs").seeds == 3
    full = regime_for("cub:x", name="full")
    assert (full.base["image_size"], full.base["epochs"], full.rates, full.seeds) == (112, 8, (1e-4,), 2)


def test_what_is_trained_completely(monkeypatch):
    made = table("finetune", name="full")
    names = [(arm.loss, arm.name) for arm in made.arms]
    forms = ["idml", "idml, weighted", "idml, against-clean"]
    wanted = [("proxy_anchor", name) for name in ("plain", TWICE, "mixup", *forms)]
    wanted += [("multi_similarity", name) for name in ("plain", *forms)] + [("proxy_anchor", "release")]
    assert names == wanted
    monkeypatch.setattr(regimes, "CHOSEN_FORM", "weighted")
    long = table("finetune-long", name="full")
    assert [arm.name for arm in long.arms] == [
        "plain", "idml, weighted", "plain, 24 epochs", "idml, weighted, 24 epochs",
    ]  # fmt: skip
    assert long.arms[-1].options == {**long.arms[1].options, "epochs": 24, "step_epochs": 15}
    assert long.arms[-1].against == "plain, 24 epochs"

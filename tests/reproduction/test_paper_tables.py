"""The tables as data: their rows, their claims, and the settings that stored rows chose."""

import math
from pathlib import Path

import pytest

from idml.reproduction.claims import SAME_AS_PLAIN, paper_figure
from idml.reproduction.paper_tables import FOUND, MARGINS, RETIRED, TABLES
from idml.reproduction.regimes import Arms, regime_for
from idml.reproduction.runner import Store, read_progress


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
    refused = {arm.key: read_progress(store, arm, 2).refused for arm in made.arms if not arm.retired}
    assert set(refused.values()) <= {""}
    if what in RETIRED:
        assert any(arm.retired for arm in made.arms)
    assert len(refused) >= 2


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


def test_the_settings_found_have_the_best_held_out_score():
    """From the stored cells: of the settings on CUB that are not almost plain."""
    regime = regime_for("cub")
    made = TABLES["settings"](Arms("cub", regime))
    store = Store(Path(__file__).parents[2] / "results", "cub", regime, lambda text: None)
    usual = {"plain", "mixup", "ism", "idml"}
    for loss, name in FOUND.items():
        scores = {}
        for arm in (arm for arm in made.arms if arm.loss == loss and arm.name not in usual):
            runs = read_progress(store, arm, regime.seeds).runs
            assert len(runs) == regime.seeds, arm
            if sum(run["weight"] for run in runs.values()) / len(runs) <= SAME_AS_PLAIN:
                scores[arm.name] = sum(run["selected_score"] for run in runs.values())
        assert name == max(scores, key=scores.get), scores


def test_other_margins_of_contrastive_end_where_those_of_the_setting_found_do():
    assert FOUND["contrastive"] == "constant, γ = 4"
    far = max(push for _, push in MARGINS)
    assert far * math.exp(-4 / (5.0 * far)) == pytest.approx(0.5, abs=0.005)  # the usual margin, of D
    words = [row.options.get("loss_parameters") for row in table("margins").arms]
    assert words == [None, None, *((f"positive_margin={a:g}", f"negative_margin={b:g}") for a, b in MARGINS)]
    assert len(table("margins", name="full").arms) == 4

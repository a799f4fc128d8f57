"""The other systems of Table 1 as arms: each can be trained in its regime, and has the paper's figure."""

import pytest

from idml.reproduction.claims import paper_figure
from idml.reproduction.comparators import COMPARATORS, comparators_table
from idml.reproduction.regimes import Arms, regime_for
from idml.reproduction.reproduce import reproduce
from idml.reproduction.runner import Store, read_progress


@pytest.mark.parametrize(("data", "regime"), [("cub:x", "frozen"), ("cars:x", "frozen"), ("cub:x", "last")])
def test_every_system_can_be_trained_in_its_regime(data, regime, tmp_path):
    chosen = regime_for(data, name=regime)
    made = comparators_table(Arms(data, chosen))
    keys = [arm.key for arm in made.arms]
    assert len(set(keys)) == len(keys)
    assert all((arm.loss, arm.against) in keys for arm in made.arms)
    assert all(claim.arm in keys and claim.over in keys for claim in made.claims)
    store = Store(tmp_path, data, chosen)
    assert {read_progress(store, arm, 2).refused for arm in made.arms} == {""}
    names = {arm.name for arm in made.arms} - {"plain"}
    left_out = {"DIML", "ABE-8"} if regime == "frozen" else set()
    assert names == {each.name for each in COMPARATORS} - left_out
    assert len(made.claims) == len(names)


def test_the_papers_figures_are_there():
    arms = Arms("cub:x", regime_for("cub:x", name="last"))
    for each in COMPARATORS:
        for data in ("cub", "cars", "sop"):
            known = paper_figure(data, each.arm(arms).key, "R@1")
            assert (known is None) is (each.name == "DREML" and data == "sop")


def test_a_dry_run_lists_them_and_other_tables_have_none(tmp_path):
    plan = reproduce("table1", "cub", out=tmp_path, comparators=True, dry_run=True)
    assert all(any(method in job["name"] for job in plan["jobs"]) for method in ("nir", "dac", "rankmi", "dreml"))
    with pytest.raises(ValueError, match="--comparators goes with table1, not with table2"):
        reproduce("table2", "cub", out=tmp_path, comparators=True)

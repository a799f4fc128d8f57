"""The other systems of Table 1: each can be trained in its regime; the columns, costs and words of their table."""

import csv
import json
import re
from pathlib import Path

import pytest

from idml.cli import main
from idml.reproduction import comparator_costs, comparators, comparators_page
from idml.reproduction.claims import TableRuns, paper_figure
from idml.reproduction.comparator_costs import Cost, measure_arm, read_costs
from idml.reproduction.comparators import COMPARATORS, NAME, PROXY_ANCHOR, comparators_table
from idml.reproduction.comparators_page import (
    comparators_columns,
    cost_table,
    describe_comparison,
    has_comparison,
    uncounted_bounds,
)
from idml.reproduction.regimes import Arms, regime_for
from idml.reproduction.render import markdown_table
from idml.reproduction.reproduce import reproduce
from idml.reproduction.results_page import Section
from idml.reproduction.runner import ArmProgress, Store, read_progress

ROOT = Path(__file__).parents[2]
TRUNK_LEARNS = {"DIML", "ABE-8"}


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
    plain = [arm for arm in made.arms if arm.options["method"] == "plain" and arm.name.startswith("plain")]
    names = {arm.name for arm in made.arms} - {arm.name for arm in plain}
    assert names == (TRUNK_LEARNS if regime == "last" else {each.name for each in COMPARATORS} - TRUNK_LEARNS)
    assert len(made.claims) == len(names)
    assert len(made.arms) == (5 if regime == "last" else 17)
    parameters = {arm.key: arm.options.get("loss_parameters") for arm in made.arms}
    for arm in made.arms:  # a system is compared with its own loss, at the same parameters of that loss
        assert parameters[arm.loss, arm.against] == arm.options.get("loss_parameters")


def test_all_fifteen_have_the_papers_figures():
    assert len(COMPARATORS) == 15
    arms = Arms("cub:x", regime_for("cub:x", name="full"))
    assert len(comparators_table(arms).claims) == 15
    for each in COMPARATORS:
        for data in ("cub", "cars", "sop"):
            known = paper_figure(data, each.arm(arms).key, "R@1")
            assert (known is None) is (each.name == "DREML" and data == "sop")


def test_a_dry_run_knows_what_a_step_costs_and_other_tables_have_none(tmp_path):
    def plan():
        return reproduce("table1", "cub", out=tmp_path, regime="last", comparators=True, dry_run=True)

    def hours(found, method):
        return sum(job["hours"] for job in found["jobs"] if f"-{method}-" in job["name"])

    usual = plan()
    assert len(usual["jobs"]) == 5 * 4  # two rates with one seed, two seeds more
    costs = [
        {"loss": "proxy_anchor", "name": "plain", "seconds": 0.5, "memory": 1e8},
        {"loss": "contrastive", "name": "ABE-8", "seconds": 4.0, "memory": 3e8},
    ]
    (tmp_path / comparator_costs.FILE).write_text(json.dumps({"cub-last": {"arms": costs}}))
    known = plan()
    assert hours(known, "plain") == hours(usual, "plain")
    fixed = 4 * 130 / 3600
    assert hours(known, "abe") - fixed == pytest.approx(8 * (hours(usual, "abe") - fixed))
    (tmp_path / comparator_costs.FILE).write_text("{")
    with pytest.raises(ValueError, match="restore the file with git"):
        plan()
    with pytest.raises(ValueError, match="--comparators goes with table1, not with table2"):
        reproduce("table2", "cub", out=tmp_path, comparators=True)


def test_features_are_counted_once_for_methods_that_share_them(tmp_path):
    found = reproduce("table1", "cub", out=tmp_path, comparators=True, dry_run=True)
    each = 2 * 0.9 * 5864 / 100 / 3600  # two epochs of crops, 100 images a second
    # three seeds: batches of crops, DiVA's second views, and images for those that plan their batches
    assert found["feature_hours"] == pytest.approx(3 * 3 * each)


# -------------------- costs --------------------


def test_the_cost_of_a_step_is_measured_for_every_method():
    regime, sizes = regime_for("cub"), {"images": 480, "classes": 60, "steps": 2}
    plain = measure_arm("cub", regime, PROXY_ANCHOR, **sizes)
    flow = measure_arm("cub", regime, ("proxy_anchor", "NIR"), **sizes)
    for cost in (plain, flow):
        assert cost["seconds"] > 0
        assert cost["memory"] >= 0


def test_costs_by_command(tmp_path, monkeypatch):
    monkeypatch.setattr(comparator_costs, "_measure_apart", lambda *_: {"seconds": 0.5, "memory": 2e8})
    found = reproduce("comparator-costs", "cub", out=tmp_path, regime="last")
    assert "500 ms (1.0×), 200 MB (1.0×)" in found["table"]
    assert read_costs(tmp_path, "cub", "last")["contrastive", "ABE-8"] == Cost(0.5, 2e8)
    reproduce("comparator-costs", "cars", out=tmp_path, regime="frozen")
    assert len(read_costs(tmp_path, "cub", "last")) == 5
    assert len(read_costs(tmp_path, "cars", "frozen")) == 17
    assert "17 processes" in reproduce("comparator-costs", out=tmp_path, dry_run=True)["table"]
    for bad, words in (({"data": "glyphs"}, "cub or cars"), ({"regime": "full"}, "frozen and last")):
        with pytest.raises(ValueError, match=words):
            reproduce("comparator-costs", bad.get("data"), out=tmp_path, regime=bad.get("regime"))


def test_the_costs_in_the_docs_are_the_stored_ones():
    header, rows = cost_table(ROOT / "results")
    assert len(rows) == 5 + 15  # plain losses, systems
    assert markdown_table(header, rows) in (ROOT / "docs" / "methods.md").read_text()


def test_the_times_in_the_list_of_methods_are_those_of_the_costs():
    page = (ROOT / "docs" / "methods.md").read_text()
    header, rows = cost_table(ROOT / "results")
    frozen, last = (header.index(f"cub, {regime}: time") for regime in ("frozen", "last"))
    times = {row[0]: re.search(r"\((.*)\)", row[frozen] or row[last])[1] for row in rows}
    for each in COMPARATORS:
        if each.method != "plain":
            (line,) = (line for line in page.splitlines() if line.startswith(f"| [`{each.method}`]"))
            assert line.split(" | ")[3] == times[each.name], each.name


# -------------------- the table and its paragraph --------------------


def run(share, classes=20):
    hits = [round(20 * share) + (c % 3) for c in range(classes)]
    sums = {"queries": [40] * classes, "hits": hits, "map@r": [x / 2 for x in hits]}
    figures = {"recall@1": share, "r_precision": share / 2, "map@r": share / 4}
    return {"classes": sums, "selected": figures, "nmi": 0.5, "selected_score": 0.3}


def table_of(shares, *, seeds=3, data="cub", regime="frozen"):
    """The table of a regime; only the named arms have runs."""
    made = comparators_table(Arms(data, regime_for(data, name=regime)))
    progress = {}
    for arm in made.arms:
        share = shares.get(arm.name if arm.key != PROXY_ANCHOR else "ProxyAnchor")
        runs = {} if share is None else {seed: run(share) for seed in range(seeds)}
        progress[arm.key] = ArmProgress(arm, 1e-4, runs, (), left=0 if runs else 3)
    return f"{data}, {regime}", made, TableRuns(data, progress, run(0.2))


def test_the_paragraph_follows_from_the_rows():
    text = describe_comparison([table_of({"ProxyAnchor": 0.5, "NIR": 0.8, "MIC": 0.5, "D&C": 0.3, "DRML": 0.9})])
    assert "Of 4 systems 2 are above it with an interval above 0: DRML (+20.0 [" in text
    assert re.search(
        r"and NIR \(\+15.0 \[.*?\]\)\. D&C \(-10\.0 \[.*?\]\) is below it with an interval below 0\.", text
    )
    assert re.search(r"For MIC \(\+0\.0 \[.*?\]\) the table cannot tell\.", text)
    assert "In all places" not in text
    none = describe_comparison([table_of({"ProxyAnchor": 0.5, "NIR": 0.4})])
    assert "Of 1 system none is above it with an interval above 0. NIR (-5.0" in none
    one_seed = describe_comparison([table_of({"ProxyAnchor": 0.5, "NIR": 0.9}, seeds=1)])
    assert "none is above it" in one_seed
    assert "For NIR" in one_seed
    both = [table_of({"ProxyAnchor": 0.5, "NIR": 0.8, "MIC": 0.9})]
    both.append(table_of({"ProxyAnchor": 0.5, "NIR": 0.8, "MIC": 0.4}, data="cars"))
    assert "of 2 in several places, 1 is above it: NIR." in describe_comparison(both)
    assert "not made yet" in describe_comparison([table_of({"NIR": 0.5})])
    assert "not made yet" in describe_comparison([])


def test_a_table_that_is_not_finished_is_worth_showing():
    made, found = table_of({"ProxyAnchor": 0.5, "NIR": 0.6})[1:]
    assert has_comparison(made, found)
    assert not has_comparison(*table_of({"ProxyAnchor": 0.5, "plain": 0.4})[1:])
    assert not has_comparison(*table_of({"NIR": 0.5})[1:])


def test_the_columns():
    _, made, found = table_of({"ProxyAnchor": 0.5, "plain": 0.5, "DIML": 0.6, "ABE-8": 0.4}, regime="last")
    costs = {PROXY_ANCHOR: Cost(0.5, 1e8), ("contrastive", "ABE-8"): Cost(4.0, 3e8)}
    header, rows = comparators_columns(made, found, costs)
    by_name = {(row[0], row[1]): dict(zip(header, row, strict=True)) for row in rows}
    abe, diml = by_name["ABE-8", "Contrastive"], by_name["DIML", "Multi-Sim"]
    assert (abe["time of a step"], abe["memory"]) == ("4,000 ms (8.0×)", "300 MB (3.0×)")
    assert abe["R@1 over ProxyAnchor"].startswith("-5.0 [")
    assert diml["R@1 over its loss"].startswith("+5.0 [")
    assert diml["time of a step"] == ""
    assert by_name["plain", "ProxyAnchor"]["R@1 over ProxyAnchor"] == ""
    assert rows[0][0] == "raw features"
    assert "37.9 (without the query 36.8 to 38.6)" in next(row for row in rows if row[0] == "DIML")
    assert "count the query" in diml["remark"]
    section = Section(NAME, made, found, regime_for("cub", name="last"), costs)
    assert section.columns == (header, rows)


@pytest.mark.parametrize("hits", [[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], [0] * 6])
def test_bounds_without_the_query_hold_the_truth(hits, monkeypatch):
    """hits: whether each of the first n results is right; n counts the query, R = n − 1 does not."""
    n = len(hits)

    def figures(size):
        precision = [sum(hits[: i + 1]) / (i + 1) for i in range(size)]
        return sum(hits[:size]) / size, sum(p for p, hit in zip(precision, hits, strict=False) if hit) / size

    counted, true = figures(n), figures(n - 1)
    monkeypatch.setitem(comparators_page._IMAGES_OF_CLASS, "cub", n)
    stored = {"RP": 100 * counted[0], "MAP@R": 100 * counted[1]}
    monkeypatch.setattr(comparators_page, "paper_figure", lambda data, key, figure: stored[figure])
    found = uncounted_bounds("cub", ("multi_similarity", "DIML"))
    for name, value in zip(("RP", "MAP@R"), true, strict=True):
        low, high = found[name]
        assert low - 1e-9 <= 100 * value <= high + 1e-9


def test_the_table_by_command_and_on_the_page(patterns, small, tmp_path, monkeypatch, capsys):
    chosen = tuple(each for each in COMPARATORS if each.name == "CircleLoss")
    monkeypatch.setattr(comparators, "COMPARATORS", chosen)
    out = tmp_path / "out"
    assert main(["reproduce", "table1", "--comparators", "--data", patterns, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "CircleLoss is above plain ProxyAnchor: **" in text
    assert "\n| system | loss |" in text
    assert re.search(r"On folder, frozen, plain ProxyAnchor has R@1 [\d.]+ \[.*?\]\. Of 1 system", text)
    (rows,) = (list(csv.DictReader(file.open())) for file in out.rglob("table1-comparators-folder-frozen/table.csv"))
    assert [row["system"] for row in rows] == ["raw features", "plain", "CircleLoss"]
    assert "[" in rows[2]["R@1 over ProxyAnchor"]
    assert main(["reproduce", "results", "--out", str(out)]) == 0
    page = (tmp_path / "docs" / "results.md").read_text()
    assert "`idml reproduce table1 --comparators --data folder:PATH`" in page
    assert "## Which of the other systems beat a tuned ProxyAnchor\n\nOn folder, frozen, plain ProxyAnchor" in page
    assert "| CircleLoss is above plain ProxyAnchor |" in page
    assert "table1-comparators (cub, last)" in page
    assert "On folder, frozen" in (tmp_path / "docs" / "results.html").read_text()

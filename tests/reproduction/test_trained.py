"""Everything trained: a form is chosen without test figures; `live-u`; the paper's own network, on small images."""

import dataclasses
import json

import pytest
from safetensors.torch import save_file

from idml.cli import main
from idml.model.backbones import Conv4
from idml.reproduction import live_u, regimes, resnet50_study
from idml.reproduction.claims import TableRuns
from idml.reproduction.default_form import choose_form
from idml.reproduction.paper_tables import TABLES
from idml.reproduction.regimes import Regime, Speed
from idml.reproduction.reproduce import reproduce
from idml.reproduction.results_page import (
    Section,
    conclusion,
    main_claim_table,
    results_markdown,
    stored_results,
    u_table,
)
from idml.reproduction.runner import ArmProgress, Store


@pytest.fixture
def trained(monkeypatch, patterns, small):
    """The SPEC, with the regimes `full` and `resnet50` made small."""
    full = Regime("full", small.base, Speed(1000, 1, "a test"), rates=(1e-3,), seeds=1, study_rate=1e-3)
    monkeypatch.setitem(regimes.LAPTOP, "full", full)
    short = {**small.base, "schedule": "constant", "warmup_epochs": 0, "epochs": 1}
    monkeypatch.setitem(regimes.LAPTOP, "resnet50", dataclasses.replace(full, name="resnet50", base=short))
    monkeypatch.setattr(regimes, "CHOSEN_FORM", None)
    return patterns


# -------------------- the default form --------------------


def test_the_form_is_the_best_mean_of_all_losses_and_seeds():
    def scores(*values):
        keys = [(loss, seed) for loss in ("a", "b") for seed in (0, 1)]
        return dict(zip(keys, values, strict=True))

    found = {"sets": scores(0.5, 0.5, 0.1, 0.1), "weighted": scores(0.3, 0.3, 0.4, 0.4)}
    assert choose_form(found) == "weighted"
    assert choose_form({**found, "against-clean": scores(0.9, 0.9, 0.9, None)}) is None


def test_nothing_of_the_test_classes_is_shown_before_the_form_is_chosen(trained, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    command = ["reproduce", "finetune", "--data", trained, "--out", str(out), "--seeds", "1"]
    assert main(command) == 0
    before = capsys.readouterr()
    assert "R@1" not in before.out + before.err
    assert before.err.count("recall") == before.err.count("held-out recall")
    rows = [json.loads(path.read_text()) for path in (out / "cells" / "folder-full").glob("*.json")]
    held_out = {row["name"]: row["selected_score"] for row in rows if "selected_score" in row}
    assert len(held_out) == 11
    result = reproduce("default-form", trained, 1, out)
    means = {row[0]: float(row[-1]) for row in result["rows"]}
    name = "{}-idml-labels=weighted-mixing=separate-lr=0.001-seed=0"
    pair = [held_out[name.format(loss)] for loss in ("proxy_anchor", "multi_similarity")]
    assert means["weighted"] == pytest.approx(50 * sum(pair), abs=0.006)
    assert result["chosen"] == max(means, key=means.get)
    assert f"Chosen: {result['chosen']}" in before.out

    monkeypatch.setattr(regimes, "CHOSEN_FORM", result["chosen"])
    assert main(command) == 0
    assert "| R@1 |" in capsys.readouterr().out
    found = reproduce("live-u", trained, 1, out)
    assert [row["name"] for row in found["results"].values()][:5] == [
        f"live-u-tau-{Store(out, trained, regimes.LAPTOP['full']).cell('proxy_anchor', arm.options, 1e-3, 0).name}"
        for arm in pilots(trained)
    ]
    lines = [line for line in found["table"].splitlines() if line.startswith("| ")]
    ways = [line.split(" | ")[0][2:] for line in lines[2:7]]
    assert ways == ["plain", "as it is", "γ = 3", "learned u of proxies", "ranking inside the metric"]


def pilots(data):
    arms = regimes.Arms(data, regimes.LAPTOP["full"])
    for tau in live_u.TAUS:
        arm = live_u.live_u_arms(arms, tau)[-1]
        yield dataclasses.replace(arm, options={**arm.options, "epochs": live_u.PILOT_EPOCHS})


# -------------------- live u --------------------


def made(share, **more):
    hits = [int(share * 10)] * 8
    return {
        "classes": {"queries": [10] * 8, "hits": hits, "map@r": hits},
        "selected": {"recall@1": share, "r_precision": share, "map@r": share},
        "level_spread": 0.2, "r_auroc": 0.6, "r_auroc_interval": [0.5, 0.7], "auroc_mixed": 0.55, "level_clean": 0.4,
        **more,
    }  # fmt: skip


def test_a_metric_whose_weight_is_above_098_is_not_called_introspective():
    def row(seed, share, **more):
        options = {"method": "idml", "teach_u": "none", "seed": seed}
        own = more.pop("options", {})
        return {"name": f"{more}{seed}", "options": {**options, **own}, **made(share, **more)}

    rows = [row(s, 0.5, options={"method": "plain", "teach_u": "ranking"}) for s in (0, 1)]
    rows += [row(s, 0.4, weight=0.99) for s in (0, 1)]
    rows += [row(s, 0.6, weight=0.7, options={"gamma": 3.0}) for s in (0, 1)]
    table = live_u.live_u_tables(rows)[0]
    assert [(line[0], line[-1]) for line in table.rows] == [
        ("plain", ""), ("as it is", "not introspective"), ("γ = 3", "introspective"),
    ]  # fmt: skip
    assert [line[3][:5] for line in table.rows] == ["", "-10.0", "+10.0"]


# -------------------- the paper's own network --------------------


@pytest.fixture
def shorter(monkeypatch):
    monkeypatch.setattr(resnet50_study, "EPOCHS", 2)
    monkeypatch.setattr(resnet50_study, "HALF", 1)


def test_the_half_way_epoch_of_plain_is_what_a_run_of_half_the_epochs_gives(trained, shorter, tmp_path, monkeypatch):
    out, weights = tmp_path / "out", tmp_path / "w.safetensors"
    save_file(Conv4(3).state_dict(), weights)
    found = reproduce("resnet50", trained, out=out, weights=weights)
    plain, idml, release = found["results"].values()
    assert plain["tested"].keys() == {"last", resnet50_study._LAST, resnet50_study._SELECTED}
    assert idml["tested"].keys() == release["tested"].keys() == {"last"}
    assert plain["last"]["recall@1"] == pytest.approx(plain["tested"]["last"]["selected"]["recall@1"])
    assert plain["images_seen"] == idml["images_seen"] == release["images_seen"]
    assert len(plain["weights"]) == 16
    assert str(tmp_path) not in json.dumps(found["results"])
    rows = [line for line in found["table"].splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[:2] for row in rows] == [
        ["| plain", "1"],
        ["| plain", "2"],
        ["| idml", "1"],
        ["| release", "1"],
    ]

    monkeypatch.setattr(resnet50_study, "EPOCHS", 1)
    monkeypatch.setattr(resnet50_study, "HALF", 9)
    alone = reproduce("resnet50", trained, out=tmp_path / "alone", weights=weights)
    half = next(iter(alone["results"].values()))
    assert half["last"] == pytest.approx(plain["tested"][resnet50_study._LAST]["selected"])


def network(method, share, epochs, **more):
    options = {"method": method, "epochs": epochs, "seed": 0, "teach_u": "none"}
    tested = {"last": made(share)}
    if method == "plain":
        tested |= {"epoch-6": made(share - 0.1), "selected-6": made(share - 0.1)}
    trend = {"held_out_map@r": [0.1 * i for i in range(epochs)]}
    row = made(share - 0.3 * (method == "plain"), images_seen=63360, trend=trend, tested=tested, **more)
    return {"name": method, "options": options, **row}


def test_the_observation_comes_first_and_is_called_one(tmp_path):
    rows = [network("plain", 0.6, 12), network("idml", 0.7, 6, weight=0.9)]
    empty = stored_results(tmp_path)
    assert main_claim_table(empty)[1][0][3] == "not run yet"
    assert {line[3] for line in main_claim_table(empty)[1]} == {"not run yet"}
    assert "not decided yet" in conclusion(empty)
    results = dataclasses.replace(empty, resnet50=rows)
    text = results_markdown(results, tmp_path)
    first = text[text.index("## ") :].split("\n## ")[0]
    assert "one seed (an observation)" in first
    assert "Of its three runs, 1 is not run yet." in first
    (line,) = [line for line in first.splitlines() if line.startswith("| idml")]
    cells = line.split(" | ")
    assert cells[3] == "70.7"
    assert [cells[i][:7] for i in (6, 8, 9)] == ["+40.0 [", "+10.0 [", "+20.0 ["]  # the last: plain after six epochs
    assert main_claim_table(results)[1][0][1:4] == ["+1.7", "+40.0 [+40.0, +40.0]", "observation: one seed"]
    words = conclusion(results)
    assert words.startswith("With all of ResNet-50 trained, IDML's gain is +40.0 [+40.0, +40.0] points of R@1 (")
    assert "not decided yet" in words  # one seed decides nothing
    rows = [network("plain", 0.6, 12), network("idml", 0.7, 6, weight=0.99)]
    same = main_claim_table(dataclasses.replace(empty, resnet50=rows))[1][0]
    assert same[3] == "observation: one seed; not introspective"
    assert ["ResNet-50", "224", "everything", "ProxyAnchor", "idml", "0.60 [0.50, 0.70] (one seed)"] in u_table(
        results
    )[1]


def test_what_follows_from_everything_trained(tmp_path):
    regime = regimes.regime_for("cub", name="full")
    built = TABLES["finetune"](regimes.Arms("cub", regime))

    def results(share, weight):
        progress = {}
        for arm in built.arms:
            own = {} if arm.name == "plain" else {"weight": weight}
            runs = {s: made(0.5 if arm.name == "plain" else share, **own) for s in (0, 1)}
            progress[arm.key] = ArmProgress(arm, 1e-4, runs, ())
        section = Section("finetune", built, TableRuns("cub", progress, made(0.1)), regime)
        verdicts = [(section, claim, claim.decide(section.found)) for claim in built.claims]
        rows = [network("plain", 0.6, 12), network("idml", 0.6, 6)]
        return dataclasses.replace(stored_results(tmp_path), sections=[section], verdicts=verdicts, resnet50=rows)

    assert "IDML's gain was not found**" in conclusion(results(0.4, 0.9))
    above = results(0.7, 0.9)
    assert "ProxyAnchor, idml, weighted: +20.0 [+20.0, +20.0];" in conclusion(above)
    assert "not introspective" in conclusion(results(0.7, 0.99))
    table = TABLES["finetune-long"](regimes.Arms("cub", regime))
    (claim,) = table.claims
    arms = {arm.key: arm for arm in table.arms}
    runs = {claim.arm: {0: made(0.8, weight=0.99)}, claim.over: {0: made(0.7)}}
    progress = {key: ArmProgress(arms[key], 1e-4, found, ()) for key, found in runs.items()}
    long = Section("finetune-long", table, TableRuns("cub", progress, made(0.1)), regime)
    missed = results(0.4, 0.9)
    said = conclusion(dataclasses.replace(missed, sections=[*missed.sections, long]))
    assert "trained for 8 epochs, IDML's gain was not found**" in said
    assert "gains +10.0 [+10.0, +10.0] (observation: one seed, not introspective)" in said
    lines = main_claim_table(above)[1]
    assert lines[1][:4] == ["IDML improves ProxyAnchor", "+1.7", "+20.0 [+20.0, +20.0]", "confirmed"]
    trained = [line for line in u_table(above)[1] if line[2] == "everything" and line[0] == "lite0"]
    assert [line[3] for line in trained] == ["ProxyAnchor", "ProxyAnchor", "Multi-Sim", "Multi-Sim"]


def test_a_line_that_sums_up_several_claims_gives_a_range_and_counts(tmp_path):
    regime = regimes.regime_for("cub")
    built = TABLES["levels"](regimes.Arms("cub", regime))
    progress = {}
    for i, arm in enumerate(built.arms):
        runs = (
            {} if i == len(built.arms) - 1 else {s: {"auroc_mixed": 0.6 + 0.02 * i * i + 0.01 * s} for s in (0, 1, 2)}
        )
        progress[arm.key] = ArmProgress(arm, 1e-3, runs, ())
    section = Section("levels", built, TableRuns("cub", progress, None), regime)
    verdicts = [(section, claim, claim.decide(section.found)) for claim in built.claims]
    results = dataclasses.replace(stored_results(tmp_path), sections=[section], verdicts=verdicts)
    (line,) = [line for line in main_claim_table(results)[1] if line[0].startswith("IDML teaches")]
    assert line[1:] == [
        "",
        "AUROC +0.02 to +0.10 over a ‖u‖ that nothing teaches",
        "confirmed: 2 of 3; not run yet: 1 of 3",
        "CUB-200-2011 (birds), EfficientNet-Lite0 at 224 pixels, only the heads trained for 12 epochs",
    ]

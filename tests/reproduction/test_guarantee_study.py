"""The guarantee study: rounds against loops, guarantees against their confidence, and going on after a stop."""

import json
import os
from functools import partial

import pytest
import torch
from scipy.stats import binom

from idml import Embeddings
from idml.calibration.open_set import QueryPool, draw_unknown
from idml.calibration.risk_control import ERROR_RATES
from idml.calibration.score_comparison import compare_scores
from idml.calibration.stored import Calibration
from idml.data.sampling import random_stream
from idml.reproduction import guarantee_study
from idml.reproduction.guarantee_study import (
    DELTA,
    GALLERIES,
    against_table,
    count_outcomes,
    draw_sample,
    guarantee_table,
    measure_share,
    score_table,
)
from idml.reproduction.reproduce import reproduce

ROUNDS = int(os.environ.get("IDML_ROUNDS", "6"))  # 200 by hand


def made(n, classes, spread, seed=0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    hard = torch.rand(n, 1, generator=g) * spread
    semantic = torch.randn(classes, 8, generator=g)[labels] + hard * torch.randn(n, 8, generator=g)
    return QueryPool(Embeddings(semantic, hard), labels)


@pytest.fixture(scope="module")
def pool():
    return made(1200, 40, 1.6)


def test_samples_are_queries_or_whole_classes(pool):
    trial = pool.search(without=torch.tensor([3, 7]))
    images = draw_sample(trial, "image", random_stream("x", 0))
    assert len(images) == 600
    assert len(images.unique()) < 600  # with replacement
    assert torch.equal(images, draw_sample(trial, "image", random_stream("x", 0)))
    rows = draw_sample(trial, "class", random_stream("x", 1))
    assert len(rows) == 20 * 30
    drawn = trial.labels[rows].bincount(minlength=40)
    assert set((drawn % 30).tolist()) == {0}
    for c in drawn.nonzero().flatten().tolist():
        mine = (trial.labels == c).nonzero().flatten()
        assert sorted(rows[trial.labels[rows] == c].tolist()) == sorted(mine.tolist() * (int(drawn[c]) // 30))


@pytest.mark.parametrize("labelled", [True, False])
def test_outcomes_against_loops(pool, labelled):
    trial = pool.search(without=draw_unknown(pool.labels, 0.25, random_stream("u", 0)))
    rows = draw_sample(trial, "image", random_stream("x", 2))
    found = Calibration.fit(trial.evidence[rows], trial.correct[rows], labelled=labelled, known=trial.known[rows])
    p, usual = found.probability(trial.evidence).tolist(), found.novelty(trial.evidence).tolist()
    fresh = set(range(1200)) - set(rows.tolist())
    seen = count_outcomes(found, trial, rows)
    assert list(seen) == [f"{rate:g}" for rate in ERROR_RATES]
    for target, counts in zip(ERROR_RATES, seen.values(), strict=True):
        threshold = found.find_guarantee(target, 0.9).threshold
        match = [i for i in range(1200) if threshold is not None and p[i] >= threshold]
        wrong = [i for i in match if not trial.correct[i]]
        new = [i for i in match if i in fresh]
        error = len(wrong) / len(match) if match else 0.0
        away = [i for i in fresh if usual[i] <= 0.05 and p[i] < 0.5 and i not in match]
        assert counts == {
            "guaranteed": threshold is not None,
            "answered": len(match) / 1200,
            "error": error,
            "violated": error > target,
            "fresh_answered": len(new),
            "fresh_wrong": len(set(new) & set(wrong)),
            "fresh_above": len(set(new) & set(wrong)) > target * len(new),
            "unknown": sum(not trial.known[i] for i in fresh),
            "known": sum(bool(trial.known[i]) for i in fresh),
            "recognised": sum(not trial.known[i] for i in away),
            "rejected": sum(bool(trial.known[i]) for i in away),
        }
    assert seen["0.2"]["guaranteed"]


@pytest.fixture(scope="module")
def measured():
    rows, pool = [], made(600, 30, 1.6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarantee_study, "COMPARED", 3)
        patch.setattr(guarantee_study, "compare_scores", partial(compare_scores, rounds=50))
        found = {}
        for share in (0.0, 0.5):
            facts = {"unknown": share, "rounds": ROUNDS, "seed": 0}
            found[share] = {**facts, **measure_share(pool, share, ROUNDS, rows.append)}
    assert rows[-1] == {"done": ROUNDS * 600, "images": ROUNDS * 600, "what": "calibrated and tested"}
    return found


def test_guarantees_by_image_hold(measured):
    for result in measured.values():
        for gallery in GALLERIES:
            for total in result["guarantees"][gallery]["image"].values():
                assert binom.sf(total["violated"] - 1, ROUNDS, DELTA) > 0.001
                assert total["rejected"] <= 0.08 * total["known"]  # 5 % asked
    assert measured[0.0]["guarantees"]["labelled"]["image"]["0.2"]["guaranteed"] == ROUNDS
    assert measured[0.5]["guarantees"]["labelled"]["image"]["0.2"]["recognised"] > 0
    assert measured[0.0]["guarantees"]["labelled"]["image"]["0.2"]["unknown"] == 0


def test_tables(measured):
    results = list(measured.values())
    header, rows = guarantee_table(results)
    assert len(rows) == len(GALLERIES) * 2 * len(ERROR_RATES)
    assert all(len(row) == len(header) for row in rows)
    row = next(r for r in rows if r[:3] == ["labelled", "50%", "20%"])
    total = measured[0.5]["guarantees"]["labelled"]["image"]["0.2"]
    assert row[3:6] == [
        f"{total['guaranteed'] / ROUNDS:.1%}", f"{total['answered'] / ROUNDS:.1%}",
        f"{total['fresh_wrong'] / total['fresh_answered']:.1%}",
    ]  # fmt: skip
    assert row[12] == f"{total['recognised'] / total['unknown']:.1%}"
    assert next(r for r in rows if r[1] == "0%")[12] == "–"
    often = json.loads(json.dumps(results))
    often[0]["guarantees"]["labelled"]["class"]["0.05"]["violated"] = 0.75 * ROUNDS
    assert next(r[:3] for r in guarantee_table(often)[1] if r[11].endswith("*")) == ["labelled", "0%", "5%"]
    total = measured[0.5]["guarantees"]["unlabelled"]["class"]["0.1"]
    row = next(r for r in rows if r[:3] == ["unlabelled", "50%", "10%"])
    assert row[8:10] == [f"{total[name] / ROUNDS:.1%}" for name in ("guaranteed", "answered")]
    header, rows = against_table(results)
    assert [row[:3] for row in rows] == [[g, s, "0"] for g in GALLERIES for s in ("0%", "50%")]
    assert [row[8] for row in rows] == ["1", "3", "1", "3"]
    drawn = often[1]["scores"]["labelled"]
    for draw, (value, high) in zip(drawn, ((-0.01, -0.005), (-0.02, 0.005), (0.06, 0.07)), strict=True):
        draw["gain"]["r_auroc"], draw["gain"]["intervals"]["r_auroc"] = value, [-0.03, high]
    assert against_table(often)[1][1][6:7] == ["+0.010 [-0.030, +0.023]"]
    assert against_table(often)[1][1][9] == "2 (1)"
    header, rows = score_table([*results, *results])
    assert len(rows) == 2 * (13 + 9)
    assert rows[0][2] == "P(right)"
    value = measured[0.0]["scores"]["labelled"][0]["scores"]["P(right)"]
    assert rows[0][3].startswith(f"{value['r_auroc']:.3f} [")


def test_a_stopped_study_goes_on_after_the_shares_that_are_measured(patterns, small, tmp_path, monkeypatch):
    monkeypatch.setattr(guarantee_study, "ROUNDS", 2)
    monkeypatch.setattr(guarantee_study, "compare_scores", partial(compare_scores, rounds=20))
    monkeypatch.setattr(guarantee_study, "COMPARED", 1)
    monkeypatch.setattr(guarantee_study, "SHARES", (0.0, 0.25))
    out = tmp_path / "out"
    folder, name = (
        out / "cells" / "folder-frozen",
        "guarantee-multi_similarity-idml-labels=sets-mixing=separate-lr=0.0003-seed=0",
    )
    assert reproduce("guarantee", patterns, 1, out, dry_run=True)["missing"] == [name]
    assert not out.exists()

    class Stopped(Exception):
        pass

    run = folder / f"{name}.run"

    def stop(row):
        if row.get("what") == "calibrated and tested" and (run / "unknown-0.json").exists():
            raise Stopped

    with pytest.raises(Stopped):
        reproduce("guarantee", patterns, 1, out, report=stop)
    kept = json.loads((run / "unknown-0.json").read_text())
    asked = []

    def measure(pool, share, *rest):
        asked.append(share)
        return measure_share(pool, share, *rest)

    monkeypatch.setattr(guarantee_study, "measure_share", measure)
    result = reproduce("guarantee", patterns, 1, out)
    assert asked == [0.25]
    assert not run.exists()
    (row,) = result["results"].values()
    assert row["rounds"] == 2
    assert list(row["shares"]) == ["0", "25"]
    assert row["shares"]["0"] == kept
    names = {f"{name}.{kind}" for name in ("table", "against", "scores") for kind in ("md", "csv", "html")}
    assert {path.name for path in (out / "tables" / "guarantee-folder").iterdir()} == names
    assert str(tmp_path) not in (folder / f"{name}.json").read_text()
    assert reproduce("guarantee", patterns, 1, out, dry_run=True)["missing"] == []

"""The studies: what is planted, how rankings are judged, and the tables on small images."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from idml import Embeddings
from idml.audit.label_errors import SCORES
from idml.data.datasets import load_dataset
from idml.reproduction import studies
from idml.reproduction.regimes import regime_for
from idml.reproduction.reproduce import reproduce
from idml.reproduction.runner import Store
from idml.reproduction.studies import (
    DISCOUNTED,
    ambiguity_figures,
    audit_cells,
    audit_tables,
    measure_audit,
    measure_raw_audit,
    plant,
    planted_figures,
    ranking_figures,
    score_table,
)


def test_one_label_in_twenty_is_wrong_and_none_of_them_by_chance_right():
    labels = torch.arange(400) % 10
    for seed in range(3):
        given = plant(labels, seed)
        assert int((given != labels).sum()) == 20
        assert set(given.tolist()) <= set(range(10))
        assert torch.equal(given, plant(labels, seed))
    assert not torch.equal(plant(labels, 0), plant(labels, 1))
    shifts = torch.cat([(plant(labels, seed) - labels) % 10 for seed in range(200)])
    counts = shifts.bincount(minlength=10)[1:].double()
    assert float((counts / counts.sum()).sub(1 / 9).abs().max()) < 0.02  # every other class alike


def test_similar_classes_are_the_three_nearest():
    torch.manual_seed(0)
    labels = torch.arange(600) % 12
    features = torch.randn(12, 5)[labels] + 0.1 * torch.randn(600, 5)
    given = plant(labels, 0, features)
    wrong = (given != labels).nonzero().flatten()
    assert len(wrong) == 30
    unit = features / features.norm(dim=1, keepdim=True)
    means = torch.stack([unit[labels == c].mean(dim=0) for c in range(12)])
    means = means / means.norm(dim=1, keepdim=True)
    for row in wrong.tolist():
        own = int(labels[row])
        near = sorted((float((means[own] - means[c]).norm()), c) for c in range(12) if c != own)[:3]
        assert int(given[row]) in [c for _, c in near]
    assert set(plant(torch.arange(40) % 2, 0, torch.randn(40, 3)).tolist()) == {0, 1}  # fewer than three others


@pytest.mark.parametrize("scores", [[3, 2, 2, 2, 1, 0], [1, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0], [2, 2, 1, 1, 0, 0]])
@pytest.mark.parametrize("wanted", [[1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1], [1, 1, 1, 0, 0, 1]])
def test_rankings_are_judged_over_all_orders_of_equal_scores(scores, wanted):
    found = ranking_figures(torch.tensor(scores).double(), torch.tensor(wanted).bool())
    n, shares = sum(wanted), {1: [], 2: []}
    for order in itertools.permutations(range(6)):
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
            for times, seen in shares.items():
                seen.append(sum(wanted[i] for i in order[: times * n]) / n)
    assert found["at_n"] == pytest.approx(np.mean(shares[1]))
    assert found["at_2n"] == pytest.approx(np.mean(shares[2]))
    assert found["ap"] == pytest.approx(average_precision_score(wanted, scores))


def test_images_that_were_not_judged_come_last():
    score = torch.tensor([-torch.inf, 1.0, -torch.inf, 0.0])
    assert ranking_figures(score, torch.tensor([False, True, False, True]))["ap"] == 1.0


def test_every_score_is_judged_on_both_kinds():
    torch.manual_seed(0)
    labels = torch.arange(200) % 8
    features = torch.randn(8, 6)[labels] + 0.2 * torch.randn(200, 6)
    figures = planted_figures(Embeddings(features, torch.rand(200, 3)), features, labels, seed=1)
    assert list(figures) == ["uniform", "similar"]
    for kind in figures.values():
        assert kind["count"] == 10
        assert set(kind["scores"]) == {*SCORES, DISCOUNTED}
        assert kind["scores"]["discriminant"]["at_n"] >= 0.8
        assert kind["scores"]["discriminant"]["suggested"] >= 0.8
    without = planted_figures(Embeddings.certain(features), features, labels, seed=1)
    assert set(without["uniform"]["scores"]) == set(SCORES)


def test_ambiguous_images_that_are_known_are_found():
    torch.manual_seed(0)
    s = torch.cat([torch.randn(40, 4) * 0.1 + 3, torch.randn(40, 4) * 0.1 - 3, torch.randn(10, 4) * 0.1])
    s[:40, 0], s[40:80, 0] = s[:40, 0] + 4, s[40:80, 0] + 4
    s[80:, 0] += 4
    labels = torch.tensor([0] * 40 + [1] * 40 + [0, 1] * 5)
    figures = ambiguity_figures(Embeddings(s, torch.rand(90, 2)), labels, torch.arange(90) >= 80)
    assert figures["shared surroundings"]["auroc"] > 0.9
    assert set(figures) == {"shared surroundings", "entropy", "‖u‖"}


@pytest.mark.parametrize("what", ["audit", "uncertainty"])
def test_a_study_is_made_once_and_read_without_its_data(patterns, small, tmp_path, monkeypatch, what):
    monkeypatch.setattr(studies, "RUNS", (("proxy_anchor", "idml"),))
    monkeypatch.setattr(studies, "LOSSES", ("proxy_anchor",))
    monkeypatch.setattr(studies, "METHODS", ("idml", "pel"))
    if what == "audit":
        names = ["audit-proxy_anchor-idml-labels=sets-mixing=separate-lr=0.0003-seed=0"]
    else:
        words = ("idml-labels=sets-mixing=separate", "pel")
        names = [f"uncertainty-proxy_anchor-{method}-lr=0.0003-seed=0" for method in words]
    out = tmp_path / "out"
    assert reproduce(what, patterns, 1, out, dry_run=True)["missing"] == names
    assert not out.exists()
    found = reproduce(what, patterns, 1, out)
    assert list(found["results"]) == names
    text = "".join(path.read_text() for path in (out / "cells" / "folder-frozen").glob("*.json"))
    assert str(tmp_path) not in text
    reproduce("collect", out=out)
    again = reproduce(what, "folder:/nowhere", 1, out)
    assert again["table"] == found["table"]
    assert reproduce(what, patterns, 1, out, dry_run=True)["missing"] == []
    folder = out / "tables" / f"{what}-folder"
    results = list(found["results"].values())
    if what == "audit":
        lines = (folder / "table.md").read_text().splitlines()
        assert lines[0].startswith("| embeddings | planted | score | found in n | found in 2n | AP |")
        assert len(lines) == 2 + 2 * (len(SCORES) + 1)  # ÷ ‖u‖ beside the scores
        assert f"| {100 * results[0]['planted']['uniform']['scores']['vote']['ap']:.1f} |" in next(
            line for line in lines if "proxy_anchor idml | uniform | vote" in line
        )
        assert not (folder / "ambiguous.md").exists()
        assert "<table>" in (folder / "table.html").read_text()
        return
    assert sorted(path.name for path in folder.glob("*.csv")) == [
        "augrc.csv", "detects.csv", "r_auroc.csv", "rises.csv",
    ]  # fmt: skip
    assert "sigma" in results[1]["views"]["clean"]
    assert "level" in results[0]["views"]["clean"]
    assert 0 <= results[1]["views"]["mixed"]["margin"]["detects"] <= 1
    header, rows = score_table(results, "r_auroc")
    assert header[:6] == ["loss", "method", "sees", "score", "clean", "mixed"]
    assert sum(row[:3] == ["proxy_anchor", "idml", "query"] and row[4].endswith(" *") for row in rows) == 1
    value = results[0]["views"]["clean"]["margin"]["r_auroc"]
    assert next(row for row in rows if row[1:4] == ["idml", "gallery", "margin"])[4].startswith(f"{value:.2f}")


def test_the_raw_features_of_a_pretrained_trunk_are_audited_too(patterns, small, tmp_path):
    store = Store(tmp_path, "cub:x", regime_for("cub:x", name="last"))
    names = [cell.name for cell in audit_cells(store, 2)]
    assert names[:3] == ["audit-raw-seed=0", "audit-raw-seed=1", "audit-multi_similarity-plain-lr=0.0003-seed=0"]
    assert len(names) == 2 + 2 * 3
    own = Store(tmp_path, patterns, small)
    cell = own.raw_cell("audit", 1)
    found = measure_raw_audit(own.config(cell, tmp_path), load_dataset(patterns), 1)
    (table,) = audit_tables([{"options": cell.options, **found}])
    assert [row[:3] for row in table.rows] == [
        ["raw features", kind, s] for kind in ("uniform", "similar") for s in SCORES
    ]


def test_a_data_set_that_knows_its_ambiguous_images_gets_a_second_table(patterns, small, tmp_path):
    from idml.training.loop import train

    dataset = load_dataset(patterns)
    object.__setattr__(dataset.test, "ambiguous", torch.arange(len(dataset.test)) % 4 == 0)
    store = Store(tmp_path, patterns, small)
    cell = store.cell("proxy_anchor", {"method": "idml"}, 1e-3, 0, study="audit")
    config = store.config(cell, tmp_path / "run")
    train(config, dataset=dataset, pages=False)
    found = measure_audit(config, tmp_path / "run", dataset, None, None)
    tables = audit_tables([{"options": cell.options, **found}])
    assert [table.name for table in tables] == ["table", "ambiguous"]
    assert tables[1].header == ["embeddings", "score", "AUROC", "found in n", "AP"]
    assert [row[:2] for row in tables[1].rows] == [
        ["proxy_anchor idml", score] for score in ("shared surroundings", "entropy", "‖u‖")
    ]

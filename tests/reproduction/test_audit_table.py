"""The audit table: what is planted, how rankings are judged, and the table itself on small pictures."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score

from idml import Embeddings
from idml.audit.label_errors import SCORES
from idml.data.datasets import load_dataset
from idml.reproduction import audit
from idml.reproduction.audit import (
    DISCOUNTED,
    ambiguity_figures,
    plant,
    planted_figures,
    ranking_figures,
    reproduce_audit,
)

ROOT = Path(__file__).parents[2]
SMALL = {
    "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8, "epochs": 1, "batch_size": 8,
    "per_class": 2, "holdout": 0.0,
}  # fmt: skip


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


def test_ambiguous_images_that_are_known_are_told():
    torch.manual_seed(0)
    s = torch.cat([torch.randn(40, 4) * 0.1 + 3, torch.randn(40, 4) * 0.1 - 3, torch.randn(10, 4) * 0.1])
    s[:40, 0], s[40:80, 0] = s[:40, 0] + 4, s[40:80, 0] + 4
    s[80:, 0] += 4
    labels = torch.tensor([0] * 40 + [1] * 40 + [0, 1] * 5)
    figures = ambiguity_figures(Embeddings(s, torch.rand(90, 2)), labels, torch.arange(90) >= 80)
    assert figures["shared surroundings"]["auroc"] > 0.9
    assert set(figures) == {"shared surroundings", "entropy", "‖u‖"}


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(audit, "FROZEN", SMALL)
    monkeypatch.setattr(audit, "RUNS", (("proxy_anchor", "idml"),))
    noise = np.random.default_rng(0)
    for c in "abcdefgh":
        (tmp_path / "data" / c).mkdir(parents=True)
        pattern = noise.integers(60, 196, (20, 20, 3))
        for i in range(10):
            image = Image.fromarray((pattern + noise.integers(-60, 60, (20, 20, 3))).astype(np.uint8))
            image.save(tmp_path / "data" / c / f"{i}.png")
    return f"folder:{tmp_path / 'data'}"


def test_the_table(pictures, tmp_path):
    out, notes = tmp_path / "out", []
    assert reproduce_audit(pictures, 2, out, dry_run=True)["missing"] == [
        "raw-0", "raw-1", "proxy_anchor-idml-0", "proxy_anchor-idml-1",
    ]  # fmt: skip
    found = reproduce_audit(pictures, 2, out, note=notes.append)
    folder = out / "audit-folder"
    lines = (folder / "table.md").read_text().splitlines()
    assert found["table"] == "\n".join(lines)
    assert lines[0].startswith("| embeddings | planted | score | found in n | found in 2n | AP |")
    assert len(lines) == 2 + 2 * len(SCORES) + 2 * (len(SCORES) + 1)  # ÷ ‖u‖ where there is a u
    values = [100 * found["results"][f"raw-{i}"]["planted"]["uniform"]["scores"]["vote"]["ap"] for i in range(2)]
    row = next(line for line in lines if "raw features | uniform | vote" in line)
    assert f"| {sum(values) / 2:.1f} ± " in row
    assert (folder / "table.csv").exists()
    assert "<table>" in (folder / "table.html").read_text()
    assert not (folder / "ambiguous.md").exists()
    assert str(tmp_path) not in "".join(path.read_text() for path in folder.glob("*.json"))
    assert reproduce_audit(pictures, 2, out, dry_run=True)["missing"] == []
    again = reproduce_audit(pictures, 2, out)
    assert again["table"] == found["table"]
    (folder / "raw-0.json").write_text("{")
    with pytest.raises(ValueError, match=r"raw-0\.json is not a result; delete it"):
        reproduce_audit(pictures, 2, out)


def test_a_data_set_that_knows_its_ambiguous_images_gets_a_second_table(pictures, tmp_path, monkeypatch):
    whole = load_dataset(pictures)
    object.__setattr__(whole.test, "ambiguous", torch.arange(len(whole.test)) % 4 == 0)
    monkeypatch.setattr(audit, "load_dataset", lambda spec, split="official": whole)
    monkeypatch.setattr(audit, "SCRATCH", SMALL)
    train = audit.run_cells

    def run_cells(cells, data, folder, **options):  # the cells train on the pictures, whatever the table is called
        return train(cells, pictures, folder, **options)

    monkeypatch.setattr(audit, "run_cells", run_cells)
    found = reproduce_audit("glyphs", 1, tmp_path / "out")
    lines = (tmp_path / "out" / "audit-glyphs" / "ambiguous.md").read_text().splitlines()
    assert lines[0] == "| embeddings | score | AUROC | found in n | AP |"
    assert len(lines) == 2 + 3
    assert found["table"].endswith("\n".join(lines))
    json.dumps(found["results"], allow_nan=False)


def test_tables_of_the_docs_are_the_ones_that_were_made():
    page = (ROOT / "docs" / "audit.md").read_text()
    assert [table for table in ROOT.glob("results/audit-*/*.md") if table.read_text() not in page] == []

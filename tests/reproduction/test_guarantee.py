"""The guarantee table: rounds against loops, promises against their confidence, cells that are never made twice."""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binom

from idml import Embeddings
from idml.calibration.calibrate import compare
from idml.calibration.open_set import QueryPool, draw_unknown
from idml.calibration.stored import Calibration
from idml.data.sampling import random_stream
from idml.reproduction import first, guarantee
from idml.reproduction.grid import Cell
from idml.reproduction.guarantee import DELTA, ERRORS, GALLERIES, draw, measure, outcome, reproduce_guarantee
from idml.reproduction.guarantee_tables import against, promises, scores

SMALL = {
    "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8, "epochs": 1, "batch_size": 8,
    "per_class": 2, "holdout": 0.0,
}  # fmt: skip

RESULTS = Path(__file__).parents[2] / "results"
ROUNDS = int(os.environ.get("IDML_ROUNDS", "8"))  # 200 by hand


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
    images = draw(trial, "image", random_stream("x", 0))
    assert len(images) == 600
    assert len(images.unique()) < 600  # with replacement
    assert torch.equal(images, draw(trial, "image", random_stream("x", 0)))
    rows = draw(trial, "class", random_stream("x", 1))
    assert len(rows) == 20 * 30
    drawn = trial.labels[rows].bincount(minlength=40)
    assert set((drawn % 30).tolist()) == {0}
    for c in drawn.nonzero().flatten().tolist():
        mine = (trial.labels == c).nonzero().flatten()
        assert sorted(rows[trial.labels[rows] == c].tolist()) == sorted(mine.tolist() * (int(drawn[c]) // 30))


@pytest.mark.parametrize("labelled", [True, False])
def test_outcomes_against_loops(pool, labelled):
    trial = pool.search(without=draw_unknown(pool.labels, 0.25, random_stream("u", 0)))
    rows = draw(trial, "image", random_stream("x", 2))
    found = Calibration.fit(trial.evidence[rows], trial.correct[rows], labelled=labelled, known=trial.known[rows])
    p, usual = found.probability(trial.evidence).tolist(), found.novelty(trial.evidence).tolist()
    fresh = set(range(1200)) - set(rows.tolist())
    seen = outcome(found, trial, rows)
    assert list(seen) == ["0.05", "0.1", "0.2"]
    for wished, counts in zip(ERRORS, seen.values(), strict=True):
        threshold = found.find_guarantee(wished, 0.9).threshold
        match = [i for i in range(1200) if threshold is not None and p[i] >= threshold]
        wrong = [i for i in match if not trial.correct[i]]
        new = [i for i in match if i in fresh]
        error = len(wrong) / len(match) if match else 0.0
        away = [i for i in fresh if usual[i] <= 0.05 and p[i] < 0.5 and i not in match]
        assert counts == {
            "promised": threshold is not None,
            "answered": len(match) / 1200,
            "error": error,
            "broken": error > wished,
            "fresh_answered": len(new),
            "fresh_wrong": len(set(new) & set(wrong)),
            "fresh_above": len(set(new) & set(wrong)) > wished * len(new),
            "unknown": sum(not trial.known[i] for i in fresh),
            "known": sum(bool(trial.known[i]) for i in fresh),
            "told": sum(not trial.known[i] for i in away),
            "sent_away": sum(bool(trial.known[i]) for i in away),
        }
    assert seen["0.2"]["promised"]


@pytest.fixture(scope="module")
def measured(pool):
    rows = []
    cells = {share: Cell("x", {"unknown": share, "rounds": ROUNDS, "seed": 0}) for share in (0.0, 0.5)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarantee, "COMPARED", 3)
        patch.setattr(guarantee, "compare", partial(compare, rounds=50))
        found = {share: {"options": c.options, **measure(pool, c, rows.append)} for share, c in cells.items()}
    assert rows[-1] == {"done": ROUNDS * 1200, "images": ROUNDS * 1200, "what": "calibrated and tested"}
    return found


def test_promises_by_image_are_kept(measured):
    for share, result in measured.items():
        for gallery in GALLERIES:
            for wished, total in result["promises"][gallery]["image"].items():
                print(share, gallery, wished, {k: round(v / ROUNDS, 3) for k, v in total.items()})
                assert binom.sf(total["broken"] - 1, ROUNDS, DELTA) > 0.001
                assert total["sent_away"] <= 0.08 * total["known"]  # 5 % asked
    assert measured[0.0]["promises"]["labelled"]["image"]["0.2"]["promised"] == ROUNDS
    assert measured[0.5]["promises"]["labelled"]["image"]["0.2"]["told"] > 0
    assert measured[0.0]["promises"]["labelled"]["image"]["0.2"]["unknown"] == 0


def test_tables(measured):
    results = list(measured.values())
    header, rows = promises(results)
    assert len(rows) == len(GALLERIES) * 2 * len(ERRORS)
    assert all(len(row) == len(header) for row in rows)
    row = next(r for r in rows if r[:3] == ["labelled", "50%", "20%"])
    total = measured[0.5]["promises"]["labelled"]["image"]["0.2"]
    assert row[3:6] == [
        f"{total['promised'] / ROUNDS:.1%}", f"{total['answered'] / ROUNDS:.1%}",
        f"{total['fresh_wrong'] / total['fresh_answered']:.1%}",
    ]  # fmt: skip
    assert row[12] == f"{total['told'] / total['unknown']:.1%}"
    assert next(r for r in rows if r[1] == "0%")[12] == "–"
    often = json.loads(json.dumps(results))
    often[0]["promises"]["labelled"]["class"]["0.05"]["broken"] = 0.75 * ROUNDS
    assert next(r[:3] for r in promises(often)[1] if r[11].endswith("*")) == ["labelled", "0%", "5%"]
    total = measured[0.5]["promises"]["unlabelled"]["class"]["0.1"]
    row = next(r for r in rows if r[:3] == ["unlabelled", "50%", "10%"])
    assert row[8:10] == [f"{total[name] / ROUNDS:.1%}" for name in ("promised", "answered")]
    header, rows = against(results)
    assert [row[:3] for row in rows] == [[g, s, "0"] for g in GALLERIES for s in ("0%", "50%")]
    assert [row[8] for row in rows] == ["1", "3", "1", "3"]
    drawn = often[1]["scores"]["labelled"]
    for told, (value, high) in zip(drawn, ((-0.01, -0.005), (-0.02, 0.005), (0.06, 0.07)), strict=True):
        told["gain"]["r_auroc"], told["gain"]["intervals"]["r_auroc"] = value, [-0.03, high]
    assert against(often)[1][1][6:7] == ["+0.010 [-0.030, +0.023]"]
    assert against(often)[1][1][9] == "2 (1)"
    header, rows = scores([*results, *results])
    assert len(rows) == 2 * (13 + 9)
    assert rows[0][2] == "P(right)"
    value = measured[0.0]["scores"]["labelled"][0]["scores"]["P(right)"]
    assert rows[0][3].startswith(f"{value['r_auroc']:.3f} [")


@pytest.mark.parametrize("table", sorted(RESULTS.glob("guarantee-*/[at]*.md")), ids=lambda p: "/".join(p.parts[-2:]))
def test_the_docs_show_the_tables_that_were_made(table):
    assert table.read_text() in (RESULTS.parent / "docs" / "calibration.md").read_text()


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    noise = np.random.default_rng(0)
    for c in range(16):
        (tmp_path / "data" / f"{c:02d}").mkdir(parents=True)
        pattern = np.kron(noise.integers(60, 196, (4, 4, 3)), np.ones((5, 5, 1)))
        for i in range(8):
            image = Image.fromarray((pattern + noise.integers(-60, 60, (20, 20, 3))).clip(0, 255).astype(np.uint8))
            image.save(tmp_path / "data" / f"{c:02d}" / f"{i}.png")
    return f"folder:{tmp_path / 'data'}"


def test_the_table_is_made_cell_by_cell_and_goes_on(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(first, "FROZEN", SMALL)
    monkeypatch.setattr(guarantee, "ROUNDS", 2)
    monkeypatch.setattr(guarantee, "compare", partial(compare, rounds=20))
    monkeypatch.setattr(guarantee, "COMPARED", 1)
    monkeypatch.setattr(guarantee, "SHARES", (0.0, 0.25))
    folder = tmp_path / "out" / "guarantee-folder"
    plan = reproduce_guarantee(pictures, 2, tmp_path / "out", dry_run=True)
    assert plan["missing"] == ["0-unknown-0", "0-unknown-25", "1-unknown-0", "1-unknown-25"]
    assert not folder.exists()

    class Stopped(Exception):
        pass

    def stop(row):
        if row.get("what") == "calibrated and tested" and (folder / "0-unknown-0.json").exists():
            raise Stopped

    with pytest.raises(Stopped):
        reproduce_guarantee(pictures, 2, tmp_path / "out", report=stop)
    assert sorted(path.name for path in folder.iterdir()) == ["0-unknown-0.json", "0.run"]
    kept = (folder / "0-unknown-0.json").read_bytes()
    model = (folder / "0.run" / "model.safetensors").stat().st_mtime_ns
    notes = []

    def trained(*given, **named):
        raise AssertionError("the finished run was trained again")

    with monkeypatch.context() as patch:
        patch.setattr(guarantee, "train", trained)
        with pytest.raises(AssertionError, match="trained again"):  # the second seed's run is not there yet
            reproduce_guarantee(pictures, 2, tmp_path / "out", note=notes.append)
    assert (folder / "0-unknown-25.json").exists()
    assert not (folder / "0.run").exists()
    assert model
    result = reproduce_guarantee(pictures, 2, tmp_path / "out", note=notes.append)
    assert (folder / "0-unknown-0.json").read_bytes() == kept
    assert str(tmp_path) not in kept.decode()
    assert len(notes) == 3
    names = {f"{name}.{kind}" for name in ("table", "against", "scores") for kind in ("md", "csv", "html")}
    assert {path.name for path in folder.iterdir()} == names | {f"{cell}.json" for cell in plan["missing"]}
    assert len(result["results"]) == 4
    assert (folder / "table.md").read_text().strip() in result["table"]
    assert reproduce_guarantee(pictures, 2, tmp_path / "out", dry_run=True)["missing"] == []
    (folder / "0-unknown-0.json").write_text(
        kept.decode().replace('"lr"', '"lR"').replace('"rounds": 2', '"rounds": 9')
    )
    with pytest.raises(ValueError, match="was made with other options; delete it"):
        reproduce_guarantee(pictures, 2, tmp_path / "out")

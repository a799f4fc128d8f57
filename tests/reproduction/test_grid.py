import json
import math

import numpy as np
import pytest
import scipy.stats
import torch

from idml.cli import main
from idml.evaluation.uncertainty import auroc_between
from idml.reproduction import first, uncertainty
from idml.reproduction.grid import Cell, interval, run_cells, what_u_tells

SMALL = {
    "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8, "epochs": 1, "batch_size": 8,
    "per_class": 2, "holdout": 0.0,
}  # fmt: skip


def quiet(_):
    pass


def test_a_finished_cell_is_not_made_again_and_a_stopped_one_goes_on(patterns, tmp_path):
    cells = [Cell(f"cell-{seed}", {**SMALL, "seed": seed, "checkpoint_every": 1}) for seed in range(2)]

    class Stopped(Exception):
        pass

    def stop(row):
        if row.get("step") == 2 and (tmp_path / "out" / "cell-0.json").exists():
            raise Stopped

    with pytest.raises(Stopped):
        run_cells(cells, patterns, tmp_path / "out", judge=what_u_tells, report=stop, note=quiet)
    kept = (tmp_path / "out" / "cell-0.json").read_bytes()
    assert (tmp_path / "out" / "cell-1.run").is_dir()
    results = run_cells(cells, patterns, tmp_path / "out", judge=what_u_tells, report=quiet, note=quiet)
    assert (tmp_path / "out" / "cell-0.json").read_bytes() == kept
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["cell-0.json", "cell-1.json"]
    assert 0 <= results["cell-1"]["auroc_mixed"] <= 1
    assert "auroc_twins" not in results["cell-1"]
    assert str(tmp_path) not in kept.decode()


def test_results_of_other_options_and_damaged_ones_are_refused(patterns, tmp_path):
    (tmp_path / "cell.json").write_text(json.dumps({"options": {**SMALL, "lr": 9.0}}))
    with pytest.raises(ValueError, match=r"cell\.json was made with other options; delete it"):
        run_cells([Cell("cell", SMALL)], patterns, tmp_path, judge=what_u_tells, report=quiet, note=quiet)
    (tmp_path / "cell.json").write_text("{")
    with pytest.raises(ValueError, match=r"cell\.json is not a result"):
        run_cells([Cell("cell", SMALL)], patterns, tmp_path, judge=what_u_tells, report=quiet, note=quiet)


def test_interval_is_students():
    values = [3.0, 4.0, 8.0]
    low, high = scipy.stats.t.interval(0.95, 2, np.mean(values), scipy.stats.sem(values))
    mean, half = interval(values)
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert interval([2.0])[0] == 2.0
    assert math.isnan(interval([2.0])[1])


def test_auroc_above_counts_pairs():
    high, low = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0])
    assert auroc_between(high, low) == pytest.approx((1 + 0 + 1 + 0.5 + 1 + 1) / 6)


def test_the_first_table_by_command(patterns, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(first, "SCRATCH", SMALL)
    monkeypatch.setattr(first, "FROZEN", SMALL)
    monkeypatch.setattr(first, "LOSSES", ("proxy_anchor",))
    arguments = ["reproduce", "first", "--data", patterns, "--seeds", "2", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--dry-run"]) == 0
    assert "8 of 8 runs to do" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["results"]) == 8
    folder = tmp_path / "out" / "first-folder"
    lines = (folder / "table.md").read_text().splitlines()
    assert len(lines) == 2 + 1 + 4  # header, raw features, four methods
    assert "±" in lines[-1]
    assert (folder / "table.csv").read_text().count("\n") == 6
    assert "<table>" in (folder / "table.html").read_text()
    assert main([*arguments, "--dry-run"]) == 0
    assert "0 of 8 runs to do" in capsys.readouterr().out
    assert main(["reproduce", "nothing"]) == 2
    assert "unknown table 'nothing'" in capsys.readouterr().err
    assert main([*arguments[:4], "--seeds", "0"]) == 2


def test_the_uncertainty_table_by_command(patterns, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(uncertainty, "FROZEN", SMALL)
    monkeypatch.setattr(uncertainty, "LOSSES", ("proxy_anchor",))
    monkeypatch.setattr(uncertainty, "METHODS", ("idml", "pel"))
    arguments = ["reproduce", "uncertainty", "--data", patterns, "--seeds", "2", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["results"]) == 4
    views = found["results"]["proxy_anchor-pel-0"]["views"]
    assert "sigma" in views["clean"]
    assert "level" in found["results"]["proxy_anchor-idml-0"]["views"]["clean"]
    assert 0 <= views["mixed"]["margin"]["detects"] <= 1
    lines = (tmp_path / "out" / "uncertainty-folder" / "r_auroc.md").read_text().splitlines()
    assert lines[0].startswith("| loss | method | sees | score | clean | mixed |")
    stars = [line for line in lines if "proxy_anchor | idml | query" in line and line.split("|")[5].endswith("* ")]
    assert len(stars) == 1
    value = found["results"]["proxy_anchor-idml-0"]["views"]["clean"]["margin"]["r_auroc"]
    other = found["results"]["proxy_anchor-idml-1"]["views"]["clean"]["margin"]["r_auroc"]
    margin = next(line for line in lines if "idml | gallery | margin" in line)
    assert f"{(value + other) / 2:.2f} ± " in margin.split("|")[5]

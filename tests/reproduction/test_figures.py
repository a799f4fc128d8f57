"""Figures beside the tables: gradients, metrics, one step."""

import itertools
import json

import pytest
import torch

from idml.cli import main
from idml.reproduction.figures import gradient_rows, metric_rows


def test_the_gradient_left_is_that_of_the_formulas():
    rows = gradient_rows()
    assert rows[0] == pytest.approx([0, 1, 1, 1, 1])
    for x, distance, by_autograd, cosine, too in rows:
        assert by_autograd == pytest.approx(distance, abs=1e-9)
        assert too == pytest.approx(cosine, abs=1e-9)
        assert distance == pytest.approx(float(torch.exp(torch.tensor(-x)) * (1 + x)), abs=1e-6)
    assert all(a[1] > b[1] and a[3] > b[3] for a, b in itertools.pairwise(rows))


def test_only_the_introspective_distance_falls_as_uncertainty_grows():
    rows = metric_rows()
    kl = [row[2] for row in rows]
    assert kl[-1] > 10 * kl[0]  # KL grows when one image is uncertain
    assert {row[1] for row in rows} == {1.0}
    softened = [row[4] for row in rows]
    assert softened == sorted(softened, reverse=True)
    assert softened[-1] < 0.02


@pytest.mark.parametrize("what", ["gradients", "metrics"])
def test_figures_are_drawn_by_command(what, tmp_path, capsys):
    assert main(["reproduce", what, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("| ")
    assert "<svg" in (tmp_path / "tables" / what / "table.html").read_text()


def test_one_step_by_command_and_again_from_its_row(patterns, small, tmp_path, monkeypatch, capsys):
    command = ["reproduce", "step-tsne", "--data", patterns, "--out", str(tmp_path / "out"), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["labels"][found["ambiguous"]] == found["labels"][found["positive"]]
    assert found["ambiguous"] != found["positive"]
    assert len(found["map"]) == 3
    assert len(found["map"][0]) == 8
    d = found["distances"]
    plain, introspective = abs(d["plain"] - d["before"]), abs(d["introspective"] - d["before"])
    assert plain > 0
    assert introspective <= 1.5 * plain
    folder = tmp_path / "out" / "tables" / "step-tsne-folder"
    assert [path.name for path in folder.iterdir()] == ["step.html"]
    monkeypatch.setattr("idml.reproduction.runner.train", None)
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["distances"] == d

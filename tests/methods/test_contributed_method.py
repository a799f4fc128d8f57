"""The method that CONTRIBUTING.md shows: registered by one line, it trains, has its flags and resumes."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from idml import cli, methods
from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.labels import LabelSets
from idml.methods.base import Task
from idml.training.config import from_dict, to_dict
from idml.training.loop import train

PAGE = Path(__file__).parent.parent.parent / "CONTRIBUTING.md"


@pytest.fixture
def away(tmp_path, monkeypatch):
    """The example as a module of its own, registered as method ``away``."""
    text = PAGE.read_text().partition("## Adding a method")[2]
    code = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    (tmp_path / "away_from_mean.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(methods.METHODS, "away", "away_from_mean:AwayFromMean")
    yield methods.find_method("away")
    sys.modules.pop("away_from_mean")


def test_its_loss_by_an_explicit_formula(away):
    task = Task(loss="contrastive", classes=2, embedding_dim=3)
    method = away(away.Options(away_weight=0.5), task)
    training = Embeddings.certain(torch.randn(7, 3))
    method.start_epoch(0, lambda: (torch.arange(7), training))
    batch = Batch(torch.zeros(4, 1, 1, 1), LabelSets(torch.tensor([0, 0, 1, 1])), torch.zeros(4, dtype=torch.bool))
    seen = Embeddings.certain(torch.randn(4, 3))
    terms = method.loss(seen, batch, torch.arange(4), seed=0)
    mean = sum(row / row.norm() for row in training.semantic) / 7
    expected = 0.5 * sum(float(row / row.norm() @ mean) for row in seen.semantic) / 4
    assert float(terms["away"]) == pytest.approx(expected, rel=1e-5)
    assert float(terms["pairs"]) == pytest.approx(float(method.metric_loss(seen, batch.labels)))


@pytest.mark.parametrize("loss", ["multi_similarity", "proxy_anchor"])
def test_it_resumes_bit_identically_with_its_state(away, options, bit_identical_after_a_kill, loss):
    tensors = bit_identical_after_a_kill({**options, "method": "away", "loss": loss, "epochs": 2})
    assert tensors["method.mean"].any()
    assert ("method.metric_loss.proxies" in tensors) is (loss == "proxy_anchor")


def test_its_term_is_logged_and_its_weight_matters(away, options, tmp_path):
    losses = {}
    for weight in (0.0, 5.0):
        run = tmp_path / str(weight)
        train(from_dict({**options, "method": "away", "away_weight": weight, "epochs": 3, "out": str(run)}))
        rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        losses[weight] = [row for row in rows if "loss" in row]
    assert all(row["loss_away"] == 0 for row in losses[0.0])
    assert losses[5.0][0]["loss"] == pytest.approx(losses[5.0][0]["loss_pairs"] + losses[5.0][0]["loss_away"])
    assert losses[5.0][-1]["loss_pairs"] != pytest.approx(losses[0.0][-1]["loss_pairs"])


def test_its_options_are_flags_of_this_method_alone(away, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert "--away-weight X" in text.partition("options of method away:")[2]
    assert "Weight of the term that keeps embeddings" in text
    assert to_dict(from_dict({"data": "glyphs", "out": "x", "method": "away"}))["away_weight"] == 0.1
    with pytest.raises(ValueError, match="method plain has no option 'away_weight': it belongs to away"):
        from_dict({"data": "glyphs", "out": "x", "away_weight": 1.0})
    with pytest.raises(ValueError, match="away_weight must be a number of at least 0"):
        from_dict({"data": "glyphs", "out": "x", "method": "away", "away_weight": -1.0})

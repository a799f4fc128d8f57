"""The method of examples/own_method.py: registered by one line, it trains, has its flags and resumes."""

import json
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

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "own_method.py"


@pytest.fixture
def centred(tmp_path, monkeypatch):
    """The example as a module of its own, registered as method ``centred``."""
    code = EXAMPLE.read_text().partition('METHODS["centred"] =')[0]  # what follows trains with it
    (tmp_path / "own_method.py").write_text(code.replace("from pictures import draw_pictures\n", ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(methods.METHODS, "centred", "own_method:Centred")
    yield methods.find_method("centred")
    sys.modules.pop("own_method")


def test_its_loss_by_an_explicit_formula(centred):
    task = Task(loss="contrastive", classes=2, embedding_dim=3)
    method = centred(centred.Options(centre_weight=0.5), task)
    training = Embeddings.certain(torch.randn(7, 3))
    method.start_epoch(0, lambda: (torch.arange(7), training))
    batch = Batch(torch.zeros(4, 1, 1, 1), LabelSets(torch.tensor([0, 0, 1, 1])), torch.zeros(4, dtype=torch.bool))
    seen = Embeddings.certain(torch.randn(4, 3))
    terms = method.loss(seen, batch, torch.arange(4), seed=0)
    mean = sum(row / row.norm() for row in training.semantic) / 7
    expected = 0.5 * sum(float(row / row.norm() @ mean) for row in seen.semantic) / 4
    assert float(terms["centre"]) == pytest.approx(expected, rel=1e-5)
    assert float(terms["pairs"]) == pytest.approx(float(method.metric_loss(seen, batch.labels)))


@pytest.mark.parametrize("loss", ["multi_similarity", "proxy_anchor"])
def test_it_resumes_bit_identically_with_its_state(centred, options, bit_identical_after_a_kill, loss):
    tensors = bit_identical_after_a_kill({**options, "method": "centred", "loss": loss, "epochs": 2})
    assert tensors["method.mean"].any()
    assert ("method.metric_loss.proxies" in tensors) is (loss == "proxy_anchor")


def test_its_term_is_logged_and_its_weight_matters(centred, options, tmp_path):
    losses = {}
    for weight in (0.0, 5.0):
        run = tmp_path / str(weight)
        train(from_dict({**options, "method": "centred", "centre_weight": weight, "epochs": 3, "out": str(run)}))
        rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        losses[weight] = [row for row in rows if "loss" in row]
    assert all(row["loss_centre"] == 0 for row in losses[0.0])
    assert losses[5.0][0]["loss"] == pytest.approx(losses[5.0][0]["loss_pairs"] + losses[5.0][0]["loss_centre"])
    assert losses[5.0][-1]["loss_pairs"] != pytest.approx(losses[0.0][-1]["loss_pairs"])


def test_its_options_are_flags_of_this_method_alone(centred, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert "--centre-weight X" in text.partition("options of method centred:")[2]
    assert "Weight of the term that keeps embeddings" in text
    assert to_dict(from_dict({"data": "glyphs", "out": "x", "method": "centred"}))["centre_weight"] == 0.1
    with pytest.raises(ValueError, match="method plain has no option 'centre_weight': it belongs to centred"):
        from_dict({"data": "glyphs", "out": "x", "centre_weight": 1.0})
    with pytest.raises(ValueError, match="centre_weight must be a number of at least 0"):
        from_dict({"data": "glyphs", "out": "x", "method": "centred", "centre_weight": -1.0})

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

import idml
from idml import files
from idml.losses import LOSSES
from idml.model import Model, build_model, load_model
from idml.training import loop
from idml.training.checkpoint import lock_run
from idml.training.config import from_dict
from idml.training.loop import train


def rows(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_a_run_leaves_what_the_contract_says(options, tmp_path):
    run, notes = tmp_path / "run", []
    metrics = train(from_dict({"out": str(run), **options}), note=notes.append)
    for name in ("config.yaml", "model.safetensors", "metrics.json", "log.jsonl", "checkpoints/last.safetensors"):
        assert (run / name).is_file()
    assert json.loads((run / "metrics.json").read_text()) == metrics
    assert yaml.safe_load((run / "config.yaml").read_text())["lr"] == 1e-3
    assert 0 < metrics["selected"]["recall@1"] <= 1
    steps = [row for row in rows(run) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, metrics["steps"] + 1))
    assert all({"level_clean", "level_mixed", "level_spread", "weight", "images/s"} <= row.keys() for row in steps)
    assert steps[0]["level_clean"] == pytest.approx(0.05, rel=0.5)
    held_out = [row for row in rows(run) if "held_out_map@r" in row]
    assert len(held_out) == 3
    assert metrics["selected_score"] == max(row["held_out_map@r"] for row in held_out)
    assert load_model(run).embed(torch.rand(2, 3, 16, 16)).level.shape == (2,)


def test_without_pages_and_with_a_data_set_at_hand_the_run_is_the_same(options, tmp_path, monkeypatch):
    with_pages = train(from_dict({"out": str(tmp_path / "with"), **options}))
    dataset = loop.load_dataset(options["data"])
    monkeypatch.delattr(loop, "load_dataset")  # it is not listed again
    assert train(from_dict({"out": str(tmp_path / "without"), **options}), dataset=dataset, pages=False) == with_pages
    for name in ("report.html", "tensorboard"):
        assert (tmp_path / "with" / name).exists()
        assert not (tmp_path / "without" / name).exists()


def test_the_front_door_takes_flat_keywords(options, tmp_path):
    keywords = idml.train(out=str(tmp_path / "keywords"), **{**options, "epochs": 1, "tau": 4.0})
    assert keywords == train(from_dict({"out": str(tmp_path / "config"), **options, "epochs": 1, "tau": 4.0}))
    assert yaml.safe_load((tmp_path / "keywords" / "config.yaml").read_text())["tau"] == 4.0
    with pytest.raises(ValueError, match="the option 'data' is missing"):
        idml.train(out="-")


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_train(options, tmp_path, loss):
    run = tmp_path / loss
    train(from_dict({"out": str(run), "loss": loss, **{**options, "epochs": 1}}))
    assert all(row["loss"] == row["loss"] for row in rows(run) if "loss" in row)


def test_training_learns(options, tmp_path):
    config = {**options, "method": "plain", "loss": "proxy_anchor", "epochs": 12, "lr": 3e-3}
    train(from_dict({"out": str(tmp_path), **config}))
    losses = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_same_seed_same_weights_other_seed_others(options, tmp_path):
    short = {**options, "epochs": 1}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(from_dict({"out": str(tmp_path / name), "seed": seed, **short}))
    a, b, c = (load_file(tmp_path / name / "checkpoints/last.safetensors") for name in "abc")
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert any(not torch.equal(a[k], c[k]) for k in a)


def test_warmup_trains_the_heads_alone(options, tmp_path):
    torch.manual_seed(0)
    runs = {}
    for name, warmup in (("warm", 1), ("cold", 0)):
        config = {**options, "epochs": 1, "warmup_epochs": warmup, "weight_decay": 0.0}
        train(from_dict({"out": str(tmp_path / name), **config}))
        runs[name] = load_model(tmp_path / name / "checkpoints" / "last").state_dict()
    torch.manual_seed(0)
    fresh = build_model("conv4", embedding_dim=8, image_size=16).state_dict()
    kernel, head = "trunk.network.layers.0.weight", "semantic.weight"
    assert torch.equal(runs["warm"][kernel], fresh[kernel])
    assert not torch.equal(runs["cold"][kernel], fresh[kernel])
    assert not torch.equal(runs["warm"][head], fresh[head])


def test_few_classes_get_a_smaller_batch_than_the_default(options, tmp_path):
    config, notes = {**options, "epochs": 1}, []
    del config["batch_size"]
    train(from_dict({"out": str(tmp_path), **config}), note=notes.append)
    assert "4 classes to train on: batches of 8 images instead of 120" in notes
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["batch_size"] == 8
    before = (tmp_path / "metrics.json").read_bytes()
    train(from_dict({"out": str(tmp_path), **config}), resume=True)  # the same options as before
    assert (tmp_path / "metrics.json").read_bytes() == before


def test_an_existing_run_is_not_overwritten(options, tmp_path):
    config = from_dict({"out": str(tmp_path), **{**options, "epochs": 1}})
    train(config)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="already holds a run"):
        train(config)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match=r"cannot resume with other options: lr: 0.001 → 0.01"):
        train(from_dict({"out": str(tmp_path), **{**options, "epochs": 1, "lr": 0.01}}), resume=True)


def test_two_runs_in_one_directory(options, tmp_path):
    with lock_run(tmp_path), pytest.raises(ValueError, match="another run is writing"):
        train(from_dict({"out": str(tmp_path), **options}))


def test_nan_stops_and_names_the_images(options, tmp_path, monkeypatch):
    config = from_dict({"out": str(tmp_path), **options})
    heads = Model.heads
    calls = []

    def poisoned(self, features, rows=None):
        calls.extend([1] * self.training)
        out = heads(self, features, rows)
        return out if len(calls) < 4 else type(out)(out.semantic * float("nan"), out.uncertainty)

    monkeypatch.setattr(Model, "heads", poisoned)
    with pytest.raises(ValueError, match=r"step 3: .*NaN.*class \d\d/\d.png.*the last checkpoint stays"):
        train(config)
    monkeypatch.undo()
    assert (tmp_path / "checkpoints/last.safetensors").exists()
    train(config, resume=True)
    assert (tmp_path / "model.safetensors").exists()


def test_full_disk_while_checkpointing_keeps_the_old_one(options, tmp_path, monkeypatch):
    config = from_dict({"out": str(tmp_path), **options})
    fsync, calls = files.os.fsync, []

    def full(number):
        calls.append(number)
        if len(calls) > 4:
            raise OSError(28, "No space left on device")
        fsync(number)

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        train(config)
    monkeypatch.undo()
    assert not list((tmp_path / "checkpoints").glob(".*part"))
    train(config, resume=True)
    assert (tmp_path / "model.safetensors").exists()

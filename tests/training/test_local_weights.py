"""Runs that start from a file of weights."""

import dataclasses
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from idml import cli
from idml.model import load_model
from idml.model.backbones import Conv4
from idml.training.config import from_dict
from idml.training.loop import Interrupted, train


@pytest.fixture
def weights(tmp_path):
    """Writes conv4's weights for a seed to a file."""

    def write(name="w.safetensors", seed=0):
        torch.manual_seed(seed)
        save_file(Conv4(3).state_dict(), tmp_path / name)
        return str(tmp_path / name)

    return write


def flags(options):
    return [f"--{key.replace('_', '-')}={value}" for key, value in options.items() if key != "pretrained"]


@pytest.mark.parametrize("trained", ["all", "heads"])
def test_a_run_starts_from_the_file_and_does_not_need_it_afterwards(options, weights, tmp_path, trained):
    path, out = weights(), tmp_path / "run"
    options = {**options, "epochs": 1, "train": trained, "lr": 1e-9, "weight_decay": 0.0, "micro_batch": 4}
    assert cli.main(["train", *flags(options), f"--weights={path}", f"--out={out}"]) == 0
    tensors = load_file(path)
    (tmp_path / "w.safetensors").unlink()
    model = load_model(out)
    for name, tensor in model.trunk.network.state_dict().items():
        torch.testing.assert_close(tensor, tensors[name], rtol=1e-4, atol=1e-6)  # statistics stay frozen too
    assert model.config.weights_file == "w.safetensors"
    assert yaml.safe_load((out / "config.yaml").read_text())["weights"] == path
    width = len(model.semantic.weight)
    rows = model.semantic.weight  # principal components are orthonormal
    torch.testing.assert_close(rows @ rows.T, torch.eye(width), rtol=0, atol=1e-4)


def test_a_run_is_resumed_with_the_same_weights_alone(options, weights, tmp_path):
    config = from_dict({**options, "out": str(tmp_path / "run"), "weights": weights(), "checkpoint_every": 1})

    def stop(row):
        if row.get("step") == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(config, report=stop)
    weights(seed=1)
    with pytest.raises(ValueError, match=r"cannot resume with other weights: .*w\.safetensors is not the file"):
        train(config, resume=True)
    without = dataclasses.replace(config, weights=None)
    with pytest.raises(ValueError, match=r"cannot resume with other options: weights: .* → None"):
        train(without, resume=True)
    moved = weights("moved.safetensors")
    shutil.move(weights(), tmp_path / "elsewhere")
    assert train(dataclasses.replace(config, weights=moved), resume=True)["steps"] > 2


def test_bad_weights_end_the_command_with_one_line(options, weights, tmp_path, capsys):
    pickle = tmp_path / "w.pth"
    torch.save(Conv4(3).state_dict(), pickle)
    cases = {
        str(tmp_path / "absent"): "there is no file of weights at",
        str(tmp_path): "is a folder",
        str(pickle): "is a pickle",
    }
    out = [f"--out={tmp_path / 'run'}"]
    for path, words in cases.items():
        assert cli.main(["train", *flags(options), f"--weights={path}", *out]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert words in lines[-1]
        assert sum(line.startswith("idml train:") for line in lines) == 1
    assert cli.main(["train", *flags({**options, "trunk": "test_resnet"}), f"--weights={weights()}", *out]) == 2
    assert "does not fit test_resnet" in capsys.readouterr().err
    for bad in (5, ""):
        with pytest.raises(ValueError, match="weights must be the name of a safetensors file"):
            from_dict({**options, "out": "-", "weights": bad})

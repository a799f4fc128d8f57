"""Checkpoints by themselves: everything comes back, and what does not belong to a run is refused in one line."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from idml.model import build_model
from idml.training.checkpoint import (
    Position,
    check_free,
    check_resumable,
    load_checkpoint,
    lock_run,
    save_checkpoint,
)
from idml.training.config import from_dict

POSITION = Position(step=7, epoch=2, epoch_start=6, best_step=5, best_score=0.25)
CONFIG = {"data": "glyphs", "out": "runs/x", "trunk": "conv4", "pretrained": False}


def trained(seed, steps=2):
    """A model, a method with a parameter and a buffer, and their optimizer after some steps."""
    torch.manual_seed(seed)
    model = build_model("conv4", embedding_dim=4, image_size=16)
    method = nn.Linear(4, 3)
    method.register_buffer("mean", torch.randn(4))
    optimizer = torch.optim.AdamW([*model.parameters(), *method.parameters()], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        method(model(torch.rand(4, 3, 16, 16)).semantic).square().sum().backward()
        optimizer.step()
    return model, method, optimizer


def state(model, method, optimizer):
    moments = optimizer.state_dict()["state"]
    own = {f"{n}.{key}": torch.as_tensor(value) for n, entry in moments.items() for key, value in entry.items()}
    return {
        **{f"model.{key}": value.clone() for key, value in model.state_dict().items()},
        **{f"method.{key}": value.clone() for key, value in method.state_dict().items()},
        **{f"optimizer.{key}": value.clone() for key, value in own.items()},
    }


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture
def config():
    return from_dict(CONFIG)


@pytest.fixture
def saved(tmp_path, config):
    """A checkpoint in a folder that did not exist, and what it was made of."""
    path = tmp_path / "new" / "checkpoints" / "last.safetensors"
    parts = trained(0)
    save_checkpoint(path, *parts, POSITION, config, "the data", "pixels")
    return path, parts


def test_everything_comes_back(saved, config):
    path, parts = saved
    others = trained(1, steps=1)
    assert not same(state(*parts), state(*others))
    assert load_checkpoint(path, *others, config, "the data", "pixels") == POSITION
    assert same(state(*parts), state(*others))
    assert any(name.startswith("optimizer.") for name in state(*others))
    assert same(load_file(path), state(*parts))
    fresh = trained(2, steps=0)  # an optimizer that has no moments yet
    load_checkpoint(path, *fresh, config, "the data", "pixels")
    assert same(state(*parts), state(*fresh))
    assert fresh[2].param_groups[0]["lr"] == 1e-2
    assert len(fresh[2].param_groups) == len(parts[2].param_groups)


def test_only_the_learning_rate_of_this_run_counts(saved, config):
    """The schedule sets it, not the checkpoint."""
    path, _ = saved
    model, method, optimizer = trained(2)
    optimizer.param_groups[0]["lr"] = 0.125
    load_checkpoint(path, model, method, optimizer, config, "the data", "pixels")
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_the_note_of_a_checkpoint(saved, config):
    path, (model, _, _) = saved
    with safe_open(path, framework="pt") as file:
        assert set(file.metadata()) == {"idml"}
        note = json.loads(file.metadata()["idml"])
    assert note["progress"] == asdict(POSITION)
    assert from_dict(note["config"]) == config
    assert (note["dataset"], note["pixels"]) == ("the data", "pixels")
    assert note["weights_sha256"] == model.config.weights_sha256


def test_tensors_that_are_not_contiguous_are_saved(tmp_path, config):
    model, _, _ = trained(0)
    method = nn.Linear(4, 3)
    method.weight = nn.Parameter(torch.arange(12.0).reshape(4, 3).T)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.1, momentum=0.9)
    save_checkpoint(tmp_path / "c.safetensors", model, method, optimizer, POSITION, config, "d", "p")
    assert torch.equal(load_file(tmp_path / "c.safetensors")["method.weight"], method.weight.detach())


def test_saving_again_replaces_the_checkpoint(saved, config):
    path, _ = saved
    later = trained(3)
    save_checkpoint(path, *later, replace(POSITION, step=8), config, "the data", "pixels")
    fresh = trained(4)
    assert load_checkpoint(path, *fresh, config, "the data", "pixels").step == 8
    assert same(state(*later), state(*fresh))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_new_run_has_done_nothing():
    assert Position() == Position(step=0, epoch=0, epoch_start=0, best_step=-1, best_score=-1.0)


def rewritten(path, **changes):
    """The checkpoint with another note."""
    with safe_open(path, framework="pt") as file:
        note = json.loads(file.metadata()["idml"])
    assert set(note) == {"progress", "config", "dataset", "pixels", "weights_sha256"}
    save_file(load_file(path), path, metadata={"idml": json.dumps({**note, **changes})})
    return note


def refusal(path, config, parts=None, data="the data", pixels="pixels"):
    """The one line of a refusal, which leaves everything as it was."""
    parts = parts or trained(5)
    before = state(*parts)
    with pytest.raises(ValueError, match=r"[a-z]") as error:
        load_checkpoint(path, *parts, config, data, pixels)
    assert same(before, state(*parts))
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__ or error.value.__context__ is None
    return str(error.value)


def test_other_options_data_and_weights_are_refused(saved, config):
    path, parts = saved
    said = refusal(path, replace(config, lr=0.5, epochs=99))
    assert said.startswith("cannot resume with other options: ")
    assert "lr" in said
    assert "; epochs" in said or "epochs" in said.split("; ")[0]
    assert refusal(path, config, data="more data") == (
        "cannot resume on other data: glyphs no longer holds the images this run began with"
    )
    assert refusal(path, config, pixels="others") == (
        "cannot resume on other data: images of glyphs have changed since this run began"
    )
    model, method, optimizer = trained(6)
    model.config = replace(model.config, weights_sha256="another file")
    weights = replace(config, weights="w.pth")
    save_checkpoint(path, *parts, POSITION, weights, "the data", "pixels")
    assert refusal(path, weights, (model, method, optimizer)) == (
        "cannot resume with other weights: w.pth is not the file this run began with"
    )
    save_checkpoint(path, model, method, optimizer, POSITION, weights, "the data", "pixels")
    assert load_checkpoint(path, model, method, optimizer, weights, "the data", "pixels") == POSITION
    assert rewritten(path)["weights_sha256"] == "another file"


def test_another_version_is_refused(saved, config):
    path, _ = saved
    note = rewritten(path, config={"no such option": 1})
    words = f"{path} was written by another version of idml: train into a new directory"
    said = refusal(path, config)
    assert said.startswith(f"{words} (")
    assert "no such option" in said
    rewritten(path, config=note["config"])
    model, method, optimizer = trained(0)
    assert refusal(path, config, (model, nn.Linear(9, 9), optimizer)).endswith("train into a new directory")
    assert load_checkpoint(path, model, method, optimizer, config, "the data", "pixels") == POSITION


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "no note", "no position", "odd position", "not JSON"])
def test_what_is_no_checkpoint_is_refused(saved, config, damage):
    path, _ = saved
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("a letter\nof two lines")
    elif damage == "no note":
        save_file(load_file(path), path, metadata={"other": "x"})
    elif damage == "no position":
        rewritten(path, progress=None)
    elif damage == "odd position":
        rewritten(path, progress={"steps": 1})
    else:
        save_file(load_file(path), path, metadata={"idml": "{"})
    said = refusal(path, config)
    assert said.startswith(f"{path} is not a sound checkpoint (")
    assert said.endswith(")")
    assert "None" not in said.partition("(")[2] or damage == "no position"
    assert said.partition("(")[2] not in (")", "")


def test_older_notes_are_read(saved, config):
    """They say nothing about weights, which is right for runs without them, and nothing about pixels."""
    path, _ = saved
    with safe_open(path, framework="pt") as file:
        note = json.loads(file.metadata()["idml"])
    del note["weights_sha256"], note["pixels"]
    save_file(load_file(path), path, metadata={"idml": json.dumps(note)})
    assert load_checkpoint(path, *trained(7), config, "the data", "pixels") == POSITION


HOLD = "import sys, time; from pathlib import Path; from idml.training.checkpoint import lock_run\n"
HOLD += "lock = lock_run(Path(sys.argv[1])); print('held', flush=True); time.sleep(1000)"


def test_one_run_a_directory(tmp_path):
    run = tmp_path / "deep" / "run"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match="another run is writing into") as error:
                lock_run(run)
            assert repr(str(run)) in str(error.value)
        finally:
            os.kill(other.pid, signal.SIGKILL)
    lock_run(run).close()  # a killed process holds nothing
    with lock_run(run):
        assert (run / ".lock").exists()


def test_a_run_that_is_locked_in_this_process(tmp_path):
    run = tmp_path / "deep" / "run"
    for _ in range(2):  # the folder is there the second time
        with lock_run(run):
            assert [file.name for file in run.iterdir()] == [".lock"]
            with pytest.raises(ValueError, match=r"^another run is writing into '.*/deep/run'$"):
                lock_run(run)


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"^cannot write into the run directory '.*/file/run' \(Not a directory\)$"):
        lock_run(tmp_path / "file" / "run")


def test_what_can_be_resumed_and_what_would_be_overwritten(tmp_path):
    run, notes = tmp_path / "run", []
    with pytest.raises(ValueError, match=r"^there is no run '.*/run' to continue; leave out --resume to start one$"):
        check_resumable(run, notes.append)
    check_free(run, resume=False)
    (run / "checkpoints").mkdir(parents=True)
    check_free(run, resume=False)
    with pytest.raises(ValueError, match="there is no run"):  # what a refused run leaves
        check_resumable(run, notes.append)
    (run / "config.yaml").touch()
    check_resumable(run, notes.append)
    assert notes == [f"{run} has no checkpoint: the run starts at its beginning"]
    check_resumable(run)
    (run / "checkpoints" / "last.safetensors").touch()
    check_resumable(run, notes.append)
    assert len(notes) == 1
    check_free(run, resume=True)
    words = r"^'.*/run' already holds a run; continue it with --resume or choose another directory$"
    with pytest.raises(ValueError, match=words):
        check_free(run, resume=False)

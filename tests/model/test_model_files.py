"""Saved models: an exact round trip, an all-or-nothing write, and no file that is trusted."""

import json
import os
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from idml.model import model
from idml.model.model import FILE, build_model, load_model, save_model


def conv4(**config):
    return build_model("conv4", **{"embedding_dim": 8, "image_size": 28, **config})


def refused(path, match, name=None):
    with pytest.raises(ValueError, match=match) as caught:
        load_model(path)
    message = str(caught.value)
    assert "\n" not in message
    assert (name or path.name) in message


@pytest.mark.parametrize(
    ("trunk", "config"),
    [
        ("conv4", {"embedding_dim": 8, "image_size": 28}),
        ("conv4", {"embedding_dim": 16, "image_size": 28, "in_chans": 1, "detach": True}),
        ("conv4", {"embedding_dim": 8, "image_size": 28, "uncertainty": "gaussian"}),
        ("resnet18", {"embedding_dim": 8, "image_size": 64}),
        ("resnet18", {"image_size": 64, "detach": True}),
    ],
)
def test_round_trip(tmp_path, trunk, config):
    model = build_model(trunk, pretrained=False, **config).train()
    images = torch.rand(4, model.config.in_chans, config["image_size"], config["image_size"])
    model(images)  # starts the head and moves the batch statistics
    expected = model.embed(images)
    folder = tmp_path / "runs" / "first"
    path = save_model(model, str(folder))
    assert path == folder / FILE
    assert list(folder.iterdir()) == [path]
    for place in (folder, str(folder), path):
        loaded = load_model(place)
        assert not loaded.training
        assert loaded.config == model.config
        got = loaded.embed(images)
        assert torch.equal(got.semantic, expected.semantic)
        assert torch.equal(got.uncertainty, expected.uncertainty)


def test_save_over_an_existing_model(tmp_path):
    save_model(conv4(), tmp_path)
    second = conv4(embedding_dim=12)
    save_model(second, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [FILE]
    loaded = load_model(tmp_path)
    assert loaded.config.embedding_dim == 12
    assert torch.equal(loaded.semantic.weight, second.semantic.weight)


@pytest.mark.parametrize("place", [(os, "fsync"), (Path, "replace")], ids=["write", "rename"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_failing_write_changes_nothing(tmp_path, monkeypatch, place, existing):
    before = save_model(conv4(), tmp_path).read_bytes() if existing else None

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(*place, full)
    with pytest.raises(OSError, match="no space left"):
        save_model(conv4(embedding_dim=12), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [FILE] * existing
    assert not existing or (tmp_path / FILE).read_bytes() == before


def test_missing(tmp_path):
    for place in (tmp_path / "absent", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no model at") as caught:
            load_model(place)
        assert "\n" not in str(caught.value)
        assert place.name in str(caught.value)


class Touch:
    """An object whose pickle creates a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_is_refused_unread(tmp_path, zipped):
    trace, path = tmp_path / "trace", tmp_path / FILE
    torch.save({"weight": torch.ones(2), "evil": Touch(trace)}, path, _use_new_zipfile_serialization=zipped)
    with path.open("rb") as file:
        torch.load(file, weights_only=False)
    assert trace.exists()  # it does harm where it is trusted
    trace.unlink()
    refused(tmp_path, "is a pickle .* only safetensors", FILE)
    assert not trace.exists()


@pytest.mark.parametrize("cut", [0, 4, 8, 100, 5000, -1])
def test_truncated(tmp_path, cut):
    path = save_model(conv4(), tmp_path)
    path.write_bytes(path.read_bytes()[:cut])
    refused(path, "is not a sound safetensors file")


def test_not_safetensors_at_all(tmp_path):
    path = tmp_path / "weights"
    for content in (
        b"",
        random.Random(0).randbytes(4096),
        b"no model, only text\n" * 50,
        b"cos\nsystem\n(S'true'\ntR.",
    ):
        path.write_bytes(content)
        refused(path, "is not a sound safetensors file")


def parts(tmp_path):
    """The tensors and the configuration of a saved model."""
    model = conv4()
    return load_file(save_model(model, tmp_path)), asdict(model.config)


def write(path, tensors, config, **more):
    path.write_bytes(save(tensors, metadata={"idml": json.dumps(config), **more}))
    return path


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_without_our_metadata(tmp_path, metadata):
    path = tmp_path / "other.safetensors"
    path.write_bytes(save({"weight": torch.ones(2)}, metadata=metadata))
    refused(path, "contains no idml model configuration")


def test_tensors_that_do_not_fit(tmp_path):
    tensors, config = parts(tmp_path)
    path = tmp_path / "other.safetensors"
    load_model(write(path, tensors, config))  # as it is, it fits
    refused(
        write(path, {**tensors, "semantic.weight": torch.ones(8, 3)}, config),
        r"semantic.weight has shape \[8, 3\], the model needs \[8, 256\]",
    )
    refused(
        write(path, {k: v for k, v in tensors.items() if k != "semantic.bias"}, config),
        r"1 of \d+ tensors are missing \(first: semantic.bias\)",
    )
    refused(write(path, {**tensors, "extra": torch.ones(1)}, config), r"1 tensors do not belong .* \(first: extra\)")
    refused(write(path, tensors, {**config, "embedding_dim": 9}), "has shape .* the model needs")


HUGE = [{"u_hidden": 65_536}, {"embedding_dim": 65_536}, {"trunk": "vit_giant_patch14_224"}, {"in_chans": 1024}]


@pytest.mark.parametrize("change", HUGE, ids=str)
def test_a_small_file_that_describes_a_large_model_takes_no_memory(tmp_path, change, monkeypatch):
    """Shapes are compared before any weight is allocated."""
    tensors, config = parts(tmp_path)
    path = write(tmp_path / "other.safetensors", tensors, {**config, **change})
    allocated, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: allocated.append(out := empty(*a, **k)) or out)
    refused(path, "has shape|are missing")
    assert allocated
    assert all(tensor.is_meta for tensor in allocated)


@pytest.mark.parametrize("name", ["embedding_dim", "u_hidden", "in_chans", "image_size", "maps"])
@pytest.mark.parametrize("value", [10**5, 10**8, 10**30])
def test_sizes_are_bounded(tmp_path, name, value):
    tensors, config = parts(tmp_path)
    refused(write(tmp_path / "other.safetensors", tensors, {**config, name: value}), f"{name} must be at most")


def test_the_number_of_slices_is_bounded(tmp_path):
    tensors, config = parts(tmp_path)
    many = {"head": "slices", "slices": [str(n) for n in range(1025)]}
    refused(write(tmp_path / "other.safetensors", tensors, {**config, **many}), "at most 1,024 slices, got 1,025")


def test_no_network_of_an_ensemble_is_built_that_the_file_cannot_hold(tmp_path, monkeypatch):
    tensors, config = parts(tmp_path)
    built, real = [], model.build_trunk
    monkeypatch.setattr(model, "build_branches", None)
    monkeypatch.setattr(model, "build_trunk", lambda *a, **k: built.append(a) or real(*a, **k))
    many = {"head": "logit_parts", "branching": "ensemble", "slices": [str(n) for n in range(1000)]}
    refused(write(tmp_path / "other.safetensors", tensors, {**config, **many}), "its 1,000 networks have .* tensors")
    assert len(built) == 1


def test_configurations_that_cannot_be_read(tmp_path):
    tensors, config = parts(tmp_path)
    path = tmp_path / "other.safetensors"
    for name in ("weights_file", "weights_sha256"):
        refused(write(path, tensors, {**config, name: ["x"]}), f"{name} must be a text")
    refused(write(path, tensors, {**config, "colour": "red"}), "a model configuration that .* cannot read .*'colour'")
    for wrong in ({**config, "embedding_dim": -8}, {**config, "u_hidden": "x"}, [1], None, "text"):
        refused(write(path, tensors, wrong), "a model configuration that this version cannot read")
    path.write_bytes(save(tensors, metadata={"idml": "{"}))
    refused(path, "a model configuration that this version cannot read")


def test_models_from_before_the_option_bound_was_removed(tmp_path):
    tensors, config = parts(tmp_path)
    path = tmp_path / "other.safetensors"
    assert load_model(write(path, tensors, {**config, "bound": None})).config == load_model(tmp_path).config
    refused(write(path, tensors, {**config, "bound": 0.7}), "its option bound was removed: train the model again")


@pytest.mark.parametrize("start", [b"\x80", b"PK"])
def test_a_sound_file_may_begin_like_a_pickle(tmp_path, start):
    """Safetensors begin with the length of their header: any multiple of 8 can occur."""
    tensors, config = parts(tmp_path)
    path = write(tmp_path / "other.safetensors", tensors, config, note="")
    length = int.from_bytes(path.read_bytes()[:8], "little")
    wanted = next(n for n in range(length, 1 << 16, 8) if n.to_bytes(8, "little").startswith(start))
    write(path, tensors, config, note="x" * (wanted - length))
    assert path.read_bytes().startswith(start)
    assert torch.equal(load_model(path).semantic.weight, tensors["semantic.weight"])

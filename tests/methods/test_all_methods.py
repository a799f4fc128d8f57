"""What holds for every method of the registry."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from idml.methods import METHODS, find_method
from idml.methods.adversary import Decorrelation
from idml.methods.nir import NirOptions
from idml.methods.options import flatten_options, list_options
from idml.model import load_model
from idml.training import loop
from idml.training.build import build, set_modes
from idml.training.config import TrainConfig, from_dict, to_dict
from idml.training.distributed import Processes
from idml.training.loop import train
from idml.training.step import compute_gradients
from method_cases import CASES, COMPARATORS, FROZEN, TAUGHT, case

METHODS_PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
MIXING = ("mixup", "idml", "pel-mixup")
RESOLVED = {"nir_weight": NirOptions().energy_weight, "align_weight": NirOptions().proxy_weight}


def log_rows(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("method", "loss"), CASES)
def test_killed_and_resumed_is_bit_identical(options, bit_identical_after_a_kill, method, loss):
    tensors = bit_identical_after_a_kill({**options, **case(method, loss), "epochs": 2})
    assert any(name.endswith("proxies") for name in tensors) is (loss == "proxy_anchor")


@pytest.mark.parametrize("method", FROZEN)
def test_a_frozen_run_killed_and_resumed_is_bit_identical(options, bit_identical_after_a_kill, method):
    frozen = {"trunk": "tf_efficientnet_lite0", "pretrained": True, "image_size": 32, "train": "heads", "crops": 2}
    step = 3 if method == "pads" else 5  # without its validation images an epoch is shorter
    bit_identical_after_a_kill({**options, **frozen, **case(method), "epochs": 2}, step=step)


@pytest.mark.parametrize("method", METHODS)
def test_heads_that_an_adversary_reads_start_at_rotated_components(options, monkeypatch, tmp_path, method):
    asked = {"trunk": "tf_efficientnet_lite0", "pretrained": True, "image_size": 32, "seed": 7, **case(method)}
    config = from_dict({**options, **asked, "out": str(tmp_path)})
    _, built = build(config, torch.arange(24) % 4, 4)
    given = []

    def start(model, features, **rotation):
        given.append(rotation)
        raise InterruptedError

    monkeypatch.setattr(loop, "start_at_principal_components", start)
    with pytest.raises(InterruptedError):
        train(config)
    read = any(isinstance(module, Decorrelation) for module in built.modules())
    assert read is (method in ("mic", "diva"))
    assert given == [{"rotation_seed": 7 if read else None}]


@pytest.mark.parametrize("method", METHODS)
def test_workers_change_nothing_and_a_run_logs_what_the_method_measures(options, tmp_path, method):
    weights = []
    for workers in (0, 2):
        run = tmp_path / str(workers)
        metrics = train(from_dict({**options, **case(method), "epochs": 1, "workers": workers, "out": str(run)}))
        weights.append((run / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    first = log_rows(run)[0]
    assert ("level_mixed" in first) is (method in MIXING)
    assert ("weight" in first) is (method in ("ism", "idml"))
    assert ("loss_u" in first) is (method in TAUGHT)
    assert ("loss_mixtures" in first) is ("weight_mixed" in first or method in MIXING)
    terms = [value for key, value in first.items() if key.startswith("loss_")]
    assert first["loss"] == pytest.approx(sum(terms) if terms else first["loss"])
    assert metrics["steps"] > 0
    gaussian = load_model(run).config.uncertainty == "gaussian"
    assert gaussian is method.startswith("pel")


@pytest.mark.parametrize(("method", "warm_up"), [*((method, False) for method in METHODS), ("idml", True)])
def test_parts_of_a_batch_give_the_gradients_of_the_whole(method, warm_up):
    found = []
    for size in (0, 5):
        config = from_dict({
            "data": "glyphs", "out": "-", **case(method), "image_size": 32, "embedding_dim": 8, "micro_batch": size,
            **({"warmup_epochs": 1, "warmup_u": False} if warm_up else {}),
        })  # fmt: skip
        torch.manual_seed(0)
        labels = torch.arange(16) % 4
        model, trained = build(config, labels, 4)
        if warm_up:  # nothing but the semantic head and the proxies learns
            set_modes(model, config, epoch=0)
        model.trunk.eval()
        batch = trained.add_images(torch.rand(16, 3, 32, 32), labels, seed=0, epoch=0, step=0)
        terms, _ = compute_gradients(batch, torch.arange(16), model, trained, config, Processes(), seed=3)
        parameters = [*model.named_parameters(), *trained.named_parameters()]
        found.append((terms, {name: p.grad for name, p in parameters if p.grad is not None}))
    (whole, expected), (parts, gradients) = found
    assert parts == pytest.approx(whole, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=2e-3, atol=2e-4 * scale + 1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_adds_is_what_it_says_it_adds(method):
    kind = find_method(method)
    for ambiguity in ((), ("cutmix",), ("blur",)):
        if ambiguity == ("cutmix",) and not kind.mixture_kinds(ambiguity):
            with pytest.raises(ValueError, match=f"method {method} has no mixtures: leave out cutmix"):
                from_dict({"data": "glyphs", "out": "-", **case(method), "ambiguity": ambiguity})
            continue
        config = from_dict({
            "data": "glyphs", "out": "-", "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8,
            **case(method), "ambiguity": ambiguity, "batch_size": 8, "per_class": 2,
        })  # fmt: skip
        _, trained = build(config, torch.arange(8) % 4, 4)
        images, labels = torch.rand(8, 3, 16, 16), torch.arange(8) % 4
        batch, again = (trained.add_images(images, labels, seed=1, epoch=2, step=3) for _ in range(2))
        added = len(batch.images) - 8
        assert added == len(batch.labels) - 8 == kind.count_added(config.method_options, ambiguity, 8)
        assert added == config.added_images
        assert bool(trained.added_key()) is (added > 0)
        assert torch.equal(batch.images[:8], images)
        assert torch.equal(batch.images, again.images)
        empty = trained.add_images(torch.zeros(8, 1, 1, 1), labels, seed=1, epoch=2, step=3)
        assert torch.equal(empty.labels.ids, batch.labels.ids)  # a frozen trunk relies on it
        assert empty.lam == batch.lam


def one_step(method, **changes):
    """The terms of a step of 16 images of 4 classes, what it measures, and the gradient of the uncertainty head."""
    config = from_dict({
        "data": "glyphs", "out": "-", "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8,
        **case(method), "batch_size": 16, "per_class": 4, **changes,
    })  # fmt: skip
    torch.manual_seed(0)
    labels = torch.arange(16) % 4
    model, trained = build(config, labels, 4)
    images = torch.rand(16, 3, 16, 16)
    batch = trained.add_images(images, labels, seed=0, epoch=0, step=0)
    terms, embeddings = compute_gradients(batch, torch.arange(16), model, trained, config, Processes(), seed=3)
    return terms, trained.measure(embeddings, batch), model.uncertainty.linear.weight.grad, batch


@pytest.mark.parametrize("method", COMPARATORS)
def test_the_introspective_metric_is_taken_or_refused_in_one_line(method):
    row = next(line for line in METHODS_PAGE.splitlines() if line.startswith(f"| [`{method}`](#{method}) |"))
    if method == "dreml":
        assert row.endswith("| no |")
        with pytest.raises(ValueError, match="method dreml has no option 'introspective'") as caught:
            one_step(method, introspective=True)
        assert "\n" not in str(caught.value)
        return
    assert not row.endswith("| no |")
    options = {"detach": False} if method != "abe" else {}
    terms, measured, gradient, _ = one_step(method, introspective=True, **options)
    assert all(value == value for value in terms.values())
    assert "u" not in terms  # the loss itself teaches u
    assert 0 < measured["weight"] <= 1
    assert bool(gradient.any())


@pytest.mark.parametrize("method", COMPARATORS)
def test_every_comparator_takes_label_sets(method):
    terms, _, _, batch = one_step(method, ambiguity=("mixup",))
    assert all(value == value for value in terms.values())
    sizes = (batch.labels.ids >= 0).sum(dim=1)
    assert int(batch.mixed.sum()) > 0
    assert bool((sizes[batch.mixed] == 2).any())
    assert bool((sizes[~batch.mixed] == 1).all())
    plain, _, _, _ = one_step(method)
    assert {**terms} != {**plain}


@pytest.mark.parametrize("method", METHODS)
def test_options_are_documented_checked_and_of_one_kind(method):
    own = list_options(find_method(method).Options)
    assert all(option.text and option.default is not dataclasses.MISSING for option in own)
    common = {field.name for field in dataclasses.fields(TrainConfig)}
    for option in own:
        assert option.name not in common
        for other in METHODS:
            same = {o.name: o.type for o in list_options(find_method(other).Options)}
            assert same.get(option.name, option.type) == option.type  # one flag serves all methods that have it
    config = from_dict({"data": "glyphs", "out": "x", "method": method, "loss": case(method)["loss"]})
    assert from_dict(to_dict(config)) == config
    assert flatten_options(config.method_options) == {option.name: option.default for option in own}


@pytest.mark.parametrize("method", COMPARATORS)
def test_the_page_of_methods_has_every_option_with_its_default(method):
    section = METHODS_PAGE.partition(f"\n## {method}\n")[2].partition("\n## ")[0]
    assert section
    shared = {option.name for option in list_options(find_method("diml").Options)}  # of the metric, for all alike
    for option in list_options(find_method(method).Options):
        flag = option.name.replace("_", "-")
        if option.name not in shared:
            default = re.search(rf"^\| `--(?:no-)?{flag}(?: \w+)?`.* \| (.+?) \| ", section, re.MULTILINE)[1]
            stands_for = RESOLVED.get(option.name, option.default)  # where the default depends on another option
            known = stands_for if option.type is str or isinstance(stands_for, str) else float(stands_for)
            assert isinstance(option.default, bool) or type(known)(default.strip("`")) == known, flag
    assert "\n## Cost\n" in METHODS_PAGE


def test_an_unknown_method_names_the_nearest():
    for name in ("idm", ["idml"]):
        with pytest.raises(ValueError, match="did you mean 'idml'"):
            find_method(name)

"""Options of the method: against explicit references, refused where senseless, bit-identical on resume."""

import json
import math
from dataclasses import replace

import pytest
import torch

from idml.data.augment import Batch
from idml.data.datasets import hold_out, load_dataset
from idml.labels import LabelSets
from idml.model import load_model
from idml.training.build import build, build_optimiser, set_learning_rate
from idml.training.config import TrainConfig, from_dict, idle_options
from idml.training.distributed import Processes
from idml.training.loop import train
from idml.training.noise import noisy_images, with_label_noise
from idml.training.step import learn

LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])


def step(**changes):
    """The model, the loss, the value of one step, and its gradients, in float64."""
    torch.manual_seed(0)
    options = {"trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 6, "loss": "contrastive"}
    config = TrainConfig(data="glyphs", out="-", **{**options, **changes})
    model, loss = build(config, 4)
    model.double().trunk.eval()
    loss.double()
    images = torch.rand(8, 3, 16, 16, dtype=torch.float64)
    model.uncertainty(model.features(images))  # starts it
    if config.learns_u:
        model.uncertainty.scale *= 20
    batch = Batch(images, LabelSets(LABELS), torch.zeros(8, dtype=torch.bool))
    value, embeddings = learn(batch, model, loss, config, Processes(), seed=0)
    return model, loss, value, embeddings, model.features(images)


def by_hand(model, features, pair, extra=lambda u: 0.0, margins=(0.0, 0.5)):
    """The contrastive loss over explicit pairs, D = ``pair``(α, u₁, u₂), and its gradients for both heads."""
    s = model.semantic(features.detach())
    u = model.uncertainty(features.detach())
    pulls, pushes = [], []
    for i in range(8):
        for j in range(8):
            if i != j:
                a, b = s[i] / s[i].norm(), s[j] / s[j].norm()
                d = pair((a - b).norm(), u[i], u[j])
                same = LABELS[i] == LABELS[j]
                (pulls if same else pushes).append((d - margins[0] if same else margins[1] - d).relu())
    pulled, pushed = ([x for x in terms if x > 0] for terms in (pulls, pushes))
    value = sum(pulled) / max(len(pulled), 1) + sum(pushed) / max(len(pushed), 1) + extra(u)
    parameters = [*model.semantic.parameters(), *model.uncertainty.parameters()]
    return value, torch.autograd.grad(value, parameters, allow_unused=True)


def check(found, expected):
    model, _, value, _, _ = found
    wanted, gradients = expected
    assert value == pytest.approx(float(wanted.detach()), rel=1e-9)
    parameters = [*model.semantic.named_parameters(), *model.uncertainty.named_parameters()]
    for (name, parameter), gradient in zip(parameters, gradients, strict=True):
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(got, torch.zeros_like(got) if gradient is None else gradient, msg=name)


@pytest.mark.parametrize("gamma", [0.3, 2.0])
def test_constant_is_the_metric_with_a_fixed_beta(gamma):
    found = step(method="constant", gamma=gamma, tau=2.0)
    model, _, _, embeddings, features = found
    check(found, by_hand(model, features, lambda a, u, v: a * torch.exp(-gamma / (2.0 * a))))
    assert not embeddings.uncertainty.any()
    assert model.uncertainty.linear.weight.grad is None


@pytest.mark.parametrize("beta", ["sum", "norms"])
def test_beta(beta):
    def pair(a, u, v):
        uncertainty = (u + v).norm() if beta == "sum" else u.norm() + v.norm()
        return a * torch.exp(-(uncertainty + 0.1) / (2.0 * a))

    found = step(method="ism", beta=beta, gamma=0.1, tau=2.0)
    check(found, by_hand(found[0], found[4], pair))


def test_penalty_is_the_mean_square_of_the_level():
    def pair(a, u, v):
        return a * torch.exp(-(u + v).norm() / (5.0 * a))

    found = step(method="ism", u_penalty=0.7)
    check(found, by_hand(found[0], found[4], pair, lambda u: 0.7 * sum(x @ x for x in u) / 8))
    assert found[2] > step(method="ism")[2]


def test_learned_uncertainty_of_proxies():
    _, loss, _, embeddings, _ = step(method="ism", loss="softmax", proxy_uncertainty=True)
    assert 0.02 < float(loss.proxy_uncertainty.detach().norm(dim=1).mean()) < 0.1
    s, u = embeddings.semantic, embeddings.uncertainty
    proxies, own = (x.detach().clone().requires_grad_() for x in (loss.proxies, loss.proxy_uncertainty))
    total = 0.0
    for i in range(8):
        scores = []
        for p, v in zip(proxies, own, strict=True):
            a, b = s[i] / s[i].norm(), p / p.norm()
            alpha, beta = (a - b).norm(), (u[i] + v).norm()
            scores.append(20 * (1 - (1 - a @ b) * torch.exp(-beta / (5 * alpha))))
        total = total - torch.log_softmax(torch.stack(scores), 0)[LABELS[i]] / 8
    gradients = torch.autograd.grad(total, (proxies, own))
    torch.testing.assert_close(loss.proxies.grad, gradients[0])
    torch.testing.assert_close(loss.proxy_uncertainty.grad, gradients[1])


def test_learning_rates_of_the_parts():
    config = TrainConfig(
        data="glyphs", out="-", trunk="conv4", pretrained=False, loss="proxy_anchor", method="ism", embedding_dim=4,
        proxy_uncertainty=True, u_lr=3.0, lr=0.01, schedule="constant",
    )  # fmt: skip
    model, loss = build(config, 5)
    optimizer = build_optimiser(model, loss, config)
    set_learning_rate(optimizer, config, 0, 10, 0)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(next(model.trunk.parameters()))] == rates[id(model.semantic.weight)] == pytest.approx(0.01)
    assert rates[id(model.uncertainty.linear.weight)] == rates[id(loss.proxy_uncertainty)] == pytest.approx(0.03)
    assert rates[id(loss.proxies)] == pytest.approx(1.0)
    assert len(rates) == len([*model.parameters(), *loss.parameters()])


def test_label_noise_spoils_what_is_learned_from_and_nothing_else(options, tmp_path):
    config = TrainConfig(out=str(tmp_path), label_noise=0.4, **options)
    images, wrong = noisy_images(config)
    seen, held_out = hold_out(load_dataset(config.data).train, config.holdout)
    assert images.fingerprint == seen.fingerprint
    assert int(wrong.sum()) == round(0.4 * len(seen))
    spoiled = with_label_noise(seen, config)
    assert torch.equal(spoiled.labels != seen.labels, wrong)
    assert with_label_noise(seen, TrainConfig(out="-", **options)) is seen
    for method in ("plain", "pel-mixup"):  # the same images whatever the method
        other = TrainConfig(out="-", label_noise=0.4, **{**options, "method": method, "loss": "proxy_anchor"})
        assert torch.equal(with_label_noise(seen, other).labels, spoiled.labels)
    assert held_out is not None
    other = TrainConfig(out="-", label_noise=0.4, **{**options, "seed": 1})
    assert not torch.equal(with_label_noise(seen, other).labels, spoiled.labels)


def test_training_sees_the_wrong_labels_and_decodes_nothing_twice(options, tmp_path, monkeypatch):
    from idml.training import loop

    shown = []

    class Watched(loop.Stream):
        def prepare(self, numbers, images, epoch, step):
            batch = super().prepare(numbers, images, epoch, step)
            shown.append((numbers, batch.labels.ids[: len(numbers), 0]))
            return batch

    monkeypatch.setattr(loop, "Stream", Watched)
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    plain = {**options, "epochs": 1}
    train(TrainConfig(out=str(tmp_path / "a"), **plain))
    decoded = sorted(path.name for path in (tmp_path / "cache").glob("pixels-*.npy"))
    shown.clear()
    config = TrainConfig(out=str(tmp_path / "b"), label_noise=0.3, **plain)
    train(config)
    assert sorted(path.name for path in (tmp_path / "cache").glob("pixels-*.npy")) == decoded
    images, _ = noisy_images(config)
    spoiled = with_label_noise(images, config).labels
    assert all(torch.equal(labels, spoiled[numbers]) for numbers, labels in shown)
    assert shown


RUNS = {
    "constant": {"method": "constant", "gamma": 0.5},
    "constant-mixup": {"method": "constant-mixup", "gamma": 0.5},
    "noise": {"label_noise": 0.2},
    "proxies": {"loss": "proxy_anchor", "proxy_uncertainty": True, "beta": "norms"},
    "penalty": {"u_penalty": 0.1, "u_lr": 2.0},
}


@pytest.mark.parametrize("name", RUNS)
def test_killed_and_resumed_is_bit_identical(options, bit_identical_after_a_kill, name):
    bit_identical_after_a_kill({**options, "epochs": 2, **RUNS[name]})


def test_a_constant_run_has_no_uncertainty_and_no_warning(options, tmp_path):
    notes = []
    train(TrainConfig(out=str(tmp_path), gamma=1.0, **{**options, "method": "constant-mixup"}), note=notes.append)
    assert not any("uncertainty" in line for line in notes)
    embeddings = load_model(tmp_path).embed(torch.rand(3, 3, 16, 16))
    assert not embeddings.uncertainty.any()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert all(0 < row["weight"] < math.exp(-1 / 10) for row in rows if "loss" in row)  # α is at most 2
    assert all(row["level_mixed"] == 0 for row in rows if "loss" in row)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "constant"}, "a fixed β, which is gamma: it must be above 0"),
        ({"method": "constant", "gamma": 4.0, "rule": "release"}, "rules similar and dissimilar"),
        ({"method": "constant", "gamma": 1.0, "beta": "norms"}, "which method constant does not compare"),
        ({"method": "plain", "beta": "norms"}, "which method plain does not compare"),
        ({"method": "idml", "beta": "norms", "rule": "release"}, "beta must be sum"),
        ({"beta": "mean"}, "unknown beta 'mean'"),
        ({"method": "mixup", "proxy_uncertainty": True}, "which method mixup does not compare"),
        ({"introspection": "none", "u_penalty": 0.1}, "u_penalty is for methods that learn u"),
        ({"method": "pel", "u_lr": 2.0}, "u_lr is for methods that learn u"),
        ({"u_penalty": -1}, "u_penalty must be a number of at least 0"),
        ({"u_lr": 0}, "u_lr must be a number above 0"),
        ({"label_noise": 1.0}, "label_noise must be below 1"),
        ({"label_noise": -0.1}, "label_noise must be a number of at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        from_dict({"data": "glyphs", "out": "x", **options})
    assert "\n" not in str(caught.value)


def test_options_of_the_metric_are_said_to_be_idle_without_it():
    config = TrainConfig(data="cars:x", out="-", tau=3.0, gamma=3.0)
    assert idle_options(config) == ["tau and gamma: for the introspective metric, which method plain does not use"]
    assert idle_options(replace(config, method="idml", detach=True)) == idle_options(TrainConfig("glyphs", "-")) == []


def test_parameters_of_the_loss_are_options():
    changes = {"method": "plain", "loss_parameters": ("positive_margin=0.01", "negative_margin=1.2")}
    model, _, value, _, features = step(**changes)
    wanted, gradients = by_hand(model, features, lambda a, u, v: a, margins=(0.01, 1.2))
    assert float(value) == pytest.approx(float(wanted.detach()), abs=1e-12)
    torch.testing.assert_close(model.semantic.weight.grad, gradients[0])
    assert float(step(method="plain")[2]) != pytest.approx(float(value), abs=1e-3)


@pytest.mark.parametrize(
    ("loss", "words", "said"),
    [
        ("contrastive", ["negative_margin"], "of the form name=number, got 'negative_margin'"),
        ("contrastive", ["negative_margin=wide"], "of the form name=number, got 'negative_margin=wide'"),
        ("contrastive", ["negative_margin=nan"], "of the form name=number"),
        ("contrastive", ["=1"], "of the form name=number"),
        ("contrastive", ["negative_margin=1", "negative_margin=2"], "give negative_margin twice"),
        ("contrastive", ["margin=1"], "unknown parameter 'margin' of Contrastive; did you mean"),
        ("contrastive", ["metric=1"], "unknown parameter 'metric' of Contrastive"),
        ("margin_dw", ["seed=1"], "unknown parameter 'seed' of MarginDW"),
        ("fast_ap", ["bins=2.5"], "bins of FastAP must be a positive whole number, got 2.5"),
        ("fast_ap", ["bins=0"], "bins of FastAP must be a positive whole number, got 0"),
        ("contrastive", "negative_margin=1", "loss_parameters must be a list of name=value"),
        ("contrastive", [0.5], "loss_parameters must be a list of name=value"),
        ("nothing", ["margin=1"], "unknown loss 'nothing'"),
    ],
)
def test_parameters_that_a_loss_does_not_have_are_refused(loss, words, said):
    with pytest.raises(ValueError, match=said) as caught:
        step(loss=loss, loss_parameters=words)
    assert "\n" not in str(caught.value)


def test_proxy_uncertainty_needs_proxies(options, tmp_path):
    with pytest.raises(ValueError, match="proxy_uncertainty is for losses with proxies: contrastive has none"):
        train(TrainConfig(out=str(tmp_path), loss="contrastive", proxy_uncertainty=True, **options))

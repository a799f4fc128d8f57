"""The preset ``release`` against what the authors' released code does, written again in NumPy.

The reference imports nothing of idml. It gets the images, the features that the trunk makes of them, and the weights.
Its gradients are central differences.
"""

import numpy as np
import pytest
import torch

from idml.data.augment import resized_crop_and_flip
from idml.data.sampling import random_stream
from idml.model import build_model
from idml.training.build import build, set_modes, start_at_random
from idml.training.config import from_dict
from idml.training.distributed import Processes
from idml.training.step import compute_gradients

CLASSES, DIM, SIZE = 5, 6, 16
LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 3])
SMALL = {
    "data": "cub:x", "out": "-", "trunk": "conv4", "pretrained": False, "image_size": SIZE, "embedding_dim": DIM,
    "batch_size": len(LABELS),
}  # fmt: skip


# --- the reference ---


def unit(x):
    return x / np.sqrt((x**2).sum(axis=1, keepdims=True))


def proxy_anchor(s, u, labels, proxies):
    """log-sum-exp pulls and pushes, scale 32, margin 0.1, on C' = 1 − (1 − C)·exp(−(‖û + 0‖² + 4)/(5‖ŝ − p‖²))."""
    s, u = unit(s), unit(u)
    gap = ((s[:, None, :] - proxies[None]) ** 2).sum(axis=2)
    cosine = s @ unit(proxies).T
    cosine = 1 - (1 - cosine) * np.exp(-((u**2).sum(axis=1, keepdims=True) + 4) / (5 * gap))
    pull, push = [], []
    for k in range(len(proxies)):
        near = [np.exp(-32 * (cosine[i, k] - 0.1)) for i in range(len(s)) if labels[i] == k]
        far = [np.exp(32 * (cosine[i, k] + 0.1)) for i in range(len(s)) if labels[i] != k]
        push.append(np.log(1 + sum(far)))
        if near:
            pull.append(np.log(1 + sum(near)))
    return sum(pull) / len(pull) + sum(push) / len(proxies)


def objective(weights, originals, mixtures, labels, partners, lam):
    """L(originals) + λ·L(mixtures, l₁) + (1 − λ)·L(mixtures, l₂) of features, by two linear heads and proxies."""

    def embed(features):
        s = features @ weights["semantic.weight"].T + weights["semantic.bias"]
        return s, features @ weights["u.weight"].T + weights["u.bias"]

    def loss(features, own):
        return proxy_anchor(*embed(features), own, weights["proxies"])

    mixed = lam * loss(mixtures, labels) + (1 - lam) * loss(mixtures, labels[partners])
    return loss(originals, labels) + mixed


def differences(function, weights, name, step=1e-5):
    """The gradient of one weight by central differences."""
    gradient = np.zeros_like(weights[name])
    for place in np.ndindex(*gradient.shape):
        values = []
        for sign in (1, -1):
            moved = weights[name].copy()
            moved[place] += sign * step
            values.append(function({**weights, name: moved}))
        gradient[place] = (values[0] - values[1]) / (2 * step)
    return gradient


# --- the tests ---


def test_one_step_has_the_loss_and_the_gradients_of_the_release():
    config = from_dict({**SMALL, "preset": "release"})
    torch.manual_seed(0)
    model, method = build(config, LABELS, CLASSES)
    model.double().trunk.eval()
    method.double()
    images = torch.rand(len(LABELS), 3, SIZE, SIZE, dtype=torch.float64)
    batch = method.add_images(images, LABELS, seed=1, epoch=0, step=0)
    n, lam = len(LABELS), batch.lam
    partners = []
    for i in range(n):  # which image is mixed into image i: read from the pixels
        gaps = [float((lam * images[i] + (1 - lam) * images[j] - batch.images[n + i]).abs().max()) for j in range(n)]
        partners.append(int(np.argmin(gaps)))
        assert min(gaps) < 1e-12
    model(batch.images)  # the uncertainty head starts at its first batch
    terms, _ = compute_gradients(batch, torch.arange(n), model, method, config, Processes(), seed=0)

    with torch.no_grad():
        features = model.features(batch.images).numpy()
    head = model.uncertainty
    weights = {
        "semantic.weight": model.semantic.weight,
        "semantic.bias": model.semantic.bias,
        "u.weight": head.linear.weight * head.scale,
        "u.bias": head.linear.bias,
        "proxies": method.metric_loss.proxies,
    }
    weights = {name: w.detach().numpy() for name, w in weights.items()}

    def value(weights):
        return objective(weights, features[:n], features[n:], LABELS.numpy(), np.array(partners), lam)

    assert sum(terms.values()) == pytest.approx(value(weights), rel=1e-9)
    for name, ours in (
        ("semantic.weight", model.semantic.weight.grad),
        ("semantic.bias", model.semantic.bias.grad),
        ("proxies", method.metric_loss.proxies.grad),
    ):
        expected = differences(value, weights, name)
        np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    assert float(head.linear.weight.grad.abs().max()) < 1e-12  # û has length 1 and proxies have none: u cannot learn


def test_the_uncertainty_head_and_the_trunk_are_frozen_during_warm_up():
    config = from_dict({**SMALL, "preset": "release", "warmup_epochs": 2})
    model, _ = build(config, LABELS, CLASSES)
    for epoch in range(4):
        set_modes(model, config, epoch)
        learns = {name for name, p in model.named_parameters() if p.requires_grad}
        parts = {name.partition(".")[0] for name in learns}
        assert parts == ({"semantic"} if epoch < 2 else {"semantic", "uncertainty", "trunk"})
    other = from_dict({**SMALL, "preset": "paper", "warmup_epochs": 2})
    set_modes(model, other, 0)
    assert all(p.requires_grad for p in model.uncertainty.parameters())


def test_the_semantic_head_starts_at_random():
    torch.manual_seed(0)
    model = build_model("conv4", embedding_dim=256)
    start_at_random(model, random_stream("head"))
    weight = model.semantic.weight.detach()
    assert float(weight.std()) == pytest.approx((2 / 256) ** 0.5, rel=0.02)
    assert not bool(model.semantic.bias.any())


def test_parts_of_random_size_are_enlarged():
    images = torch.arange(40.0 * 40).view(1, 1, 40, 40).expand(400, 3, 40, 40) / 1600  # every pixel tells its place
    crops = resized_crop_and_flip(images, 20, random_stream("crop"))
    assert crops.shape == (400, 3, 20, 20)
    across = (crops[:, 0, :, -1] - crops[:, 0, :, 0]).mean(dim=1) * 1600 * 20 / 19  # the width of the part, in pixels
    down = (crops[:, 0, -1] - crops[:, 0, 0]).mean(dim=1) * 40 * 20 / 19
    flipped = across < 0
    assert 150 < int(flipped.sum()) < 250
    area, ratio = (across.abs() * down) / 1600, across.abs() / down
    assert float(area.min()) < 0.15
    assert float(area.max()) > 0.9
    assert float(area.min()) > 0.06
    assert float(area.max()) < 1.06
    assert 0.45 < float(area.mean()) < 0.6  # uniform in 0.08 … 1 has the mean 0.54
    inside = (ratio > 0.7) & (ratio < 1.43)
    assert bool(inside.all())
    again = resized_crop_and_flip(images, 20, random_stream("crop"))
    assert torch.equal(crops, again)


def test_the_preset_has_the_settings_of_the_release():
    config = from_dict({"data": "cub:x", "out": "-", "preset": "release"})
    options = config.method_options
    assert (options.mixtures.mixing, options.mixtures.labels, options.mixtures.weight) == ("separate", "weighted", 1.0)
    assert options.mixtures.beta == 1.0
    assert (config.per_class, config.crop, config.warmup_epochs, config.warmup_u) == (0, "resized", 5, False)
    assert (config.loss, options.metric.rule, config.pca) == ("proxy_anchor", "release", False)
    assert (config.trunk, config.image_size, config.batch_size) == ("resnet50", 224, 120)

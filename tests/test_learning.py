"""The uncertainty head can learn, and does: the two things the authors' release cannot show."""

import pytest
import torch

from idml import Embeddings, IntrospectiveMetric, LabelSets
from idml.losses import LOSSES, build_loss
from idml.model import build_model


def mixed_batch(seed=0, n=24, d=8, classes=6):
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    order = torch.randperm(n, generator=g)
    s = torch.randn(classes, d, generator=g)[labels] + 0.7 * torch.randn(n, d, generator=g)
    s = torch.cat([s, (s + s[order]) / 2]).requires_grad_()
    u = (0.2 * torch.randn(2 * n, d, generator=g)).requires_grad_()
    return Embeddings(s, u), LabelSets.cat([LabelSets(labels), LabelSets.mixed(labels, labels[order])])


@pytest.mark.parametrize("name", LOSSES)
def test_uncertainty_gets_a_radial_gradient_from_every_loss(name):
    """⟨∂L/∂u, u⟩ is how much the loss wants ‖u‖ to change; it is zero for a normalised u."""
    e, labels = mixed_batch()
    torch.manual_seed(0)
    value = build_loss(name, num_classes=6, embedding_dim=8)(e, labels, seed=0)
    (grad,) = torch.autograd.grad(value, e.uncertainty, retain_graph=True)
    radial = (grad * e.uncertainty).sum(dim=1)
    assert (radial.abs() > 1e-6).float().mean() > 0.5
    assert grad.norm() > 1e-3

    unit = torch.nn.functional.normalize(e.uncertainty.detach()).requires_grad_()
    normalised = Embeddings(e.semantic.detach(), torch.nn.functional.normalize(unit))
    (grad,) = torch.autograd.grad(build_loss(name, num_classes=6, embedding_dim=8)(normalised, labels, seed=0), unit)
    assert (grad * unit).sum(dim=1).abs().max() < 1e-5


@pytest.mark.parametrize("name", LOSSES)
def test_without_the_metric_uncertainty_gets_none(name):
    e, labels = mixed_batch()
    loss = build_loss(name, metric=IntrospectiveMetric(rule="off"), num_classes=6, embedding_dim=8)
    assert torch.autograd.grad(loss(e, labels, seed=0), e.uncertainty, allow_unused=True)[0] is None


def pictures(images, seed, classes=16):
    """Made data: every class has a pattern of 16×16 pixels; an image is its pattern, shifted, with noise."""
    g = torch.Generator().manual_seed(99)
    patterns = torch.nn.functional.interpolate(torch.rand(classes, 1, 4, 4, generator=g), size=16, mode="bilinear")
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=g)
    shifts = torch.randint(-1, 2, (images, 2), generator=g).tolist()
    moved = [torch.roll(patterns[k], tuple(s), dims=(1, 2)) for k, s in zip(labels.tolist(), shifts, strict=True)]
    return (torch.stack(moved) + 0.1 * torch.randn(images, 1, 16, 16, generator=g)).clamp(0, 1), labels


def mix(x, y, seed):
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=g)
    share = float(torch.rand((), generator=g))  # λ ~ Beta(1, 1)
    return share * x + (1 - share) * x[order], LabelSets.mixed(y, y[order])


@pytest.mark.parametrize("name", ["contrastive", "proxy_anchor"])
def test_mixed_images_end_more_uncertain_than_clean_ones(name):
    torch.manual_seed(0)
    model = build_model("conv4", in_chans=1, embedding_dim=16, image_size=16).train()
    loss = build_loss(name, num_classes=16, embedding_dim=16)
    proxies = [{"params": loss.parameters(), "lr": 3e-1}] if list(loss.parameters()) else []
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "lr": 3e-3}, *proxies])
    for step in range(120):
        x, y = pictures(64, seed=step)
        blend, sets = mix(x, y, seed=step)
        value = loss(model(torch.cat([x, blend])), LabelSets.cat([LabelSets(y), sets]), seed=step)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    x, y = pictures(300, seed=10_000)
    partner = next(
        p for p in (torch.roll(torch.arange(300), k) for k in range(1, 300)) if (y != y[p]).float().mean() > 0.8
    )
    different = y != y[partner]
    clean = model.embed(x).level
    mixed = model.embed((x + x[partner]) / 2).level[different]
    higher = (mixed.unsqueeze(1) > clean).float().mean()  # AUROC
    print(f"{name}: ‖u‖ clean {clean.mean():.3f}, mixed {mixed.mean():.3f}, AUROC {higher:.3f}")
    assert mixed.mean() > clean.mean()
    assert higher > 0.6

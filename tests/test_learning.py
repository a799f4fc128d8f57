"""The uncertainty head can learn, and does: the two things the authors' release cannot show."""

import pytest
import torch

from idml import Embeddings, IntrospectiveMetric, LabelSets
from idml.losses import LOSSES, build_loss
from made_data import judge, train


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


@pytest.mark.parametrize("name", ["triplet_semihard", "proxy_anchor"])
def test_mixed_images_end_more_uncertain_than_clean_ones(name):
    result = judge(train(name, steps=70))
    assert result["mixed"] > 1.1 * result["clean"]
    assert result["auroc"] > 0.8
    assert result["recall@1"] > 0.9

"""With plain labels and rule ``off``, values and gradients equal pytorch-metric-learning's."""

import pytest
import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners

from idml import IntrospectiveMetric, LabelSets
from idml.labels import pair_masks
from idml.losses import build_loss
from idml.losses.margin_dw import margin_of_pairs
from idml.mining import distance_weighted

DIM = 24
OFF = IntrospectiveMetric(rule="off")
BATCHES = [(8, 3, 0), (32, 4, 1), (60, 12, 2), (120, 30, 3), (33, 33, 4), (48, 2, 5)]  # images, classes, seed

PAIR = {
    "contrastive": (pml.ContrastiveLoss(pos_margin=0.0, neg_margin=0.5), None),
    "triplet_semihard": (
        pml.TripletMarginLoss(margin=0.1),
        miners.TripletMarginMiner(margin=0.1, type_of_triplets="semihard"),
    ),
    "fast_ap": (pml.FastAPLoss(num_bins=10), None),
    "multi_similarity": (pml.MultiSimilarityLoss(alpha=2, beta=50, base=0.5), miners.MultiSimilarityMiner(epsilon=0.1)),
    "circle": (pml.CircleLoss(m=0.4, gamma=80), None),
}
PROXY = {
    "proxy_anchor": lambda c: pml.ProxyAnchorLoss(c, DIM, margin=0.1, alpha=32),
    "proxy_nca": lambda c: pml.ProxyNCALoss(c, DIM, softmax_scale=32),
    "proxy_nca_pp": lambda c: pml.ProxyNCALoss(c, DIM, softmax_scale=9),
    "softmax": lambda c: pml.NormalizedSoftmaxLoss(c, DIM, temperature=1 / 20),
    "soft_triple": lambda c: pml.SoftTripleLoss(c, DIM, centers_per_class=10, la=20, gamma=0.1, margin=0.01),
}


def batch(images, classes, seed):
    """Clustered embeddings, so that every loss and miner has something to do, and their labels."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (images,), generator=g)
    centres = torch.randn(classes, DIM, generator=g)
    x = (centres[labels] + 0.9 * torch.randn(images, DIM, generator=g)) * (0.5 + 3 * torch.rand(images, 1, generator=g))
    return x.requires_grad_(), labels


def assert_same(ours, theirs, inputs, their_inputs):
    torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=1e-5, rtol=1e-5)
    got = torch.autograd.grad(ours, inputs)
    expected = torch.autograd.grad(theirs, their_inputs, allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("images", "classes", "seed"), BATCHES)
@pytest.mark.parametrize("name", PAIR)
def test_pair_loss(name, images, classes, seed):
    x, labels = batch(images, classes, seed)
    oracle, miner = PAIR[name]
    theirs = oracle(x, labels, miner(x, labels) if miner else None)
    ours = build_loss(name, metric=OFF)(x, labels)
    assert_same(ours, theirs, [x], [x])
    if classes < images / 2:
        assert ours > 0  # the batch exercises the loss


@pytest.mark.parametrize(("images", "classes", "seed"), BATCHES)
@pytest.mark.parametrize("name", PROXY)
def test_proxy_loss(name, images, classes, seed):
    x, labels = batch(images, classes, seed)
    oracle = PROXY[name](classes)
    loss = build_loss(name, metric=OFF, num_classes=classes, embedding_dim=DIM)
    (theirs_p,) = oracle.parameters()
    with torch.no_grad():
        theirs_p.copy_(loss.proxies.T if theirs_p.shape != loss.proxies.shape else loss.proxies)
    x2 = x.detach().clone().requires_grad_()
    # this oracle does not normalise the images itself
    theirs = oracle(torch.nn.functional.normalize(x2) if name == "softmax" else x2, labels)
    ours = loss(x, labels)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    got = torch.autograd.grad(ours, [x, loss.proxies])
    expected = list(torch.autograd.grad(theirs, [x2, theirs_p]))
    if expected[1].shape != got[1].shape:
        expected[1] = expected[1].T
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("images", "classes", "seed"), BATCHES)
def test_margin_on_the_same_pairs(images, classes, seed):
    x, labels = batch(images, classes, seed)
    ours_matrix = OFF.distances(x)
    matches = LabelSets(labels).matches()
    anchors, negatives = distance_weighted(ours_matrix, matches, DIM, seed=seed)
    positive, _ = pair_masks(matches)
    ours = build_loss("margin_dw", metric=OFF)(x, labels, seed=seed)
    direct = margin_of_pairs(ours_matrix[positive], ours_matrix[anchors, negatives], beta=1.2, margin=0.2)
    torch.testing.assert_close(ours, direct)
    # their triplets: the positive pairs of anchors that drew negatives, each with its negative
    a, p = positive.nonzero(as_tuple=True)
    kept = torch.isin(a, anchors)
    a, p = a[kept], p[kept]
    assert torch.equal(a, anchors)
    theirs = pml.MarginLoss(margin=0.2, beta=1.2)(x, labels, (a, p, negatives))
    ours_on_same = margin_of_pairs(ours_matrix[a, p], ours_matrix[anchors, negatives], beta=1.2, margin=0.2)
    assert_same(ours_on_same, theirs, [x], [x])
    if kept.all():
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

"""With plain labels and rule ``off``, values and gradients equal pytorch-metric-learning's."""

import pytest
import torch
from pytorch_metric_learning import distances, miners
from pytorch_metric_learning import losses as pml

from idml import Embeddings, IntrospectiveMetric, LabelSets
from idml.labels import pair_masks
from idml.losses import build_loss, ranked_list
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
def test_contrastive_of_squared_distances(images, classes, seed):
    x, labels = batch(images, classes, seed)
    theirs = pml.ContrastiveLoss(0.0, 1.0, distance=distances.LpDistance(power=2))(x, labels)
    assert_same(build_loss("contrastive", metric=OFF, negative_margin=1.0, power=2.0)(x, labels), theirs, [x], [x])


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


@pytest.mark.parametrize(("images", "classes", "seed"), BATCHES)
@pytest.mark.parametrize("parameters", [{}, {"Tp": 2.0, "imbalance": 0.3, "alpha": 1.1}])
def test_ranked_list_has_the_value_of_theirs(images, classes, seed, parameters):
    """Not the gradient: theirs runs through the weights, which the authors keep constant."""
    x, labels = batch(images, classes, seed)
    share = parameters.get("imbalance", 0.5)
    weights = {"positive_weight": 1 - share, "negative_weight": share}
    ours = build_loss(
        "ranked_list", metric=OFF, margin=0.4, temperature=5.0, alpha=parameters.get("alpha", 1.2),
        positive_temperature=parameters.get("Tp", 0.0), **weights,
    )(x, labels)  # fmt: skip
    theirs = pml.RankedListLoss(margin=0.4, Tn=5, **parameters)(x, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)  # they add 1e-5 to every weight below the line


def test_ranked_list_between_the_mean_and_the_hardest_negative():
    x, labels = batch(20, 4, 0)
    d = OFF.distances(x.detach())
    negative = pair_masks(LabelSets(labels).matches())[1] & (d < 1.2)
    found = negative.any(dim=1)
    mean = ((1.2 - d) * negative).sum(dim=1)[found] / negative.sum(dim=1)[found]
    hardest = (1.2 - d.masked_fill(~negative, 2.0).amin(dim=1))[found]
    for temperature, expected in ((0.0, mean), (1e4, hardest)):
        loss = build_loss("ranked_list", metric=OFF, temperature=temperature, positive_weight=0.0)
        assert float(loss(x, labels)) == pytest.approx(float(expected.sum() / 20), rel=1e-4)


@pytest.mark.parametrize("metric", [OFF, IntrospectiveMetric()])
def test_ranked_list_that_moves_only_the_query(metric):
    """Σ_i over L_i(s_i, constant gallery): the gradient of the authors, one query at a time."""
    x, labels = batch(16, 4, 1)
    e = Embeddings(x, 0.1 * torch.ones_like(x))
    whole, query = (build_loss("ranked_list", metric=metric, gallery_gradient=g) for g in (1.0, 0.0))
    assert float(query(e, labels)) == pytest.approx(float(whole(e, labels)), rel=1e-6)
    (found,) = torch.autograd.grad(query(e, labels), x)
    expected = torch.zeros_like(x)
    for i in range(len(x)):
        others = x.detach().clone()
        moving = others[i].clone().requires_grad_()
        rows = torch.cat([others[:i], moving[None], others[i + 1 :]])
        d = metric.distances(Embeddings(rows, 0.1 * torch.ones_like(rows)))
        one = torch.zeros_like(d).index_fill_(0, torch.tensor([i]), 1.0)
        row = d * one + d.detach() * (1 - one)  # the other rows are other queries
        value = ranked_list(row, LabelSets(labels).matches())
        expected[i] = torch.autograd.grad(value, moving)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
    others = Embeddings(x.detach().flip(1), e.uncertainty).detach()
    others.semantic.requires_grad_()
    inputs, theirs = [x, others.semantic], {"other": others, "other_labels": labels}
    moved, kept = torch.autograd.grad(query(e, labels, **theirs), inputs)
    expected = torch.autograd.grad(whole(e, labels, **theirs), inputs)
    torch.testing.assert_close(moved, expected[0])  # images of a gallery apart
    assert expected[1].any()
    assert not kept.any()
    (full,) = torch.autograd.grad(whole(e, labels), x)
    assert torch.nn.functional.cosine_similarity(full.flatten(), found.flatten(), dim=0) < 0.999


def test_the_critic_of_rankmi_finds_the_divergence():
    """At V = log p₊/p₋ the bound is J = 2·JSD(p₊‖p₋) − log 4; the critic's loss comes close to −J by training."""
    grid = torch.linspace(0.1, 1.9, 400)
    near, far = (torch.exp(-0.5 * ((grid - centre) / 0.2) ** 2) for centre in (0.8, 1.1))
    near, far = near / near.sum(), far / far.sum()
    middle = (near + far) / 2
    divergence = 0.5 * sum((p * (p / middle).log()).sum() for p in (near, far))
    loss = build_loss("rankmi", metric=OFF)
    optimiser = torch.optim.Adam(loss.critic.parameters(), lr=3e-3)
    for _ in range(150):
        optimiser.zero_grad()
        v = loss.critic(grid[:, None]).squeeze(1) + 4.0 * (1.2 - grid)
        value = (near * torch.nn.functional.softplus(-v)).sum() + (far * torch.nn.functional.softplus(v)).sum()
        value.backward()
        optimiser.step()
    assert float(value) == pytest.approx(float(torch.log(torch.tensor(4.0)) - 2 * divergence), abs=0.01)
    assert float(value) > float(torch.log(torch.tensor(4.0)) - 2 * divergence) - 1e-4

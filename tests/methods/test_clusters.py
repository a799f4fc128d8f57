"""Clusters that keep their names, the adversary with its reversed gradient, a margin loss with a β for each class."""

import itertools

import pytest
import torch
from sklearn.cluster import KMeans

from idml import IntrospectiveMetric, LabelSets
from idml.labels import pair_masks
from idml.losses import build_loss
from idml.methods.adversary import Decorrelation
from idml.methods.clusters import cluster_images, match_clusters
from idml.methods.mic import standardise_within_classes
from idml.mining import distance_weighted


@pytest.mark.parametrize("seed", range(5))
def test_names_are_those_of_the_best_permutation(seed):
    g = torch.Generator().manual_seed(seed)
    old, new = (torch.randint(4, (30,), generator=g) for _ in range(2))

    def changes(order):
        return sum(
            len({*(new == i).nonzero().flatten().tolist()} ^ {*(old == j).nonzero().flatten().tolist()})
            for i, j in enumerate(order)
        )

    best = min(changes(order) for order in itertools.permutations(range(4)))
    named = match_clusters(old, new, 4)
    order = [int(named[(new == i).nonzero()[0, 0]]) for i in range(4)]
    assert changes(order) == best
    cycle = torch.tensor([1, 2, 3, 0])  # not its own inverse
    assert torch.equal(match_clusters(old, cycle[old], 4), old)


def test_clusters_are_those_of_k_means_and_fixed_by_the_seed():
    points = torch.randn(60, 3) + 6 * torch.eye(3).repeat(20, 1)
    found = cluster_images(points, 3, seed=1)
    assert torch.equal(found, cluster_images(points, 3, seed=1))
    centres = torch.stack([points[found == k].mean(dim=0) for k in range(3)])
    inertia = float((points - centres[found]).square().sum())
    assert inertia == pytest.approx(KMeans(3, n_init=5, random_state=0).fit(points.numpy()).inertia_, rel=1e-4)
    with pytest.raises(ValueError, match="61 clusters need at least 61 images, but there are 60"):
        cluster_images(points, 61, seed=0)


def test_standardised_classes_have_no_mean_and_one_spread():
    labels = torch.arange(40) % 4
    points = torch.randn(40, 3) * torch.tensor([1.0, 5.0, 0.0]) + 10 * torch.randn(4, 3)[labels]
    found = standardise_within_classes(points, labels)
    for c in range(4):
        torch.testing.assert_close(found[labels == c].mean(dim=0), torch.zeros(3), rtol=0, atol=1e-4)
        torch.testing.assert_close(found[labels == c, :2].std(dim=0, correction=0), torch.ones(2), rtol=1e-4, atol=1e-4)


def test_the_adversary_raises_what_the_embeddings_lower():
    adversary = Decorrelation(4, hidden=7).double()
    c, a = (torch.nn.functional.normalize(torch.randn(6, 4, dtype=torch.float64)).requires_grad_() for _ in range(2))

    correlation = 0.0
    for target, source in zip(c, a, strict=True):
        g = adversary.predict(source)
        correlation = correlation + 4 * ((target * g / g.norm()) ** 2).sum() / 6
    loss = adversary(c, a)
    assert float(loss) == pytest.approx(-float(correlation))
    own = list(adversary.parameters())
    found = torch.autograd.grad(loss, [c, a, *own])
    expected = torch.autograd.grad(correlation, [c, a, *own])
    for x, y in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(x, y)
    for x, y in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(x, -y)


def test_a_beta_for_each_class_by_a_loop():
    sets = [{0}, {0}, {1}, {1, 2}, {2}, {2, 0}]
    labels, s = LabelSets.of(sets), torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    plain = IntrospectiveMetric(rule="off")
    loss = build_loss("margin_dw", metric=plain, num_classes=3, learned_beta=True).double()
    assert float(loss(s, labels, seed=3)) == pytest.approx(
        float(build_loss("margin_dw", metric=plain)(s, labels, seed=3))
    )
    with torch.no_grad():
        loss.class_beta.copy_(torch.tensor([0.9, 1.2, 1.4]))
    d = plain.distances(s)
    terms = []
    for i, j in pair_masks(labels.matches())[0].nonzero().tolist():
        beta = sum(loss.class_beta[c] for c in sets[i]) / len(sets[i])
        terms.append(torch.relu(d[i, j] - (beta - 0.2)))
    for i, j in zip(*(x.tolist() for x in distance_weighted(d.detach(), labels.matches(), 4, seed=3)), strict=True):
        beta = sum(loss.class_beta[c] for c in sets[i]) / len(sets[i])
        terms.append(torch.relu(beta + 0.2 - d[i, j]))
    expected = sum(terms) / sum(float(t) > 0 for t in terms)
    found = loss(s, labels, seed=3)
    torch.testing.assert_close(found, expected)
    for x, y in zip(*(torch.autograd.grad(v, [s, loss.class_beta]) for v in (found, expected)), strict=True):
        torch.testing.assert_close(x, y)
    with pytest.raises(ValueError, match="it needs num_classes"):
        build_loss("margin_dw", learned_beta=True)

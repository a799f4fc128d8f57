"""Over label sets and with every rule, values and gradients equal explicit loops over images and Python sets."""

import loops
import pytest
import torch

from idml import Embeddings, IntrospectiveMetric, LabelSets
from idml.losses import LOSSES, ProxyLoss, build_loss
from idml.mining import distance_weighted

DIM = 6
BATCHES = ["mixed", "sets", "hub"]
PROXY = [name for name, kind in LOSSES.items() if issubclass(kind, ProxyLoss)]
CASES = [
    (name, rule, gamma)
    for name, kind in LOSSES.items()
    for rule, gamma in [("off", 0.0), ("similar", 0.0), ("similar", 0.7), ("dissimilar", 0.0), ("dissimilar", 0.7)]
    if rule != "dissimilar" or kind.form == "cosine"
]
SOFTPLUS = ("multi_similarity", "proxy_anchor", "circle")  # torch's softplus(x) is x from 20 on: off by up to 2e-9
OTHER_PARAMETERS = {
    "triplet_semihard": {"margin": 0.25},
    "proxy_nca": {"scale": 5.0},
    "fast_ap": {"bins": 7},
    "contrastive": {"positive_margin": 0.4, "negative_margin": 1.1, "power": 2.0},
    "margin_dw": {"beta": 0.9, "margin": 0.3},
    "multi_similarity": {"alpha": 3.0, "beta": 20.0, "base": 0.3, "epsilon": 0.02},
    "proxy_anchor": {"alpha": 9.0, "margin": 0.3},
    "softmax": {"scale": 7.0},
    "soft_triple": {"centers_per_class": 3, "scale": 9.0, "entropy": 0.5, "margin": 0.2},
    "circle": {"relaxation": 0.25, "scale": 20.0},
    "proxy_nca_pp": {"temperature": 0.5},
    "ranked_list": {
        "alpha": 1.1, "margin": 0.6, "temperature": 3.0, "positive_temperature": 2.0, "positive_weight": 0.3,
        "negative_weight": 0.7,
    },
    "rankmi": {"slope": 2.0, "offset": 0.9},
}  # fmt: skip


def vectors(rows, spread, seed):
    g = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, DIM, generator=g, dtype=torch.float64)


def batch(kind):
    """s, u, the sets as Python sets, the same as LabelSets, and the number of classes."""
    if kind == "mixed":  # 12 plain and 12 mixed images, some mixed with their own class; class 5 has no image
        labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4])
        partners = labels[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
        sets = [{a} for a in labels.tolist()]
        sets += [{a, b} for a, b in zip(labels.tolist(), partners.tolist(), strict=True)]
        assert {len(x) for x in sets[12:]} == {1, 2}
        label_sets, classes = LabelSets.cat([LabelSets(labels), LabelSets.mixed(labels, partners)]), 6
    else:
        if kind == "sets":  # 1 to 4 labels; the last image matches no other, class 9 has no image
            sets = [{0}, {1}, {0, 1}, {1, 2, 3}, {4, 5, 6, 7}, {4}, {2, 5}, {3, 7}, {6}, {0, 7}, {1, 6, 7}, {5}, {8}]
            classes = 10
        else:  # the first image matches every other
            sets = [{0, 1, 2, 3}, {0}, {0}, {1}, {1, 2}, {2}, {3}, {3, 0}, {2}, {1}]
            classes = 4
        label_sets = LabelSets.of(sets)
    centres = vectors(classes, 1.0, seed=2)
    centres[1] = 0.9 * centres[0] + 0.1 * centres[1]  # two classes that overlap
    s = torch.stack([centres[sorted(labels)].mean(dim=0) for labels in sets]) + vectors(len(sets), 0.3, seed=3)
    s *= torch.linspace(0.5, 3.0, len(sets), dtype=torch.float64).unsqueeze(1)
    u = vectors(len(sets), 0.3, seed=4)
    return s.requires_grad_(), u.requires_grad_(), sets, label_sets, classes


def build(name, metric, classes, **parameters):
    torch.manual_seed(5)
    return build_loss(name, metric=metric, num_classes=classes, embedding_dim=DIM, **parameters).double()


def looped_pairs(metric, form, s, u, t=None, v=None):
    value = getattr(loops, f"{form}_{metric.rule}")
    others = None if t is None else list(zip(t, torch.zeros_like(t) if v is None else v, strict=True))
    return loops.table(value, metric.tau, metric.gamma, list(zip(s, u, strict=True)), others)


def assert_same(ours, expected, inputs, tolerance=1e-10):
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
    got = torch.autograd.grad(ours.sum(), inputs, allow_unused=True)
    wanted = torch.autograd.grad(expected.sum(), inputs, allow_unused=True)
    for x, a, b in zip(inputs, got, wanted, strict=True):
        a, b = (torch.zeros_like(x) if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    return got


def check(name, metric, kind, proxy_options=None, **parameters):
    s, u, sets, label_sets, classes = batch(kind)
    loss = build(name, metric, classes, **(proxy_options or {}), **parameters)
    ours = loss(Embeddings(s, u), label_sets, seed=7)
    assert ours > 0
    if name in ("margin_dw", "rankmi"):
        drawn = distance_weighted(metric.distances(Embeddings(s, u)), label_sets.matches(), DIM, seed=7)
        parameters["sampled"] = list(zip(*(x.tolist() for x in drawn), strict=True))
    if name == "rankmi":
        torch.nn.init.normal_(loss.critic[-1].weight, std=0.3)  # it starts at 0
        ours = loss(Embeddings(s, u), label_sets, seed=7)
        parameters["layers"] = [(layer.weight, layer.bias) for layer in loss.critic[::2]]
    proxies = (loss.proxies, loss.proxy_uncertainty) if name in PROXY else ()
    expected = getattr(loops, name)(looped_pairs(metric, loss.form, s, u, *proxies), sets, **parameters)
    gradients = assert_same(ours, expected, [s, u, *loss.parameters()], 1e-8 if name in SOFTPLUS else 1e-10)
    assert gradients[0].abs().max() > 1e-3
    return gradients


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(("name", "rule", "gamma"), CASES)
def test_loss(name, rule, gamma, kind):
    fewer = {"centers_per_class": 4} if name == "soft_triple" else {}  # than 10, for speed
    gradients = check(name, IntrospectiveMetric(rule=rule, gamma=gamma), kind, **fewer)
    if rule != "off":
        assert gradients[1].abs().max() > 1e-4


@pytest.mark.parametrize("name", LOSSES)
def test_off_ignores_gamma_and_uncertainty(name):
    s, u, _, label_sets, classes = batch("mixed")
    plain, biased = (build(name, IntrospectiveMetric(rule="off", gamma=gamma), classes) for gamma in (0.0, 0.7))
    expected, ours = plain(Embeddings.certain(s), label_sets, seed=7), biased(Embeddings(s, u), label_sets, seed=7)
    assert torch.equal(ours, expected)
    assert torch.equal(*(torch.autograd.grad(x, s)[0] for x in (ours, expected)))


@pytest.mark.parametrize("name", LOSSES)
def test_loss_with_other_parameters(name):
    check(name, IntrospectiveMetric(tau=2.0), "mixed", **OTHER_PARAMETERS[name])


@pytest.mark.parametrize("name", PROXY)
def test_uncertain_proxies(name):
    gradients = check(name, IntrospectiveMetric(), "mixed", {"proxy_uncertainty": True})
    assert gradients[3].abs().max() > 1e-4


@pytest.mark.parametrize("kind", BATCHES)
def test_sampled_negatives(kind):
    s, u, sets, label_sets, _ = batch(kind)
    d = IntrospectiveMetric().distances(Embeddings(s, u))
    anchors, negatives = distance_weighted(d, label_sets.matches(), DIM, seed=7)
    for i in range(len(sets)):
        reachable = [j for j in loops.negatives(i, sets) if d[i, j] <= 1.4]
        drawn = negatives[anchors == i].tolist()
        assert set(drawn) <= set(reachable)
        assert len(drawn) == (len(loops.positives(i, sets)) if reachable else 0)


@pytest.mark.parametrize("kind", BATCHES)
def test_matches(kind):
    _, _, sets, label_sets, classes = batch(kind)
    assert label_sets.matches().tolist() == [[bool(a & b) for b in sets] for a in sets]
    assert label_sets.in_classes(classes).tolist() == [[c in a for c in range(classes)] for a in sets]


@pytest.mark.parametrize("rule", ["off", "similar"])
@pytest.mark.parametrize("name", LOSSES)
def test_sets_of_one_label_are_plain_labels(name, rule):
    s, u, _, _, classes = batch("mixed")
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4])
    e = Embeddings(s[:12], u[:12])
    loss = build(name, IntrospectiveMetric(rule=rule), classes)
    plain = loss(e, labels, seed=7)
    assert plain > 0
    padded = LabelSets.cat([LabelSets.of([[0, 1, 2, 3]]), LabelSets(labels)])[1:]
    for sets in (LabelSets.of([[a] for a in labels.tolist()]), LabelSets.mixed(labels, labels), padded):
        assert torch.equal(loss(e, sets, seed=7), plain)


FORMS = [("similar", "distance"), ("similar", "cosine"), ("dissimilar", "cosine"), ("strict", "distance")]
METRICS = [
    *(("off", form, 5.0, 0.0) for form in ("distance", "cosine")),
    *((*rule, tau, gamma) for rule in FORMS for tau, gamma in [(5.0, 0.0), (2.0, 0.7)]),
    ("release", "cosine", 5.0, 4.0),
]


@pytest.mark.parametrize("against", ["itself", "uncertain", "certain"])
@pytest.mark.parametrize(("rule", "form", "tau", "gamma"), METRICS)
def test_pair_matrix(rule, form, tau, gamma, against):
    metric = IntrospectiveMetric(tau, gamma, rule)
    s, u, *_ = batch("mixed")
    e, inputs, keep = Embeddings(s, u), [s, u], ~torch.eye(len(s), dtype=torch.bool)
    t = v = other = None
    if against != "itself":
        t, v = vectors(7, 1.3, seed=8).requires_grad_(), vectors(7, 0.3, seed=9).requires_grad_()
        other = Embeddings(t, v) if against == "uncertain" else Embeddings.certain(t)
        inputs, keep = [s, u, t, v], torch.ones(len(s), len(t), dtype=torch.bool)
    matrix = metric.distances(e, other) if form == "distance" else metric.cosines(e, other)
    looped = looped_pairs(metric, form, s, u, t, v if against == "uncertain" else None)
    expected = torch.stack([value for row in looped for value in row if value is not None])
    weight = torch.linspace(-1.0, 2.0, len(expected), dtype=torch.float64)  # no symmetry, no cancelling
    torch.testing.assert_close(matrix[keep], expected, atol=1e-12, rtol=1e-12)
    assert_same(matrix[keep] * weight, expected * weight, inputs)
    if rule == "strict":
        assert 0 < (matrix[keep] == 0).sum() < len(expected)

"""PADS: draws by the histogram, the policy's loss by loops, a bandit that it learns, and validation images left out."""

import pytest
import torch
from method_batches import assert_same, batch_of, method_of
from sklearn.metrics import normalized_mutual_info_score

from idml import Embeddings, IntrospectiveMetric, LabelSets
from idml.labels import pair_masks
from idml.losses.margin_dw import margin_of_anchors
from idml.methods.clusters import cluster_images
from idml.methods.pads import BINS, STATE, policy_loss, validation_figures
from idml.mining import histogram_bins, histogram_negatives

LABELS = torch.arange(48) % 6


def pads(**options):
    return method_of("pads", loss="margin_dw", classes=6, dim=6, labels=LABELS, **options)


@pytest.mark.parametrize("whole", [False, True])
def test_draws_follow_the_histogram(whole):
    g = torch.Generator().manual_seed(0)
    labels, x = torch.arange(12) % 3, torch.randn(12, 3, generator=g)
    distances, matches = IntrospectiveMetric(rule="off").distances(x), LabelSets(labels).matches()
    histogram = torch.rand(BINS, generator=g)
    counts = torch.zeros(12, 12)
    rounds = 400
    for seed in range(rounds):
        anchors, drawn = histogram_negatives(distances, matches, histogram, whole_batch=whole, seed=seed)
        counts.index_put_((anchors, drawn), torch.ones(len(anchors)), accumulate=True)
    assert not counts.diagonal().any()
    chi, free = 0.0, 0
    for i in range(12):
        allowed = [j for j in range(12) if j != i and (whole or labels[j] != labels[i])]
        p = torch.stack([histogram[min(max(int((distances[i, j] - 0.1) / 1.3 * 29), 0), 28)] for j in allowed])
        expected = p / p.sum() * 3 * rounds  # three positives each
        chi += float(((counts[i, allowed] - expected) ** 2 / expected).sum())
        free += len(allowed) - 1
    assert chi < free + 5 * (2 * free) ** 0.5
    assert histogram_bins(torch.tensor([-1.0, 0.1, 1.39, 7.0]), 29, 0.1, 1.4).tolist() == [0, 0, 28, 28]
    assert len(histogram_negatives(distances[:1, :1], matches[:1, :1], histogram)[0]) == 0


@pytest.mark.parametrize("introspective", [False, True])
def test_the_loss_is_the_margin_loss_of_the_drawn_pairs(introspective):
    method = pads(introspective=introspective)
    embeddings, batch = batch_of(12, 6, classes=6)
    found = method.loss(embeddings, batch, torch.arange(12), seed=5)["pairs"]
    d, matches = method.metric_loss.metric.distances(embeddings), batch.labels.matches()
    drawn = histogram_negatives(d, matches, method.histogram, whole_batch=True, seed=5)
    positives = pair_masks(matches)[0].nonzero(as_tuple=True)
    assert_same(found, margin_of_anchors(d, positives, drawn, 0.6, 0.2), embeddings.semantic, embeddings.uncertainty)
    assert int(method.steps) == 1


def test_the_policys_loss_by_a_loop():
    new, old = torch.randn(BINS, 3).log_softmax(1)[:, 0], torch.randn(BINS, 3).log_softmax(1)[:, 0]
    for advantage in (-0.7, 1.3):
        terms = []
        for a, b in zip(new.tolist(), old.tolist(), strict=True):
            ratio = 2.718281828459045 ** (a - b)
            terms.append(min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
        assert float(policy_loss(new, old, torch.tensor(advantage))) == pytest.approx(-sum(terms) / BINS, rel=1e-4)
        assert float(policy_loss(new, new, torch.tensor(advantage))) == pytest.approx(-advantage)


def test_advantage_and_value_of_a_second_decision():
    method = pads()
    first, second = torch.rand(7), torch.rand(7)
    assert float(method.decide(first, seed=0)) == 0
    last, action = method.state.clone(), method.action.clone()
    assert len(last) == STATE == 198
    histogram = method.histogram.clone()
    loss = method.decide(second, seed=1)
    log_old, value = method.policy(last)
    state = torch.cat([torch.zeros(18 * 7), first, second, *[(first + second) / 2] * 4, histogram, torch.zeros(1)])
    torch.testing.assert_close(method.state, state)
    reward = 1.0 if second[0] > first[0] else -1.0
    advantage = (reward + 0.99 * method.policy(state)[1] - value).detach()
    expected = -advantage + 0.5 * (value - second[0]) ** 2  # π_old is π: the ratio is 1
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    assert log_old.shape == (BINS, 3)
    assert int(method.decisions) == 2
    assert not torch.equal(action, method.action)
    assert torch.autograd.grad(loss, method.policy.actions.weight)[0].any()


def test_actions_scale_the_bins():
    method = pads()
    before = method.histogram.clone()
    method.action.fill_(1)
    method.apply_action()
    torch.testing.assert_close(method.histogram, before)
    method.action.fill_(0)
    method.action[8] = 2
    method.apply_action()
    scaled = before * 0.8
    scaled[8] = before[8] * 1.25
    torch.testing.assert_close(method.histogram, scaled.clamp_min(1e-15) / scaled.sum(), rtol=1e-4, atol=1e-12)


def test_a_bandit_raises_the_best_bin():
    method = pads()
    method.histogram.fill_(1 / BINS)
    optimiser = torch.optim.Adam(method.policy.parameters(), lr=0.01)
    for step in range(150):
        share = float(method.histogram[5])
        loss = method.decide(torch.tensor([share, 0, 0, 0, 0, 0, 0]), seed=step)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(method.histogram[5]) > 5 / BINS


def test_validation_figures_by_loops():
    labels = torch.arange(10) % 3
    unit = torch.nn.functional.normalize(torch.randn(10, 4) + 2 * torch.eye(4)[labels])
    found = validation_figures(unit, labels, seed=0)
    order = [sorted((j for j in range(10) if j != i), key=lambda j: -float(unit[i] @ unit[j])) for i in range(10)]
    for place, k in enumerate((1, 2, 4, 8)):
        expected = sum(any(labels[j] == labels[i] for j in order[i][:k]) for i in range(10)) / 10
        assert float(found[place]) == pytest.approx(expected)
    within = [1 - float(unit[i] @ unit[j]) for i in range(10) for j in range(10) if i != j and labels[i] == labels[j]]
    assert float(found[5]) == pytest.approx(sum(within) / len(within), rel=1e-4)
    clusters = cluster_images(unit, 3, seed=0)
    assert float(found[4]) == pytest.approx(normalized_mutual_info_score(labels, clusters))
    assert 0 < float(found[4]) < 1
    between = [1 - float(unit[i] @ unit[j]) for i in range(10) for j in range(10) if labels[i] != labels[j]]
    assert float(found[6]) == pytest.approx(sum(between) / len(between), rel=1e-4)


def test_validation_images_are_left_out_of_training():
    method = pads(validation=0.25)
    chosen = method.validation.nonzero().squeeze(1)
    assert LABELS[chosen].bincount().tolist() == [2] * 6
    seen = torch.cat(method.plan(torch.arange(48), batch_size=8, per_class=2, epoch=0))
    assert not torch.isin(seen, chosen).any()
    points = torch.randn(48, 6)
    method.embed = lambda: (torch.arange(48), Embeddings.certain(points))
    expected = validation_figures(torch.nn.functional.normalize(points[chosen]), LABELS[chosen], 0)
    torch.testing.assert_close(method._validate(), expected)
    assert not pads(policy_steps=0).validation.any()
    few = method_of("pads", loss="margin_dw", classes=6, labels=torch.arange(12) % 6)
    few.embed = lambda: (torch.arange(12), Embeddings.certain(torch.randn(12, 6)))
    with pytest.raises(ValueError, match="needs classes of at least 4 images to validate its policy"):
        few._validate()


def test_another_loss_is_refused():
    with pytest.raises(ValueError, match="method pads draws the negatives of the margin loss, not of contrastive"):
        method_of("pads", loss="contrastive")


def test_a_policy_needs_validation_images():
    with pytest.raises(ValueError, match="rewarded by validation images: validation 0 needs policy_steps 0"):
        pads(validation=0.0)
    assert not pads(validation=0.0, policy_steps=0).validation.any()

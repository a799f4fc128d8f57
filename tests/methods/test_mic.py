"""MIC: halves by class and by cluster, every term by its formula, weights of 0 as plain training, planted styles."""

from dataclasses import replace

import pytest
import torch
from method_batches import assert_same, batch_of, method_of
from sklearn.metrics import normalized_mutual_info_score

from idml import Embeddings, LabelSets

LABELS = torch.arange(48) % 6


def mic(loss="contrastive", **options):
    options = {"clusters": 4, "per_cluster": 2, "cluster_noise": 0.0, **options}
    return method_of("mic", loss=loss, classes=6, dim=8, labels=LABELS, **options)


@pytest.mark.parametrize("introspective", [False, True])
def test_every_term_by_its_formula(introspective):
    method = mic(adversary_weight=0.3, cluster_weight=0.5, introspective=introspective)
    embeddings, batch = batch_of(8, 16, dim=8)
    numbers = torch.arange(8)
    terms = method.loss(embeddings, batch, numbers, seed=0)
    c, a = embeddings.semantic[:, :8], embeddings.semantic[:, 8:]
    pairs = method.metric_loss(Embeddings(c[:4], embeddings.uncertainty[:4]), batch.labels[:4])
    clusters = method.cluster_loss(a[4:], LabelSets(method.kappa[numbers[4:]]))
    inputs = [embeddings.semantic, embeddings.uncertainty]
    assert_same(terms["pairs"], pairs, *inputs)
    assert_same(terms["clusters"], 0.5 * clusters, *inputs)
    total = 0.0
    for target, source in zip(c, a, strict=True):
        g = method.adversary.predict(source / source.norm())
        total = total - 8 * ((target / target.norm() * g / g.norm()) ** 2).sum() / 4
    assert float(terms["adversary"]) == pytest.approx(0.3 * float(total), rel=1e-4)
    found, expected = (torch.autograd.grad(x, inputs[0], retain_graph=True)[0] for x in (terms["adversary"], total))
    torch.testing.assert_close(found, -0.3 * expected, rtol=1e-4, atol=1e-6)  # the embeddings work against g
    assert method.cluster_loss.metric.rule == "off"


def test_mixtures_of_the_first_half_join_the_classes():
    method = mic(adversary_weight=0.3)
    images, labels = torch.rand(8, 3, 4, 4), torch.arange(8) % 4
    method.task = replace(method.task, ambiguity=("mixup",))
    batch = method.add_images(images, labels, seed=0, epoch=0, step=0)
    assert len(batch.images) == 12 == 8 + method.count_added(method.options, ("mixup",), 8)
    assert torch.equal(batch.images[:8], images)
    for i in range(4):
        first, second = labels[i], next(j for j in batch.labels.ids[8 + i].tolist() if j != labels[i])
        lam, other = batch.lam, labels[:4].tolist().index(second)
        torch.testing.assert_close(batch.images[8 + i], lam * images[i] + (1 - lam) * images[other])
        assert int(first) in batch.labels.ids[8 + i].tolist()
    embeddings, _ = batch_of(12, 16, dim=8)
    terms = method.loss(embeddings, batch, torch.arange(8), seed=0)
    rows = [0, 1, 2, 3, 8, 9, 10, 11]
    part = Embeddings(embeddings.semantic[rows, :8], embeddings.uncertainty[rows])
    assert_same(terms["pairs"], method.metric_loss(part, batch.labels[rows]), embeddings.semantic)
    clustered = method.cluster_loss(embeddings.semantic[4:8, 8:], LabelSets(method.kappa[torch.arange(4, 8)]))
    assert_same(terms["clusters"], 0.8 * clustered, embeddings.semantic)


def test_without_clusters_and_adversary_the_first_half_is_plain_training():
    method, plain = mic(cluster_weight=0.0, adversary_weight=0.0), method_of("plain", loss="contrastive", dim=8)
    embeddings, batch = batch_of(8, 16, dim=8)
    found = method.loss(embeddings, batch, torch.arange(8), seed=0)["pairs"]
    half = Embeddings(embeddings.semantic[:4, :8], embeddings.uncertainty[:4])
    assert torch.equal(found, plain.metric_loss(half, batch.labels[:4]))


def test_halves_of_a_batch():
    method = mic()
    method.kappa.copy_(torch.arange(48) // 12)
    plan = method.plan(torch.arange(48), batch_size=8, per_class=2, epoch=0)
    for batch in plan:
        assert sorted(LABELS[batch[:4]].bincount().tolist())[-2:] == [2, 2]
        assert sorted(method.kappa[batch[4:]].bincount().tolist())[-2:] == [2, 2]
    with pytest.raises(ValueError, match="batch_size 6 / 2 must be a multiple of per_class 2 and of per_cluster 2"):
        method.plan(torch.arange(48), batch_size=6, per_class=2, epoch=0)
    method.kappa.zero_()
    with pytest.raises(ValueError, match="the clusters of the images do not fill half a batch"):
        method.plan(torch.arange(48), batch_size=8, per_class=2, epoch=0)


def test_first_clusters_are_styles_and_later_ones_those_of_the_second_head():
    method = mic()
    styles = (torch.arange(48) // 6) % 4
    directions = torch.linalg.qr(torch.randn(8, 8))[0]
    s = 10 * torch.randn(6, 8)[LABELS] + 3 * directions[styles] + 0.1 * torch.randn(48, 8)
    other = (torch.arange(48) * 7) % 4
    a = 5 * directions[other] + 0.1 * torch.randn(48, 8)
    outputs = Embeddings(torch.cat([s, a], dim=1), torch.zeros(48, 8))
    method.start_epoch(0, lambda: (torch.arange(48), outputs))
    assert normalized_mutual_info_score(styles, method.kappa) > 0.9
    method.start_epoch(4, lambda: (torch.arange(48), outputs))
    assert normalized_mutual_info_score(other, method.kappa) > 0.99
    method.start_epoch(5, lambda: pytest.fail("clustered too early"))


def test_noise_gives_some_images_the_cluster_of_another():
    method = mic(cluster_noise=0.5)
    kappa = torch.arange(4000) % 4
    noisy = method._noisy(kappa, seed=1)
    assert float((noisy != kappa).double().mean()) == pytest.approx(0.5 * 0.75, abs=0.05)
    assert torch.equal(noisy, method._noisy(kappa, seed=1))


@pytest.mark.parametrize("share", [3.0, 1.01, -0.1])
def test_the_noise_is_a_share(share):
    with pytest.raises(ValueError, match="cluster_noise must be"):
        mic(cluster_noise=share)
    assert mic(cluster_noise=1.0).options.cluster_noise == 1

"""DiVA: DaNCE against cross-entropy, queue and moving average against plain ones, triplets, and each task's term."""

from collections import deque
from dataclasses import replace

import pytest
import torch
from method_batches import assert_same, batch_of, method_of
from torch.nn.functional import cross_entropy, normalize

from idml import Embeddings, IntrospectiveMetric, LabelSets
from idml.data.sampling import random_stream
from idml.losses.margin_dw import margin_of_pairs
from idml.methods.diva import intra_class_triplets, noise_contrast, queue_weights, second_view
from idml.mining import log_inverse_density
from idml.model import build_model


def unit(n, d=5, seed=0):
    return normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def test_dance_with_weights_of_one_is_infonce_and_with_others_a_loop():
    q, k, queue = unit(4).requires_grad_(), unit(4, seed=1), unit(7, seed=2)
    scores = torch.cat([(q * k).sum(dim=1, keepdim=True), q @ queue.T], dim=1) / 0.1
    expected = cross_entropy(scores, torch.zeros(4, dtype=torch.long))
    found = noise_contrast(q, k, queue, 0.1, torch.ones(4, 7, dtype=torch.float64))
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(x, q, retain_graph=True) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)
    w = torch.rand(4, 7, dtype=torch.float64)
    total = 0.0
    for i in range(4):
        own = torch.exp(q[i] @ k[i] / 0.1)
        total = total - torch.log(own / (own + sum(torch.exp(w[i, j] * (q[i] @ queue[j]) / 0.1) for j in range(7)))) / 4
    torch.testing.assert_close(noise_contrast(q, k, queue, 0.1, w), total)
    assert float(noise_contrast(q, k, queue[:0], 0.1, w[:, :0])) == 0


def test_weights_are_the_inverse_density_over_the_queue():
    q, queue = unit(3), unit(9, seed=3)
    found = queue_weights(q, queue)
    for i in range(3):
        d = [float((q[i] - row).norm()) for row in queue]
        p = [0.0 if x > 1.4 else float(log_inverse_density(torch.tensor(max(x, 0.5)), 5).exp()) for x in d]
        torch.testing.assert_close(found[i], torch.tensor(p, dtype=torch.float64) / sum(p), rtol=1e-4, atol=1e-6)
    assert bool((found == 0).any())


@pytest.fixture
def attached():
    method = method_of("diva", loss="contrastive", dim=8, queue=10, temperature=1.0)
    model = build_model("conv4", embedding_dim=8, image_size=16, **method.model_options(method.options)).eval()
    method.attach(model)
    return method, model


def test_the_queue_is_a_deque_and_the_keys_follow_by_a_moving_average(attached):
    method, model = attached
    expected, weights = deque(maxlen=10), []
    start = None
    for step in range(5):
        with torch.no_grad():
            model.semantic.linear.weight.add_(0.1 * torch.randn(8, 256))
        weights.append(model.semantic.linear.weight.detach().clone())
        views = torch.rand(4, 3, 16, 16)
        method._sample_loss(unit(4, 2, seed=step).float(), views)
        start = weights[0] if start is None else 0.9 * start + 0.1 * weights[-1]
        torch.testing.assert_close(method.key_head.linear.weight, start)
        expected.extend(method._keys(views))
    assert int(method.filled) == 10
    found = {tuple(row.tolist()) for row in method.keys_of_queue}
    assert found == {tuple(row.tolist()) for row in expected}
    closed = 0.9**4 * weights[0] + 0.1 * sum(0.9 ** (4 - t) * weights[t] for t in range(1, 5))
    torch.testing.assert_close(method.key_head.linear.weight, closed)
    assert not any(p.requires_grad for p in method.key_head.parameters())


def test_triplets_lie_within_a_class():
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    anchors, first, second = intra_class_triplets(LabelSets(labels), random_stream("t"))
    assert anchors.tolist() == [0, 1, 2, 5, 6, 7, 8]
    for a, p, n in zip(anchors.tolist(), first.tolist(), second.tolist(), strict=True):
        assert len({a, p, n}) == 3
        assert labels[a] == labels[p] == labels[n]
    assert len(intra_class_triplets(LabelSets(torch.arange(3)), random_stream("t"))[0]) == 0


def test_each_task_has_its_slice(attached):
    method, model = attached
    images, labels = torch.rand(12, 3, 16, 16), torch.arange(12) % 4
    batch = method.add_images(images, labels, seed=0, epoch=0, step=0)
    outputs = model.training_outputs(batch.images)
    s = outputs.semantic.detach().requires_grad_()
    terms = method.loss(Embeddings(s, outputs.uncertainty), batch, torch.arange(12), seed=3)
    for k, name in enumerate(("pairs", "shared", "intra")):
        (gradient,) = torch.autograd.grad(terms[name], s, retain_graph=True)
        assert gradient[:12, 2 * k : 2 * k + 2].any()
        gradient[:, 2 * k : 2 * k + 2] = 0
        assert not gradient.any()
    plain = IntrospectiveMetric(rule="off")
    assert_same(terms["pairs"], method.metric_loss(Embeddings(s[:12, :2], outputs.uncertainty[:12]), labels), s)
    generator = random_stream("tasks", 3)
    order = torch.randperm(12, generator=generator)
    assert_same(terms["shared"], 0.3 * method.shared_loss(s[:12, 2:4], labels[order]), s)
    d = plain.distances(s[:12, 4:6])
    a, p, n = intra_class_triplets(LabelSets(labels), generator)
    assert_same(terms["intra"], 0.3 * margin_of_pairs(d[a, p], d[a, n], beta=1.2, margin=0.2), s)
    unit_s = normalize(s[:12].unflatten(1, (4, 2)), dim=2)
    adversary = sum(part(unit_s[:, 0], unit_s[:, t + 1]) for t, part in enumerate(method.adversaries))
    assert_same(terms["adversary"], 0.09 * adversary, s)
    again = method.loss(Embeddings(s, outputs.uncertainty), batch, torch.arange(12), seed=3)
    assert float(terms["sample"]) == 0  # the queue was empty
    assert float(again["sample"]) > 0


def test_a_slice_that_has_nothing_to_learn_from_is_told():
    rows = [{"loss_intra": 0.0}, {"loss_intra": 0.0}]
    assert "per_class must be at least 3" in method_of("diva", dim=8).warn(rows)[0]
    assert method_of("diva", dim=8).warn([*rows, {"loss_intra": 0.1}]) == []
    assert method_of("diva", dim=8, task_weight=0.0).warn(rows) == []


def test_mixtures_get_second_views_too():
    method = method_of("diva", loss="contrastive", dim=8)
    images, labels = torch.rand(6, 3, 8, 8), torch.arange(6) % 3
    one = method.add_images(images, labels, seed=0, epoch=0, step=0)
    method.task = replace(method.task, ambiguity=("mixup",))
    batch = method.add_images(images, labels, seed=0, epoch=0, step=0)
    assert (len(one.images), len(batch.images)) == (12, 24)
    assert [method.count_added(method.options, kinds, 6) for kinds in ((), ("mixup",))] == [6, 18]
    assert batch.mixed.tolist() == ([False] * 6 + [True] * 6) * 2
    assert torch.equal(batch.labels.ids[:12], batch.labels.ids[12:])
    assert method.added_key() == ("second view", "mixup")
    embeddings, _ = batch_of(24, 8)
    method._sample_loss = lambda queries, views: queries.sum() * 0 + len(views)
    terms = method.loss(embeddings, batch, torch.arange(6), seed=0)
    seen = Embeddings(embeddings.semantic[:12, :2], embeddings.uncertainty[:12])
    assert_same(terms["pairs"], method.metric_loss(seen, batch.labels[:12]), embeddings.semantic)
    assert float(terms["sample"]) == pytest.approx(0.3 * 12)


def test_without_the_further_tasks_it_is_the_loss_of_one_slice():
    method = method_of("diva", loss="contrastive", dim=8, task_weight=0.0, diva_adversary=0.0)
    method._sample_loss = lambda queries, views: queries.sum() * 0
    embeddings, batch = batch_of(24, 8)  # 12 images and a second view of each
    terms = method.loss(embeddings, batch, torch.arange(12), seed=0)
    total = sum(value for name, value in terms.items() if name != "u")
    plain = method_of("plain", loss="contrastive", dim=2)
    seen = Embeddings(embeddings.semantic[:12, :2], embeddings.uncertainty[:12])
    expected = plain.metric_loss(seen, batch.labels[:12])
    torch.testing.assert_close(total, expected)


def test_second_views_are_crops_of_the_first():
    images = torch.arange(16.0).repeat(3, 16, 1)[None].repeat(50, 1, 1, 1) / 15
    views = second_view(images, random_stream("views"))
    assert views.shape == images.shape
    slopes = (views[:, 0, 8, 15] - views[:, 0, 8, 0]).tolist()
    assert all(0.7 <= abs(slope) <= 1.01 for slope in slopes)
    assert 10 < sum(slope < 0 for slope in slopes) < 40

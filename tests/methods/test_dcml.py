"""DCML: composites by loops, the start, clear choices by F.cross_entropy, subtasks, one composite as plain training."""

import math

import torch
from method_batches import assert_same, batch_of, gradients_of, method_of
from torch.nn.functional import cross_entropy, normalize

from idml import Embeddings, LabelSets
from idml.data.sampling import random_stream
from idml.evaluation import evaluate_retrieval
from idml.methods.dcml import reinforcement, subtask_rows
from idml.model import build_model
from idml.model.heads import ComposedHead
from idml.training.build import start_at_principal_components


def composed_head():
    """A head whose compositors are not at their start, but depend on the features."""
    head = ComposedHead(5, 6, 3)
    torch.nn.init.normal_(head.compositors.weight)
    torch.nn.init.normal_(head.compositors.bias)
    return head


def test_the_head_by_loops():
    torch.manual_seed(0)
    head, features = composed_head().double(), torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    rows = []
    for h in features:
        e = [head.linear.weight[2 * k : 2 * k + 2] @ h + head.linear.bias[2 * k : 2 * k + 2] for k in range(3)]
        scores = head.compositors(torch.cat(e).detach()).view(3, 3)
        shares = scores.exp() / scores.exp().sum(dim=1, keepdim=True)
        rows.append(torch.cat([*(sum(shares[m, k] * e[k] for k in range(3)) for m in range(3)), scores.flatten()]))
    expected, found = torch.stack(rows), head.outputs(features)
    torch.testing.assert_close(found, expected)
    inputs = [features, *head.parameters()]
    weight = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), inputs) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)
    composites = found[:, :6].view(4, 3, 2)
    torch.testing.assert_close(head(features), normalize(composites, dim=2).flatten(1))
    with torch.no_grad():
        head.compositors.weight.zero_()
        head.compositors.bias.copy_(torch.tensor([1e4, 0, 0, 0, 0, 1e4, 0, 1e4, 0]))  # one-hot choices 0, 2, 1
    parts = head.linear(features).view(4, 3, 2)
    torch.testing.assert_close(head(features), normalize(parts[:, [0, 2, 1]], dim=2).flatten(1))


def test_clear_choices():
    scores = torch.randn(5, 3, 4, requires_grad=True)
    expected = sum(cross_entropy(scores[:, m], scores[:, m].argmax(dim=1)) for m in range(3))
    torch.testing.assert_close(reinforcement(scores), expected)
    assert float(reinforcement(torch.randn(5, 1, 1))) == 0
    head, features = composed_head(), torch.randn(4, 5, requires_grad=True)
    term = reinforcement(head.outputs(features)[:, 6:].view(4, 3, 3))
    gradients = torch.autograd.grad(term, [features, head.linear.weight, head.compositors.weight])
    assert [bool(gradient.any()) for gradient in gradients] == [False, False, True]


def test_composites_start_as_their_own_sub_embeddings_at_the_quality_of_the_features():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40).repeat_interleave(10)
    quality = {}
    for name, options in (("plain", {}), ("composed", {"head": "composed", "slices": ("a", "b", "c", "d")})):
        model = build_model("conv4", embedding_dim=32, image_size=16, **options).eval()
        generator.manual_seed(0)
        features = 0.5 * torch.randn(40, 256, generator=generator)[labels] + torch.randn(400, 256, generator=generator)
        start_at_principal_components(model, features)
        quality[name] = evaluate_retrieval(model.embed_features(features), labels)["map@r"]
    assert quality["composed"] > 0.85 * quality["plain"] > 0.6  # random compositors: 0.3 of it
    scores = model.outputs(features).semantic[:, 32:].unflatten(1, (4, 4))
    own = scores.softmax(dim=2).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(own, torch.full_like(own, math.e**3 / (math.e**3 + 3)))


def test_the_usage_of_sub_embeddings_is_measured_and_a_collapse_is_said():
    method = method_of("dcml", dim=6, composites=3)
    embeddings, batch = batch_of(4, 6 + 9, dim=6)
    scores = torch.zeros(4, 3, 3)
    scores[:, 0, 2] = scores[:, 1, 2] = scores[:3, 2, 0] = scores[3:, 2, 2] = 1.0
    used = Embeddings(torch.cat([embeddings.semantic[:, :6], scores.flatten(1)], dim=1), embeddings.uncertainty)
    row = method.measure(used, batch)
    assert row == {"choice_1": 0.25, "choice_2": 0.0, "choice_3": 0.75, "largest_choice": 0.75}
    alike = {**row, "largest_choice": 1.0}
    even = dict.fromkeys(row, 1 / 3)
    assert method.warn([even] * 8) == method.warn([]) == method.warn([alike] * 6 + [even] * 2) == []
    assert "no compositor chooses 1 of the 3 sub-embeddings" in method.warn([even] * 6 + [row] * 2)[0]
    assert [
        "all compositors choose the same sub-embedding" in told for told in method.warn([even] * 6 + [alike] * 2)
    ] == [True]
    assert method_of("dcml", composites=1).warn([alike]) == []


def test_each_composite_has_a_random_half_of_the_classes():
    method = method_of("dcml", loss="contrastive", classes=6, dim=6, composites=3)
    embeddings, batch = batch_of(12, 6 + 9, classes=6, dim=6)
    terms = method.loss(embeddings, batch, torch.arange(12), seed=4)
    total, halves = 0.0, []
    for m in range(3):
        rows = subtask_rows(batch.labels, 6, random_stream("subtask", 4, m))
        halves.append(tuple(batch.labels.ids[rows, 0].unique().tolist()))
        part = Embeddings(embeddings.semantic[rows, 2 * m : 2 * m + 2], embeddings.uncertainty[rows])
        total = total + method.metric_loss[m](part, batch.labels[rows], seed=4)
    assert all(len(half) == 3 for half in halves)
    assert len(set(halves)) > 1
    assert_same(terms["pairs"], total, embeddings.semantic)
    assert len(subtask_rows(LabelSets(torch.zeros(4, dtype=torch.long)), 6, random_stream("x"))) == 4


def test_one_composite_is_plain_training():
    method, plain = method_of("dcml", composites=1), method_of("plain")
    embeddings, batch = batch_of(12, 7, dim=6)
    whole = Embeddings(embeddings.semantic[:, :6], embeddings.uncertainty)
    found, expected = gradients_of(method, embeddings, batch), gradients_of(plain, whole, batch)
    torch.testing.assert_close(found[0][:, :6], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    assert not found[0][:, 6:].any()

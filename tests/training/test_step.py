"""One step: how mixtures are labelled, and what is refused."""

import pytest
import torch

from idml.data.augment import Batch, with_mixtures
from idml.data.sampling import random_stream
from idml.labels import LabelSets
from idml.training.build import build
from idml.training.config import from_dict
from idml.training.distributed import Processes
from idml.training.step import check_gradients, compute_gradients

LABELS = torch.arange(16) % 4


def one_step(loss, method, lam, labels):
    """The loss of a step, its embeddings, the batch and the loss itself."""
    torch.manual_seed(0)
    config = from_dict({
        "data": "glyphs", "out": "-", "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8,
        "loss": loss, "method": method, "labels": labels,
    })  # fmt: skip
    model, trained = build(config, LABELS, 4)
    model.trunk.eval()
    images = torch.rand(16, 3, 16, 16, generator=random_stream("images"))
    batch = with_mixtures(images, LABELS, "mixup", random_stream("mixture"), lam=lam)
    terms, embeddings = compute_gradients(batch, torch.arange(16), model, trained, config, Processes(), seed=3)
    return terms["pairs"], embeddings, batch, trained.metric_loss.requires_grad_(False)


@pytest.mark.parametrize("method", ["mixup", "idml", "pel-mixup"])
@pytest.mark.parametrize("loss", ["proxy_anchor", "multi_similarity"])
def test_weighted_labels_are_the_weighted_losses_of_the_parents(loss, method):
    value, embeddings, batch, metric_loss = one_step(loss, method, 0.3, "weighted")
    first = torch.cat([LABELS, batch.labels.ids[16:, 0]])
    second = torch.cat([LABELS, batch.labels.ids[16:, 1]])
    assert not torch.equal(first, second)
    parents = [float(metric_loss(embeddings, LabelSets(labels), seed=3)) for labels in (first, second)]
    assert value == pytest.approx(0.3 * parents[0] + 0.7 * parents[1], rel=1e-6)
    assert value != pytest.approx(0.7 * parents[0] + 0.3 * parents[1], rel=1e-4)
    assert value != pytest.approx(one_step(loss, method, 0.3, "sets")[0], rel=1e-4)


@pytest.mark.parametrize("method", ["mixup", "idml", "pel-mixup"])
def test_sets_are_the_loss_over_the_sets_of_both_parents(method):
    value, embeddings, batch, metric_loss = one_step("proxy_anchor", method, 0.3, "sets")
    sets = [[int(a)] if b < 0 else [int(a), int(b)] for a, b in batch.labels.ids]
    assert value == pytest.approx(float(metric_loss(embeddings, LabelSets.of(sets), seed=3)), rel=1e-6)


def test_weighted_labels_with_one_parent_are_plain_labels():
    value, embeddings, batch, metric_loss = one_step("proxy_anchor", "idml", 1.0, "weighted")
    assert value == pytest.approx(float(metric_loss(embeddings, batch.labels.ids[:, 0])), rel=1e-6)


def test_a_loss_that_is_not_finite_is_refused():
    config = from_dict({
        "data": "glyphs", "out": "-", "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8,
    })  # fmt: skip
    model, method = build(config, LABELS, 4)
    method.loss = lambda embeddings, batch, numbers, seed: {"pairs": embeddings.semantic.sum() * torch.nan}
    batch = Batch(torch.rand(16, 3, 16, 16), LabelSets(LABELS), torch.zeros(16, dtype=torch.bool))
    with pytest.raises(ValueError, match="the loss is nan"):
        compute_gradients(batch, torch.arange(16), model, method, config, Processes(), seed=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_gradients_that_are_not_finite_are_refused(bad):
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]  # the first has no gradient at all
    for parameter in parameters[1:]:
        parameter.grad = torch.tensor([3e38, 3e38, 3e38])  # finite, though their sum is not
    check_gradients(parameters)
    parameters[2].grad[1] = bad
    with pytest.raises(ValueError, match="the gradients hold NaN or infinity"):
        check_gradients(parameters)

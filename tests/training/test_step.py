"""One step: how mixtures are labelled, and what is refused."""

import pytest
import torch

from idml.compat import cpu_computes_bfloat16
from idml.data.augment import Batch, with_mixtures
from idml.data.sampling import random_stream
from idml.labels import LabelSets
from idml.training.build import build
from idml.training.config import from_dict
from idml.training.distributed import Processes
from idml.training.step import check_gradients, compute_gradients

LABELS = torch.arange(16) % 4


def one_step(loss, method, **options):
    """The terms of a step, its embeddings, the pixels' own account of the parents, and the loss itself."""
    torch.manual_seed(0)
    config = from_dict({
        "data": "glyphs", "out": "-", "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8,
        "loss": loss, "method": method, **options,
    })  # fmt: skip
    model, trained = build(config, LABELS, 4)
    model.trunk.eval()
    images = torch.rand(16, 3, 16, 16, generator=random_stream("images"))
    batch = with_mixtures(images, LABELS, "mixup", random_stream("mixture"), lam=0.3)
    terms, embeddings = compute_gradients(batch, torch.arange(16), model, trained, config, Processes(), seed=3)
    mixed = (
        batch.images[16:, None] - 0.3 * images[:, None]
    )  # 0.7 of the second parent is left of mixture i, if i is the first
    second = (mixed - 0.7 * images[None]).abs().amax(dim=(2, 3, 4)).argmin(dim=1)
    return terms, embeddings, LABELS[second], trained.metric_loss.requires_grad_(False)


@pytest.mark.parametrize("method", ["mixup", "idml", "pel-mixup"])
@pytest.mark.parametrize("loss", ["proxy_anchor", "multi_similarity"])
def test_the_label_of_the_parent_with_the_share_lambda_has_the_weight_lambda(loss, method):
    terms, embeddings, second, metric_loss = one_step(loss, method, labels="weighted")
    assert not torch.equal(LABELS, second)
    parents = [float(metric_loss(embeddings[16:], LabelSets(labels), seed=3)) for labels in (LABELS, second)]
    assert parents[0] != pytest.approx(parents[1], rel=1e-4)
    assert terms["mixtures"] == pytest.approx(0.3 * parents[0] + 0.7 * parents[1], rel=1e-6)
    assert terms["pairs"] == pytest.approx(float(metric_loss(embeddings[:16], LabelSets(LABELS), seed=3)), rel=1e-5)


@pytest.mark.parametrize("method", ["mixup", "idml", "pel-mixup"])
def test_a_mixture_has_the_set_of_both_labels(method):
    terms, embeddings, second, metric_loss = one_step("proxy_anchor", method, labels="sets")
    sets = [[a, b] for a, b in zip(LABELS.tolist(), second.tolist(), strict=True)]
    assert terms["mixtures"] == pytest.approx(float(metric_loss(embeddings[16:], LabelSets.of(sets), seed=3)), rel=1e-5)


def test_the_weight_of_the_mixtures_reaches_the_loss():
    whole, half = (one_step("proxy_anchor", "idml", mixture_weight=w)[0] for w in (1.0, 0.5))
    assert half["mixtures"] == pytest.approx(0.5 * whole["mixtures"], rel=1e-6)
    assert half["pairs"] == whole["pairs"]


def test_bfloat16_gives_the_gradients_of_float32_but_for_rounding():
    """The network computes in bfloat16 (8 bits), s, u, the metric and the loss in float32."""
    if not (torch.cuda.is_available() or cpu_computes_bfloat16()):
        return  # tests/training/test_processes.py holds that it is refused there
    found = {}
    for precision in ("float32", "bfloat16"):
        torch.manual_seed(0)
        config = from_dict({
            "data": "glyphs", "out": "-", "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8,
            "loss": "proxy_anchor", "method": "idml", "labels": "sets", "precision": precision,
        })  # fmt: skip
        model, method = build(config, LABELS, 4)
        model.trunk.eval()
        images = torch.rand(16, 3, 16, 16, generator=random_stream("images"))
        batch = with_mixtures(images, LABELS, "mixup", random_stream("mixture"), lam=0.3)
        terms, embeddings = compute_gradients(batch, torch.arange(16), model, method, config, Processes(), seed=3)
        assert embeddings.semantic.dtype == embeddings.uncertainty.dtype == torch.float32
        parameters = dict(model.named_parameters())
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in parameters.values() if p.grad is not None)
        found[precision] = terms, {name: p.grad.flatten() for name, p in parameters.items() if p.grad is not None}
    (exact, gradients), (rounded, others) = found["float32"], found["bfloat16"]
    assert rounded != exact  # it was computed in bfloat16
    assert rounded == pytest.approx(exact, rel=1e-2)
    for name, gradient in gradients.items():
        assert float(torch.cosine_similarity(gradient, others[name], dim=0)) > 0.97, name
        assert float(others[name].norm()) == pytest.approx(float(gradient.norm()), rel=0.05), name


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

"""One step: micro-batches keep the pair matrix right, weighted labels are what they say."""

import pytest
import torch

from idml.data.augment import with_mixtures
from idml.data.sampling import random_stream
from idml.labels import LabelSets
from idml.losses import build_loss
from idml.metric import IntrospectiveMetric
from idml.model import build_model
from idml.methods.pel import ProbabilisticLoss
from idml.training.config import TrainConfig
from idml.training.distributed import Processes
from idml.training.step import learn, require_finite_gradients


def one_step(loss="multi_similarity", method="idml", lam=None, **changes):
    torch.manual_seed(0)
    metric = IntrospectiveMetric(rule="similar" if method == "idml" else "off")
    criterion = build_loss(loss, metric=metric, num_classes=4, embedding_dim=8)
    kind = "introspective"
    if method == "pel-mixup":
        criterion, kind = ProbabilisticLoss(criterion), "gaussian"
    model = build_model(image_size=32, embedding_dim=8, uncertainty=kind)
    model.trunk.eval()
    model.heads(torch.ones(2, model.trunk.width))  # the uncertainty head starts at the scale of its first batch
    images = torch.rand(16, 3, 32, 32, generator=random_stream("images"))
    batch = with_mixtures(images, torch.arange(16) % 4, "mixup", random_stream("mixture"), lam=lam)
    config = TrainConfig(data="glyphs", out="-", loss=loss, method=method, **changes)
    value, embeddings = learn(batch, model, criterion, config, Processes(), seed=3)
    gradients = {k: p.grad for m in (model, criterion) for k, p in m.named_parameters() if p.grad is not None}
    criterion.requires_grad_(False)
    return value, gradients, embeddings, batch, criterion


@pytest.mark.parametrize("method", ["idml", "mixup", "pel-mixup"])
@pytest.mark.parametrize("loss", ["multi_similarity", "proxy_anchor"])
def test_parts_give_the_gradients_of_the_whole_batch(loss, method):
    whole, expected, *_ = one_step(loss, method)
    for size in (5, 16):
        value, gradients, *_ = one_step(loss, method, micro_batch=size)
        assert value == pytest.approx(whole, rel=1e-5)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(gradient, expected[name], rtol=2e-3, atol=2e-4 * scale + 1e-9)


def test_weighted_labels_are_the_weighted_losses_of_the_parents():
    value, _, embeddings, batch, loss = one_step("proxy_anchor", lam=0.3, labels="weighted")
    first = torch.cat([batch.labels.ids[:16, 0], batch.labels.ids[16:, 0]])
    second = torch.cat([batch.labels.ids[:16, 0], batch.labels.ids[16:, 1]])
    expected = 0.3 * loss(embeddings, LabelSets(first)) + 0.7 * loss(embeddings, LabelSets(second))
    assert value == pytest.approx(float(expected), rel=1e-6)
    sets, *_ = one_step("proxy_anchor", lam=0.3)
    assert value != pytest.approx(sets, rel=1e-3)


def test_weighted_labels_without_mixtures_are_plain_labels():
    from idml.data.augment import Batch

    value, _, embeddings, batch, loss = one_step("proxy_anchor", lam=1.0, labels="weighted")
    assert value == pytest.approx(float(loss(embeddings, batch.labels.ids[:, 0])), rel=1e-6)
    unmixed = Batch(batch.images[:16], batch.labels[:16], batch.mixed[:16])
    assert unmixed.lam is None


@pytest.mark.parametrize(("lam", "parents"), [(0.9, [0]), (0.75, [0, 1]), (0.5, [0, 1]), (0.25, [0, 1]), (0.1, [1])])
@pytest.mark.parametrize("loss", ["proxy_anchor", "multi_similarity"])
def test_main_labels_leave_out_a_parent_with_less_than_a_quarter(loss, lam, parents):
    value, _, embeddings, batch, criterion = one_step(loss, lam=lam, labels="main")
    sets = [[int(row[0])] if row[1] < 0 else [int(row[i]) for i in parents] for row in batch.labels.ids]
    expected = float(criterion(embeddings, LabelSets.of(sets), seed=3))
    assert value == pytest.approx(expected, rel=1e-6)
    both = float(criterion(embeddings, batch.labels, seed=3))
    assert (value == pytest.approx(both, rel=1e-6)) == (len(parents) == 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_gradients_that_are_no_numbers_are_refused(bad):
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]  # the first has no gradient at all
    for parameter in parameters[1:]:
        parameter.grad = torch.tensor([3e38, 3e38, 3e38])  # numbers, though their sum is none
    require_finite_gradients(parameters)
    parameters[2].grad[1] = bad
    with pytest.raises(ValueError, match="the gradients hold NaN or infinity"):
        require_finite_gradients(parameters)

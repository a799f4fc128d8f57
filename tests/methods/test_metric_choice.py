"""The mean weight that methods of both metrics report: over what their loss compares, by loops over the formula."""

import math

import pytest
import torch
from method_batches import batch_of, method_of

from idml.data.augment import Batch
from idml.methods.dac import Dac

ORIGINALS, MIXTURES = 8, 4
GAMMA = 0.3


def looped(s, u, proxies=None):
    """The mean of e^(−(‖u₁ + u₂‖ + γ)/(5α)) over pairs of images, or over images and certain proxies."""
    s = [row / row.norm() for row in s]
    columns = [(t, v, j) for j, (t, v) in enumerate(zip(s, u, strict=True))]
    if proxies is not None:
        columns = [(p / p.norm(), torch.zeros_like(u[0]), None) for p in proxies.detach()]
    weights = []
    for i, (a, b) in enumerate(zip(s, u, strict=True)):
        for t, v, j in columns:
            if i != j:
                weights.append(math.exp(-float((b + v).norm() + GAMMA) / (5 * float((a - t).norm()))))
    return sum(weights) / len(weights)


def measured(name, columns, dim, *, loss, copies=1, **options):
    """The method, s and u of its originals, and the weight that it reports of a batch with mixtures."""
    method = method_of(name, loss=loss, dim=dim, introspective=True, gamma=GAMMA, **options)
    embeddings, _ = batch_of(copies * (ORIGINALS + MIXTURES), columns, dim=dim)
    mixed = torch.tensor(([False] * ORIGINALS + [True] * MIXTURES) * copies)
    batch = Batch(torch.zeros(len(mixed), 1, 1, 1), batch_of(len(mixed), 1)[1].labels, mixed, 0.5)
    originals = embeddings.detach()[:ORIGINALS]
    return method, originals.semantic, originals.uncertainty, lambda: method.measure(embeddings, batch)["weight"]


@pytest.mark.parametrize("loss", ["contrastive", "proxy_anchor"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("abe", {"learners": 2}), ("ranked-lmh", {"stage_heads": 2}), ("dcml", {"composites": 2})],
)
def test_of_slices_it_is_the_mean_over_the_slices(name, options, loss):
    method, s, u, weight = measured(name, 12 if name == "dcml" else 8, 8, loss=loss, **options)
    parts = [(s[:, 4 * k : 4 * k + 4], getattr(method.metric_loss[k], "proxies", None)) for k in range(2)]
    assert weight() == pytest.approx(sum(looped(part, u, proxies) for part, proxies in parts) / 2, rel=1e-4)


@pytest.mark.parametrize("loss", ["contrastive", "proxy_anchor"])
def test_of_groups_it_is_that_of_the_slice_that_was_trained(loss):
    method, s, u, weight = measured("dac", 8, 8, loss=loss, groups=2)
    assert isinstance(method, Dac)
    method.groups.fill_(1)
    embeddings, batch = batch_of(12, 8)
    method.loss(embeddings, batch, torch.arange(12), 0)
    proxies = [getattr(part, "proxies", None) for part in method.metric_loss]
    assert weight() == pytest.approx(looped(s[:, 4:], u, proxies[1]), rel=1e-4)
    method.whole.fill_(True)
    unit = torch.nn.functional.normalize
    together = None if proxies[0] is None else torch.cat([unit(p.detach()) for p in proxies], dim=1)
    assert weight() == pytest.approx(looped(torch.cat([unit(s[:, :4]), unit(s[:, 4:])], dim=1), u, together), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "loss", "columns"),
    [
        ("nir", "proxy_anchor", 8), ("drml", "proxy_anchor", 20), ("mic", "proxy_anchor", 16),
        ("mic", "contrastive", 16), ("diva", "proxy_anchor", 8), ("diva", "contrastive", 8),
        ("diml", "contrastive", 8 * 17), ("pads", "margin_dw", 8),
    ],
)  # fmt: skip
def test_of_one_loss_it_is_over_the_images_that_the_loss_reads(name, loss, columns):
    method, s, u, weight = measured(name, columns, 8, loss=loss, copies=2 if name == "diva" else 1)
    if name == "mic":  # the second half is drawn by cluster
        s, u = s[: ORIGINALS // 2], u[: ORIGINALS // 2]
    width = 2 if name == "diva" else 8
    assert weight() == pytest.approx(looped(s[:, :width], u, getattr(method.metric_loss, "proxies", None)), rel=1e-4)

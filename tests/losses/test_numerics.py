"""Finite losses and gradients where data is ordinary but awkward; NaN is an error that says so."""

import math

import pytest
import torch

from idml import Embeddings, IntrospectiveMetric, LabelSets
from idml.losses import LOSSES, ProxyLoss, build_loss

N, DIM, CLASSES = 12, 6, 4
RULES = {
    name: ("off", "similar", *(("dissimilar", "release") if cls.form == "cosine" else ()))
    for name, cls in LOSSES.items()
}
CASES = [(name, rule) for name, rules in RULES.items() for rule in rules]


def parts(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, DIM, generator=g), 0.3 * torch.randn(N, DIM, generator=g), torch.arange(N) % CLASSES


def loss_of(name, rule):
    return build_loss(name, metric=IntrospectiveMetric(rule=rule), num_classes=CLASSES, embedding_dim=DIM)


def assert_finite(name, rule, s, u, labels, dtype=None):
    s, u = s.clone().requires_grad_(), u.clone().requires_grad_()
    e = Embeddings(s, u) if dtype is None else Embeddings(s.to(dtype), u.to(dtype))
    loss = loss_of(name, rule)
    value = loss(e, labels, seed=0)
    assert value.shape == ()
    assert torch.isfinite(value)
    value.backward()
    grads = [s.grad, u.grad, *(p.grad for p in loss.parameters())]
    for grad in grads:
        assert grad is None or torch.isfinite(grad).all()
    assert s.grad is not None
    return value


def identical_images(s, u, y):
    s[:] = s[0]
    u[:] = u[0]
    return s, u, y


def duplicates_across_classes(s, u, y):
    s[1] = s[0]
    u[1] = -u[0]
    return s, u, y


def zero_vectors(s, u, y):
    s[::3] = 0.0
    u[::2] = 0.0
    return s, u, y


AWKWARD = {
    "identical images": identical_images,
    "the same image in two classes": duplicates_across_classes,
    "zero vectors": zero_vectors,
    "all zero": lambda s, u, y: (s * 0, u * 0, y),
    "one class": lambda s, u, y: (s, u, y * 0),
    "no positive pair": lambda s, u, y: (s[:CLASSES], u[:CLASSES], torch.arange(CLASSES)),
    "one image": lambda s, u, y: (s[:1], u[:1], y[:1]),
    "huge s": lambda s, u, y: (s * 1e30, u, y),
    "tiny s": lambda s, u, y: (s * 1e-30, u, y),
    "huge u": lambda s, u, y: (s, u * 1e30, y),
    "tiny u": lambda s, u, y: (s, u * 1e-30, y),
    "opposed u": lambda s, u, y: (s, torch.cat([u[:6], -u[:6]]), y),
    "one label for all, as sets": lambda s, u, y: (s, u, LabelSets.mixed(y * 0, y)),
}


@pytest.mark.parametrize("case", AWKWARD)
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_awkward_batches_stay_finite(name, rule, case):
    assert_finite(name, rule, *AWKWARD[case](*parts()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_half_precision(name, rule, dtype):
    s, u, y = parts()
    value = assert_finite(name, rule, s, u, y, dtype)
    assert value.dtype == torch.float32
    low = Embeddings(s.to(dtype), u.to(dtype)).to(torch.float32)
    torch.manual_seed(0)
    first = loss_of(name, rule)
    torch.testing.assert_close(first(low, y, seed=0), first(low.to(dtype), y, seed=0))


@pytest.mark.parametrize("name", [n for n, c in LOSSES.items() if not issubclass(c, ProxyLoss)])
def test_nothing_to_compare_is_no_loss(name):
    s, u, _ = parts()
    labels = torch.arange(CLASSES)
    value = assert_finite(name, "similar", s[:1], u[:1], labels[:1])
    assert value == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["semantic", "uncertainty"])
@pytest.mark.parametrize("name", LOSSES)
def test_nan_is_an_error_that_says_so(name, part, bad):
    s, u, y = parts()
    (s if part == "semantic" else u)[7, 2] = bad
    with pytest.raises(ValueError, match=f"{part} embeddings hold NaN or infinity in 1 of {N} rows .first: row 7"):
        loss_of(name, "similar")(Embeddings(s, u), y)


@pytest.mark.parametrize("name", LOSSES)
def test_gradcheck_with_the_metric_on(name):
    s, u, y = parts(1)
    s, u = s.double().requires_grad_(), u.double().requires_grad_()
    labels = LabelSets.mixed(y, y.flip(0))
    torch.manual_seed(0)
    metric = IntrospectiveMetric(gamma=0.2)
    loss = build_loss(name, metric=metric, num_classes=CLASSES, embedding_dim=DIM).double()
    value = loss(Embeddings(s, u), labels, seed=3)
    assert value > 0
    if name in ("circle", "ranked_list", "rankmi"):  # parts are constants for the gradient, not for finite differences
        return
    assert torch.autograd.gradcheck(lambda a, b: loss(Embeddings(a, b), labels, seed=3), (s, u))

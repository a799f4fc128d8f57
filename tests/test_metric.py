import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idml import Embeddings, IntrospectiveMetric
from idml.metric import RULES, alphas, betas, plain_cosines

TAUS = st.floats(0.3, 20.0)
GAMMAS = st.floats(0.0, 5.0)
SEEDS = st.integers(0, 10_000)


def images(seed=0, n=7, d=5, level=0.7, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    s = torch.randn(n, d, generator=g, dtype=dtype) * 3
    u = torch.randn(n, d, generator=g, dtype=dtype) * level
    return Embeddings(s.requires_grad_(), u.requires_grad_())


def grad_of_one_pair(matrix, wrt, i=0, j=1):
    return torch.autograd.grad(matrix[i, j], wrt, retain_graph=True)[0]


@given(SEEDS, TAUS, GAMMAS)
def test_gradient_analysis_of_the_distance(seed, tau, gamma):
    """∂D/∂s = ∂α/∂s·e^(−x)(1 + x), x = (β + γ)/(τα): the paper's H, for every τ and γ."""
    e = images(seed)
    unit = Embeddings(e.unit.detach().requires_grad_(), e.uncertainty)
    x = (betas(unit) + gamma) / (tau * alphas(unit))
    plain = grad_of_one_pair(IntrospectiveMetric(rule="off").distances(unit), unit.semantic)
    ours = grad_of_one_pair(IntrospectiveMetric(tau, gamma).distances(unit), unit.semantic)
    torch.testing.assert_close(ours, plain * (torch.exp(-x) * (1 + x))[0, 1])


@given(SEEDS, TAUS, GAMMAS)
def test_gradient_analysis_of_the_cosine(seed, tau, gamma):
    """∂C'/∂s = ∂C/∂s·e^(−x)(1 + x/2)."""
    e = images(seed)
    x = (betas(e) + gamma) / (tau * alphas(e))
    plain = grad_of_one_pair(IntrospectiveMetric(rule="off").cosines(e), e.semantic)
    ours = grad_of_one_pair(IntrospectiveMetric(tau, gamma).cosines(e), e.semantic)
    torch.testing.assert_close(ours, plain * (torch.exp(-x) * (1 + x / 2))[0, 1])


@pytest.mark.parametrize("form", ["distances", "cosines"])
def test_more_uncertainty_means_less_gradient(form):
    e = images(1)
    norms = []
    for k in (0.0, 0.5, 1.0, 2.0, 4.0):
        pairs = getattr(IntrospectiveMetric(), form)(Embeddings(e.semantic, k * e.uncertainty))
        norms.append(float(grad_of_one_pair(pairs, e.semantic).norm()))
    assert norms == sorted(norms, reverse=True)
    assert norms[0] == pytest.approx(
        float(grad_of_one_pair(getattr(IntrospectiveMetric(rule="off"), form)(e), e.semantic).norm())
    )


def test_opposed_uncertainties_cancel():
    """β falls as ‖u₁‖ grows against an opposed u₂: the vectors are added, not their lengths."""
    s = torch.eye(2)
    longer = Embeddings(s, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    shorter = Embeddings(s, torch.tensor([[0.5, 0.0], [-1.0, 0.0]]))
    assert betas(longer)[0, 1] == 0.0
    assert IntrospectiveMetric().distances(longer)[0, 1] > IntrospectiveMetric().distances(shorter)[0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rule", "form"), [("similar", "distances"), ("similar", "cosines"), ("strict", "distances")])
def test_without_uncertainty_it_is_exactly_the_plain_metric(rule, form, dtype):
    e = images(2, dtype=dtype)
    for certain in (Embeddings(e.semantic, torch.zeros_like(e.semantic)), Embeddings.certain(e.semantic)):
        ours = getattr(IntrospectiveMetric(rule=rule), form)(certain)
        plain = getattr(IntrospectiveMetric(rule="off"), form)(certain)
        assert torch.equal(ours, plain)
        weight = torch.rand_like(ours)
        torch.testing.assert_close(
            torch.autograd.grad((ours * weight).sum(), e.semantic)[0],
            torch.autograd.grad((plain * weight).sum(), e.semantic)[0],
        )


@pytest.mark.parametrize(
    ("rule", "form"),
    [(r, f) for r in RULES for f in ("distances", "cosines") if (r, f) not in
     {("dissimilar", "distances"), ("release", "distances"), ("strict", "cosines")}],
)  # fmt: skip
def test_gradcheck(rule, form):
    e, other = images(3, n=5), images(4, n=4)
    m = IntrospectiveMetric(rule=rule) if rule == "release" else IntrospectiveMetric(2.0, 0.3, rule)

    def pairs(s, u, t=None, v=None):
        right = None if t is None else Embeddings(t, v)
        return getattr(m, form)(Embeddings(s, u), right)

    assert torch.autograd.gradcheck(pairs, (e.semantic, e.uncertainty))
    assert torch.autograd.gradcheck(pairs, (e.semantic, e.uncertainty, other.semantic, other.uncertainty))
    assert torch.autograd.gradcheck(
        lambda s, u, t: getattr(m, form)(Embeddings(s, u), Embeddings.certain(t)),
        (e.semantic, e.uncertainty, other.semantic),
    )
    assert torch.autograd.gradcheck(
        lambda s, t, v: getattr(m, form)(Embeddings.certain(s), Embeddings(t, v)),
        (e.semantic, other.semantic, other.uncertainty),
    )


@pytest.mark.parametrize("form", ["distances", "cosines"])
def test_fitted_to_the_mean_weight(form):
    """D/w̄ and 1 − (1 − C')/w̄: values by explicit loops; to the gradient w̄ is a constant."""
    e, other = images(18, n=5), images(19, n=4)
    usual, fitted = (IntrospectiveMetric(2.0, 0.3, fit=fit) for fit in (False, True))
    for second, count in ((None, 20), (other, 20)):
        weights = usual.weights(e, second)
        pairs = [(i, j) for i in range(5) for j in range(weights.shape[1]) if second is not None or i != j]
        assert len(pairs) == count
        mean = sum(float(weights[i, j]) for i, j in pairs) / count
        assert mean < 0.95
        plain = getattr(usual, form)(e, second)
        expected = plain / mean if form == "distances" else 1 - (1 - plain) / mean
        got = getattr(fitted, form)(e, second)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        gradients = [torch.autograd.grad(x.sin().sum(), (e.semantic, e.uncertainty)) for x in (got, expected)]
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    own = getattr(fitted, form)(e).diagonal()
    assert torch.equal(own, torch.full_like(own, 0.0 if form == "distances" else 1.0))
    for rule in ("off", "dissimilar", "strict", "release"):
        with pytest.raises(ValueError, match="fit goes with rule 'similar' only"):
            IntrospectiveMetric(rule=rule, fit=True)
    assert repr(fitted).endswith(", fit=True)")


def test_old_descriptions_stay():
    """Results are stored under the text of a metric."""
    assert repr(IntrospectiveMetric()) == "IntrospectiveMetric(tau=5.0, gamma=0.0, rule='similar')"


@given(SEEDS, TAUS, GAMMAS)
def test_laws(seed, tau, gamma):
    """Softening only shrinks a distance, only raises a similarity, and is symmetric."""
    e, m = images(seed, level=1.5), IntrospectiveMetric(tau, gamma)
    d, c = m.distances(e), m.cosines(e)
    off = IntrospectiveMetric(rule="off")
    assert (d <= off.distances(e) + 1e-12).all()
    assert (c >= off.cosines(e) - 1e-12).all()
    assert (c <= 1).all()
    assert (d >= 0).all()
    torch.testing.assert_close(d, d.T)
    torch.testing.assert_close(c, c.T)
    assert torch.equal(d.diagonal(), torch.zeros(7, dtype=d.dtype))
    assert torch.equal(c.diagonal(), torch.ones(7, dtype=d.dtype))
    torch.testing.assert_close(m.weights(e) * off.distances(e), d)


def test_strict_is_the_indicator():
    e = images(5, level=0.4)
    m = IntrospectiveMetric(gamma=0.2, rule="strict")
    a, b = alphas(e), betas(e)
    assert torch.equal(m.distances(e), torch.where(a > b + 0.2, a, 0.0))
    zeros = (m.distances(e) == 0).sum() - len(e)
    assert 0 < zeros < a.numel() - len(e)  # both cases occur


def test_release_is_exactly_one_over_d_squared_against_proxies():
    e, proxies = images(6), images(7).semantic.detach()
    m = IntrospectiveMetric(rule="release")
    assert m.gamma == 4.0
    cos = plain_cosines(e, Embeddings.certain(proxies))
    d2 = (e.unit.unsqueeze(1) - proxies).square().sum(dim=2)
    expected = 1 - (1 - cos) * torch.exp(-1 / d2)
    ours = m.cosines(e, Embeddings.certain(proxies))
    torch.testing.assert_close(ours, expected)
    ours.sum().backward()
    assert e.uncertainty.grad.abs().max() < 1e-6  # the released head cannot learn


@pytest.mark.parametrize("form", ["distances", "cosines"])
@pytest.mark.parametrize("gamma", [0.0, 3.0])
def test_identical_images_and_zero_vectors_stay_finite(form, gamma):
    s = torch.randn(6, 4)
    s[1], s[2], s[4], s[5] = s[0], 2 * s[0], 0.0, 0.0
    for u in (torch.zeros(6, 4), torch.randn(6, 4)):
        e = Embeddings(s.clone().requires_grad_(), u.clone().requires_grad_())
        pairs = getattr(IntrospectiveMetric(gamma=gamma), form)(e)
        pairs.square().sum().backward()
        for x in (pairs, e.semantic.grad, e.uncertainty.grad):
            assert torch.isfinite(x).all()
        if form == "distances":
            assert pairs[0, 1] < 1e-3
            assert pairs[0, 2] < 1e-3
            assert pairs[4, 5] == 0
        assert not e.semantic.grad[4:].any()


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("form", ["distances", "cosines"])
def test_huge_and_tiny_uncertainty(form, scale):
    base = images(8, level=1.0, dtype=torch.float32)
    u = (base.uncertainty.detach() * scale).requires_grad_()
    pairs = getattr(IntrospectiveMetric(), form)(Embeddings(base.semantic, u))
    pairs.sum().backward()
    for x in (pairs, u.grad, base.semantic.grad):
        assert torch.isfinite(x).all()
    distinct = ~torch.eye(7, dtype=torch.bool)
    if scale > 1:  # so uncertain that everything looks alike
        torch.testing.assert_close(pairs[distinct], torch.full_like(pairs, float(form == "cosines"))[distinct])
    else:
        torch.testing.assert_close(pairs, getattr(IntrospectiveMetric(rule="off"), form)(base))


def test_beta_needs_no_sum_of_squares_to_fit():
    u = torch.tensor([[3e30, 0.0], [0.0, 4e30]])
    torch.testing.assert_close(betas(Embeddings(torch.eye(2), u))[0, 1], torch.tensor(5e30))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_compared_in_float32(dtype):
    e = images(9, dtype=torch.float32).detach()
    half = e.to(dtype)
    for form in ("distances", "cosines"):
        low, full = (
            getattr(IntrospectiveMetric(), form)(half),
            getattr(IntrospectiveMetric(), form)(half.to(torch.float32)),
        )
        assert low.dtype == torch.float32
        assert torch.equal(low, full)
        mixed = getattr(IntrospectiveMetric(), form)(half, e)  # half images against float32 proxies
        assert mixed.dtype == torch.float32


def test_autocast_does_not_reach_the_metric():
    e = images(10, dtype=torch.float32).detach()
    expected = IntrospectiveMetric().distances(e)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(IntrospectiveMetric().distances(Embeddings(e.semantic, e.uncertainty)), expected)


def test_blocks_change_nothing(monkeypatch):
    e, other = images(11, n=40), images(12, n=30)
    for form in ("distances", "cosines"):
        whole = getattr(IntrospectiveMetric(), form)(e, other)
        grads = torch.autograd.grad(whole.square().sum(), [e.semantic, other.uncertainty], retain_graph=True)
        monkeypatch.setattr("idml.pairwise._BLOCK", 64)
        parts = getattr(IntrospectiveMetric(), form)(e, other)
        again = torch.autograd.grad(parts.square().sum(), [e.semantic, other.uncertainty])
        monkeypatch.undo()
        torch.testing.assert_close(parts, whole)
        torch.testing.assert_close(again, grads)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: IntrospectiveMetric(tau=0), "tau must be a positive number"),
        (lambda: IntrospectiveMetric(tau=-1.0), "tau must be a positive number"),
        (lambda: IntrospectiveMetric(tau=math.nan), "tau must be"),
        (lambda: IntrospectiveMetric(tau="5"), "tau must be"),
        (lambda: IntrospectiveMetric(gamma=-0.1), "gamma must be 0 or larger"),
        (lambda: IntrospectiveMetric(gamma=math.inf), "gamma must be 0 or larger"),
        (lambda: IntrospectiveMetric(rule="simlar"), "unknown rule 'simlar'; did you mean 'similar'"),
        (lambda: IntrospectiveMetric(tau=3.0, rule="release"), "fixes tau = 5 and gamma = 4"),
        (lambda: IntrospectiveMetric(rule="dissimilar").distances(images()), "no distance form, only cosine"),
        (lambda: IntrospectiveMetric(rule="release").distances(images()), "no distance form"),
        (lambda: IntrospectiveMetric(rule="strict").cosines(images()), "no cosine form, only distance"),
        (lambda: IntrospectiveMetric().distances(torch.randn(3, 2)), "a plain tensor only goes with rule 'off'"),
        (lambda: IntrospectiveMetric().distances(images(), torch.randn(3, 5)), "plain tensor only"),
        (lambda: IntrospectiveMetric().distances(images()[:0]), "batch is empty"),
        (lambda: IntrospectiveMetric().cosines(images(), images()[:0]), "batch is empty"),
        (lambda: IntrospectiveMetric().cosines(images(d=4), images(d=5)), "semantic sizes differ: 4 and 5"),
        (
            lambda: IntrospectiveMetric().cosines(images(), Embeddings(torch.ones(2, 5), torch.ones(2, 3))),
            "uncertainty sizes differ: 5 and 3",
        ),
        (lambda: IntrospectiveMetric().cosines(images(), images().to("meta")), "on cpu and meta"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["semantic", "uncertainty"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("right", [None, "others", "certain"])
def test_nan_is_an_error_that_says_so(part, bad, right):
    tensors = {"semantic": torch.randn(5, 4), "uncertainty": torch.randn(5, 4)}
    tensors[part][3, 0] = bad
    sound = Embeddings(torch.randn(4, 4), torch.randn(4, 4))
    other = {None: None, "others": sound, "certain": Embeddings.certain(sound.semantic)}[right]
    with pytest.raises(ValueError, match=f"{part} embeddings hold NaN or infinity in 1 of 5 rows .first: row 3"):
        IntrospectiveMetric().distances(Embeddings(**tensors), other)

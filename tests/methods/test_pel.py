import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from idml import Embeddings, IntrospectiveMetric, LabelSets
from idml.losses import LOSSES, build_loss
from idml.methods.pel import (
    ProbabilisticLoss,
    gaussian_kl_distances,
    kl_to_standard_normal,
    sample,
)
from idml.model.model import standard_deviation

OFF = IntrospectiveMetric(rule="off")


def gaussians(n=6, d=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, d, generator=g, dtype=torch.float64, requires_grad=True)
    log_variance = (torch.randn(n, d, generator=g, dtype=torch.float64) - 3).requires_grad_()
    return mean, log_variance, Embeddings(mean, standard_deviation(log_variance))


def normal(e, i):
    return Independent(Normal(e.unit[i], e.uncertainty[i]), 1)


def test_clamp():
    raw = torch.tensor([-100.0, -14.0, -12.0, 0.0, 4.0, 100.0], requires_grad=True)
    sigma = standard_deviation(raw)
    torch.testing.assert_close(sigma.log() * 2, torch.tensor([-14.0, -14.0, -12.0, 0.0, 4.0, 4.0]))
    sigma.sum().backward()
    assert raw.grad[0] == raw.grad[-1] == 0
    assert (raw.grad[1:-1] > 0).all()


def test_kl_is_the_one_of_torch_distributions():
    _, _, e = gaussians()
    standard = Independent(Normal(torch.zeros(5).double(), torch.ones(5).double()), 1)
    expected = torch.stack([kl_divergence(normal(e, i), standard) for i in range(6)]).mean() / 5
    torch.testing.assert_close(kl_to_standard_normal(e), expected)


def test_kl_grows_as_sigma_leaves_one():
    """The sign that is easily got wrong: KL is smallest at σ = 1 and pulls small σ up."""
    mean = torch.eye(3)
    values = [float(kl_to_standard_normal(Embeddings(mean, torch.full((3, 3), s)))) for s in (0.01, 0.1, 1.0, 3.0)]
    assert values[0] > values[1] > values[2] < values[3]
    assert values[2] == pytest.approx(0.5 / 3)  # ½·‖μ‖²/d remains


def test_symmetric_kl_is_the_one_of_torch_distributions():
    _, _, e = gaussians()
    _, _, other = gaussians(n=4, seed=1)
    for right in (None, other):
        target = e if right is None else right
        both_ways = [
            (kl_divergence(normal(e, i), normal(target, j)) + kl_divergence(normal(target, j), normal(e, i))) / 2
            for i in range(len(e))
            for j in range(len(target))
        ]
        expected = torch.stack(both_ways).view(len(e), len(target))
        torch.testing.assert_close(gaussian_kl_distances(e, right), expected, atol=1e-9, rtol=1e-9)


def test_symmetric_kl_gradient():
    mean, log_variance, _ = gaussians(n=4, d=3)
    assert torch.autograd.gradcheck(
        lambda m, v: gaussian_kl_distances(Embeddings(m, standard_deviation(v)))[~torch.eye(4, dtype=torch.bool)],
        (mean, log_variance),
    )


def test_uncertainty_does_not_blur_the_gaussian_distance_but_does_the_introspective_one():
    """The paper's motivation: as one image grows uncertain, KL still tells the pair apart, D goes to 0."""
    s = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    kl, ism = [], []
    for k in (1.0, 3.0, 10.0, 30.0, 100.0):
        u = torch.tensor([[0.1, 0.1], [0.1 * k, 0.1 * k]])
        kl.append(float(gaussian_kl_distances(Embeddings(s, u))[0, 1]))
        ism.append(float(IntrospectiveMetric().distances(Embeddings(s, u))[0, 1]))
    assert min(kl) > 20
    assert kl[-1] > 10 * kl[0]
    assert ism == sorted(ism, reverse=True)
    assert ism[-1] < 0.2 * ism[0]


def test_samples_are_on_the_sphere_and_follow_the_seed():
    _, _, e = gaussians()
    drawn = sample(e, 8, seed=1)
    assert drawn.shape == (8, 6, 5)
    torch.testing.assert_close(drawn.norm(dim=2), torch.ones(8, 6).double())
    assert torch.equal(drawn, sample(e, 8, seed=1))
    assert not torch.equal(drawn, sample(e, 8, seed=2))


def test_samples_have_the_asked_mean_and_deviation():
    sigma = torch.tensor([[0.01, 0.03, 0.002]], dtype=torch.float64)
    e = Embeddings(torch.tensor([[2.0, 0.0, 0.0]], dtype=torch.float64), sigma)
    drawn = sample(e, 40_000, seed=0).squeeze(1)
    torch.testing.assert_close(drawn.mean(dim=0), e.unit[0].detach(), atol=1e-3, rtol=0)
    torch.testing.assert_close(drawn[:, 1:].std(dim=0), sigma[0, 1:], atol=0, rtol=0.03)  # across the sphere
    assert drawn[:, 0].std() < 0.002  # along it, renormalising takes the noise away


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_equals_its_mean_over_samples(name):
    mean, log_variance, e = gaussians(n=12, d=8, seed=2)
    plain = torch.arange(6) // 2
    labels = LabelSets.cat([LabelSets(plain), LabelSets.mixed(plain, torch.arange(6) // 3)])
    loss = build_loss(name, metric=OFF, num_classes=3, embedding_dim=8).double()
    if name == "rankmi":
        torch.nn.init.normal_(loss.critic[-1].weight)  # it starts at 0, and lets no gradient pass
    ours = ProbabilisticLoss(loss, samples=4, kl_weight=0.01)(e, labels, seed=7)
    noise = torch.randn(4, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    total = 0.0
    for k in range(4):
        point = torch.nn.functional.normalize(torch.nn.functional.normalize(mean) + e.uncertainty * noise[k])
        total = total + loss(point, labels, seed=7 * 4 + k) / 4
    variance = log_variance.exp()
    unit = torch.nn.functional.normalize(mean)
    kl = 0.5 * (variance + unit**2 - 1 - log_variance).sum(dim=1).mean() / 8
    expected = total + 0.01 * kl
    torch.testing.assert_close(ours, expected)
    inputs = [mean, log_variance, *loss.parameters()]
    for a, b in zip(
        torch.autograd.grad(ours, inputs, retain_graph=True), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(a, b)
        assert a.abs().max() > 0
    largest = [ProbabilisticLoss(loss, samples=4)(e, labels, seed=2**63 - 1) for _ in range(2)]
    assert torch.isfinite(largest[0])
    assert torch.equal(*largest)  # the seeds of steps are that large


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ProbabilisticLoss(build_loss("contrastive")), "rule 'off', not 'similar'"),
        (lambda: ProbabilisticLoss(build_loss("contrastive", metric=OFF), samples=0), "1 or larger"),
        (lambda: ProbabilisticLoss(build_loss("contrastive", metric=OFF), kl_weight=-1), "0 or larger"),
        (
            lambda: ProbabilisticLoss(build_loss("contrastive", metric=OFF))(torch.eye(3), torch.arange(3)),
            "not a plain tensor",
        ),
        (lambda: sample(Embeddings(torch.ones(2, 3), torch.ones(2, 2)), 1), "one σ for each μ"),
        (lambda: sample(Embeddings(torch.ones(2, 3), torch.ones(2, 3)), 0), "1 or larger"),
        (lambda: kl_to_standard_normal(Embeddings(torch.ones(2, 3), torch.ones(2, 2))), "one σ for each μ"),
        (lambda: gaussian_kl_distances(Embeddings(torch.ones(2, 3), torch.zeros(2, 3))), "positive"),
        (lambda: gaussian_kl_distances(Embeddings(torch.ones(2, 3), torch.ones(2, 2))), "one size"),
        (lambda: gaussian_kl_distances(Embeddings(torch.ones(0, 3), torch.ones(0, 3))), "empty"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()

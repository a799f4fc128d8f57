"""NIR: the flow against FrEIA and autograd, the energy by a loop, its two forms, and weight 0 as plain training."""

import math

import pytest
import torch
import yaml
from FrEIA.modules import GLOWCouplingBlock
from method_batches import batch_of, gradients_of, method_of

from idml import Embeddings, LabelSets
from idml.methods.nir import ConditionalFlow, Coupling, NirOptions, bounded_exp, energies
from idml.training.config import from_dict, from_stored, to_dict
from idml.training.refit import read_config


def wide(module, gain=1.3):
    """Weights that make the flow bend more than it does at the start."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=gain / parameter.shape[-1] ** 0.5)
    return module.double()


@pytest.mark.parametrize("size", [6, 7])
def test_a_coupling_is_that_of_freia(size):
    ours = wide(Coupling(size, 3))
    theirs = GLOWCouplingBlock([(size,)], dims_c=[(3,)], subnet_constructor=_network, clamp=2.0).double()
    theirs.subnet1.load_state_dict(ours.net1.state_dict())
    theirs.subnet2.load_state_dict(ours.net2.state_dict())
    x, condition = torch.randn(5, size, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    (expected,), log_det = theirs([x], c=[condition], rev=False)
    found = ours(x, condition)
    torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], log_det, rtol=1e-12, atol=1e-12)


def _network(inputs, outputs):
    from idml.methods.nir import _network as build

    return build(inputs, outputs)


def test_the_flow_knows_its_jacobian_and_its_inverse():
    flow = wide(ConditionalFlow(5, 4, seed=0))
    x, condition = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    z, log_det = flow(x, condition)
    for i in range(3):
        one = condition[i : i + 1]
        jacobian = torch.autograd.functional.jacobian(lambda v, one=one: flow(v[None], one)[0][0], x[i])
        torch.testing.assert_close(log_det[i], torch.linalg.slogdet(jacobian)[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(flow.invert(z, condition), x, rtol=1e-9, atol=1e-9)
    assert float((z - x).detach().abs().mean()) > 0.1


def test_its_density_integrates_to_one():
    flow = wide(ConditionalFlow(2, 2, seed=1), gain=0.6)
    line = torch.linspace(-8, 8, 80, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    with torch.no_grad():
        z, log_det = flow(grid, torch.tensor([[0.6, 0.8]], dtype=torch.float64).expand(len(grid), 2))
    density = (-0.5 * z.square().sum(dim=1) - math.log(2 * math.pi) + log_det).exp()
    assert float(density.sum()) * float(line[1] - line[0]) ** 2 == pytest.approx(1.0, abs=0.01)


def test_energies_of_label_sets_by_a_loop():
    flow, proxies = wide(ConditionalFlow(4, 4, seed=0)), torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    sets = [{0}, {1, 3}, {2}, {4, 0, 1}]
    s = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    found = energies(flow, Embeddings.certain(s).unit, LabelSets.of(sets), proxies)
    expected = []
    for i, labels in enumerate(sets):
        densities = []
        for label in labels:
            z, log_det = flow((s[i] / s[i].norm())[None], (proxies[label] / proxies[label].norm())[None])
            densities.append(torch.exp(-0.5 * (z**2).sum() + log_det[0]))
        expected.append(-torch.log(sum(densities) / len(densities)))
    expected = torch.stack(expected)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for a, b in zip(
        torch.autograd.grad(found.sum(), [s, proxies]), torch.autograd.grad(expected.sum(), [s, proxies]), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_the_two_forms_and_weight_zero():
    embeddings, batch = batch_of(12, 6, classes=4)
    plain = method_of("plain", loss="proxy_anchor")
    for options, share in (({"nir_weight": 0.6}, 1.0), ({"nir_form": "exponential", "align_weight": 0.3}, 0.3)):
        method = method_of("nir", loss="proxy_anchor", **options)
        method.metric_loss.load_state_dict(plain.metric_loss.state_dict())
        terms = method.loss(embeddings, batch, torch.arange(12), seed=0)
        energy = energies(method.flow, embeddings.unit, batch.labels, method.metric_loss.proxies)
        assert float(terms["pairs"]) == pytest.approx(share * float(plain.metric_loss(embeddings, batch.labels)))
        expected = energy.exp().mean() if share < 1 else 0.6 / 6 * energy.mean()
        assert float(terms["nir"]) == pytest.approx(float(expected), rel=1e-5)
    method = method_of("nir", loss="proxy_anchor", nir_weight=0.0)
    method.metric_loss.load_state_dict(plain.metric_loss.state_dict())
    for a, b in zip(gradients_of(method, embeddings, batch), gradients_of(plain, embeddings, batch), strict=True):
        assert torch.equal(a, b)


def test_the_exponential_neither_overflows_nor_loses_its_gradient():
    x = torch.tensor([-200.0, 0.0, 500.0], requires_grad=True)
    value = bounded_exp(x)
    value.sum().backward()
    assert bool(torch.isfinite(value).all() and torch.isfinite(x.grad).all())
    assert float(x.grad[2]) > 0


def test_a_loss_without_proxies_is_refused():
    with pytest.raises(ValueError, match="method nir regularises losses with proxies: contrastive has none"):
        method_of("nir", loss="contrastive")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"align_weight": 0.3}, "align_weight belongs to nir_form exponential: nir_form energy does not use it"),
        ({"nir_form": "exponential", "nir_weight": 0.1}, "nir_weight belongs to nir_form energy"),
        ({"nir_weight": -1.0}, "nir_weight must be a number of at least 0"),
        ({"nir_form": "exponential", "align_weight": "x"}, "align_weight must be a number of at least 0"),
    ],
)
def test_a_weight_that_the_form_does_not_use_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        method_of("nir", loss="proxy_anchor", **options)


def test_the_default_weights():
    assert (NirOptions().energy_weight, NirOptions().proxy_weight) == (0.1, 0.0075)
    assert NirOptions(nir_weight=0.0).energy_weight == 0
    assert NirOptions(nir_form="exponential", align_weight=0.3).proxy_weight == 0.3


@pytest.mark.parametrize(("form", "weight"), [("energy", "nir_weight"), ("exponential", "align_weight")])
def test_what_a_run_of_version_0_1_wrote_can_be_read(form, weight, tmp_path):
    wrote = {"data": "glyphs", "out": "-", "method": "nir", "loss": "proxy_anchor", "nir_form": form}
    wrote |= {"nir_weight": 0.2, "align_weight": 0.3, "train": "heads"}
    options = from_stored(wrote).method_options
    assert options == NirOptions(nir_form=form, **{weight: wrote[weight]})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(wrote))
    assert read_config(tmp_path).method_options == options
    config = from_dict({key: value for key, value in wrote.items() if key in ("data", "out", "method", "loss")})
    assert from_stored(to_dict(config)) == config

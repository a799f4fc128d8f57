"""The options of the metric and the parameters of the loss, against explicit references."""

import pytest
import torch

from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.labels import LabelSets
from idml.methods.ism import measure_weights
from idml.training.build import build, build_optimiser, set_learning_rate
from idml.training.config import from_dict
from idml.training.distributed import Processes
from idml.training.step import compute_gradients

LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])


def step(**changes):
    """The model, the loss, the value of one step, its embeddings and the features, in float64."""
    torch.manual_seed(0)
    options = {"trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 6, "loss": "contrastive"}
    config = from_dict({"data": "glyphs", "out": "-", **options, **changes})
    model, method = build(config, LABELS, 4)
    model.double().trunk.eval()
    method.double()
    images = torch.rand(8, 3, 16, 16, dtype=torch.float64)
    model.uncertainty(model.features(images))  # starts it
    model.uncertainty.scale *= 20
    batch = Batch(images, LabelSets(LABELS), torch.zeros(8, dtype=torch.bool))
    terms, embeddings = compute_gradients(batch, torch.arange(8), model, method, config, Processes(), seed=0)
    return model, method.metric_loss, terms["pairs"], embeddings, model.features(images)


def by_hand(model, features, pair, margins=(0.0, 0.5)):
    """The contrastive loss over explicit pairs, D = ``pair``(α, u₁, u₂), and its gradients for both heads."""
    s = model.semantic(features.detach())
    u = model.uncertainty(features.detach())
    pulls, pushes = [], []
    for i in range(8):
        for j in range(8):
            if i != j:
                a, b = s[i] / s[i].norm(), s[j] / s[j].norm()
                d = pair((a - b).norm(), u[i], u[j])
                same = LABELS[i] == LABELS[j]
                (pulls if same else pushes).append((d - margins[0] if same else margins[1] - d).relu())
    pulled, pushed = ([x for x in terms if x > 0] for terms in (pulls, pushes))
    value = sum(pulled) / max(len(pulled), 1) + sum(pushed) / max(len(pushed), 1)
    parameters = [*model.semantic.parameters(), *model.uncertainty.parameters()]
    return value, torch.autograd.grad(value, parameters, allow_unused=True)


def test_tau_and_gamma_reach_the_loss():
    model, _, value, _, features = step(method="ism", gamma=0.1, tau=2.0)
    wanted, gradients = by_hand(model, features, lambda a, u, v: a * torch.exp(-((u + v).norm() + 0.1) / (2.0 * a)))
    assert value == pytest.approx(float(wanted.detach()), rel=1e-9)
    parameters = [*model.semantic.named_parameters(), *model.uncertainty.named_parameters()]
    for (name, parameter), gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, msg=name)
    assert value != pytest.approx(step(method="ism")[2], rel=1e-3)


def test_learned_uncertainty_of_proxies():
    _, loss, _, embeddings, _ = step(method="ism", loss="softmax", proxy_uncertainty=True)
    assert 0.02 < float(loss.proxy_uncertainty.detach().norm(dim=1).mean()) < 0.1
    s, u = embeddings.semantic, embeddings.uncertainty
    proxies, own = (x.detach().clone().requires_grad_() for x in (loss.proxies, loss.proxy_uncertainty))
    total = 0.0
    for i in range(8):
        scores = []
        for p, v in zip(proxies, own, strict=True):
            a, b = s[i] / s[i].norm(), p / p.norm()
            alpha, beta = (a - b).norm(), (u[i] + v).norm()
            scores.append(20 * (1 - (1 - a @ b) * torch.exp(-beta / (5 * alpha))))
        total = total - torch.log_softmax(torch.stack(scores), 0)[LABELS[i]] / 8
    gradients = torch.autograd.grad(total, (proxies, own))
    torch.testing.assert_close(loss.proxies.grad, gradients[0])
    torch.testing.assert_close(loss.proxy_uncertainty.grad, gradients[1])


@pytest.mark.parametrize(("schedule", "rates"), [("cosine", [1, 0.854, 0.5, 0.146]), ("step", [1, 1, 0.5, 0.5])])
def test_the_learning_rate_falls_by_the_share_of_the_run_that_is_done(schedule, rates):
    """Two epochs, each asked at its beginning and in its middle: (1 + cos πx) / 2 at ¼ is 0.854."""
    config = from_dict({
        "data": "glyphs", "out": "-", "trunk": "conv4", "pretrained": False, "lr": 1.0, "schedule": schedule,
        "epochs": 2, "step_epochs": 1, "step_factor": 0.5,
    })  # fmt: skip
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [parameter], "factor": 1.0}], lr=1.0)
    found = []
    for epoch, done in ((0, 0.0), (0, 0.5), (1, 0.0), (1, 0.5)):
        set_learning_rate(optimizer, config, epoch, done)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx(rates, abs=1e-3)


def test_learning_rates_of_the_parts():
    config = from_dict({
        "data": "glyphs", "out": "-", "trunk": "conv4", "pretrained": False, "loss": "proxy_anchor", "method": "ism",
        "embedding_dim": 4, "proxy_uncertainty": True, "lr": 0.01, "schedule": "constant",
    })  # fmt: skip
    model, method = build(config, torch.arange(5), 5)
    optimizer = build_optimiser(model, method, config)
    set_learning_rate(optimizer, config, 0, 0.0)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    same = (next(model.trunk.parameters()), model.semantic.weight, model.uncertainty.linear.weight)
    assert [rates[id(p)] for p in (*same, method.metric_loss.proxy_uncertainty)] == [pytest.approx(0.01)] * 4
    assert rates[id(method.metric_loss.proxies)] == pytest.approx(1.0)
    assert len(rates) == len([*model.parameters(), *method.parameters()])


@pytest.mark.parametrize(("loss", "factor"), [("proxy_anchor", 100.0), ("proxy_nca", 1.0), ("softmax", 100.0)])
def test_proxies_learn_as_fast_as_the_loss_says_or_the_user(loss, factor):
    shared = {"data": "glyphs", "out": "-", "trunk": "conv4", "pretrained": False, "embedding_dim": 4, "loss": loss}
    for given, expected in ((None, factor), (7.0, 7.0)):
        config = from_dict({**shared, "proxy_lr": given})
        _, method = build(config, torch.arange(5), 5)
        assert method.learning_rate_factors()["metric_loss.proxies"] == expected


@pytest.mark.parametrize("rule", ["similar", "release"])
@pytest.mark.parametrize("loss", ["multi_similarity", "proxy_anchor"])
def test_the_mean_weight_is_what_the_loss_applied(loss, rule):
    gamma = 4.0 if rule == "release" else 0.3
    _, metric_loss, _, embeddings, _ = step(method="ism", loss=loss, rule=rule, gamma=gamma)
    s, u = (x / x.norm(dim=1, keepdim=True) for x in (embeddings.semantic, embeddings.uncertainty))
    u = u if rule == "release" else embeddings.uncertainty
    columns = [(s[j], u[j], j) for j in range(8)]
    if loss == "proxy_anchor":
        proxies = metric_loss.proxies.detach()
        proxies = proxies if rule == "release" else proxies / proxies.norm(dim=1, keepdim=True)
        columns = [(p, torch.zeros(6), None) for p in proxies]
    weights = []
    for i in range(8):
        for t, v, j in columns:
            alpha, beta = (s[i] - t).norm(), (u[i] + v).norm()
            x = (beta**2 + 4) / (5 * alpha**2) if rule == "release" else (beta + 0.3) / (5 * alpha)
            weights += [torch.exp(-x)] if i != j else []
    batch = Batch(torch.zeros(8, 1), LabelSets(LABELS), torch.arange(8) >= 8)
    measured = measure_weights(metric_loss, embeddings, batch)
    assert measured == {"weight": pytest.approx(float(torch.stack(weights).mean()), rel=1e-6)}


@pytest.mark.parametrize("mixing", ["separate", "joint", "against-clean"])
@pytest.mark.parametrize("loss", ["contrastive", "proxy_anchor"])
def test_the_mean_weight_of_mixtures_is_over_what_they_meet(loss, mixing):
    config = from_dict({
        "data": "glyphs", "out": "-", "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 6,
        "loss": loss, "method": "idml", "mixing": mixing,
    })  # fmt: skip
    method = build(config, LABELS, 4)[1].double()
    s, u = torch.randn(14, 6, dtype=torch.float64), torch.randn(14, 6, dtype=torch.float64)
    unit = s / s.norm(dim=1, keepdim=True)
    batch = Batch(torch.zeros(14, 1), LabelSets(torch.arange(14) % 4), torch.arange(14) >= 8, 0.5)
    measured = method.measure(Embeddings(s, u), batch)

    def mean(rows, columns):
        weights = []
        for i in rows:
            for t, v, j in columns:
                weights += [torch.exp(-(u[i] + v).norm() / (5 * (unit[i] - t).norm()))] if i != j else []
        return pytest.approx(float(torch.stack(weights).mean()))

    images = [(unit[j], u[j], j) for j in range(14)]
    clean, mixed = images[:8], images[8:]
    if loss == "proxy_anchor":
        proxies = method.metric_loss.proxies.detach()
        clean = mixed = [(p / p.norm(), torch.zeros(6), None) for p in proxies]
    meets = clean if mixing == "against-clean" else mixed
    assert measured == {"weight": mean(range(8), clean), "weight_mixed": mean(range(8, 14), meets)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "mixup", "proxy_uncertainty": True}, "method mixup has no option 'proxy_uncertainty'"),
        (
            {"method": "ism", "loss": "contrastive", "proxy_uncertainty": True},
            "proxy_uncertainty is for losses with proxies: contrastive has none",
        ),
        ({"method": "idml", "fit": True, "rule": "dissimilar"}, "fit needs the rule similar"),
        ({"preset": "release", "loss": "contrastive"}, "rule release has no distances, which contrastive compares"),
        ({"preset": "release", "gamma": 3.0}, "rule 'release' fixes tau = 5 and gamma = 4"),
        ({"method": "dac", "introspective": True, "rule": "dissimilar", "loss": "margin_dw"}, "has no distances"),
        ({"method": "idml", "fit": 1}, "fit must be true or false"),
        ({"method": "idml", "rule": "simila"}, "unknown rule 'simila'; did you mean 'similar'"),
        ({"method": "idml", "gamma": -1}, "gamma must be a number of at least 0"),
        ({"method": "idml", "tau": 0}, "tau must be a number above 0"),
        ({"method": "pel", "samples": 0}, "samples must be a whole number of at least 1"),
        ({"method": "pel", "kl_weight": -1}, "kl_weight must be a number of at least 0"),
        ({"method": "mixup", "labels": "main"}, "unknown labels 'main'"),
        ({"method": "plain", "mixing": "joint"}, "method plain has no option 'mixing'"),
        ({"method": "ism", "ambiguity": ("mixup",)}, "method ism has no mixtures: leave out mixup"),
    ],
)
def test_contradictions_are_refused(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        from_dict({"data": "glyphs", "out": "x", **options})
    assert "\n" not in str(caught.value)


def test_parameters_of_the_loss_are_options():
    changes = {"method": "plain", "loss_parameters": ("positive_margin=0.01", "negative_margin=1.2")}
    model, _, value, _, features = step(**changes)
    wanted, gradients = by_hand(model, features, lambda a, u, v: a, margins=(0.01, 1.2))
    assert float(value) == pytest.approx(float(wanted.detach()), abs=1e-12)
    torch.testing.assert_close(model.semantic.weight.grad, gradients[0])
    assert float(step(method="plain")[2]) != pytest.approx(float(value), abs=1e-3)


@pytest.mark.parametrize(
    ("loss", "words", "said"),
    [
        ("contrastive", ["negative_margin"], "of the form name=number, got 'negative_margin'"),
        ("contrastive", ["negative_margin=wide"], "of the form name=number, got 'negative_margin=wide'"),
        ("contrastive", ["negative_margin=nan"], "of the form name=number"),
        ("contrastive", ["=1"], "of the form name=number"),
        ("contrastive", ["negative_margin=1", "negative_margin=2"], "give negative_margin twice"),
        ("contrastive", ["margin=1"], "unknown parameter 'margin' of Contrastive; did you mean"),
        ("contrastive", ["metric=1"], "unknown parameter 'metric' of Contrastive"),
        ("margin_dw", ["seed=1"], "unknown parameter 'seed' of MarginDW"),
        ("fast_ap", ["bins=2.5"], "bins of FastAP must be a positive whole number, got 2.5"),
        ("fast_ap", ["bins=0"], "bins of FastAP must be a positive whole number, got 0"),
        ("proxy_anchor", ["alpha=-3"], "alpha of ProxyAnchor must be above 0, got -3"),
        ("multi_similarity", ["alpha=0"], "alpha of MultiSimilarity must be above 0, got 0"),
        ("soft_triple", ["entropy=-1"], "entropy of SoftTriple must be above 0, got -1"),
        ("contrastive", "negative_margin=1", "loss_parameters must be a list of name=value"),
        ("contrastive", [0.5], "loss_parameters must be a list of name=value"),
        ("nothing", ["margin=1"], "unknown loss 'nothing'"),
    ],
)
def test_parameters_that_a_loss_does_not_have_are_refused(loss, words, said):
    with pytest.raises(ValueError, match=said) as caught:
        step(loss=loss, loss_parameters=words)
    assert "\n" not in str(caught.value)

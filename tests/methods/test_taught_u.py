"""u taught by ranking: values and gradients by explicit loops, and what its gradient reaches."""

import math

import pytest
import torch

from idml import Embeddings
from idml.data.sampling import random_stream
from idml.methods.taught_u import TEMPERATURE, pair_losses, rank_levels
from idml.model import load_model
from idml.training.build import build
from idml.training.config import from_dict
from idml.training.distributed import Processes
from idml.training.loop import train
from idml.training.step import compute_gradients


def embeddings(n=9, d=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    s, u = (torch.randn(n, d, generator=g, dtype=torch.float64) for _ in range(2))
    return Embeddings(s, u.requires_grad_())


def by_hand(u, target):
    terms = []
    for i in range(len(u)):
        for j in range(len(u)):
            if target[i] > target[j]:
                gap = (u[j].norm().log() - u[i].norm().log()) / TEMPERATURE
                terms.append(torch.log1p(gap.exp()))
    return sum(terms) / len(terms)


def test_levels_are_ranked_by_explicit_pairs():
    e = embeddings()
    target = torch.tensor([0.0, 3.0, 1.0, 1.0, 2.0, math.nan, 0.0, 5.0, 1.0])  # NaN ranks neither above nor below
    found, wanted = rank_levels(e.level, target), by_hand(e.uncertainty, target)
    torch.testing.assert_close(found, wanted)
    gradients = (torch.autograd.grad(x, e.uncertainty, retain_graph=True)[0] for x in (found, wanted))
    torch.testing.assert_close(*gradients)
    assert float(rank_levels(e.level.detach(), torch.zeros(9))) == 0.0


def test_the_ranking_does_not_depend_on_the_scale_and_stays_finite():
    e, target = embeddings(), torch.arange(9)
    torch.testing.assert_close(rank_levels(e.level, target), rank_levels(7 * e.level, target))
    u = torch.zeros(3, 4, requires_grad=True)
    value = rank_levels(Embeddings(torch.ones(3, 4), u).level, torch.arange(3))
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(u.grad).all()


def test_pair_losses_by_explicit_sums():
    e, labels = embeddings(7), torch.tensor([0, 0, 1, 1, 1, 2, 0])
    found = pair_losses(e, labels)
    for i in range(7):
        cosines = [float(torch.cosine_similarity(e.semantic[i], e.semantic[j], dim=0)) for j in range(7)]
        every = sum(math.exp(16 * cosines[j]) for j in range(7) if j != i)
        own = sum(math.exp(16 * cosines[j]) for j in range(7) if j != i and labels[j] == labels[i])
        assert found[i].isnan() if own == 0 else float(found[i]) == pytest.approx(math.log(every / own), rel=1e-9)


def one_step(method, teach_u):
    torch.manual_seed(0)
    own = {"detach": True} if method in ("ism", "idml") else {}
    config = from_dict({
        "data": "glyphs", "out": "-", "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 6,
        "method": method, "teach_u": teach_u, "u_hidden": 5 if own or teach_u == "ranking" else 0, **own,
    })  # fmt: skip
    labels = torch.arange(12).repeat_interleave(2)
    model, trained = build(config, labels, 12)
    model.trunk.eval()
    numbers = torch.arange(24).flip(0)
    images = torch.rand(24, 3, 16, 16, generator=random_stream("images"))
    batch = trained.add_images(images, labels[numbers], seed=0, epoch=0, step=0)
    terms, seen = compute_gradients(batch, numbers, model, trained, config, Processes(), 0)
    return terms, seen, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, labels[numbers]


@pytest.mark.parametrize("method", ["plain", "mixup", "ism", "idml"])
def test_the_ranking_is_added_to_the_loss_and_reaches_the_uncertainty_head_alone(method):
    terms, seen, gradients, labels = one_step(method, "ranking")
    alone, _, others, _ = one_step(method, "none")
    assert terms["u"] == pytest.approx(float(rank_levels(seen.level[:24], pair_losses(seen[:24], labels))), rel=1e-6)
    assert "u" not in alone
    if method in ("plain", "mixup"):
        assert terms["pairs"] == alone["pairs"]
        assert {name for name in gradients if name not in others} == {
            f"uncertainty.{layer}.{part}" for layer in ("hidden", "linear") for part in ("weight", "bias")
        }
    for name in others:
        if not name.startswith("uncertainty"):
            assert torch.equal(gradients[name], others[name]), name


@pytest.fixture
def frozen(options):
    return {
        **options, "trunk": "tf_efficientnet_lite0", "pretrained": True, "image_size": 32, "train": "heads",
        "crops": 2, "epochs": 2, "holdout": 0.0, "split": "all",
    }  # fmt: skip


def test_u_learns_and_s_stays_that_of_plain_training(frozen, tmp_path):
    models = {}
    for teach_u in ("none", "ranking"):
        config = {**frozen, "method": "plain", "teach_u": teach_u, "u_hidden": 0}
        train(from_dict({"out": str(tmp_path / teach_u), **config}))
        models[teach_u] = load_model(tmp_path / teach_u / "checkpoints" / "last").state_dict()
    for name in models["none"]:
        assert torch.equal(models["none"][name], models["ranking"][name]) is not name.startswith("uncertainty.linear")


def test_by_default_u_is_taught_and_the_trunk_stays_that_of_plain_training(options, tmp_path):
    by_default = {key: value for key, value in options.items() if key != "method"}
    metrics = {}
    for name, own in (("default", {}), ("none", {"teach_u": "none"})):
        metrics[name] = train(from_dict({"out": str(tmp_path / name), **by_default, **own}))
    taught, untaught = (load_model(tmp_path / name / "checkpoints" / "last").state_dict() for name in metrics)
    shared = [name for name in untaught if not name.startswith("uncertainty")]
    assert all(torch.equal(taught[name], untaught[name]) for name in shared)
    assert metrics["default"] == metrics["none"]
    assert "uncertainty.hidden.weight" in taught
    assert taught["uncertainty.linear.bias"].any()  # it began at 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"teach_u": "ranking", "method": "idml"}, "teach_u ranking needs detach or train heads"),
        ({"teach_u": "ranking", "method": "ism", "train": "last"}, "teach_u ranking needs detach or train heads"),
        (
            {"teach_u": "ranking", "method": "pel"},
            "method pel has no option 'teach_u': it belongs to plain",
        ),
        ({"teach_u": "rank"}, "unknown teach_u 'rank'; did you mean 'ranking'"),
        ({"u_hidden": 64, "teach_u": "none"}, "u_hidden is for an uncertainty that is taught"),
        ({"u_hidden": -1}, "u_hidden must be a whole number"),
    ],
)
def test_contradictions_are_refused(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        from_dict({"data": "glyphs", "out": "x", **options})
    assert "\n" not in str(caught.value)

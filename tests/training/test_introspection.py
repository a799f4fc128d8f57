"""What teaches u beside the loss: values and gradients by explicit loops, and who is reached by them."""

import math

import pytest
import torch

from idml import Embeddings
from idml.data.augment import Batch, Degradations, apply_ambiguity
from idml.data.datasets import load_dataset
from idml.data.pixel_cache import load_pixels
from idml.data.sampling import random_stream
from idml.labels import LabelSets
from idml.model import build_model, load_model
from idml.training.batches import FrozenStream, Stream
from idml.training.build import build
from idml.training.config import TrainConfig, from_dict
from idml.training.distributed import Processes
from idml.training.introspection import PARTS, TEMPERATURE, Introspection, own_losses, ranked
from idml.training.loop import train
from idml.training.step import learn

SIGNALS = ("ranking", "error", "graded")


def embeddings(n=9, d=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    s, u = (torch.randn(n, d, generator=g, dtype=torch.float64) for _ in range(2))
    return Embeddings(s, u.requires_grad_())


def by_hand(u, target, comparable=lambda i, j: True):
    terms = []
    for i in range(len(u)):
        for j in range(len(u)):
            if target[i] > target[j] and comparable(i, j):
                gap = (u[j].norm().log() - u[i].norm().log()) / TEMPERATURE
                terms.append(torch.log1p(gap.exp()))
    return sum(terms) / len(terms)


def same(found, wanted, u):
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x, u, retain_graph=True)[0] for x in (found, wanted)))


def test_ranked_by_explicit_pairs():
    e = embeddings()
    target = torch.tensor([0.0, 3.0, 1.0, 1.0, 2.0, math.nan, 0.0, 5.0, 1.0])  # NaN ranks neither above nor below
    same(ranked(e.level, target), by_hand(e.uncertainty, target), e.uncertainty)
    assert float(ranked(e.level.detach(), torch.zeros(9))) == 0.0


def test_ranked_knows_no_scale_and_stays_finite():
    e, target = embeddings(), torch.arange(9)
    torch.testing.assert_close(ranked(e.level, target), ranked(7 * e.level, target))
    u = torch.zeros(3, 4, requires_grad=True)
    value = ranked(Embeddings(torch.ones(3, 4), u).level, torch.arange(3))
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(u.grad).all()


def test_own_losses_by_explicit_sums():
    e, labels = embeddings(7), torch.tensor([0, 0, 1, 1, 1, 2, 0])
    found = own_losses(e, labels)
    for i in range(7):
        cosines = [float(torch.cosine_similarity(e.semantic[i], e.semantic[j], dim=0)) for j in range(7)]
        every = sum(math.exp(16 * cosines[j]) for j in range(7) if j != i)
        own = sum(math.exp(16 * cosines[j]) for j in range(7) if j != i and labels[j] == labels[i])
        assert found[i].isnan() if own == 0 else float(found[i]) == pytest.approx(math.log(every / own), rel=1e-9)


def config_of(signal, **changes):
    options = {"trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 6, "detach": True}
    return TrainConfig(data="glyphs", out="-", introspection=signal, **{**options, "method": "plain", **changes})


def batch_of(signal, labels, mixed=False):
    images = torch.rand(len(labels), 3, 16, 16, generator=random_stream("images"))
    batch = apply_ambiguity(images, labels, ("mixup",) if mixed else (), seed=0, epoch=0, step=0)
    if signal != "graded":
        return batch
    degraded = Degradations.draw(len(labels), random_stream("degradations"))
    return Batch(torch.cat([batch.images, degraded.of(images)]), batch.labels, batch.mixed, batch.lam, degraded)


def one_step(signal, *, epoch=0, mixed=False, introspected=True, **changes):
    torch.manual_seed(0)
    labels = torch.arange(12).repeat_interleave(2)
    config = config_of(signal, **changes)
    model, loss = build(config, 12)
    model.trunk.eval()
    introspection, numbers = Introspection(config, labels), torch.arange(24).flip(0)
    introspection.epoch = epoch
    introspection.wrong[::3] = 1
    batch = batch_of(signal, labels[numbers], mixed)
    term = (introspection, numbers) if introspected else ()
    value, seen = learn(batch, model, loss, config, Processes(), 0, *term)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return value, seen, gradients, batch, (model, loss, introspection, numbers)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("signal", ["ranking", "graded"])
def test_the_loss_and_everything_but_u_are_untouched(signal, mixed):
    _, _, plain, *_ = one_step(signal, mixed=mixed, introspected=False)
    value, seen, found, batch, (_, loss, *_) = one_step(signal, mixed=mixed)
    assert len(seen) == len(batch.labels)
    assert value > float(loss(seen, batch.labels))
    assert {name for name in found if name not in plain} == {
        f"uncertainty.{layer}.{part}" for layer in ("hidden", "linear") for part in ("weight", "bias")
    }
    assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("mixed", [False, True])
def test_held_out_classes_do_not_enter_the_loss_and_all_teach_u(epoch, mixed):
    value, seen, _, batch, (_, loss, introspection, numbers) = one_step("error", epoch=epoch, mixed=mixed)
    held = torch.tensor([any((c + epoch) % PARTS == 0 for c in s) for s in batch.labels.tolist()])
    assert 0 < int(held.sum()) < len(held)
    target = [float(introspection.wrong[n]) for n in numbers.tolist()]
    term = by_hand(seen.uncertainty[:24].double(), target)
    assert value == pytest.approx(float(loss(seen[~held], batch.labels[~held]) + term), rel=1e-5)


def test_the_parts_take_turns():
    config = config_of("error")
    introspection = Introspection(config, torch.arange(12))
    batch = Batch(torch.zeros(12, 1, 1, 1), LabelSets(torch.arange(12)), torch.zeros(12, dtype=torch.bool))
    held = []
    for epoch in range(PARTS):
        introspection.epoch = epoch
        held += (~introspection.enters(batch)).nonzero().flatten().tolist()
    assert sorted(held) == list(range(12))
    everything = Batch(torch.zeros(1, 1, 1, 1), LabelSets(torch.zeros(1, dtype=torch.long)), torch.zeros(1).bool())
    introspection.epoch = 0
    assert not introspection.enters(everything).any()  # such a batch has no loss, see learn


def test_wrong_neighbours_by_brute_force(options):
    images = load_dataset(options["data"]).train
    pixels = load_pixels(images, 18)
    config = config_of("error")
    introspection = Introspection(config, torch.arange(len(images)))
    e = Embeddings.certain(torch.randn(len(images), 4))
    introspection.look(e, pixels)
    distances = torch.cdist(e.unit, e.unit).fill_diagonal_(9)
    wrong = images.labels[distances.argmin(dim=1)] != images.labels
    assert torch.equal(introspection.wrong.bool(), wrong)
    assert int(wrong.sum()) > 0


def test_graded_compares_copies_of_one_kind_and_each_with_its_original():
    torch.manual_seed(3)
    n = 9
    degraded = Degradations.draw(n, random_stream("degradations"))
    e = embeddings(2 * n)
    batch = Batch(torch.zeros(2 * n, 1, 1, 1), LabelSets(torch.arange(n)), torch.zeros(n).bool(), None, degraded)
    found = Introspection(config_of("graded"), torch.arange(n)).term(e, batch, torch.arange(n))
    strength = [0.0] * n + degraded.strength.tolist()

    def comparable(i, j):
        if i < n or j < n:
            return i % n == j % n
        return bool(degraded.kind[i - n] == degraded.kind[j - n])

    same(found, by_hand(e.uncertainty, strength, comparable), e.uncertainty)


def test_degradations():
    images = torch.rand(30, 3, 16, 16, generator=random_stream("images"))
    drawn = Degradations.draw(30, random_stream("degradations", 1))
    assert drawn.kind.bincount().tolist() == [10, 10, 10]
    assert not (drawn.partner == torch.arange(30)).any()
    copies = drawn.of(images)
    assert copies.shape == images.shape
    mixed = int((drawn.kind == 2).nonzero()[0])
    share = 0.5 * float(drawn.strength[mixed])
    expected = (1 - share) * images[mixed] + share * images[drawn.partner[mixed]]
    torch.testing.assert_close(copies[mixed], expected)
    none = Degradations(drawn.kind, torch.zeros(30), drawn.partner)
    torch.testing.assert_close(none.of(images), images)
    for kind in (0, 1):  # the stronger, the further away
        chosen = drawn.kind == kind
        weak, strong = (
            (Degradations(drawn.kind, torch.full((30,), t), drawn.partner).of(images) - images)[chosen].abs().mean()
            for t in (0.3, 1.0)
        )
        assert weak < strong


@pytest.fixture
def frozen(options):
    return {
        **options, "trunk": "tf_efficientnet_lite0", "pretrained": True, "image_size": 32, "freeze_trunk": True,
        "crops": 2, "epochs": 2, "holdout": 0.0, "split": "all",
    }  # fmt: skip


def test_kept_features_of_degraded_copies_are_those_of_the_stream(frozen):
    config = TrainConfig(out="-", introspection="graded", **frozen)
    model = build_model(image_size=32, embedding_dim=8).eval()
    stream = Stream(load_pixels(load_dataset(config.data, split="all").train, 37), config, 32, torch.device("cpu"))
    kept = FrozenStream(stream, model, lambda done, total: None)
    expected = {tuple(n.tolist()): batch for n, batch in stream.batches(0, 0)}
    for numbers, batch in kept.batches(0, 0):
        reference = expected[tuple(numbers.tolist())]
        assert len(batch.images) == 3 * len(numbers)  # originals, mixtures, degraded copies
        with torch.no_grad():
            torch.testing.assert_close(batch.images, model.features(reference.images), rtol=1e-4, atol=1e-4)
        assert torch.equal(batch.degraded.strength, reference.degraded.strength)
        assert torch.equal(batch.degraded.kind, reference.degraded.kind)
        assert torch.equal(batch.mixed, reference.mixed)


@pytest.mark.parametrize("signal", SIGNALS)
def test_killed_and_resumed_is_bit_identical(frozen, tmp_path, bit_identical_after_a_kill, signal):
    config = {**frozen, "introspection": signal, "u_hidden": 5, "method": "ism"}
    assert "introspection.wrong" in bit_identical_after_a_kill(config, step=12)  # in the second epoch
    assert load_model(tmp_path / "whole").config.u_hidden == 5


def test_u_learns_and_s_stays_that_of_plain_training(frozen, tmp_path):
    models = {}
    for signal in ("none", "ranking"):
        config = {**frozen, "method": "plain", "introspection": signal, "u_hidden": 0}
        train(TrainConfig(out=str(tmp_path / signal), **config))
        models[signal] = load_model(tmp_path / signal / "checkpoints" / "last").state_dict()
    for name in models["none"]:
        assert torch.equal(models["none"][name], models["ranking"][name]) is not name.startswith("uncertainty.linear")


def test_by_default_u_is_taught_and_a_whole_trunk_stays_that_of_plain_training(options, tmp_path):
    by_default = {key: value for key, value in options.items() if key != "method"}
    metrics = {}
    for name, own in (("default", {}), ("none", {"introspection": "none"})):
        metrics[name] = train(TrainConfig(out=str(tmp_path / name), **by_default, **own))
    taught, untaught = (load_model(tmp_path / name / "checkpoints" / "last").state_dict() for name in metrics)
    shared = [name for name in untaught if not name.startswith("uncertainty")]
    assert all(torch.equal(taught[name], untaught[name]) for name in shared)
    assert metrics["default"] == metrics["none"]
    assert "uncertainty.hidden.weight" in taught
    assert taught["uncertainty.linear.bias"].any()  # it began at 0


def test_the_signals_train_a_whole_trunk_too(options, tmp_path):
    for signal in SIGNALS:
        config = {**options, "epochs": 1, "split": "all", "holdout": 0.0, "detach": True, "introspection": signal}
        assert train(TrainConfig(out=str(tmp_path / signal), **config))["steps"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"introspection": "ranking", "method": "idml"}, "introspection needs detach or a frozen trunk"),
        ({"introspection": "error", "method": "ism", "train": "last"}, "introspection needs detach or a frozen trunk"),
        ({"introspection": "graded", "method": "pel", "freeze_trunk": True}, "which method pel does not have"),
        ({"introspection": "error", "method": "constant", "gamma": 1, "detach": True}, "method constant does not have"),
        ({"introspection": "rank"}, "unknown introspection 'rank'; did you mean 'ranking'"),
        ({"u_hidden": 64, "introspection": "none"}, "u_hidden is for methods that learn u"),
        ({"u_hidden": -1}, "u_hidden must be a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words) as caught:
        from_dict({"data": "glyphs", "out": "x", **options})
    assert "\n" not in str(caught.value)


def test_too_few_classes_to_hold_out():
    with pytest.raises(ValueError, match="needs 10 or more"):
        Introspection(config_of("error"), torch.arange(9))

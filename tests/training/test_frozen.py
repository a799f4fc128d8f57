"""Laptop mode: what the heads train on is what the trunk makes of the very batches that full training would see."""

import json

import pytest
import torch

from idml.data.datasets import load_dataset
from idml.data.pixel_cache import load_pixels
from idml.evaluation import evaluate_retrieval
from idml.model import build_model, load_model
from idml.model.feature_cache import load_features
from idml.training.batches import FrozenStream, Stream
from idml.training.build import build, start_at_principal_components
from idml.training.config import from_dict
from idml.training.loop import train


def quiet(done, total):
    pass


@pytest.fixture
def frozen(options):
    """Options of a run with the pretrained trunk, at a size where it takes seconds."""
    return {
        **options, "trunk": "tf_efficientnet_lite0", "pretrained": True, "image_size": 32, "freeze_trunk": True,
        "crops": 2,
    }  # fmt: skip


def streams(frozen, **changes):
    config = from_dict({"out": "-", **{**frozen, **changes}})
    images = load_dataset(config.data).train
    _, method = build(config, images.labels, len(images.classes))
    model = build_model(image_size=32, embedding_dim=8)
    stream = Stream(load_pixels(images, 37), config, method, 32, torch.device("cpu"))
    return stream, FrozenStream(stream, model, quiet), model


@pytest.mark.parametrize("changes", [{}, {"method": "plain"}, {"ambiguity": ("cutmix", "mixup", "blur")}])
def test_features_are_those_of_the_batches_of_full_training(frozen, changes):
    stream, cached, model = streams(frozen, **changes)
    model.eval()
    for epoch in range(3):  # two are planned, the third is the first again in another order
        planned = epoch % 2
        expected = {}
        for numbers, batch in stream.batches(planned, planned * cached.steps):
            expected[tuple(numbers.tolist())] = batch
        for numbers, batch in cached.batches(epoch, epoch * cached.steps):
            reference = expected.pop(tuple(numbers.tolist()))
            with torch.no_grad():
                torch.testing.assert_close(batch.images, model.features(reference.images), rtol=1e-4, atol=1e-4)
            assert torch.equal(batch.labels.ids, reference.labels.ids)
            assert torch.equal(batch.mixed, reference.mixed)
            assert batch.lam == reference.lam
        assert not expected


def test_methods_share_the_features_of_the_originals(frozen, monkeypatch, tmp_path):
    monkeypatch.setenv("IDML_CACHE", str(tmp_path))
    _, mixed, _ = streams(frozen)
    before = {path.name for path in tmp_path.glob("*.npy")}
    assert sum(name.startswith("crops-") for name in before) == 1
    assert sum(name.startswith("added-") for name in before) == 1
    _, plain, _ = streams(frozen, method="plain")
    assert len(plain.parts) == 1
    assert {path.name for path in tmp_path.glob("*.npy")} == before
    streams(frozen, seed=1)
    assert len(list(tmp_path.glob("crops-*.npy"))) == 2
    assert mixed.parts[0].shape == mixed.parts[1].shape == plain.parts[0].shape
    streams(frozen, method="mixup")
    streams(frozen, method="mixup", ambiguity=("cutmix",))
    assert len(list(tmp_path.glob("crops-*.npy"))) == 2
    assert len(list(tmp_path.glob("added-*.npy"))) == 3  # Mixup of two seeds, CutMix of one


def test_another_trunk_has_other_features(frozen, monkeypatch, tmp_path):
    monkeypatch.setenv("IDML_CACHE", str(tmp_path))
    stream, _, model = streams(frozen)
    first = load_features(model, stream.pixels)
    with torch.no_grad():
        next(model.trunk.parameters()).mul_(1.5)
    second = load_features(model, stream.pixels)
    assert not torch.allclose(first, second)


def test_the_trunk_stays_and_the_heads_learn(frozen, tmp_path):
    metrics = train(from_dict({"out": str(tmp_path), **frozen}))
    trained, fresh = load_model(tmp_path), build_model(image_size=32, embedding_dim=8)
    for (name, a), b in zip(trained.trunk.state_dict().items(), fresh.trunk.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(trained.semantic.weight, fresh.semantic.weight)
    assert metrics["selected"]["recall@1"] > 0
    test = load_dataset(frozen["data"]).test
    embeddings = trained.embed(torch.stack([_centre(source) for source in test.sources]))
    figures = evaluate_retrieval(embeddings, test.labels, recall_at=(1,))
    assert metrics["selected"]["recall@1"] == pytest.approx(figures["recall@1"])


def _centre(source):
    from idml.data.augment import centre_crop
    from idml.data.datasets import ImageSet

    pixels = load_pixels(ImageSet("one", [source], torch.tensor([0]), ("a",)), 37)
    return centre_crop(pixels.batch(torch.tensor([0])), 32)[0]


def test_killed_and_resumed_frozen_run_is_bit_identical(frozen, tmp_path, bit_identical_after_a_kill):
    bit_identical_after_a_kill(frozen, step=3)
    logs = [(tmp_path / run / "log.jsonl").read_text().splitlines() for run in ("whole", "killed")]
    assert [json.loads(line)["step"] for line in logs[0]] == [json.loads(line)["step"] for line in logs[1]]


def test_the_head_starts_at_the_quality_of_the_features():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(20).repeat_interleave(10)
    model = build_model("conv4", embedding_dim=32, image_size=16)
    directions = torch.randn(20, model.trunk.width, generator=generator)
    features = 0.5 * directions[labels] + torch.randn(200, model.trunk.width, generator=generator) + 7

    def quality():
        return evaluate_retrieval(model.embed_features(features), labels)["map@r"]

    random = quality()
    start_at_principal_components(model, features)
    assert quality() > random
    centred = features - features.mean(dim=0)
    _, _, rows = torch.linalg.svd(centred, full_matrices=False)  # another way to the same subspace
    ours = model.semantic.weight @ rows[:32].T
    torch.testing.assert_close(ours.abs().amax(dim=1)[:15], torch.ones(15), rtol=1e-3, atol=1e-3)
    s = model.embed_features(features).semantic
    torch.testing.assert_close(s.mean(dim=0), torch.zeros(32), rtol=0, atol=1e-3)
    variances = s.var(dim=0)
    assert bool((variances[:-1] >= variances[1:] - 1e-3).all())


def test_where_the_eigenvectors_are_not_found_the_head_starts_at_the_same_place(monkeypatch):
    def gives_up(matrix):
        raise torch.linalg.LinAlgError("failed to converge")

    heads = []
    features = torch.randn(30, 256, generator=torch.Generator().manual_seed(0)) * torch.linspace(1, 3, 256)
    for broken in (False, True):
        model = build_model("conv4", embedding_dim=50, image_size=16)
        if broken:
            monkeypatch.setattr(torch.linalg, "eigh", gives_up)
        start_at_principal_components(model, features)
        heads.append(model.semantic)
    first, second = (head.weight.detach() for head in heads)
    torch.testing.assert_close(first[:29], second[:29], rtol=1e-4, atol=1e-4)  # the images span no more
    torch.testing.assert_close(second @ second.T, torch.eye(50), rtol=0, atol=1e-5)


def test_more_dimensions_than_features_start_at_zero():
    model = build_model("conv4", embedding_dim=300, image_size=16)
    start_at_principal_components(model, torch.randn(40, model.trunk.width))
    assert not model.semantic.weight[model.trunk.width :].any()
    assert bool(torch.isfinite(model.semantic.weight).all())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"freeze_trunk": True}, "train heads needs pretrained weights"),
        ({"micro_batch": 4}, "micro_batch needs frozen batch normalisation"),
        ({"crops": 0}, "crops must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_frozen_is_refused(options, changes, words):
    with pytest.raises(ValueError, match=words):
        from_dict({"out": "-", **{**options, **changes}})

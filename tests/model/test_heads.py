"""Heads with slices: what they compute, how they start, what is saved, and one clear line for what cannot be."""

import pytest
import torch
from torch.nn.functional import normalize

from idml.model import build_model, load_model, save_model
from idml.model.heads import unit_slices
from idml.model.model import pool_positions
from idml.training.build import start_at_principal_components

NAMES = ("a", "b", "c", "d")


def build(**options):
    return build_model("conv4", embedding_dim=8, image_size=16, **options).eval()


@pytest.mark.parametrize("training", [(), ("more", "most")])
def test_slices_are_normalised_one_by_one(training, tmp_path):
    model = build(head="slices", slices=NAMES, training_slices=training)
    features = torch.randn(5, 256)
    raw, whole = model.outputs(features).semantic, model.heads(features)
    assert raw.shape == (5, 2 * (4 + len(training)))
    for k, name in enumerate(NAMES):
        expected = normalize(
            features @ model.semantic.linear.weight[2 * k : 2 * k + 2].T + model.semantic.linear.bias[2 * k : 2 * k + 2]
        )
        torch.testing.assert_close(whole.semantic[:, 2 * k : 2 * k + 2], expected)
        assert torch.equal(model.slice(whole, name).semantic, whole.semantic[:, 2 * k : 2 * k + 2])
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert torch.equal(again.heads(features).semantic, whole.semantic)
    assert torch.equal(again.outputs(features).semantic, raw)


@pytest.mark.parametrize("kind", ["parts", "shared"])
def test_parts_read_their_part_of_the_features(kind):
    model = build(head=kind, slices=NAMES)
    features = torch.randn(3, 256)
    layers = list(model.semantic.linears) * (4 if kind == "shared" else 1)
    expected = [layers[k](features[:, 64 * k : 64 * k + 64]) for k in range(4)]
    torch.testing.assert_close(model.outputs(features).semantic, torch.cat(expected, dim=1))
    torch.testing.assert_close(model.heads(features).semantic, torch.cat([normalize(x) for x in expected], dim=1))


def test_slices_start_at_components_in_turn():
    features = torch.randn(300, 256) * torch.linspace(3, 1, 256)
    linear, sliced = build(), build(head="slices", slices=NAMES, training_slices=("more",))
    for model in (linear, sliced):
        start_at_principal_components(model, features)
    for k in range(4):
        torch.testing.assert_close(sliced.semantic.linear.weight[2 * k : 2 * k + 2], linear.semantic.weight[k::4])
    torch.testing.assert_close(sliced.semantic.linear.weight[8:], linear.semantic.weight[:2])
    parts = build(head="parts", slices=NAMES)
    start_at_principal_components(parts, features)
    s = parts.outputs(features).semantic
    torch.testing.assert_close(s.mean(dim=0), torch.zeros(8), rtol=0, atol=1e-4)


def test_a_rotated_start_keeps_the_distances_in_a_slice_and_spreads_its_variance():
    features = torch.randn(300, 256, generator=torch.Generator().manual_seed(0)) * torch.linspace(2, 0, 256) ** 6
    found = {}
    for seed in (None, 0, 0, 1):
        model = build_model(
            "conv4", embedding_dim=64, image_size=16, head="slices", slices=("a", "b"), training_slices=("more",)
        )
        start_at_principal_components(model, features, rotation_seed=seed)
        if seed in found:
            assert all(
                torch.equal(x, found[seed].semantic.state_dict()[n]) for n, x in model.semantic.state_dict().items()
            )
        found[seed] = model.eval()
    plain, turned, other = (found[seed].outputs(features).semantic.detach().split(32, dim=1) for seed in (None, 0, 1))
    for before, after, another in zip(plain, turned, other, strict=True):
        torch.testing.assert_close(torch.pdist(after), torch.pdist(before), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(after.mean(dim=0), torch.zeros(32), rtol=0, atol=1e-3)
        energy = [x.square().mean(dim=0) for x in (before, after)]
        first, spread = (float(e[:8].sum() / e.sum()) for e in energy)
        assert first > 0.4 > 0.32 > spread > 0.18  # 8 of 32 columns
        assert not torch.allclose(after, another, atol=1.0)
    rotations = [x.T @ y for x, y in zip(plain, turned, strict=True)]
    assert not torch.allclose(rotations[0], rotations[1], rtol=0.5)  # each slice has its own


def test_a_rotated_start_of_more_dimensions_than_the_features_have():
    features, pairs = torch.randn(60, 256), []
    for seed in (None, 3):
        model = build_model("conv4", embedding_dim=300, image_size=16).eval()
        start_at_principal_components(model, features, rotation_seed=seed)
        pairs.append(torch.pdist(model.embed_features(features).semantic))
    torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-3)


def test_a_slice_without_length_is_zero():
    assert unit_slices(torch.tensor([[0.0, 0.0, 0.0, 5.0]]), 2).tolist() == [[0.0, 0.0, 0.0, 1.0]]


def test_maps_are_positions_averaged_to_a_grid():
    positions = torch.randn(2, 16, 3)
    assert torch.equal(pool_positions(positions, 4), positions)
    coarse = torch.arange(4.0).view(1, 4, 1)  # a map of 2 × 2
    fine = pool_positions(coarse, 4).view(4, 4)
    torch.testing.assert_close(fine.mean(), coarse.mean())
    assert bool((fine.diff(dim=0) >= 0).all() and (fine.diff(dim=1) >= 0).all())
    with pytest.raises(ValueError, match="the trunk has no position maps: its 15 positions do not form a square"):
        pool_positions(torch.randn(2, 15, 3), 4)


def test_maps_follow_the_pooled_features():
    model = build(maps=4)
    images = torch.rand(3, 3, 16, 16)
    features = model.training_features(images)
    assert features.shape == (3, 17 * 256)
    torch.testing.assert_close(features[:, :256], model.features(images))
    torch.testing.assert_close(features[:, 256:].view(3, 16, 256), pool_positions(model.positions(images), 4))
    outputs = model.outputs(features)
    torch.testing.assert_close(outputs.semantic[:, :8], model(images).semantic)
    torch.testing.assert_close(outputs.semantic[:, 16:24], model.semantic(features[:, 512:768]))
    torch.testing.assert_close(outputs.uncertainty, model(images).uncertainty)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head": "slices", "slices": ("a", "b", "c")}, "embedding_dim 8 does not divide into 3 slices"),
        (
            {"head": "parts", "slices": tuple("abcdefgh"), "training_slices": ("i",)},
            "256 does not divide into 9 slices",
        ),
        ({"head": "slices"}, "a slices head needs the names of its slices"),
        ({"slices": ("a",)}, "a linear head has no slices"),
        ({"head": "slices", "slices": ("a", "a")}, "the names of slices must differ"),
        ({"head": "slises", "slices": ("a",)}, "unknown head 'slises'; did you mean 'slices'"),
        ({"branching": "tree"}, "unknown branching 'tree'"),
        ({"slices": "ab"}, "slices must be a list of names"),
    ],
)
def test_what_does_not_fit_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        build(**options)


def test_slices_asked_of_a_model_without_them():
    model, sliced = build(), build(head="slices", slices=NAMES)
    e = model.heads(torch.randn(2, 256))
    with pytest.raises(ValueError, match="there is no slice 'a': the model has a semantic embedding without slices"):
        model.slice(e, "a")
    with pytest.raises(ValueError, match="unknown slice 'e'"):
        sliced.slice(e, "e")

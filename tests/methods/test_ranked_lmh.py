"""RLL-(L,M,H): each head by an independent computation, the high one alone as plain training, and what it refuses."""

import pytest
import torch
from method_batches import assert_same, batch_of, gradients_of, method_of
from torch.nn.functional import normalize

from idml.model import build_model, load_model, save_model
from idml.model.backbones import build_trunk
from idml.training.config import from_dict
from losses import loops

SETS = [{k % 4} for k in range(12)]


def model_of(heads, image_size=32, **options):
    kind = method_of("ranked-lmh", dim=6, stage_heads=heads)
    torch.manual_seed(0)
    options = {"trunk": "conv4", **kind.model_options(kind.options), **options}
    return build_model(embedding_dim=6, image_size=image_size, **options).eval()


def lower_features(layers, x):
    """What the layers on a map [n, c, 4, 4] compute, position by position."""
    weight, bias = layers.convolution.weight[:, :, 0, 0], layers.convolution.bias
    reduced = torch.relu(torch.einsum("ck,nkij->ncij", weight, x) + bias[None, :, None, None])
    return torch.relu(reduced.flatten(1) @ layers.linear.weight.T + layers.linear.bias)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_the_loss_is_that_of_each_head_by_loops(heads):
    method = method_of("ranked-lmh", loss="ranked_list", dim=24, stage_heads=heads)
    embeddings, batch = batch_of(12, 24)
    terms = method.loss(embeddings, batch, torch.arange(12), seed=0)
    expected = 0.0
    for part in embeddings.semantic.split(24 // heads, dim=1):
        unit = part / part.square().sum(dim=1, keepdim=True).sqrt()
        d = [[(a - b).square().sum().clamp_min(1e-24).sqrt() for b in unit] for a in unit]
        expected = expected + loops.ranked_list(d, SETS)
    assert_same(terms["pairs"], expected, embeddings.semantic)


def test_the_high_head_alone_is_plain_training(tmp_path):
    embeddings, batch = batch_of(12, 6)
    found, expected = (
        gradients_of(method, embeddings, batch)
        for method in (
            method_of("ranked-lmh", loss="ranked_list", stage_heads=1),
            method_of("plain", loss="ranked_list"),
        )
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    model, plain = model_of(1), build_model("conv4", embedding_dim=6, image_size=32).eval()
    plain.trunk.load_state_dict(model.trunk.state_dict())
    plain.semantic.load_state_dict(model.semantic.linears[0].state_dict())
    images = torch.rand(3, 3, 32, 32)
    torch.testing.assert_close(model(images).semantic, plain(images).unit)
    torch.testing.assert_close(model.training_outputs(images).semantic, plain(images).semantic)


@pytest.mark.parametrize("heads", [2, 3])
def test_each_head_reads_its_own_stage(tmp_path, heads):
    model, images = model_of(heads), torch.rand(3, 3, 32, 32)
    layers = model.trunk.network.layers
    low = layers[:8](2 * images - 1)  # 8 × 8 positions
    middle = layers[8:12](low)  # 4 × 4
    high = layers[12:](middle).flatten(2)
    means = low.unflatten(2, (4, 2)).unflatten(4, (4, 2)).mean(dim=(3, 5))
    parts = [
        lower_features(own, x) for own, x in zip(model.trunk.layers, [means, middle][2 - heads + 1 :], strict=True)
    ]
    parts.append(high.mean(dim=2) + high.amax(dim=2))
    torch.testing.assert_close(model.features(images), torch.cat(parts, dim=1))
    slices = [normalize(linear(part)) for linear, part in zip(model.semantic.linears, parts, strict=True)]
    torch.testing.assert_close(model(images).semantic, torch.cat(slices, dim=1))
    assert model.config.slices == ("low", "middle", "high")[-heads:]
    stored = model.stages.activations(images)  # what --train last stores
    assert stored.shape == (3, 128 + (64 if heads == 3 else 0), 4, 4)
    torch.testing.assert_close(model.last_stage(stored).semantic, model(images).semantic)
    torch.testing.assert_close(model.last_stage_outputs(stored).semantic, model.training_outputs(images).semantic)
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path)(images).semantic, model(images).semantic)


def test_what_learns_with_the_last_stage():
    model = model_of(3)
    learning = {id(p) for p in model.stages.last.parameters()}
    assert all(id(p) in learning for p in model.trunk.layers.parameters())
    below = {id(p) for p in model.stages.below.parameters()}
    assert not below & learning
    assert below | learning == {id(p) for p in model.trunk.parameters()}


@pytest.mark.parametrize(("trunk", "sizes"), [("tf_efficientnet_lite0", (12, 6)), ("resnet18", (12, 6))])
def test_the_maps_of_trunks_shrink_from_stage_to_stage(trunk, sizes):
    stages = build_trunk(trunk, pretrained=False, image_size=96).eval().split()
    images = torch.rand(1, 3, 96, 96)
    maps = stages.maps(images)
    assert tuple(each.shape[-1] for each in maps) == sizes
    assert stages.positions(maps[1]).shape[1] == 9
    assert torch.equal(stages.activations(images), maps[1])
    if trunk == "tf_efficientnet_lite0":
        assert [each.shape[1] for each in maps] == [40, 112]  # docs/methods.md: 152 channels are stored


def test_the_last_stage_is_killed_and_resumed_with_three_heads(options, bit_identical_after_a_kill):
    trunk = {"trunk": "tf_efficientnet_lite0", "pretrained": True, "image_size": 32, "train": "last", "crops": 2}
    own = {"method": "ranked-lmh", "loss": "ranked_list", "embedding_dim": 9}
    bit_identical_after_a_kill({**options, **trunk, **own, "epochs": 2}, step=5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train": "heads"}, "ranked-lmh learns layers on the maps of earlier stages: it needs train last or all"),
        ({"stage_heads": 0}, "stage_heads must be a whole number of at least 1"),
        ({"stage_heads": 4}, "stage_heads must be at most 3, got 4"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        from_dict({"data": "glyphs", "out": "-", "method": "ranked-lmh", "loss": "ranked_list", **options})


def test_what_a_model_cannot_have_is_refused():
    with pytest.raises(ValueError, match="embedding_dim 8 does not divide into 3 slices"):
        method_of("ranked-lmh", dim=8)
    with pytest.raises(ValueError, match="a trunk has branches at 3 stages, got 4"):
        build_model("conv4", embedding_dim=8, image_size=16, head="parts", branching="stages", slices=tuple("abcd"))
    with pytest.raises(ValueError, match="the last stage of VisionTransformer is not known"):
        model_of(2, trunk="test_vit", pretrained=False)
    with pytest.raises(ValueError, match="several stages has no position maps"):
        model_of(2).positions(torch.rand(1, 3, 32, 32))

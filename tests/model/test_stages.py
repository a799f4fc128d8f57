"""A trunk in two parts is the trunk."""

import pytest
import torch

from idml.model import build_model
from idml.model.backbones import Stages


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


@pytest.mark.parametrize("trunk", ["conv4", "vit_tiny_patch16_224"])
def test_other_trunks_are_refused(trunk):
    model = build_model(trunk, pretrained=False, embedding_dim=4)
    with pytest.raises(ValueError, match="train last is for ResNets and EfficientNets"):
        Stages(model.trunk)

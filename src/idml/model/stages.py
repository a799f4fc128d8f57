"""A trunk in two: what lies before its last stage, and the last stage, which can be trained on kept activations.

The last stage is what follows the last shrinking of the feature map: of a ResNet its layer4, of an EfficientNet the
last two groups of blocks and the final convolution. Most of the time goes into what comes before, where maps are large.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from idml.model.backbones import Trunk


class Stages:
    """The two parts of a trunk; they share its modules, so training one trains the trunk."""

    def __init__(self, trunk: Trunk) -> None:
        below, above = _parts(trunk.network)
        self.trunk, self.below, self.last = trunk, nn.Sequential(*below), nn.Sequential(*above)

    def activations(self, images: Tensor) -> Tensor:
        """What the last stage sees [n, c, h, w] of images [n, 3, height, width] in [0, 1]."""
        images = images.to(self.trunk.mean.dtype).contiguous(memory_format=torch.channels_last)
        out: Tensor = self.below((images - self.trunk.mean) / self.trunk.deviation)
        return out

    def features(self, activations: Tensor) -> Tensor:
        """The trunk's pooled features [n, width] of activations."""
        x = activations.to(self.trunk.mean.dtype).contiguous(memory_format=torch.channels_last)
        positions = self.last(x).flatten(2).transpose(1, 2)
        pooled: Tensor = positions.mean(dim=1) + positions.amax(dim=1)
        return pooled


def _parts(network: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    from timm.models.efficientnet import EfficientNet
    from timm.models.resnet import ResNet

    n: Any = cast(Any, network)
    if isinstance(network, ResNet):
        return [n.conv1, n.bn1, n.act1, n.maxpool, n.layer1, n.layer2, n.layer3], [n.layer4]
    if isinstance(network, EfficientNet) and len(n.blocks) > 2:
        return [n.conv_stem, n.bn1, *n.blocks[:-2]], [*n.blocks[-2:], n.conv_head, n.bn2]
    raise ValueError(
        f"the last stage of {type(network).__name__} is not known; train last is for ResNets and EfficientNets"
    )

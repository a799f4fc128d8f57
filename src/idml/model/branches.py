"""Trunks with several branches: their features are those of all branches side by side [n, branches·width].

    ensemble     K networks of their own
    attention    one network whose last stage sees the map before it through K attention masks (ABE, Kim et al., 2018)
    stages       one network, and layers of their own on the maps before its last stage (RLL, Wang et al., 2019)

A head of kind ``parts``, ``logit_parts`` or ``shared`` gives each branch a slice of the embedding.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from idml.model.backbones import Form, Stages, Trunk, build_trunk

BRANCHINGS = ("none", "ensemble", "attention", "stages")
STAGES = ("low", "middle", "high")  # the branches of a `StageTrunk`, of which the last ones exist


class EnsembleTrunk(Trunk):
    """K networks that see the same images."""

    def __init__(self, members: list[Trunk]) -> None:
        first = members[0]
        networks = nn.ModuleList(member.network for member in members)
        super().__init__(networks, first.width * len(members), first.image_size, *first.normalisation)

    def forward(self, images: Tensor) -> Tensor:
        """Return the pooled features of all members [n, members·width]."""
        parts = [self.positions_of(network, images) for network in self.network]
        return torch.cat([part.mean(dim=1) + part.amax(dim=1) for part in parts], dim=1)

    def positions(self, images: Tensor) -> Tensor:
        """An ensemble has no position maps."""
        raise ValueError("an ensemble of trunks has no position maps")


class AttentionTrunk(Trunk):
    """B_m(x) = pool(G(S(x) ∘ A_m(S(x)))): S all stages but the last, G the last one, A_m a mask for each branch.

    The masks have the size of S(x), channels and positions: A_m = sigmoid(W_m·relu(V·S(x))), V and W_m convolutions
    of 1 × 1. V is shared by the branches, W_m is each branch's own (the paper has a copy of G's first layers for V;
    two re-implementations share it as well). ``masked`` = False leaves the masks out: A ≡ 1.
    """

    def __init__(self, trunk: Trunk, branches: int) -> None:
        super().__init__(trunk.network, trunk.width * branches, trunk.image_size, *trunk.normalisation)
        self.masked = True
        probe = torch.zeros(1, trunk.mean.shape[1], trunk.image_size, trunk.image_size)
        with torch.no_grad():
            channels = int(Stages(trunk.eval()).activations(probe).shape[1])
        trunk.train()
        self.shared_attention = nn.Conv2d(channels, channels, 1)
        self.attentions = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(branches))

    def forward(self, images: Tensor) -> Tensor:
        """Return the pooled features of all branches [n, branches·width]."""
        stages = self.split()
        return stages.features(stages.activations(images))

    def split(self) -> Stages:
        """All stages but the last, and the last one with its masks."""
        return AttentionStages(self)

    def positions(self, images: Tensor) -> Tensor:
        """The branches have maps of their own."""
        raise ValueError("a trunk with attention branches has no position maps of its own")


class AttentionStages(Stages):
    """An `AttentionTrunk` in two parts: the last stage sees its input through each mask in turn."""

    def __init__(self, trunk: AttentionTrunk) -> None:
        super().__init__(trunk)
        self.attention = trunk
        self.last = nn.Sequential(
            self.last, trunk.shared_attention, trunk.attentions
        )  # what learns with the last stage

    def features(self, activations: Tensor) -> Tensor:
        """Return the pooled features of all branches [n, branches·width] for the last stage's inputs."""
        x = activations.to(self.trunk.mean.dtype).contiguous(memory_format=torch.channels_last)
        shared = self.attention.shared_attention(x).relu()
        parts = []
        for mask in self.attention.attentions:
            masked = x * torch.sigmoid(mask(shared)) if self.attention.masked else x
            positions = self.last[0](masked).flatten(2).transpose(1, 2)
            parts.append(positions.mean(dim=1) + positions.amax(dim=1))
        return torch.cat(parts, dim=1)


class StageTrunk(Trunk):
    """The pooled features of the last stage (high), and layers on the maps after the two stages before (low, middle).

        low, middle:  relu(W·relu(V·pool(x)))        pool: 4 × 4 positions, V: 1 × 1 convolution to 128 channels
        high:         the trunk's own features

    Each has the width of the trunk's features: 1024 in the paper, whose heads (Wang et al., 2019) these are, without
    batch normalisation. The low map is averaged to the size of the middle one, so that both can be stored.
    """

    def __init__(self, trunk: Trunk, branches: int) -> None:
        if branches > len(STAGES):
            raise ValueError(f"a trunk has branches at {len(STAGES)} stages, got {branches}")
        super().__init__(trunk.network, trunk.width * branches, trunk.image_size, *trunk.normalisation)
        probe = torch.zeros(1, trunk.mean.shape[1], trunk.image_size, trunk.image_size)
        with torch.no_grad():
            channels = [int(map.shape[1]) for map in Stages(trunk.eval()).maps(probe)]
        trunk.train()
        used = channels[len(channels) + 1 - branches :]
        self.low_channels = used[0] if len(used) == len(channels) else 0
        self.layers = nn.ModuleList(MapLayers(count, trunk.width) for count in used)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of all branches, the lowest first [n, branches·width]."""
        stages = self.split()
        return stages.features(stages.activations(images))

    def split(self) -> Stages:
        """All stages but the last, and the last one with the layers on the maps before it."""
        return BranchedStages(self)

    def positions(self, images: Tensor) -> Tensor:
        """The branches have maps of their own."""
        raise ValueError("a trunk with branches at several stages has no position maps of its own")


class MapLayers(nn.Module):
    """From a map [n, channels, h, w] to features [n, width]: 4 × 4 positions, 128 channels each, a hidden layer."""

    side, reduced = 4, 128

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, self.reduced, 1)
        self.linear = nn.Linear(self.reduced * self.side**2, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        x = self.convolution(adaptive_avg_pool2d(x, self.side)).relu()
        out: Tensor = self.linear(x.flatten(1)).relu()
        return out


class BranchedStages(Stages):
    """A `StageTrunk` in two parts: what is stored is the input of the last stage and, if it is used, the low map."""

    def __init__(self, trunk: StageTrunk) -> None:
        super().__init__(trunk)
        self.layers, self.low_channels = trunk.layers, trunk.low_channels
        self.last = nn.Sequential(self.last, trunk.layers)  # what learns with the last stage
        self.stored = ("with the low map",) if self.low_channels else ()

    def activations(self, images: Tensor) -> Tensor:
        """Return the input of the last stage, followed by the channels of the low map at that size [n, c, h, w]."""
        low, middle = self.maps(images)
        if not self.low_channels:
            return middle
        return torch.cat([middle, adaptive_avg_pool2d(low, (middle.shape[2], middle.shape[3]))], dim=1)

    def features(self, activations: Tensor) -> Tensor:
        """Return the features of all branches [n, branches·width] for what `activations` returns."""
        x = activations.to(self.trunk.mean.dtype)
        sizes = [x.shape[1] - self.low_channels, self.low_channels] if self.low_channels else [x.shape[1]]
        parts = [part.contiguous(memory_format=torch.channels_last) for part in x.split(sizes, dim=1)]
        positions = self.last[0](parts[0]).flatten(2).transpose(1, 2)
        lower = [layers(part) for layers, part in zip(self.layers, reversed(parts), strict=False)]
        return torch.cat([*lower, positions.mean(dim=1) + positions.amax(dim=1)], dim=1)


def build_branches(trunk: Trunk, branching: str, branches: int, others: tuple[str, int, Form] | None) -> Trunk:
    """A trunk with branches: attention, layers on several stages, or an ensemble of it and others like it.

    ``others`` are the name, the channels and the form of the other networks of an ensemble, which get random weights
    of their own; None makes them copies of a trunk with trained weights.
    """
    if branching == "attention":
        return AttentionTrunk(trunk, branches)
    if branching == "stages":
        return StageTrunk(trunk, branches)
    if others is None:
        return EnsembleTrunk([trunk, *(copy.deepcopy(trunk) for _ in range(branches - 1))])
    name, channels, form = others
    options: dict[str, Any] = {"in_chans": channels, "image_size": trunk.image_size, "form": form}
    more = [build_trunk(name, pretrained=False, **options) for _ in range(branches - 1)]
    return EnsembleTrunk([trunk, *more])

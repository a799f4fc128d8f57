"""Semantic heads: from the trunk's features to the semantic embedding.

A head has two results. ``forward`` is the embedding s that tests, searches and exports use. ``outputs`` is what the
loss of a method reads: all columns as they are, before the slices are normalised, and those that exist in training
alone. For the linear head both are the same.

A *slice* is a named part of s. At test each slice is normalised by itself, so a distance between two images is the
mean over the slices' squared distances.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from idml.errors import unknown_name


class StartBlock(NamedTuple):
    """Rows of a head that start at principal components of some columns of the features.

    Row i starts at the component ``first`` + i·``step``.
    """

    weight: Tensor
    bias: Tensor
    columns: slice
    first: int = 0
    step: int = 1


class LinearHead(nn.Linear):
    """s = W·features + b, in training as in tests."""

    def start_blocks(self) -> list[StartBlock]:
        """All rows."""
        return [StartBlock(self.weight, self.bias, slice(None))]


class SlicedHead(nn.Module):
    """K linear slices of equal size. Each reads all features, or (``parts``) its own K-th part of them.

    With ``shared`` one linear layer serves all parts. ``logits`` and ``logit_parts`` are scores of classes, which do
    not start at principal components. Training slices come last and are left out of the embedding.
    """

    def __init__(self, width: int, dim: int, kind: str, slices: tuple[str, ...], training: tuple[str, ...]) -> None:
        super().__init__()
        self.names, self.count = (*slices, *training), len(slices)
        self.parts, self.logits = kind in ("parts", "logit_parts", "shared"), kind in ("logits", "logit_parts")
        self.size, total = divide(dim, self.count, "embedding_dim"), len(self.names)
        if self.parts:
            part = divide(width, total, "the width of the features")
            layers = 1 if kind == "shared" else total
            self.linears = nn.ModuleList(nn.Linear(part, self.size) for _ in range(layers))
        else:
            self.linear = nn.Linear(width, self.size * total)

    def outputs(self, features: Tensor) -> Tensor:
        """All slices side by side, not normalised [n, size·(slices + training slices)]."""
        if not self.parts:
            out: Tensor = self.linear(features)
            return out
        parts = features.unflatten(1, (len(self.names), -1)).unbind(dim=1)
        layers = list(self.linears) * (len(parts) if len(self.linears) == 1 else 1)
        return torch.cat([layer(part) for layer, part in zip(layers, parts, strict=True)], dim=1)

    def forward(self, features: Tensor) -> Tensor:
        """The slices that are used in tests, each normalised [n, embedding_dim]."""
        kept = self.outputs(features)[:, : self.size * self.count]
        return unit_slices(kept, self.count)

    def start_blocks(self) -> list[StartBlock]:
        """Each slice; of slices that read the same features each gets every K-th component."""
        if self.logits:
            return []
        total, size = len(self.names), self.size
        if not self.parts:
            places = [slice(k * size, (k + 1) * size) for k in range(total)]
            weight, bias = self.linear.weight, self.linear.bias
            steps = [(k, self.count) if k < self.count else (k - self.count, 1) for k in range(total)]
            return [
                StartBlock(weight[place], bias[place], slice(None), first, step)
                for place, (first, step) in zip(places, steps, strict=True)
            ]
        layers: list[Any] = list(self.linears)
        part = int(layers[0].in_features)
        places = [slice(k * part, (k + 1) * part) for k in range(len(layers))]
        return [StartBlock(layer.weight, layer.bias, place) for layer, place in zip(layers, places, strict=True)]


class PositionHead(LinearHead):
    """A linear head that in training also reads a map: features [n, (1 + positions)·width], the pooled ones first."""

    def outputs(self, features: Tensor) -> Tensor:
        """The head of the pooled features, then that of every position [n, (1 + positions)·embedding_dim]."""
        out: Tensor = self(features.unflatten(1, (-1, self.in_features)))
        return out.flatten(1)


class RelationHead(nn.Module):
    """The head of DRML (Zheng et al., ICCV 2021): K parts of the features become nodes, and a relation mixes them.

        v_k = unit(E_k·h_k)                                    nodes, h = (h₁ … h_K)
        r_ij = [w·(A_i·h_i − B_j·h_j) + w₀]₊,  R_ij = r_ij / Σ_i r_ij         edges, from constant h
        m_j = Σ_i R_ij·v_i,   o_j = Q·[v_j; m_j] + q           Q starts at [I 0], so o starts at v
        e_k = mean((G_k·v_k − h_k)²)                           decoders, of constant v and h

    The embedding is (o₁ … o_K), normalised as a whole by whoever compares it. In training the nodes and the errors e
    follow it: [n, dim + dim + K].
    """

    def __init__(self, width: int, dim: int, parts: int) -> None:
        super().__init__()
        self.parts, self.size = parts, divide(dim, parts, "embedding_dim")
        part = divide(width, parts, "the width of the features")
        self.nodes, self.sources, self.targets = (
            nn.ModuleList(nn.Linear(part, self.size) for _ in range(parts)) for _ in range(3)
        )
        self.decoders = nn.ModuleList(nn.Linear(self.size, part) for _ in range(parts))
        self.edge, self.mix = nn.Linear(self.size, 1), nn.Linear(2 * self.size, self.size)
        with torch.no_grad():
            self.mix.weight.copy_(torch.eye(self.size, 2 * self.size))
            self.mix.bias.zero_()

    def forward(self, features: Tensor) -> Tensor:
        """The embedding (o₁ … o_K) [n, dim]."""
        parts = features.unflatten(1, (self.parts, -1)).unbind(dim=1)
        return self._relate(parts, self._embed(self.nodes, parts, unit=True))

    def outputs(self, features: Tensor) -> Tensor:
        """The embedding, the nodes and the errors of the decoders [n, dim + dim + K]."""
        parts = features.unflatten(1, (self.parts, -1)).unbind(dim=1)
        nodes = self._embed(self.nodes, parts, unit=True)
        errors = [
            (decoder(node) - part.detach()).square().mean(dim=1)
            for decoder, node, part in zip(self.decoders, nodes.detach().unbind(dim=1), parts, strict=True)
        ]
        return torch.cat([self._relate(parts, nodes), nodes.flatten(1), torch.stack(errors, dim=1)], dim=1)

    def _embed(self, layers: nn.ModuleList, parts: tuple[Tensor, ...], unit: bool = False) -> Tensor:
        embedded = torch.stack([layer(part) for layer, part in zip(layers, parts, strict=True)], dim=1)
        return normalize(embedded, dim=2) if unit else embedded

    def _relate(self, parts: tuple[Tensor, ...], nodes: Tensor) -> Tensor:
        constant = tuple(part.detach() for part in parts)
        sources, targets = self._embed(self.sources, constant), self._embed(self.targets, constant)
        edges = self.edge(sources.unsqueeze(2) - targets.unsqueeze(1)).squeeze(3).relu()  # [n, i, j]
        relations = edges / edges.sum(dim=1, keepdim=True).clamp_min(1e-12)
        messages = relations.transpose(1, 2) @ nodes
        mixed: Tensor = self.mix(torch.cat([nodes, messages], dim=2))
        return mixed.flatten(1)

    def start_blocks(self) -> list[StartBlock]:
        """Each node, at the components of its own part."""
        layers: list[Any] = list(self.nodes)
        part = int(layers[0].in_features)
        places = [slice(k * part, (k + 1) * part) for k in range(self.parts)]
        return [StartBlock(layer.weight, layer.bias, place) for layer, place in zip(layers, places, strict=True)]


class ComposedHead(nn.Module):
    """The head of DCML (Zheng et al., CVPR 2021): M compositors mix K sub-embeddings into M composites.

        e_k = E_k·h       p^m = softmax(W_m·[e₁ … e_K] + w_m) from constant e       y^m = Σ_k p^m_k·e_k       K = M

    At test each composite is normalised. In training the compositors' scores W_m·e + w_m follow them: [n, dim + M·K].

    The start is our choice: W starts at 0 and w at 3·I, so p^m_m starts at e³/(e³ + K − 1), 0.87 for K = 4, and
    each composite begins as its own sub-embedding. With random W all p start near 1/K: the composites begin as means of
    different directions, all alike, and compositors soon choose the same sub-embedding as others.
    """

    def __init__(self, width: int, dim: int, composites: int) -> None:
        super().__init__()
        self.count, self.size = composites, divide(dim, composites, "embedding_dim")
        self.linear = nn.Linear(width, dim)
        self.compositors = nn.Linear(dim, composites * composites)
        with torch.no_grad():
            self.compositors.weight.zero_()
            self.compositors.bias.copy_(3.0 * torch.eye(composites).flatten())

    def outputs(self, features: Tensor) -> Tensor:
        """The composites, not normalised, and the scores of the compositors [n, dim + M·K]."""
        parts = self.linear(features)
        scores: Tensor = self.compositors(parts.detach())
        shares = scores.unflatten(1, (self.count, self.count)).softmax(dim=2)
        composites = shares @ parts.unflatten(1, (self.count, self.size))
        return torch.cat([composites.flatten(1), scores], dim=1)

    def forward(self, features: Tensor) -> Tensor:
        """The composites, each normalised [n, dim]."""
        return unit_slices(self.outputs(features)[:, : self.count * self.size], self.count)

    def start_blocks(self) -> list[StartBlock]:
        """Each sub-embedding gets every K-th component."""
        weight, bias = self.linear.weight, self.linear.bias
        places = [slice(k * self.size, (k + 1) * self.size) for k in range(self.count)]
        return [StartBlock(weight[p], bias[p], slice(None), k, self.count) for k, p in enumerate(places)]


def unit_slices(x: Tensor, count: int) -> Tensor:
    """Each of ``count`` slices of equal size divided by its length; a slice without length stays 0.

    >>> unit_slices(torch.tensor([[3.0, 4.0, 0.0, 2.0]]), 2)
    tensor([[0.6000, 0.8000, 0.0000, 1.0000]])
    """
    return normalize(x.unflatten(1, (count, -1)), dim=2).flatten(1)


def divide(total: int, count: int, what: str) -> int:
    """total / count; a ``ValueError`` if it is not a whole number."""
    if count < 1 or total % count:
        raise ValueError(f"{what} {total} does not divide into {count} slices of equal size")
    return total // count


@dataclass(frozen=True)
class Slices:
    """Where the named slices lie in the columns of an embedding."""

    names: tuple[str, ...]
    size: int

    def columns(self, name: str) -> slice:
        """The columns of a slice."""
        if not self.names:
            raise ValueError(f"there is no slice {name!r}: the model has a semantic embedding without slices")
        if name not in self.names:
            raise ValueError(unknown_name("slice", name, self.names))
        place = self.names.index(name)
        return slice(place * self.size, (place + 1) * self.size)


def build_head(width: int, dim: int, kind: str, slices: tuple[str, ...], training_slices: tuple[str, ...]) -> nn.Module:
    """The semantic head of a kind for features of this width; the other arguments are fields of `ModelConfig`.

    A linear one also reads position maps.
    """
    if kind == "relations":
        return RelationHead(width, dim, len(slices))
    if kind == "composed":
        return ComposedHead(width, dim, len(slices))
    if kind == "linear":
        return PositionHead(width, dim)
    return SlicedHead(width, dim, kind, slices, training_slices)

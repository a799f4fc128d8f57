"""Embeddings: the semantic and the uncertainty embedding of each image, which every model returns."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

Index = int | slice | Tensor | Sequence[int] | Sequence[bool]

_NO_DIRECTION = 1e-12  # a vector shorter than this has no direction
_SAFE = 1e15  # squares of larger numbers leave float32


def full_precision(x: Tensor) -> Tensor:
    """Convert float16 and bfloat16 to float32; leave other types as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def require_finite(name: str, x: Tensor) -> None:
    """Raise a ``ValueError`` that counts the rows of ``x`` holding a NaN or an infinity."""
    bad = (~torch.isfinite(x)).any(dim=1).nonzero().flatten()
    if len(bad):
        raise ValueError(
            f"the {name} embeddings hold NaN or infinity in {len(bad)} of {len(x)} rows (first: row {int(bad[0])})"
        )


class Direction(NamedTuple):
    """Rows ready to be normalised: ``x`` within float range, 1/‖x‖ [n, 1], and which rows have no length."""

    x: Tensor
    inverse_length: Tensor
    pointless: Tensor | None


def direction(x: Tensor, name: str = "semantic") -> Direction:
    """Prepare the rows of ``x`` for normalisation.

    A row shorter than 1e-12 has no direction: its 1/‖x‖ is set to 0, so it becomes zero and gets no gradient.
    Lengths up to the largest float are handled without overflow; NaN and infinity raise ``ValueError``.
    """
    x = full_precision(x)
    with torch.no_grad():
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        shortest, longest = (float(v) for v in torch.aminmax(length)) if len(x) else (1.0, 1.0)
    if not longest < _SAFE:  # also true for NaN
        require_finite(name, x)
        x = x / x.detach().abs().amax(dim=1, keepdim=True).clamp_min(1.0)  # the direction stays
        length = torch.linalg.vector_norm(x.detach(), dim=1, keepdim=True)
    if shortest >= _NO_DIRECTION:
        return Direction(x, length.reciprocal(), None)
    pointless = length < _NO_DIRECTION
    return Direction(x, length.reciprocal().masked_fill(pointless, 0.0), pointless.squeeze(1))


def unit_rows(x: Tensor, name: str = "semantic") -> Tensor:
    """Divide each row by its length, x/‖x‖; a row without length becomes zero, without gradient.

    >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    safe, inverse_length, _ = direction(x, name)
    unit = safe * inverse_length
    radial = (unit.detach() * safe).sum(dim=1, keepdim=True) * inverse_length  # 1 in value; ∇ = x̂/‖x‖
    return unit + unit.detach() * (radial.detach() - radial)


@dataclass(frozen=True, eq=False)
class Embeddings:
    """A batch of images as the paper represents them, y = {s, u}.

    ``semantic`` [n, d] is kept as given and ``unit`` is its normalised form, which the metric uses.
    ``uncertainty`` [n, d'] is raw; its length ``level`` = ‖u‖ is the image's uncertainty level.

    >>> e = Embeddings(semantic=torch.tensor([[3.0, 4.0]]), uncertainty=torch.tensor([[0.0, 2.0]]))
    >>> e.unit, e.level
    (tensor([[0.6000, 0.8000]]), tensor([2.]))
    """

    semantic: Tensor
    uncertainty: Tensor

    def __post_init__(self) -> None:
        for name, x in (("semantic", self.semantic), ("uncertainty", self.uncertainty)):
            if not isinstance(x, Tensor) or x.ndim != 2 or not x.is_floating_point():
                raise ValueError(f"{name} must be a floating-point tensor [images, dimensions], got {_describe(x)}")
        s, u = self.semantic, self.uncertainty
        if s.shape[1] == 0:
            raise ValueError("semantic embeddings need at least one dimension")
        if len(s) != len(u):
            raise ValueError(f"semantic has {len(s)} rows but uncertainty has {len(u)}")
        if s.device != u.device:
            raise ValueError(f"semantic is on {s.device} but uncertainty is on {u.device}")
        if s.dtype != u.dtype:
            raise ValueError(f"semantic is {s.dtype} but uncertainty is {u.dtype}")

    @classmethod
    def certain(cls, semantic: Tensor) -> "Embeddings":
        """Embeddings without uncertainty, u = 0 (of no dimensions): proxies, or a model with one head."""
        if not isinstance(semantic, Tensor) or semantic.ndim != 2:
            raise ValueError(
                f"semantic must be a floating-point tensor [images, dimensions], got {_describe(semantic)}"
            )
        return cls(semantic, semantic.new_zeros(len(semantic), 0))

    @classmethod
    def cat(cls, parts: "Sequence[Embeddings]") -> "Embeddings":
        """Join several batches into one."""
        if not parts:
            raise ValueError("nothing to concatenate: the list of embeddings is empty")
        widths = {(p.semantic.shape[1], p.uncertainty.shape[1]) for p in parts}
        if len(widths) > 1:
            raise ValueError(f"cannot concatenate embeddings of different sizes: {sorted(widths)}")
        return cls(torch.cat([p.semantic for p in parts]), torch.cat([p.uncertainty for p in parts]))

    @cached_property
    def unit(self) -> Tensor:
        """The semantic part normalised, in float32 or better."""
        return unit_rows(self.semantic)

    @cached_property
    def direction(self) -> Direction:
        """The semantic part prepared for normalisation, for matrix products that normalise afterwards."""
        return direction(self.semantic)

    @cached_property
    def level(self) -> Tensor:
        """The uncertainty level ‖u‖ of each image [n], in float32 or better."""
        u = full_precision(self.uncertainty)
        level: Tensor = torch.linalg.vector_norm(u, dim=1)
        if not math.isfinite(float(level.detach().sum())):
            require_finite("uncertainty", u)
            scale = float(u.detach().abs().max())  # the squares overflowed
            level = torch.linalg.vector_norm(u / scale, dim=1) * scale
        return level

    def to(self, target: torch.device | torch.dtype | str) -> "Embeddings":
        """Move both parts to a device, or cast them to a dtype."""
        return Embeddings(self.semantic.to(target), self.uncertainty.to(target))

    def detach(self) -> "Embeddings":
        """Return the same values, detached from the graph."""
        return Embeddings(self.semantic.detach(), self.uncertainty.detach())

    def __len__(self) -> int:
        return len(self.semantic)

    def __getitem__(self, index: Index) -> "Embeddings":
        rows = as_rows(index, len(self))
        return Embeddings(self.semantic[rows], self.uncertainty[rows])

    def __repr__(self) -> str:
        s, u = self.semantic, self.uncertainty
        return (
            f"Embeddings({len(s)} images, semantic {s.shape[1]}-d, uncertainty {u.shape[1]}-d, {s.dtype}, {s.device})"
        )


def as_rows(index: Index, length: int) -> slice | Tensor | list[int] | list[bool]:
    """Return an index that keeps the row dimension: one number selects a batch of one."""
    if isinstance(index, int):
        if not -length <= index < length:
            raise IndexError(f"row {index} of {length}")
        return slice(index, index + 1 or None)
    if isinstance(index, slice | Tensor):
        return index
    return list(index)


def _describe(x: object) -> str:
    return f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__

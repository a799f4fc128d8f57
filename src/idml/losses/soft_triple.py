"""SoftTriple (Qian et al., 2019), without the regulariser that merges centres."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from idml.losses.base import ProxyLoss, require_pairs
from idml.losses.reduce import log_share_of_matches


def soft_triple(
    cosines: Tensor,
    matches: Tensor,
    *,
    centers_per_class: int = 10,
    scale: float = 20.0,
    entropy: float = 0.1,
    margin: float = 0.01,
) -> Tensor:
    """Softmax loss on the relaxed similarity to a class, S_ic = Σ_k softmax_k(C_ick / γ)·C_ick, γ = ``entropy``.

    −log( Σ over the set e^(λ(S_ic − δ)) / (that + Σ over the other classes e^(λ·S_ic)) ) with λ = ``scale`` and
    δ = ``margin``. ``cosines`` [n, classes·centres] holds the centres of a class side by side; ``matches``
    is [n, classes].
    """
    if centers_per_class < 1 or cosines.shape[1] != matches.shape[1] * centers_per_class:
        raise ValueError(
            f"{cosines.shape[1]} centres do not divide into {matches.shape[1]} classes of {centers_per_class}"
        )
    if not entropy > 0:
        raise ValueError(f"entropy must be positive, got {entropy}")
    similarity: Tensor = _Relaxed.apply(cosines.view(len(cosines), -1, centers_per_class), 1.0 / entropy)
    require_pairs(similarity, matches)
    return -log_share_of_matches(similarity - margin * matches.to(similarity.dtype), matches, scale=scale).mean()


class _Relaxed(torch.autograd.Function):
    """S = Σ_k p_k·c_k with p = softmax(c/γ), ∂S/∂c_k = p_k·(1 + (c_k − S)/γ), a few images at a time.

    There are many centres, so of all tensors of their size only the cosines are stored.
    """

    @staticmethod
    def forward(ctx: Any, centers: Tensor, sharpness: float) -> Tensor:
        out = torch.empty(centers.shape[:2], dtype=centers.dtype, device=centers.device)
        for c, s in zip(*_split(centers, out), strict=True):
            torch.sum((c * sharpness).softmax(dim=2).mul_(c), dim=2, out=s)
        ctx.save_for_backward(centers, out)
        ctx.sharpness = sharpness
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        centers, out = ctx.saved_tensors
        d_centers = torch.empty_like(centers)
        for c, s, g, d in zip(*_split(centers, out.unsqueeze(2), grad.unsqueeze(2), d_centers), strict=True):
            slope = (c - s).mul_(ctx.sharpness).add_(1.0).mul_(g)
            torch.mul(slope, (c * ctx.sharpness).softmax(dim=2), out=d)
        return d_centers, None


def _split(centers: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """Split into blocks of images whose centres fit into the cache."""
    images = max(1, (1 << 17) // centers[0].numel())
    return [x.split(images) for x in (centers, *others)]


class SoftTriple(ProxyLoss):
    """SoftTriple with several centres per class."""

    form = "cosine"
    function = staticmethod(soft_triple)

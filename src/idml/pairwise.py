"""The matrix products of the metric, with their gradients written out.

Each class is one step over all pairs [n, m]. A gradient that is written out stores one or two matrices instead of ten,
and stays finite where the formula divides by zero: identical images, cancelling uncertainties. Tests compare every
gradient with finite differences (tests/test_metric.py).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1 << 16  # pairs handled at a time, so that intermediate results stay in the cache


class Cosines(torch.autograd.Function):
    """C = a·b/(‖a‖‖b‖), normalised after the product: cheaper than before it when there are many proxies b.

    ∂L/∂a_i = (1/‖a_i‖)·(Σ_j G_ij·b̂_j − â_i·Σ_j G_ij·C_ij), and the same for b.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor) -> Tensor:
        cos = (a @ b.T).mul_(inverse_a).mul_(inverse_b.T)
        ctx.save_for_backward(a, b, inverse_a, inverse_b, cos)
        return cos

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, inverse_a, inverse_b, cos = ctx.saved_tensors
        product = grad * cos
        scaled = (grad * inverse_a).mul_(inverse_b.T)
        d_a = d_b = None
        if ctx.needs_input_grad[0]:
            d_a = (scaled @ b).addcmul_(a, product.sum(dim=1, keepdim=True) * inverse_a.square(), value=-1.0)
        if ctx.needs_input_grad[1]:
            d_b = (scaled.T @ a).addcmul_(b, product.sum(dim=0).unsqueeze(1) * inverse_b.square(), value=-1.0)
        return d_a, d_b, None, None


class SelfCosines(torch.autograd.Function):
    """The same for a batch against itself: 1 on the diagonal and no gradient through it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, inverse: Tensor) -> Tensor:
        cos = (a @ a.T).mul_(inverse).mul_(inverse.T).fill_diagonal_(1.0)
        ctx.save_for_backward(a, inverse, cos)
        return cos

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        a, inverse, cos = ctx.saved_tensors
        both = (grad + grad.T).fill_diagonal_(0.0)
        radial = (both * cos).sum(dim=1, keepdim=True).mul_(inverse.square())
        return (both.mul_(inverse).mul_(inverse.T) @ a).addcmul_(a, radial, value=-1.0), None


class Alpha(torch.autograd.Function):
    """α = √(‖ŝ₁‖² + ‖ŝ₂‖² − 2C), ∂α/∂C = −1/α, and 0 where α = 0."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, squares: Tensor | float) -> Tensor:
        alpha = (cos * -2.0).add_(squares).clamp_min_(0.0).sqrt_()
        ctx.save_for_backward(alpha)
        return alpha

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (alpha,) = ctx.saved_tensors
        return (grad / alpha).neg_().masked_fill_(alpha == 0, 0.0), None


class Beta(torch.autograd.Function):
    """β = √(‖u‖² + ‖v‖² + 2u·v), ∂L/∂u_i = Σ_j H_ij·(u_i + v_j) with H = G/β, and 0 where β = 0."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, v: Tensor) -> Tensor:
        own, others = (torch.linalg.vector_norm(x, dim=1).square_() for x in (u, v))
        beta = torch.addmm(others, u, v.T, alpha=2.0).add_(own.unsqueeze(1)).clamp_min_(0.0).sqrt_()
        ctx.save_for_backward(u, v, beta)
        return beta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        u, v, beta = ctx.saved_tensors
        share = (grad / beta).masked_fill_(beta == 0, 0.0)
        d_u = (share @ v).addcmul_(u, share.sum(dim=1, keepdim=True))
        return d_u, (share.T @ u).addcmul_(v, share.sum(dim=0).unsqueeze(1))


class SelfBeta(torch.autograd.Function):
    """The same for a batch against itself, with one product less."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        beta = Beta.forward(ctx, u, u)
        ctx.save_for_backward(u, beta)
        return beta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        u, beta = ctx.saved_tensors
        share = (grad / beta).masked_fill_(beta == 0, 0.0)
        share = share + share.T
        d_u: Tensor = (share @ u).addcmul_(u, share.sum(dim=1, keepdim=True))
        return d_u


class Soften(torch.autograd.Function):
    """Rule `similar` as one step, x = (β + γ)/(τα), finite at α = 0.

    D  = α·e^(−x)                   ∂D/∂C = −(1/α)·e^(−x)·(1 + x)    ∂D/∂β = −e^(−x)/τ
    C' = C + (1 − C)(1 − e^(−x))    ∂C'/∂C = e^(−x)·(1 + x/2)         ∂C'/∂β = (1 − C)·e^(−x)/(τα)

    β is [n, m], or [n, 1] where it is the same along a row. Only C and β are kept for the gradient; the rest is
    computed again, block by block.
    """

    @staticmethod
    def forward(
        ctx: Any, cos: Tensor, beta: Tensor, squares: Tensor | float, tau: float, gamma: float, distance: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, beta, squares if isinstance(squares, Tensor) else None)
        ctx.tau, ctx.gamma, ctx.distance = tau, gamma, distance
        out = torch.empty_like(cos)
        for rows in _blocks(cos):
            alpha_squared, _, exponent = _parts(cos, beta, squares, tau, gamma, rows)
            if distance:
                torch.mul(alpha_squared.sqrt_(), exponent.exp_(), out=out[rows])
            else:
                torch.addcmul(cos[rows], exponent.exp_().sub_(1.0), cos[rows] - 1.0, out=out[rows])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, beta, squares = ctx.saved_tensors
        d_cos, d_beta = torch.empty_like(cos), torch.empty_like(beta)
        for rows in _blocks(cos):
            base = 2.0 if squares is None else squares
            alpha_squared, inverse, exponent = _parts(cos, beta, base, ctx.tau, ctx.gamma, rows)
            softened = exponent.exp().mul_(grad[rows])
            if ctx.distance:
                factor, sign = alpha_squared.sqrt_().mul_(inverse), -1.0  # α·(1/α) = 1, but 0 where α = 0
                torch.mul(softened, exponent.sub_(1.0).mul_(inverse).mul_(factor), out=d_cos[rows])
            else:
                factor, sign = torch.sub(1.0, cos[rows]).mul_(inverse), 1.0
                torch.addcmul(softened, softened, exponent, value=-0.5, out=d_cos[rows])
            if beta.shape == cos.shape:
                torch.mul(softened.mul_(factor), sign / ctx.tau, out=d_beta[rows])
            else:
                torch.mul(torch.linalg.vecdot(softened, factor).unsqueeze(1), sign / ctx.tau, out=d_beta[rows])
        return d_cos, d_beta, None, None, None, None


def _blocks(cos: Tensor) -> list[slice]:
    step = max(1, _BLOCK // cos.shape[1])
    return [slice(i, i + step) for i in range(0, len(cos), step)]


def _parts(
    cos: Tensor, beta: Tensor, squares: Tensor | float, tau: float, gamma: float, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """α², 1/α (large but finite where α = 0) and −x of a block of rows."""
    base = squares[rows] if isinstance(squares, Tensor) else squares
    alpha_squared = (cos[rows] * -2.0).add_(base).clamp_min_(0.0)
    inverse = alpha_squared.clamp_min(torch.finfo(cos.dtype).eps ** 2).rsqrt_()
    return alpha_squared, inverse, ((beta[rows] + gamma) * (-1.0 / tau)) * inverse

"""The introspective similarity metric.

For two images, or an image and a proxy, with semantic embeddings s and uncertainty embeddings u:

    α = ‖s₁ − s₂‖          semantic discrepancy, s normalised, so α² = 2 − 2C with C the cosine
    β = ‖u₁ + u₂‖          similarity uncertainty: the vectors are added, then the norm is taken
    r = (β + γ) / α        relative uncertainty; x = r/τ below

    rule          distances                     cosines                        use
    similar       D = α·e^(−x)                  C' = 1 − (1 − C)·e^(−x)        ISM-Sim, the method
    dissimilar    –                             C' = C·e^(−x)                  ISM-Dis, an ablation
    strict        D = α if α > β + γ else 0     –                              analysis
    off           D = α                         C' = C                         the baselines
    release       –                             C' as similar, see `_release`  the authors' released code

Everything comes from matrix products, ‖u₁ + u₂‖² = ‖u₁‖² + ‖u₂‖² + 2u₁·u₂: no [n, m, d] tensor exists.
An image compared with itself has D = 0 and C' = 1, and passes no gradient.
"""

import math
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import Tensor

from idml.embeddings import Embeddings, full_precision, require_finite, unit_rows

RULES = ("similar", "dissimilar", "strict", "off", "release")
Form = Literal["distance", "cosine"]

_FORMS: dict[str, tuple[Form, ...]] = {
    "similar": ("distance", "cosine"),
    "dissimilar": ("cosine",),
    "strict": ("distance",),
    "off": ("distance", "cosine"),
    "release": ("cosine",),
}
_RELEASE_TAU, _RELEASE_GAMMA = 5.0, 4.0


@dataclass(frozen=True)
class IntrospectiveMetric:
    """The metric of the paper with its temperature τ, introspective bias γ and rule.

    >>> e = Embeddings(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.3, 0.0], [0.4, 0.0]]))
    >>> IntrospectiveMetric(rule="off").distances(e)[0, 1]
    tensor(1.4142)
    >>> IntrospectiveMetric().distances(e)[0, 1]  # √2·exp(−0.7 / (5·√2))
    tensor(1.2809)
    """

    tau: float = 5.0
    gamma: float = 0.0
    rule: str = "similar"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            near = get_close_matches(str(self.rule), RULES, n=1, cutoff=0.0)
            raise ValueError(
                f"unknown rule {self.rule!r}; did you mean {near[0]!r}? (rules: {', '.join(RULES)})"
            )
        if not (isinstance(self.tau, int | float) and 0 < self.tau < math.inf):
            raise ValueError(f"tau must be a positive number, got {self.tau!r}")
        if not (isinstance(self.gamma, int | float) and 0 <= self.gamma < math.inf):
            raise ValueError(f"gamma must be 0 or larger, got {self.gamma!r}")
        if self.rule == "release":
            if self.tau != _RELEASE_TAU or self.gamma not in (0.0, _RELEASE_GAMMA):
                raise ValueError("rule 'release' fixes tau = 5 and gamma = 4, as the released code does")
            object.__setattr__(self, "gamma", _RELEASE_GAMMA)

    def distances(self, embeddings: Embeddings | Tensor, other: Embeddings | Tensor | None = None) -> Tensor:
        """D of every pair [n, m]; without ``other``, of the batch against itself [n, n]."""
        return self._pairs("distance", embeddings, other)

    def cosines(self, embeddings: Embeddings | Tensor, other: Embeddings | Tensor | None = None) -> Tensor:
        """C' of every pair [n, m]; without ``other``, of the batch against itself [n, n]."""
        return self._pairs("cosine", embeddings, other)

    @torch.no_grad()
    def weights(self, embeddings: Embeddings, other: Embeddings | None = None) -> Tensor:
        """The factor e^(−x) by which each pair's discrepancy is softened [n, m]; 1 means the plain metric."""
        if self.rule == "off":
            return torch.ones_like(cosines(embeddings, other))
        alpha = _Root.apply(_alpha_squared(cosines(embeddings, other), embeddings, other))
        return torch.exp(
            -(pair_uncertainty(embeddings, other) + self.gamma) / (self.tau * alpha.clamp_min(1e-12))
        )

    def _pairs(self, form: Form, a: Embeddings | Tensor, b: Embeddings | Tensor | None) -> Tensor:
        if form not in _FORMS[self.rule]:
            raise ValueError(f"rule {self.rule!r} has no {form} form, only {' and '.join(_FORMS[self.rule])}")
        left = self._embeddings(a)
        right = None if b is None else self._embeddings(b)
        _check(left, right)
        with torch.autocast(left.semantic.device.type, enabled=False):
            cos = cosines(left, right)
            if self.rule == "off":
                return cos if form == "cosine" else _Root.apply(_alpha_squared(cos, left, right))
            if self.rule == "release":
                return _release(cos, left, right)
            beta = pair_uncertainty(left, right)
            alpha_squared = _alpha_squared(cos, left, right)
            if self.rule == "similar":
                return _Soften.apply(cos, alpha_squared, beta, self.tau, self.gamma, form == "distance")
            alpha = _Root.apply(alpha_squared)
            if self.rule == "strict":
                return torch.where(alpha > beta + self.gamma, alpha, torch.zeros_like(alpha))
            return cos * torch.exp(-(beta + self.gamma) / (self.tau * alpha.clamp_min(1e-12)))  # dissimilar

    def _embeddings(self, e: Embeddings | Tensor) -> Embeddings:
        if isinstance(e, Embeddings):
            return e
        if self.rule != "off":
            raise ValueError(
                f"rule {self.rule!r} needs Embeddings(semantic, uncertainty); a plain tensor only goes with rule 'off'"
            )
        return Embeddings.certain(e)


def cosines(e: Embeddings, other: Embeddings | None = None) -> Tensor:
    """C = ŝ₁·ŝ₂ for every pair [n, m]."""
    if other is None:
        return _SelfCosines.apply(e.unit)
    a, b = e.unit, other.unit
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype) @ b.to(dtype).T


def pair_uncertainty(e: Embeddings, other: Embeddings | None = None) -> Tensor:
    """β = ‖u₁ + u₂‖ for every pair: [n, m], or [n, 1] where the others are certain (u₂ = 0)."""
    if other is not None and other.uncertainty.shape[1] == 0:
        return _level(e).unsqueeze(1)
    if e.uncertainty.shape[1] == 0:
        return _level(e if other is None else other).unsqueeze(0).expand(len(e), -1)
    u = full_precision(e.uncertainty)
    v = u if other is None else full_precision(other.uncertainty)
    largest = float(torch.maximum(u.detach().abs().max(), v.detach().abs().max()))
    if not math.isfinite(largest):
        require_finite("uncertainty", u)
        require_finite("uncertainty", v)
    scale = largest if largest > 1e9 or 0 < largest < 1e-9 else 1.0  # squares must stay inside float32
    if scale != 1.0:
        u, v = u / scale, v / scale
    dtype = torch.promote_types(u.dtype, v.dtype)
    u, v = u.to(dtype), v.to(dtype)
    own, others = u.square().sum(dim=1), v.square().sum(dim=1)
    beta: Tensor = _Root.apply(torch.addmm(others, u, v.T, alpha=2.0) + own.unsqueeze(1))
    return beta * scale if scale != 1.0 else beta


def _level(e: Embeddings) -> Tensor:
    """‖u‖ with the overflow and the NaN of the raw norm handled."""
    level = e.level
    if len(level) and not bool(torch.isfinite(level).all()):
        u = full_precision(e.uncertainty)
        require_finite("uncertainty", u)
        scale = float(u.detach().abs().max())
        return torch.linalg.vector_norm(u / scale, dim=1) * scale
    return level


def _alpha_squared(cos: Tensor, e: Embeddings, other: Embeddings | None) -> Tensor:
    """α² = ‖ŝ₁‖² + ‖ŝ₂‖² − 2C; the unit vectors' squares are 1, or 0 where there is no direction."""
    a, b = e.unit, (e if other is None else other).unit
    pointed_a, pointed_b = (a != 0).any(dim=1), (b != 0).any(dim=1)
    if bool(pointed_a.all()) and bool(pointed_b.all()):
        return 2.0 - 2.0 * cos
    squares = pointed_a.to(cos.dtype).unsqueeze(1) + pointed_b.to(cos.dtype)
    if other is None:
        squares.fill_diagonal_(2.0)
    return squares - 2.0 * cos


def _release(cos: Tensor, e: Embeddings, other: Embeddings | None) -> Tensor:
    """What the authors released: û normalised, squared norms, γ = 4, proxies p as they are.

    C' = 1 − (1 − C)·exp(−(‖û₁ + û₂‖² + 4) / (5·‖ŝ − p‖²)). With û₂ = 0 the exponent is 1/‖ŝ − p‖² and u
    gets no gradient: it cannot learn. Kept for comparison only.
    """
    own = Embeddings(e.semantic, unit_rows(e.uncertainty, "uncertainty").to(e.semantic.dtype))
    if other is None:
        gap, partner = 2.0 - 2.0 * cos, None
    else:
        raw = full_precision(other.semantic).to(cos.dtype)
        gap = 1.0 + raw.square().sum(dim=1) - 2.0 * (e.unit.to(cos.dtype) @ raw.T)
        partner = Embeddings(
            other.semantic, unit_rows(other.uncertainty, "uncertainty").to(other.semantic.dtype)
        )
    exponent = (pair_uncertainty(own, partner).square() + _RELEASE_GAMMA) / (
        _RELEASE_TAU * gap.clamp_min(1e-12)
    )
    return cos - (1.0 - cos) * torch.expm1(-exponent)


def _check(e: Embeddings, other: Embeddings | None) -> None:
    if len(e) == 0 or (other is not None and len(other) == 0):
        raise ValueError("the batch is empty: there is nothing to compare")
    if other is None:
        return
    if e.semantic.device != other.semantic.device:
        raise ValueError(f"embeddings are on {e.semantic.device} and {other.semantic.device}")
    if e.semantic.shape[1] != other.semantic.shape[1]:
        raise ValueError(f"semantic sizes differ: {e.semantic.shape[1]} and {other.semantic.shape[1]}")
    widths = {w for w in (e.uncertainty.shape[1], other.uncertainty.shape[1]) if w}
    if len(widths) > 1:
        raise ValueError(
            f"uncertainty sizes differ: {e.uncertainty.shape[1]} and {other.uncertainty.shape[1]}"
        )


class _SelfCosines(torch.autograd.Function):
    """ŝŝᵀ with ones on the diagonal and no gradient through it: an image says nothing about itself."""

    @staticmethod
    def forward(ctx: Any, unit: Tensor) -> Tensor:
        ctx.save_for_backward(unit)
        return (unit @ unit.T).fill_diagonal_(1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (unit,) = ctx.saved_tensors
        return (grad + grad.T).fill_diagonal_(0.0) @ unit


class _Root(torch.autograd.Function):
    """√x, 0 for x ≤ 0, with gradient 0 there instead of infinity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = x.clamp_min(0.0).sqrt_()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return (0.5 * grad).div_(root).masked_fill_(root == 0, 0.0)


class _Soften(torch.autograd.Function):
    """Rule `similar` as one step with its gradient written out, finite at α = 0.

    D  = α·e^(−x)                ∂D/∂α² = e^(−x)(1 + x)/(2α)             ∂D/∂β = −e^(−x)/τ
    C' = C + (1−C)(1 − e^(−x))   ∂C'/∂C = e^(−x), ∂C'/∂α² = −(1−C)·e^(−x)·x/(2α²)   ∂C'/∂β = (1−C)·e^(−x)/(τα)
    """

    @staticmethod
    def forward(
        ctx: Any, cos: Tensor, alpha_squared: Tensor, beta: Tensor, tau: float, gamma: float, distance: bool
    ) -> Tensor:
        alpha = alpha_squared.clamp_min(0.0).sqrt_()
        inverse = alpha.reciprocal().masked_fill_(alpha == 0, 0.0)
        exponent = ((beta + gamma) * (-1.0 / tau)) * inverse  # −x
        out = alpha.mul_(exponent.exp()) if distance else cos - (1.0 - cos).mul_(exponent.expm1())
        ctx.save_for_backward(out if distance else cos, inverse, exponent)
        ctx.tau, ctx.distance, ctx.row_beta = tau, distance, beta.shape != cos.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, inverse, exponent = ctx.saved_tensors
        if ctx.distance:  # first = D
            share = grad * first * inverse  # grad·e^(−x), and 0 at α = 0
            d_cos, d_alpha_squared = None, (1.0 - exponent) * share * inverse * 0.5
            d_beta = share * (-1.0 / ctx.tau)
        else:  # first = C
            d_cos = grad * exponent.exp()
            share = (1.0 - first) * d_cos * inverse
            d_alpha_squared = share * exponent * inverse * 0.5
            d_beta = share * (1.0 / ctx.tau)
        if ctx.row_beta:
            d_beta = d_beta.sum(dim=1, keepdim=True)
        return d_cos, d_alpha_squared, d_beta, None, None, None

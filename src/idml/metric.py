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

With ``fit`` the rule `similar` divides by the mean weight w̄ of the batch (a constant for the gradient): D = α·e^(−x)/w̄,
and 1 − C' likewise, so that thresholds chosen for α and C fit. It is for training only.

Everything is computed by matrix products, ‖u₁ + u₂‖² = ‖u₁‖² + ‖u₂‖² + 2u₁·u₂: no [n, m, d] tensor exists.
An image compared with itself has D = 0 and C' = 1, and passes no gradient.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from idml.embeddings import Embeddings, full_precision, require_finite, unit_rows
from idml.errors import unknown_name
from idml.pairwise import Alpha, Beta, Cosines, SelfBeta, SelfCosines, Soften

RULES = ("similar", "dissimilar", "strict", "off", "release")
Form = Literal["distance", "cosine"]

FORMS: dict[str, tuple[Form, ...]] = {
    "similar": ("distance", "cosine"),
    "dissimilar": ("cosine",),
    "strict": ("distance",),
    "off": ("distance", "cosine"),
    "release": ("cosine",),
}
"""What each rule has: distances, cosines or both."""
_RELEASE_TAU, _RELEASE_GAMMA = 5.0, 4.0
_NO_GAP = 1e-12  # identical images: dividing by this makes e^(−x) vanish unless x is 0


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
    fit: bool = False

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(unknown_name("rule", self.rule, RULES))
        if not (isinstance(self.tau, int | float) and 0 < self.tau < math.inf):
            raise ValueError(f"tau must be a positive number, got {self.tau!r}")
        if not (isinstance(self.gamma, int | float) and 0 <= self.gamma < math.inf):
            raise ValueError(f"gamma must be 0 or larger, got {self.gamma!r}")
        if self.rule == "release":
            if self.tau != _RELEASE_TAU or self.gamma not in (0.0, _RELEASE_GAMMA):
                raise ValueError("rule 'release' fixes tau = 5 and gamma = 4, as the released code does")
            object.__setattr__(self, "gamma", _RELEASE_GAMMA)
        if self.fit and self.rule != "similar":
            raise ValueError(f"fit goes with rule 'similar' only, got rule {self.rule!r}")

    def __repr__(self) -> str:
        fit = ", fit=True" if self.fit else ""  # results are stored under this text
        return f"IntrospectiveMetric(tau={self.tau!r}, gamma={self.gamma!r}, rule={self.rule!r}{fit})"

    def distances(self, embeddings: Embeddings | Tensor, other: Embeddings | Tensor | None = None) -> Tensor:
        """Return D of every pair [n, m]; without ``other``, of the batch against itself [n, n]."""
        return self._pairs("distance", embeddings, other)

    def cosines(self, embeddings: Embeddings | Tensor, other: Embeddings | Tensor | None = None) -> Tensor:
        """Return C' of every pair [n, m]; without ``other``, of the batch against itself [n, n]."""
        return self._pairs("cosine", embeddings, other)

    @torch.no_grad()
    def weights(self, embeddings: Embeddings, other: Embeddings | None = None) -> Tensor:
        """Return the factor that the rule gives to each pair [n, m]; 1 means the plain metric.

        It is e^(−x) for the rules `similar` (before ``fit`` divides by the mean) and `dissimilar`, 0 or 1 for `strict`,
        and for `release` the factor in its own formula.
        """
        _check(embeddings, other)
        if self.rule == "release":
            return _release_exponents(embeddings, other).exp()
        alpha = alphas(embeddings, other)
        if self.rule == "off":
            return torch.ones_like(alpha)
        beta = betas(embeddings, other)
        if self.rule == "strict":
            return (alpha > beta + self.gamma).to(alpha.dtype)
        return torch.exp(-(beta + self.gamma) / (self.tau * alpha.clamp_min(_NO_GAP)))

    def _pairs(self, form: Form, a: Embeddings | Tensor, b: Embeddings | Tensor | None) -> Tensor:
        if form not in FORMS[self.rule]:
            raise ValueError(f"rule {self.rule!r} has no {form} form, only {' and '.join(FORMS[self.rule])}")
        e = self._embeddings(a)
        other = None if b is None else self._embeddings(b)
        _check(e, other)
        device = e.semantic.device.type
        if torch.is_autocast_enabled(device):  # pairs are compared in float32 at least
            with torch.autocast(device, enabled=False):
                return self._compare(form, e, other)
        return self._compare(form, e, other)

    def _compare(self, form: Form, e: Embeddings, other: Embeddings | None) -> Tensor:
        if self.rule == "similar":
            softened = soften(e, other, self.tau, self.gamma, form)
            if not self.fit:
                return softened
            mean = _mean(self.weights(e, other), alone=other is None).clamp_min(_NO_GAP)
            return softened / mean if form == "distance" else 1.0 - (1.0 - softened) / mean
        if self.rule == "off":
            return plain_cosines(e, other) if form == "cosine" else alphas(e, other)
        if self.rule == "strict":
            alpha = alphas(e, other)
            return alpha * (alpha > betas(e, other) + self.gamma)
        if self.rule == "dissimilar":
            gap = alphas(e, other).clamp_min(_NO_GAP)
            return plain_cosines(e, other) * torch.exp(-(betas(e, other) + self.gamma) / (self.tau * gap))
        return _release(e, other)

    def _embeddings(self, e: Embeddings | Tensor) -> Embeddings:
        if isinstance(e, Embeddings):
            return e
        if self.rule != "off":
            raise ValueError(
                f"rule {self.rule!r} needs Embeddings(semantic, uncertainty); a plain tensor only goes with rule 'off'"
            )
        return Embeddings.certain(e)


def plain_cosines(e: Embeddings, other: Embeddings | None = None) -> Tensor:
    """Return C = ŝ₁·ŝ₂ for every pair [n, m]; 1 and without gradient for an image and itself."""
    a, inverse_a, _ = e.direction
    if other is None:
        cos: Tensor = SelfCosines.apply(a, inverse_a)
        return cos
    b, inverse_b, _ = other.direction
    cos = Cosines.apply(*_common(a, b), *_common(inverse_a, inverse_b))
    return cos


def alphas(e: Embeddings, other: Embeddings | None = None) -> Tensor:
    """Return α = ‖ŝ₁ − ŝ₂‖ for every pair [n, m]."""
    alpha: Tensor = Alpha.apply(plain_cosines(e, other), _squares(e, other))
    return alpha


def betas(e: Embeddings, other: Embeddings | None = None) -> Tensor:
    """Return β = ‖u₁ + u₂‖ of every pair: [n, m], or [n, 1] if u₂ = 0 has no dimensions."""
    if other is not None and other.uncertainty.shape[1] == 0:
        return e.level.unsqueeze(1)
    if e.uncertainty.shape[1] == 0:
        return (e if other is None else other).level.expand(len(e), -1)
    u, v, scale = _scaled(e, other)
    beta: Tensor = SelfBeta.apply(u) if other is None else Beta.apply(u, v)
    return beta * scale if scale != 1.0 else beta


def _mean(pairs: Tensor, *, alone: bool) -> Tensor:
    """Return the mean over pairs; for a batch against itself, over the pairs of different images."""
    total, count = pairs.sum(), pairs.numel()
    if alone and len(pairs) > 1:
        total, count = total - pairs.diagonal().sum(), count - len(pairs)
    return total / count


def soften(e: Embeddings, other: Embeddings | None, tau: float, gamma: float, form: Form) -> Tensor:
    """Apply rule `similar`: D = α·e^(−x) or C' = 1 − (1 − C)·e^(−x), x = (β + γ)/(τα)."""
    out: Tensor = Soften.apply(
        plain_cosines(e, other), betas(e, other), _squares(e, other), tau, gamma, form == "distance"
    )
    return out


def _common(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Convert two tensors to the wider of their types."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _scaled(e: Embeddings, other: Embeddings | None) -> tuple[Tensor, Tensor, float]:
    """Divide u₁ and u₂ by a number that keeps their squares inside float32 (1, except for huge and tiny values)."""
    u = full_precision(e.uncertainty)
    v = u if other is None else full_precision(other.uncertainty)
    largest = max(float(x.detach().abs().max()) for x in ((u,) if other is None else (u, v)))
    if not math.isfinite(largest):
        require_finite("uncertainty", u)
        require_finite("uncertainty", v)
    u, v = _common(u, v)
    if 1e-9 < largest < 1e9 or largest == 0:
        return u, v, 1.0
    return u / largest, v / largest, largest


def _squares(e: Embeddings, other: Embeddings | None) -> Tensor | float:
    """Return ‖ŝ₁‖² + ‖ŝ₂‖²: 2, minus 1 for each vector that has no direction."""
    right = e if other is None else other
    if e.direction.pointless is None and right.direction.pointless is None:
        return 2.0
    rows, columns = ((x.direction.inverse_length > 0).to(x.direction.x.dtype) for x in (e, right))
    squares = rows + columns.T
    return squares.fill_diagonal_(2.0) if other is None else squares


def _release(e: Embeddings, other: Embeddings | None) -> Tensor:
    """Compute what the authors released: û normalised, squared norms, γ = 4, proxies p not normalised.

    C' = 1 − (1 − C)·exp(−(‖û₁ + û₂‖² + 4) / (5·‖ŝ − p‖²)). With û₂ = 0 the exponent is 1/‖ŝ − p‖² and u
    gets no gradient: it cannot learn. Kept for comparison only.
    """
    cos = plain_cosines(e, other)
    return cos - (1.0 - cos) * torch.expm1(_release_exponents(e, other))


def _release_exponents(e: Embeddings, other: Embeddings | None) -> Tensor:
    """Return −(‖û₁ + û₂‖² + 4) / (5·‖ŝ − p‖²) of every pair."""

    def with_unit_uncertainty(x: Embeddings) -> Embeddings:
        return Embeddings(full_precision(x.semantic), unit_rows(x.uncertainty, "uncertainty"))

    if other is None:
        gap, partner = 2.0 - 2.0 * plain_cosines(e), None
    else:
        unit, raw = _common(e.unit, full_precision(other.semantic))
        gap = 1.0 + raw.square().sum(dim=1) - 2.0 * (unit @ raw.T)
        partner = with_unit_uncertainty(other)
    beta_squared = betas(with_unit_uncertainty(e), partner).square()
    return -(beta_squared + _RELEASE_GAMMA) / (_RELEASE_TAU * gap.clamp_min(_NO_GAP))


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
        raise ValueError(f"uncertainty sizes differ: {e.uncertainty.shape[1]} and {other.uncertainty.shape[1]}")

"""PEL: probabilistic embedding learning, the baseline that the paper compares with; alone and with Mixup.

An image is a Gaussian N(μ, σ²), as in hedged instance embeddings (Oh et al., 2019). Its `Embeddings` hold μ as the
semantic part and σ as the uncertainty part, so ``level`` = ‖σ‖ is its uncertainty level. Training draws K samples of
every image, normalises them, and pairs sample k with sample k. The loss is averaged over k, and a small KL divergence
to N(0, I) is added. Tests use μ.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from idml.data.augment import Batch
from idml.embeddings import Embeddings, full_precision, unit_rows
from idml.labels import LabelSets
from idml.losses import MetricLoss, ProxyLoss
from idml.methods.base import Method, Task
from idml.methods.mixup import MixtureOptions, choose_mixture_kinds
from idml.methods.options import check_number
from idml.metric import IntrospectiveMetric

_SEEDS = 1 << 63  # how many a generator knows


def sample(embeddings: Embeddings, count: int, seed: int | None = None) -> Tensor:
    """``count`` reparameterised samples μ̂ + σ·ε of each image, back on the unit sphere: [count, n, d]."""
    mean, sigma = embeddings.unit, full_precision(embeddings.uncertainty)
    if sigma.shape != mean.shape:
        raise ValueError(f"a Gaussian needs one σ for each μ, got σ {list(sigma.shape)} for μ {list(mean.shape)}")
    if count < 1:
        raise ValueError(f"the number of samples must be 1 or larger, got {count}")
    generator = None if seed is None else torch.Generator(mean.device).manual_seed(seed)
    noise = torch.randn(count, *mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
    return unit_rows((mean + sigma * noise).flatten(0, 1)).view_as(noise)


def kl_to_standard_normal(embeddings: Embeddings) -> Tensor:
    """The mean over images of KL(N(μ̂, σ²) ‖ N(0, I)) / d = ½ Σ (σ² + μ² − 1 − log σ²) / d."""
    sigma = full_precision(embeddings.uncertainty)
    if sigma.shape != embeddings.semantic.shape:
        raise ValueError(
            f"a Gaussian needs one σ for each μ, got σ {list(sigma.shape)} for μ {list(embeddings.semantic.shape)}"
        )
    variance = sigma.square()
    terms = variance + embeddings.unit.square() - 1.0 - variance.clamp_min(torch.finfo(sigma.dtype).tiny).log()
    return 0.5 * terms.mean()


def gaussian_kl_distances(embeddings: Embeddings, other: Embeddings | None = None) -> Tensor:
    """The symmetric Gaussian KL divergence of every pair, ½(KL₁₂ + KL₂₁) [n, m], from matrix products.

    ½(KL₁₂ + KL₂₁) = ¼ Σ [σ₁²/σ₂² + σ₂²/σ₁² − 2 + (μ₁ − μ₂)²(1/σ₁² + 1/σ₂²)]. It grows with the difference of the
    σ and does not vanish when both images are uncertain: the paper's motivation for the introspective metric.
    Computed in float64, because 1/σ² reaches 10⁶.
    """
    right = embeddings if other is None else other
    sizes = {tuple(x.shape[1:]) for e in (embeddings, right) for x in (e.semantic, e.uncertainty)}
    if len(sizes) > 1:
        raise ValueError(f"μ and σ must have one size, got {sorted(s[0] for s in sizes)}")
    if len(embeddings) == 0 or len(right) == 0:
        raise ValueError("the batch is empty: there is nothing to compare")
    m1, m2 = embeddings.unit.double(), right.unit.double()
    v1, v2 = (e.uncertainty.double().square() for e in (embeddings, right))
    if not bool((v1 > 0).all() and (v2 > 0).all()):
        raise ValueError("σ must be positive and finite everywhere")
    p1, p2 = v1.reciprocal(), v2.reciprocal()
    ratio = v1 @ p2.T + p1 @ v2.T - 2.0 * m1.shape[1]
    gap = (m1.square() * p1).sum(dim=1, keepdim=True) + (m2.square() * p2).sum(dim=1)  # Σ μ₁²/σ₁² + μ₂²/σ₂²
    gap = gap + m1.square() @ p2.T + p1 @ m2.square().T - 2.0 * (m1 @ (m2 * p2).T + (m1 * p1) @ m2.T)
    return 0.25 * (ratio.clamp_min(0.0) + gap.clamp_min(0.0))


class ProbabilisticLoss(nn.Module):
    """Any loss, built with rule ``off``, as its PEL counterpart.

    >>> from idml import IntrospectiveMetric
    >>> from idml.losses import build_loss
    >>> pel = ProbabilisticLoss(build_loss("contrastive", metric=IntrospectiveMetric(rule="off")))
    >>> e = Embeddings(torch.eye(4), torch.full((4, 4), 0.0025))
    >>> pel(e, torch.tensor([0, 0, 1, 1]), seed=0).shape
    torch.Size([])
    """

    def __init__(self, loss: MetricLoss, *, samples: int = 8, kl_weight: float = 1e-4) -> None:
        super().__init__()
        if loss.metric.rule != "off":
            raise ValueError(
                f"PEL compares samples by the plain metric: build the loss with rule 'off', not {loss.metric.rule!r}"
            )
        if samples < 1:
            raise ValueError(f"the number of samples must be 1 or larger, got {samples}")
        if not kl_weight >= 0:
            raise ValueError(f"kl_weight must be 0 or larger, got {kl_weight}")
        self.loss, self.samples, self.kl_weight = loss, samples, kl_weight

    def forward(
        self,
        embeddings: Embeddings,
        labels: LabelSets | Tensor,
        seed: int | None = None,
        *,
        other: Embeddings | None = None,
        other_labels: LabelSets | Tensor | None = None,
    ) -> Tensor:
        """mean_k loss(sample k) + kl_weight·KL; ``seed`` fixes the samples and the loss's own choices.

        With ``other`` (losses over pairs) sample k of an image is compared with sample k of those images alone. The
        divergence counts for ``embeddings`` only.
        """
        if not all(isinstance(e, Embeddings) for e in (embeddings, other) if e is not None):
            raise ValueError("PEL needs Embeddings(semantic=μ, uncertainty=σ), not a plain tensor")
        n = len(embeddings)
        drawn = sample(embeddings if other is None else Embeddings.cat([embeddings, other]), self.samples, seed)
        seeds = [None if seed is None else (seed * self.samples + k) % _SEEDS for k in range(self.samples)]

        def loss_of(x: Tensor, own_seed: int | None) -> Tensor:
            rest = {} if other is None else {"other": x[n:], "other_labels": other_labels}
            value: Tensor = self.loss(x[:n], labels, seed=own_seed, **rest)
            return value

        losses = torch.stack([loss_of(x, s) for x, s in zip(drawn, seeds, strict=True)])
        return losses.mean() + self.kl_weight * kl_to_standard_normal(embeddings)


# ---- the methods ----


@dataclass(frozen=True)
class SamplingOptions:
    """The samples of a Gaussian and the pull towards N(0, I)."""

    samples: int = 8
    """Samples K that are drawn of every image."""
    kl_weight: float = 1e-4
    """Weight of the KL divergence to N(0, I)."""

    def __post_init__(self) -> None:
        check_number("samples", self.samples, at_least=1, whole=True)
        check_number("kl_weight", self.kl_weight, at_least=0)

    def build_loss(self, task: Task) -> ProbabilisticLoss:
        """The loss of the run over samples."""
        plain = task.build_loss(IntrospectiveMetric(rule="off"))
        return ProbabilisticLoss(plain, samples=self.samples, kl_weight=self.kl_weight)


@dataclass(frozen=True)
class PelOptions:
    """Options of PEL."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)


class Pel(Method):
    """Probabilistic embeddings: the loss on samples of a Gaussian for each image.

    L = mean_k loss(sample k) + kl_weight·KL; the second head gives σ.
    """

    Options = PelOptions
    options: PelOptions

    def __init__(self, options: PelOptions, task: Task) -> None:
        super().__init__(options, task)
        self.metric_loss = options.sampling.build_loss(task)

    @classmethod
    def model_options(cls, options: PelOptions) -> dict[str, Any]:
        """A head for σ."""
        return {"uncertainty": "gaussian"}

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The loss of all pairs of samples."""
        return {"pairs": self.metric_loss(embeddings, batch.labels, seed=seed)}


@dataclass(frozen=True)
class PelMixupOptions:
    """Options of PEL with Mixup."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    mixtures: MixtureOptions = field(default_factory=MixtureOptions)


class PelMixup(Method):
    """PEL over original images and mixtures."""

    Options = PelMixupOptions
    options: PelMixupOptions

    def __init__(self, options: PelMixupOptions, task: Task) -> None:
        super().__init__(options, task)
        self.metric_loss = options.sampling.build_loss(task)

    @classmethod
    def model_options(cls, options: PelMixupOptions) -> dict[str, Any]:
        """A head for σ."""
        return {"uncertainty": "gaussian"}

    @classmethod
    def mixture_kinds(cls, ambiguity: Sequence[str]) -> tuple[str, ...]:
        """The kinds that the user asks for, else Mixup."""
        return choose_mixture_kinds(ambiguity)

    @property
    def mixture_beta(self) -> float:
        """As the options say."""
        return self.options.mixtures.beta

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The terms of the samples of originals and mixtures."""
        proxies = isinstance(self.metric_loss.loss, ProxyLoss)
        return self.options.mixtures.terms(self.metric_loss, embeddings, batch, seed, proxies=proxies)

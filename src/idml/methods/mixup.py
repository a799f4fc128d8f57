"""Mixup without the metric: every batch also holds mixtures x = λx₁ + (1 − λ)x₂ of its images.

How mixtures enter the loss, for every method with mixtures (`MixtureOptions`). O are the originals, M the mixtures:

    mixing separate        L(O) + w·L(M), two losses, each over its own images; w = 1
    mixing joint           L(O ∪ M), one pair matrix
    mixing against-clean   L(O) + w·L(M against O), mixtures are compared with originals only; w = 0.4, λ ~ Beta(2, 2).
                           A loss with proxies compares images with proxies only: there it is L(O) + w·L(M)
    labels sets            a mixture has the label set {l₁, l₂}; two images match when their sets intersect (the paper)
    labels weighted        L(·) = λ·L(·, l₁) + (1 − λ)·L(·, l₂), ordinary Mixup (Zhang et al., 2018)

``against-clean`` follows Metrix (Venkataramanan et al., 2022) for the contrastive loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from idml.data.augment import MIXTURES, Batch
from idml.embeddings import Embeddings
from idml.labels import LabelSets
from idml.losses import ProxyLoss
from idml.methods.base import Method, Task
from idml.methods.options import check_number, check_types
from idml.methods.taught_u import TeachingOptions
from idml.metric import IntrospectiveMetric


class LossOfImages(Protocol):
    """A loss of images with label sets; a loss over pairs also takes ``other`` images to compare them with."""

    def __call__(self, embeddings: Embeddings, labels: LabelSets, seed: int | None = None, **other: Any) -> Tensor:
        """Return the loss, a scalar."""


@dataclass(frozen=True)
class MixtureOptions:
    """How mixtures enter the loss."""

    mixing: Literal["separate", "joint", "against-clean"] = "separate"
    """Which images meet: separate: originals and mixtures each among themselves; joint: all; against-clean: mixtures
    meet originals only."""
    labels: Literal["sets", "weighted"] = "sets"
    """Labels of mixtures: sets of their parents' labels, or weighted: the λ-weighted losses with each label."""
    mixture_weight: float | None = None
    """Weight w of the mixtures' term, by default 1, with mixing against-clean 0.4."""
    mixture_beta: float | None = None
    """λ of the mixtures is drawn from Beta(b, b), by default b = 1, with mixing against-clean 2."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.mixture_weight is not None:
            check_number("mixture_weight", self.mixture_weight, at_least=0)
            if self.mixing == "joint":
                raise ValueError("mixture_weight is for a term of the mixtures alone: mixing joint has none")
        if self.mixture_beta is not None:
            check_number("mixture_beta", self.mixture_beta, above=0)

    @property
    def weight(self) -> float:
        """The weight w of the mixtures' term."""
        if self.mixture_weight is not None:
            return self.mixture_weight
        return 0.4 if self.mixing == "against-clean" else 1.0

    @property
    def beta(self) -> float:
        """The parameter b of λ ~ Beta(b, b)."""
        if self.mixture_beta is not None:
            return self.mixture_beta
        return 2.0 if self.mixing == "against-clean" else 1.0

    def terms(
        self, metric_loss: LossOfImages, embeddings: Embeddings, batch: Batch, seed: int, *, proxies: bool
    ) -> dict[str, Tensor]:
        """The terms of a batch of originals and mixtures; ``proxies``: the loss compares images with proxies only."""
        if batch.lam is None:
            return {"pairs": metric_loss(embeddings, batch.labels, seed=seed)}
        if self.mixing == "joint":
            return {"pairs": self._loss(metric_loss, embeddings, batch.labels, batch.lam, seed)}
        originals, mixtures = embeddings[~batch.mixed], embeddings[batch.mixed]
        plain, mixed = batch.labels[~batch.mixed], batch.labels[batch.mixed]
        against = self.mixing == "against-clean" and not proxies
        other = {"other": originals, "other_labels": plain} if against else {}
        return {
            "pairs": metric_loss(originals, plain, seed=seed),
            "mixtures": self.weight * self._loss(metric_loss, mixtures, mixed, batch.lam, seed, **other),
        }

    def _loss(
        self, metric_loss: LossOfImages, e: Embeddings, sets: LabelSets, lam: float, seed: int, **other: Any
    ) -> Tensor:
        if self.labels == "sets":
            return metric_loss(e, sets, seed=seed, **other)
        first = sets.ids[:, 0]
        second = torch.where(sets.ids[:, -1] < 0, first, sets.ids[:, -1])
        losses = [metric_loss(e, LabelSets(labels), seed=seed, **other) for labels in (first, second)]
        return lam * losses[0] + (1 - lam) * losses[1]


def choose_mixture_kinds(ambiguity: Sequence[str]) -> tuple[str, ...]:
    """The kinds of mixtures that the user asks for, else Mixup."""
    return tuple(kind for kind in ambiguity if kind in MIXTURES) or ("mixup",)


@dataclass(frozen=True)
class MixupOptions:
    """Options of Mixup without the metric."""

    mixtures: MixtureOptions = field(default_factory=lambda: MixtureOptions(labels="weighted"))
    teaching: TeachingOptions = field(default_factory=TeachingOptions)


class Mixup(Method):
    """The loss on images and on mixtures of two; u is taught beside it.

    L = the loss of originals and mixtures by the plain metric, and L_u for the uncertainty of the originals.
    """

    Options = MixupOptions
    options: MixupOptions

    def __init__(self, options: MixupOptions, task: Task) -> None:
        super().__init__(options, task)
        self.metric_loss = task.build_loss(IntrospectiveMetric(rule="off"))

    @classmethod
    def check_options(cls, options: MixupOptions, *, train: str, loss: str) -> None:
        """A hidden layer needs something that teaches it."""
        options.teaching.check(loss_teaches_u=False, detached=True)

    @classmethod
    def model_options(cls, options: MixupOptions) -> dict[str, Any]:
        """The uncertainty head never changes the trunk."""
        return options.teaching.model_options(detach=True)

    @classmethod
    def mixture_kinds(cls, ambiguity: Sequence[str]) -> tuple[str, ...]:
        """The kinds that the user asks for, else Mixup."""
        return choose_mixture_kinds(ambiguity)

    @property
    def mixture_beta(self) -> float:
        """As the options say."""
        return self.options.mixtures.beta

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The terms of originals and mixtures, and the ranking of the originals' ‖u‖."""
        originals = batch.labels.ids[: len(numbers), 0]
        proxies = isinstance(self.metric_loss, ProxyLoss)
        return {
            **self.options.mixtures.terms(self.metric_loss, embeddings, batch, seed, proxies=proxies),
            **self.options.teaching.terms(embeddings, originals),
        }

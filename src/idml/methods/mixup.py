"""Mixup without the metric: every batch also holds mixtures x = λx₁ + (1 − λ)x₂ of its images.

A mixture has the label set {l₁, l₂} of its parents, and all images form one pair matrix (``labels sets``). With
``labels weighted`` the loss is λ·L(·, l₁) + (1 − λ)·L(·, l₂) instead, ordinary Mixup (Zhang et al., 2018).

`MixtureOptions` and `choose_mixture_kinds` are for every method with mixtures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from idml.data.augment import MIXTURES, Batch
from idml.embeddings import Embeddings
from idml.labels import LabelSets
from idml.methods.base import Method, Task
from idml.methods.options import check_types
from idml.methods.taught_u import TeachingOptions
from idml.metric import IntrospectiveMetric


@dataclass(frozen=True)
class MixtureOptions:
    """How mixtures enter the loss."""

    labels: Literal["sets", "weighted"] = "sets"
    """Labels of mixtures: sets of their parents' labels, or weighted: the λ-weighted losses with each label."""

    def __post_init__(self) -> None:
        check_types(self)

    def loss(self, metric_loss: Callable[..., Tensor], embeddings: Embeddings, batch: Batch, seed: int) -> Tensor:
        """The loss of a batch of originals and mixtures; one λ for the batch."""
        sets = batch.labels
        if self.labels == "sets" or batch.lam is None:
            return metric_loss(embeddings, sets, seed=seed)
        first = LabelSets(sets.ids[:, 0])
        second = LabelSets(torch.where(sets.ids[:, -1] < 0, sets.ids[:, 0], sets.ids[:, -1]))
        losses = [metric_loss(embeddings, labels, seed=seed) for labels in (first, second)]
        return batch.lam * losses[0] + (1 - batch.lam) * losses[1]


def choose_mixture_kinds(ambiguity: Sequence[str]) -> tuple[str, ...]:
    """The kinds of mixtures that the user asks for, else Mixup."""
    return tuple(kind for kind in ambiguity if kind in MIXTURES) or ("mixup",)


@dataclass(frozen=True)
class MixupOptions:
    """Options of Mixup without the metric."""

    mixtures: MixtureOptions = field(default_factory=MixtureOptions)
    teaching: TeachingOptions = field(default_factory=TeachingOptions)


class Mixup(Method):
    """L = loss(s, labels) over originals and mixtures, and L_u for the uncertainty of the originals."""

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

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The loss of all pairs, and the ranking of the originals' ‖u‖."""
        originals = batch.labels.ids[: len(numbers), 0]
        return {
            "pairs": self.options.mixtures.loss(self.metric_loss, embeddings, batch, seed),
            **self.options.teaching.terms(embeddings, originals),
        }

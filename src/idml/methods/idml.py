"""IDML, the method of the paper: the introspective metric over original images and mixtures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.methods.base import Method, Task
from idml.methods.ism import MetricOptions, warn_of_uninformative_u
from idml.methods.mixup import MixtureOptions, choose_mixture_kinds
from idml.methods.taught_u import TeachingOptions


@dataclass(frozen=True)
class IdmlOptions:
    """Options of the paper's method."""

    metric: MetricOptions = field(default_factory=MetricOptions)
    mixtures: MixtureOptions = field(default_factory=MixtureOptions)
    teaching: TeachingOptions = field(default_factory=lambda: TeachingOptions("none"))


class Idml(Method):
    """L = loss(s, u, label sets) over originals and mixtures, with the introspective metric."""

    Options = IdmlOptions
    options: IdmlOptions

    def __init__(self, options: IdmlOptions, task: Task) -> None:
        super().__init__(options, task)
        self.metric_loss = options.metric.build_loss(task)

    @classmethod
    def check_options(cls, options: IdmlOptions, *, train: str, loss: str) -> None:
        """Proxies must exist to get an uncertainty; a ranking must not move the trunk."""
        options.metric.check(loss)
        options.teaching.check(loss_teaches_u=True, detached=options.metric.detach or train == "heads")

    @classmethod
    def model_options(cls, options: IdmlOptions) -> dict[str, Any]:
        """The uncertainty head, detached if asked for."""
        return options.teaching.model_options(detach=options.metric.detach)

    @classmethod
    def mixture_kinds(cls, ambiguity: Sequence[str]) -> tuple[str, ...]:
        """The kinds that the user asks for, else Mixup."""
        return choose_mixture_kinds(ambiguity)

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The loss of all pairs, and the ranking of the originals' ‖u‖ if asked for."""
        originals = batch.labels.ids[: len(numbers), 0]
        return {
            "pairs": self.options.mixtures.loss(self.metric_loss, embeddings, batch, seed),
            **self.options.teaching.terms(embeddings, originals),
        }

    def measure(self, embeddings: Embeddings, batch: Batch) -> dict[str, float]:
        """The mean weight of the pairs of originals."""
        return self.options.metric.measure(embeddings, batch)

    def warn(self, rows: list[dict[str, Any]]) -> list[str]:
        """Whether the uncertainty says nothing."""
        return warn_of_uninformative_u(rows)

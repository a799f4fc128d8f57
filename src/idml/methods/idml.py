"""IDML, the method of the paper: the introspective metric over original images and mixtures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.losses import ProxyLoss
from idml.methods.base import Method, Task
from idml.methods.ism import MetricOptions, measure_weights, warn_of_uninformative_u
from idml.methods.mixup import MixtureOptions, choose_mixture_kinds
from idml.methods.taught_u import TeachingOptions


@dataclass(frozen=True)
class IdmlOptions:
    """Options of the paper's method.

    Labels of mixtures are weighted by default, which `idml reproduce default-form` chose; the paper has sets.
    """

    metric: MetricOptions = field(default_factory=MetricOptions)
    mixtures: MixtureOptions = field(default_factory=lambda: MixtureOptions(labels="weighted"))
    teaching: TeachingOptions = field(default_factory=lambda: TeachingOptions("none"))


class Idml(Method):
    """The paper's method: the introspective metric on images and mixtures.

    L = the loss of originals and mixtures by the introspective metric; `MixtureOptions` says which images meet.
    """

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

    @property
    def mixture_beta(self) -> float:
        """As the options say."""
        return self.options.mixtures.beta

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The terms of originals and mixtures, and the ranking of the originals' ‖u‖ if asked for."""
        originals = batch.labels.ids[: len(numbers), 0]
        proxies = isinstance(self.metric_loss, ProxyLoss)
        return {
            **self.options.mixtures.terms(self.metric_loss, embeddings, batch, seed, proxies=proxies),
            **self.options.teaching.terms(embeddings, originals),
        }

    def measure(self, embeddings: Embeddings, batch: Batch) -> dict[str, float]:
        """The mean weight of the originals in the loss, and that of the mixtures."""
        against_clean = self.options.mixtures.mixing == "against-clean"
        return measure_weights(self.metric_loss, embeddings, batch, against_clean=against_clean)

    def warn(self, rows: list[dict[str, Any]]) -> list[str]:
        """Whether the uncertainty says nothing."""
        return warn_of_uninformative_u(rows)

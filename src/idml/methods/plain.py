"""Plain training: the loss with the plain metric on s. By default u is taught by ranking, beside the loss."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.methods.base import Method, Task
from idml.methods.taught_u import TeachingOptions
from idml.metric import IntrospectiveMetric


@dataclass(frozen=True)
class PlainOptions:
    """Options of plain training."""

    teaching: TeachingOptions = field(default_factory=TeachingOptions)


class Plain(Method):
    """The loss alone; u is taught beside it.

    L = loss(s, labels), and L_u for the uncertainty. The loss itself never sees u.
    """

    Options = PlainOptions
    options: PlainOptions

    def __init__(self, options: PlainOptions, task: Task) -> None:
        super().__init__(options, task)
        self.metric_loss = task.build_loss(IntrospectiveMetric(rule="off"))

    @classmethod
    def check_options(cls, options: PlainOptions, *, train: str, loss: str) -> None:
        """A hidden layer needs something that teaches it."""
        options.teaching.check(loss_teaches_u=False, detached=True)

    @classmethod
    def model_options(cls, options: PlainOptions) -> dict[str, Any]:
        """The uncertainty head never changes the trunk."""
        return options.teaching.model_options(detach=True)

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The loss of all pairs, and the ranking of ‖u‖."""
        originals = batch.labels.ids[: len(numbers), 0]
        return {
            "pairs": self.metric_loss(embeddings, batch.labels, seed=seed),
            **self.options.teaching.terms(embeddings, originals),
        }

"""The choice between the plain and the introspective metric, for methods that work with both.

With the plain metric the loss never sees u, which is then taught by ranking beside the loss, as in plain training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from idml.data.augment import MIXTURES, Batch
from idml.embeddings import Embeddings
from idml.losses import MetricLoss
from idml.methods.base import Method, Task
from idml.methods.ism import MetricOptions, warn_of_uninformative_u
from idml.methods.options import check_types
from idml.methods.taught_u import TeachingOptions
from idml.metric import IntrospectiveMetric

PLAIN = IntrospectiveMetric(rule="off")


@dataclass(frozen=True)
class MetricChoice:
    """Whether pairs are compared by the introspective metric, and its options."""

    introspective: bool = False
    """Compare pairs by the introspective metric; else by the plain one, and u is taught by ranking."""
    options: MetricOptions = field(default_factory=MetricOptions)

    def __post_init__(self) -> None:
        check_types(self)
        if not self.introspective and self.options != MetricOptions():
            raise ValueError("the options of the introspective metric need introspective: true (--introspective)")

    @property
    def metric(self) -> IntrospectiveMetric:
        """The metric that the loss compares pairs by."""
        return self.options.metric if self.introspective else PLAIN

    def build_loss(self, task: Task, **options: Any) -> MetricLoss:
        """The loss of the run with this metric; ``options`` are further ones of the loss, such as its size."""
        if self.introspective and self.options.proxy_uncertainty:
            options["proxy_uncertainty"] = True
        return task.build_loss(self.metric, **options)

    @property
    def teaching(self) -> TeachingOptions:
        """What teaches u beside the loss."""
        return TeachingOptions("none") if self.introspective else TeachingOptions()


def refuse_proxy_uncertainty(choice: MetricChoice) -> None:
    """Raise ``ValueError`` if proxies of slices should get an uncertainty."""
    if choice.options.proxy_uncertainty:
        raise ValueError("proxy_uncertainty is for whole embeddings: the slices of this method share the u of an image")


def margin_options(task: Task) -> dict[str, Any]:
    """The options of a loss in methods whose margin loss learns a β for each class."""
    return {"learned_beta": True} if task.loss == "margin_dw" else {}


class MetricMethod(Method):
    """The hooks that follow from a `MetricChoice`, which the options of the method hold as ``choice``.

    `embedding` says which embedding at test the outputs of the model stand for.
    """

    metric_loss: Any
    """The loss of the run, or a ``ModuleList`` with one for each slice."""

    @classmethod
    def check_options(cls, options: Any, *, train: str, loss: str) -> None:
        """Proxies must exist to get an uncertainty."""
        options.choice.options.check(loss)

    @classmethod
    def model_options(cls, options: Any) -> dict[str, Any]:
        """The uncertainty head; it never changes the trunk unless the loss teaches it."""
        choice: MetricChoice = options.choice
        return choice.teaching.model_options(detach=not choice.introspective or choice.options.detach)

    @classmethod
    def mixture_kinds(cls, ambiguity: Sequence[str]) -> tuple[str, ...]:
        """Those that the user asks for; a mixture has the label set of its parents."""
        return tuple(kind for kind in ambiguity if kind in MIXTURES)

    def embedding(self, outputs: Embeddings) -> Embeddings:
        """The embedding that a test would use; here, the outputs themselves."""
        return outputs

    def teach(self, outputs: Embeddings, batch: Batch, count: int) -> dict[str, Tensor]:
        """The term that teaches u the ranking of the ``count`` original images, or nothing."""
        originals = batch.labels.ids[:count, 0]
        terms: dict[str, Tensor] = self.options.choice.teaching.terms(self.embedding(outputs), originals)
        return terms

    def compared(self, outputs: Embeddings, batch: Batch) -> list[tuple[MetricLoss, Embeddings]]:
        """The losses that compare by the metric of the run, each with the original images as it reads them.

        A `metric_loss` for each slice reads its slice, with the u that all slices share.
        """
        whole = self.embedding(outputs)[~batch.mixed]
        if not isinstance(self.metric_loss, nn.ModuleList):
            return [(self.metric_loss, whole)]
        losses: list[Any] = list(self.metric_loss)
        parts = whole.semantic.unflatten(1, (len(losses), -1)).unbind(dim=1)
        return [(loss, Embeddings(s, whole.uncertainty)) for loss, s in zip(losses, parts, strict=True)]

    @torch.no_grad()
    def measure(self, embeddings: Embeddings, batch: Batch) -> dict[str, float]:
        """With the introspective metric, the mean weight that it gives to original images in the loss."""
        if not self.options.choice.introspective:
            return {}
        weights = [loss.mean_weight(images) for loss, images in self.compared(embeddings, batch)]
        return {"weight": sum(weights) / len(weights)}

    def warn(self, rows: list[dict[str, Any]]) -> list[str]:
        """Whether the uncertainty says nothing, with the introspective metric."""
        return warn_of_uninformative_u(rows) if self.options.choice.introspective else []

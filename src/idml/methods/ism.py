"""ISM: the introspective metric without mixtures. The loss compares pairs by D or C' and so teaches u.

`MetricOptions`, `measure_weights` and `warn_of_uninformative_u` are for every method with the introspective metric.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.losses import LOSSES, MetricLoss, ProxyLoss
from idml.methods.base import Method, Task
from idml.methods.options import check_number, check_types
from idml.methods.taught_u import TeachingOptions
from idml.metric import FORMS, IntrospectiveMetric

COLLAPSED = 1e-3  # a mean ‖u‖ below this leaves the plain metric
INFLATED = 0.8, 0.1  # a mean weight below the first and a spread below the second: u is large for every image alike


@dataclass(frozen=True)
class MetricOptions:
    """The introspective metric of a run, and who has an uncertainty in it."""

    tau: float = 5.0
    """Temperature τ of the metric."""
    gamma: float = 0.0
    """Introspective bias γ of the metric (the paper: 3 for Cars196, else 0)."""
    rule: Literal["similar", "dissimilar", "release"] = "similar"
    """How uncertain pairs are treated: similar is the paper's method, dissimilar and release are for comparison."""
    fit: bool = False
    """Divide by the mean weight of the batch, so that the loss's thresholds fit the metric."""
    proxy_uncertainty: bool = False
    """Give the proxies a learned uncertainty instead of u = 0 (losses with proxies)."""
    detach: bool = False
    """Keep the gradient of u out of the trunk."""

    def __post_init__(self) -> None:
        check_types(self)
        check_number("tau", self.tau, above=0)
        check_number("gamma", self.gamma, at_least=0)
        if self.fit and self.rule != "similar":
            raise ValueError(f"fit needs the rule similar: there is no mean weight to divide by with {self.rule}")
        _ = self.metric  # it refuses what its rule does not have

    @property
    def metric(self) -> IntrospectiveMetric:
        """The metric that the loss compares pairs by."""
        return IntrospectiveMetric(self.tau, self.gamma, self.rule, self.fit)

    def build_loss(self, task: Task) -> MetricLoss:
        """The loss of the run with this metric."""
        return task.build_loss(self.metric, **({"proxy_uncertainty": True} if self.proxy_uncertainty else {}))

    def check(self, loss: str) -> None:
        """Raise ``ValueError`` for a rule that the loss cannot read, or proxies that it does not have."""
        known = LOSSES.get(loss)
        if known is not None and known.form not in FORMS[self.rule]:
            raise ValueError(f"rule {self.rule} has no {known.form}s, which {loss} compares: use a loss of cosines")
        if self.proxy_uncertainty and not issubclass(LOSSES.get(loss, ProxyLoss), ProxyLoss):
            raise ValueError(f"proxy_uncertainty is for losses with proxies: {loss} has none")


@torch.no_grad()
def measure_weights(
    loss: MetricLoss, embeddings: Embeddings, batch: Batch, *, against_clean: bool = False
) -> dict[str, float]:
    """The mean weight that the loss applied: over pairs of images, or over images and proxies, by its own rule.

    ``weight`` is that of the original images with each other, ``weight_mixed`` that of the mixtures with each other, or
    with the originals (``against_clean``).
    """
    originals, mixtures = embeddings[~batch.mixed].detach(), embeddings[batch.mixed].detach()
    weights = {"weight": loss.mean_weight(originals)}
    if len(mixtures):
        weights["weight_mixed"] = loss.mean_weight(mixtures, originals if against_clean else None)
    return weights


def warn_of_uninformative_u(rows: list[dict[str, Any]]) -> list[str]:
    """The two ways in which a learned uncertainty says nothing: it is 0, or it is large for every image alike."""
    if not rows:
        return []
    tail = rows[-max(1, len(rows) // 4) :]
    level, spread, weight = (sum(r[key] for r in tail) / len(tail) for key in ("level_clean", "level_spread", "weight"))
    if level < COLLAPSED:
        return [f"the uncertainty has collapsed: mean ‖u‖ {level:.1e}, the metric is the plain one"]
    if weight < INFLATED[0] and spread < INFLATED[1]:
        return [f"the uncertainty is inflated: ‖u‖ {level:.2f} for every image alike, mean weight {weight:.2f}"]
    return []


@dataclass(frozen=True)
class IsmOptions:
    """Options of the metric without mixtures."""

    metric: MetricOptions = field(default_factory=MetricOptions)
    teaching: TeachingOptions = field(default_factory=lambda: TeachingOptions("none"))


class Ism(Method):
    """The introspective metric without mixtures.

    L = loss(s, u, labels) with the introspective metric.
    """

    Options = IsmOptions
    options: IsmOptions

    def __init__(self, options: IsmOptions, task: Task) -> None:
        super().__init__(options, task)
        self.metric_loss = options.metric.build_loss(task)

    @classmethod
    def check_options(cls, options: IsmOptions, *, train: str, loss: str) -> None:
        """Proxies must exist to get an uncertainty; a ranking must not move the trunk."""
        options.metric.check(loss)
        options.teaching.check(loss_teaches_u=True, detached=options.metric.detach or train == "heads")

    @classmethod
    def model_options(cls, options: IsmOptions) -> dict[str, Any]:
        """The uncertainty head, detached if asked for."""
        return options.teaching.model_options(detach=options.metric.detach)

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The loss of all pairs, and the ranking of ‖u‖ if asked for."""
        originals = batch.labels.ids[: len(numbers), 0]
        return {
            "pairs": self.metric_loss(embeddings, batch.labels, seed=seed),
            **self.options.teaching.terms(embeddings, originals),
        }

    def measure(self, embeddings: Embeddings, batch: Batch) -> dict[str, float]:
        """The mean weight in the loss."""
        return measure_weights(self.metric_loss, embeddings, batch)

    def warn(self, rows: list[dict[str, Any]]) -> list[str]:
        """Whether the uncertainty says nothing."""
        return warn_of_uninformative_u(rows)

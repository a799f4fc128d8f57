"""The modules around the loss functions: they check the input and build the pair matrix and the match mask.

A loss is a pure function ``loss(pairs, matches, others, *, parameters…)`` of the pair matrix (distances D or cosines
C', depending on its `form`) and the mask of matching pairs. Its rows are the images of a batch. Its columns are the
same images, or with ``others`` other images; the columns of a loss with proxies are proxies, and it has no ``others``.
The module beside it names that function and its form; all other code is here.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from idml.embeddings import Embeddings
from idml.errors import unknown_name
from idml.labels import LabelSets
from idml.metric import Form, IntrospectiveMetric

_FACTORS = ("alpha", "beta", "scale", "power", "slope", "entropy")
"""Parameters that multiply, divide or raise something in whichever loss has them, so they are above 0."""


class MetricLoss(nn.Module):
    """Base of all losses: the metric, the loss function's parameters, and the checks of the input."""

    form: ClassVar[Form]
    function: ClassVar[Callable[..., Tensor]]
    proxy_lr: ClassVar[float] = 100.0
    """Learning rate of the loss's own parameters, in units of the model's, unless the user asks for another."""

    def __init__(
        self,
        *,
        metric: IntrospectiveMetric | None = None,
        num_classes: int | None = None,
        embedding_dim: int | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__()
        self.metric = IntrospectiveMetric() if metric is None else metric
        if self.metric.rule == "strict":
            raise ValueError("rule 'strict' is for analysis only: u gets no gradient, so it cannot be trained")
        self._require_form()
        for name, count in (("num_classes", num_classes), ("embedding_dim", embedding_dim)):
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"{name} must be a positive whole number, got {count!r}")
        self.num_classes, self.embedding_dim = num_classes, embedding_dim
        self.parameters_of_loss = {**self.defaults(), **self.known(parameters)}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the loss function's parameters with their defaults."""
        signature = inspect.signature(cls.function).parameters.values()
        return {p.name: p.default for p in signature if p.kind is p.KEYWORD_ONLY and p.default not in (p.empty, None)}

    @classmethod
    def known(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the same parameters; one that the loss does not have, or that cannot be, is a ``ValueError``."""
        usual = cls.defaults()
        for name, value in parameters.items():
            if name not in usual:
                raise ValueError(unknown_name("parameter", name, usual, whose=f" of {cls.__name__}"))
            if isinstance(usual[name], int) and not (type(value) is int and value >= 1):
                raise ValueError(f"{name} of {cls.__name__} must be a positive whole number, got {value!r}")
            if name in _FACTORS and value <= 0:
                raise ValueError(f"{name} of {cls.__name__} must be above 0, got {value:g}")
        return parameters

    def _require_form(self) -> None:
        method = {"distance": self.metric.distances, "cosine": self.metric.cosines}[self.form]
        probe = Embeddings(torch.ones(1, 1), torch.zeros(1, 1))
        try:
            method(probe)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__} reads {self.form}s, but {error}") from None

    def pairs(self, e: Embeddings, other: Embeddings | None = None) -> Tensor:
        """Return the pair matrix that the loss reads: D or C' of every pair."""
        return self.metric.distances(e, other) if self.form == "distance" else self.metric.cosines(e, other)

    def _checked(self, embeddings: Embeddings | Tensor, labels: LabelSets | Tensor) -> tuple[Embeddings, LabelSets]:
        if isinstance(embeddings, Tensor):
            if self.metric.rule != "off":
                raise ValueError(
                    f"rule {self.metric.rule!r} needs Embeddings(semantic, uncertainty); "
                    "a plain tensor only goes with rule 'off'"
                )
            embeddings = Embeddings.certain(embeddings)
        if not isinstance(embeddings, Embeddings):
            raise ValueError(f"expected Embeddings, got {type(embeddings).__name__}")
        device = labels.ids.device if isinstance(labels, LabelSets) else getattr(labels, "device", None)
        if device is not None and device != embeddings.semantic.device:
            raise ValueError(f"embeddings are on {embeddings.semantic.device} but labels are on {device}")
        sets = labels if isinstance(labels, LabelSets) else LabelSets(labels)
        if len(embeddings) == 0:
            raise ValueError("the batch is empty: a loss needs at least one image")
        if len(embeddings) != len(sets):
            raise ValueError(f"{len(embeddings)} embeddings but {len(sets)} labels")
        if self.embedding_dim is not None and embeddings.semantic.shape[1] != self.embedding_dim:
            raise ValueError(
                f"embeddings are {embeddings.semantic.shape[1]}-d, the loss expects {self.embedding_dim}-d"
            )
        return embeddings, sets

    def mean_weight(self, embeddings: Embeddings, other: Embeddings | None = None) -> float:
        """Return the mean weight e^(−x) that the metric gives to the pairs of these images in this loss.

        ``other`` are the images that they are compared with, if it is not with each other.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the loss's parameters, for printing."""
        return ", ".join([f"metric={self.metric}", *(f"{k}={v!r}" for k, v in self.parameters_of_loss.items())])


class PairLoss(MetricLoss):
    """A loss over the pairs of a batch."""

    def forward(
        self,
        embeddings: Embeddings | Tensor,
        labels: LabelSets | Tensor,
        seed: int | None = None,
        *,
        other: Embeddings | Tensor | None = None,
        other_labels: LabelSets | Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a batch, a scalar; ``seed`` fixes the draws of losses that sample.

        With ``other`` the images of the batch are compared with those images alone, not with each other.
        """
        e, sets = self._checked(embeddings, labels)
        if self.num_classes is not None:
            sets.check_below(self.num_classes)
        if other is None or other_labels is None:
            if other is not None or other_labels is not None:
                raise ValueError("other and other_labels go together")
            return self.loss_of_pairs(self.pairs(e), sets.matches(), False, e.semantic.shape[1], seed)
        columns, column_sets = self._checked(other, other_labels)
        return self.loss_of_pairs(self.pairs(e, columns), sets.matches(column_sets), True, e.semantic.shape[1], seed)

    def loss_of_pairs(self, pairs: Tensor, matches: Tensor, others: bool, dim: int, seed: int | None) -> Tensor:
        """Return the loss of a pair matrix in ``dim`` dimensions; ``others``: its columns are other images."""
        return type(self).function(pairs, matches, others, **self.parameters_of_loss)

    def mean_weight(self, embeddings: Embeddings, other: Embeddings | None = None) -> float:
        """Return the mean of the metric's weights over the pairs of different images; 1 if there is no pair."""
        if other is not None:
            return float(self.metric.weights(embeddings, other).mean())
        n = len(embeddings)
        if n < 2:
            return 1.0
        weights = self.metric.weights(embeddings)
        return float((weights.sum() - weights.diagonal().sum()) / (n * (n - 1)))


class ProxyLoss(MetricLoss):
    """A loss between images and learned proxies of the classes, ``centers_per_class`` for each.

    The metric normalises the proxies, but for rule ``release``. They are certain (u = 0), unless ``proxy_uncertainty``
    makes their uncertainty a parameter too, which starts small.
    """

    def __init__(
        self,
        *,
        metric: IntrospectiveMetric | None = None,
        num_classes: int | None = None,
        embedding_dim: int | None = None,
        proxy_uncertainty: bool = False,
        **parameters: Any,
    ) -> None:
        super().__init__(metric=metric, num_classes=num_classes, embedding_dim=embedding_dim, **parameters)
        if num_classes is None or embedding_dim is None:
            raise ValueError(f"{type(self).__name__} learns proxies: it needs num_classes and embedding_dim")
        count = num_classes * int(self.parameters_of_loss.get("centers_per_class", 1))
        self.proxies = nn.Parameter(torch.empty(count, embedding_dim))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")
        self.proxy_uncertainty = None
        if proxy_uncertainty:
            small = 0.05 / embedding_dim**0.5  # ‖u‖ ≈ 0.05, as the images start
            self.proxy_uncertainty = nn.Parameter(torch.randn(count, embedding_dim) * small)

    def forward(self, embeddings: Embeddings | Tensor, labels: LabelSets | Tensor, seed: int | None = None) -> Tensor:
        """Return the loss of a batch, a scalar; proxy losses do not sample, so ``seed`` has no effect."""
        e, sets = self._checked(embeddings, labels)
        if self.proxies.device != e.semantic.device:
            raise ValueError(f"the proxies are on {self.proxies.device} but embeddings are on {e.semantic.device}")
        assert self.num_classes is not None
        pairs = self.pairs(e, self.proxy_embeddings())
        return type(self).function(pairs, sets.in_classes(self.num_classes), **self.parameters_of_loss)

    def mean_weight(self, embeddings: Embeddings, other: Embeddings | None = None) -> float:
        """Return the mean of the metric's weights over the images and the proxies; ``other`` has no effect."""
        return float(self.metric.weights(embeddings, self.proxy_embeddings()).mean())

    def proxy_embeddings(self) -> Embeddings:
        """Return the proxies as embeddings."""
        if self.proxy_uncertainty is None:
            return Embeddings.certain(self.proxies)
        return Embeddings(self.proxies, self.proxy_uncertainty)


def require_pairs(pairs: Tensor, matches: Tensor, square: bool = False) -> None:
    """Raise ``ValueError`` unless ``matches`` is a bool mask of the pair matrix (square: batch against itself)."""
    if pairs.ndim != 2 or not pairs.is_floating_point():
        raise ValueError(f"the pair matrix must be a floating-point [n, m], got {pairs.dtype} {list(pairs.shape)}")
    if matches.dtype != torch.bool or matches.shape != pairs.shape:
        raise ValueError(f"matches must be bool {list(pairs.shape)}, got {matches.dtype} {list(matches.shape)}")
    if square and pairs.shape[0] != pairs.shape[1]:
        raise ValueError(f"a batch against itself has a square pair matrix, got {list(pairs.shape)}")
    if pairs.device != matches.device:
        raise ValueError(f"the pair matrix is on {pairs.device} but matches are on {matches.device}")

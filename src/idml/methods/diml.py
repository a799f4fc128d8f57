"""DIML: deep interpretable metric learning by structural matching (Zhao et al., ICCV 2021), in training.

The value of a pair is the mean of what the run's loss reads and of its structural counterpart over 4 × 4 positions:

    cosine losses      ½(C + Σ_ab T_ab·X_a·Y_b)             distance losses    ½(D + Σ_ab T_ab·‖X_a − Y_b‖)

with the transport plan T of `idml.model.structural_matching`, a constant to the gradient. A position passes through
the same linear head as the pooled features. C or D of the whole images may be introspective; positions have no u.
The trained model is an ordinary one; `idml evaluate --rerank diml` also matches positions at test, with any model.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from idml.data.augment import Batch
from idml.embeddings import Embeddings, unit_rows
from idml.losses import LOSSES, PairLoss
from idml.methods.base import Task
from idml.methods.metric_choice import MetricChoice, MetricMethod
from idml.model.structural_matching import marginals, transport_plans

GRID = 4
_PAIRS = 2048  # transport problems solved at a time
_ROUNDS = 40  # the plan of a step need not be exact


def structural_pairs(maps: Tensor, whole: Tensor, *, distance: bool) -> Tensor:
    """Σ_ab T_ab·S_ab, or Σ_ab T_ab·‖X_a − Y_b‖, of every pair of a batch [n, n].

    ``maps`` [n, r, d] and ``whole`` [n, d] are unit rows. The diagonal is that of an image with itself.
    """
    n, r, _ = maps.shape
    flat = maps.flatten(0, 1)
    similarity = (flat @ flat.T).view(n, r, n, r).transpose(1, 2)  # [i, j, a, b]
    with torch.no_grad():
        products = (flat @ whole.T).view(n, r, n)
        weights = marginals(products.transpose(1, 2))  # [i, j, a]: the positions of i, seen from j
        first, second = torch.triu_indices(n, n, device=maps.device)
        plans = torch.empty_like(similarity)
        for i, j in zip(first.split(_PAIRS), second.split(_PAIRS), strict=True):
            plan = transport_plans(1.0 - similarity[i, j], weights[i, j], weights[j, i], rounds=_ROUNDS)
            plans[i, j], plans[j, i] = plan, plan.transpose(1, 2)
    values = (2.0 - 2.0 * similarity).clamp_min(1e-12).sqrt() if distance else similarity
    return (plans * values).sum(dim=(2, 3))


@dataclass(frozen=True)
class DimlOptions:
    """Options of DIML in training."""

    choice: MetricChoice = field(default_factory=MetricChoice)


class Diml(MetricMethod):
    """A pair loss on the mean of the pair matrix and of one that matches positions."""

    Options = DimlOptions
    options: DimlOptions

    def __init__(self, options: DimlOptions, task: Task) -> None:
        super().__init__(options, task)
        loss = options.choice.build_loss(task)
        assert isinstance(loss, PairLoss)
        self.metric_loss = loss

    @classmethod
    def check_options(cls, options: DimlOptions, *, train: str, loss: str) -> None:
        """Proxies have no positions to match."""
        super().check_options(options, train=train, loss=loss)
        if not issubclass(LOSSES.get(loss, PairLoss), PairLoss):
            raise ValueError(f"method diml compares pairs of images, not proxies: {loss} has proxies")

    @classmethod
    def model_options(cls, options: DimlOptions) -> dict[str, Any]:
        """A map of positions beside the pooled features."""
        return {**super().model_options(options), "maps": GRID}

    def embedding(self, outputs: Embeddings) -> Embeddings:
        """The head of the pooled features."""
        return Embeddings(outputs.semantic[:, : self.task.embedding_dim], outputs.uncertainty)

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The loss of the mean of both matrices, and the ranking of ‖u‖."""
        whole, loss = self.embedding(embeddings), self.metric_loss
        positions = embeddings.semantic[:, self.task.embedding_dim :].unflatten(1, (-1, self.task.embedding_dim))
        maps = unit_rows(positions.flatten(0, 1)).view_as(positions)
        structural = structural_pairs(maps, whole.unit, distance=loss.form == "distance")
        pairs = 0.5 * (loss.pairs(whole) + structural)
        return {
            "pairs": loss.loss_of_pairs(pairs, batch.labels.matches(), False, self.task.embedding_dim, seed),
            **self.teach(embeddings, batch, len(numbers)),
        }

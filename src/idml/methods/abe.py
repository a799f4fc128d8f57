"""ABE: attention-based ensemble (Kim et al., ECCV 2018).

M learners look at the map before the trunk's last stage through M attention masks (`idml.model.branches`); the last
stage and the linear head are shared. A divergence term keeps the learners' embeddings of an image apart:

    L = Σ_m L(B_m, y) + λ·mean_i Σ_{p<q} [m_div − ‖B_p(x_i) − B_q(x_i)‖²]₊        λ = 1, m_div = 1

B_m are unit vectors; at test they are concatenated. L is the run's loss; the authors' is contrastive on squared
distances with margin 1 (``negative_margin`` 1, ``power`` 2). All learners share u.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.methods.base import Task
from idml.methods.metric_choice import MetricChoice, MetricMethod, refuse_proxy_uncertainty
from idml.methods.options import check_number
from idml.model.heads import divide, unit_slices


def divergence(learners: Tensor, margin: float) -> Tensor:
    """mean_i Σ_{p<q} [margin − ‖B_p − B_q‖²]₊ of unit learners [n, M, d].

    >>> divergence(torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]), 1.0)  # one equal pair
    tensor(1.)
    """
    squares = 2.0 - 2.0 * learners @ learners.transpose(1, 2)
    p, q = torch.triu_indices(learners.shape[1], learners.shape[1], 1, device=learners.device)
    return (margin - squares[:, p, q]).relu().sum(dim=1).mean()


@dataclass(frozen=True)
class AbeOptions:
    """Options of ABE."""

    learners: int = 8
    """Learners M, each with a slice of embedding_dim / M."""
    divergence_weight: float = 1.0
    """Weight λ of the divergence between learners."""
    divergence_margin: float = 1.0
    """Squared distance beyond which two learners are far enough apart."""
    choice: MetricChoice = field(default_factory=MetricChoice)

    def __post_init__(self) -> None:
        check_number("learners", self.learners, at_least=1, whole=True)
        check_number("divergence_weight", self.divergence_weight, at_least=0)
        check_number("divergence_margin", self.divergence_margin, at_least=0)


class Abe(MetricMethod):
    """Attention branches: the loss of each learner, and their divergence."""

    Options = AbeOptions
    options: AbeOptions

    def __init__(self, options: AbeOptions, task: Task) -> None:
        super().__init__(options, task)
        self.size = divide(task.embedding_dim, options.learners, "embedding_dim")
        self.metric_loss = nn.ModuleList(
            options.choice.build_loss(task, embedding_dim=self.size) for _ in range(options.learners)
        )

    @classmethod
    def check_options(cls, options: AbeOptions, *, train: str, loss: str) -> None:
        """The masks lie within the trunk, so it cannot be frozen."""
        super().check_options(options, train=train, loss=loss)
        refuse_proxy_uncertainty(options.choice)
        if train == "heads":
            raise ValueError("method abe learns attention masks within the trunk: it needs train last or all")

    @classmethod
    def model_options(cls, options: AbeOptions) -> dict[str, Any]:
        """Branches of the trunk and one linear layer for all of them."""
        names = tuple(f"learner {m + 1}" for m in range(options.learners))
        own = {"head": "shared", "branching": "attention", "slices": names}
        return {**super().model_options(options), **own}

    def embedding(self, outputs: Embeddings) -> Embeddings:
        """The learners' embeddings, normalised one by one."""
        return Embeddings(unit_slices(outputs.semantic, self.options.learners), outputs.uncertainty)

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The losses of the learners, their divergence, and the ranking of ‖u‖."""
        unit = self.embedding(embeddings).semantic.unflatten(1, (self.options.learners, -1))
        parts = [
            loss(Embeddings(unit[:, m], embeddings.uncertainty), batch.labels, seed=seed)
            for m, loss in enumerate(self.metric_loss)
        ]
        apart = divergence(unit, self.options.divergence_margin)
        return {
            "pairs": torch.stack(parts).sum(),
            "divergence": self.options.divergence_weight * apart,
            **self.teach(embeddings, batch, len(numbers)),
        }

"""RLL-(L,M,H): heads on three stages of the trunk, as in the ranked list loss (Wang et al., CVPR 2019 and TPAMI 2021).

The high head reads the trunk's pooled features. The middle and the low head have layers of their own on the maps after
the two stages before (`idml.model.branches`). Each head has its own loss of weight 1:

    L = L(s_low, y) + L(s_middle, y) + L(s_high, y)

The heads' embeddings are unit vectors; at test they are concatenated. L is the run's loss; the authors' is ranked_list.
All heads share u. The authors' heads have batch normalisation, ours do not: parts of a batch would change it.
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
from idml.model.branches import STAGES
from idml.model.heads import divide, unit_slices


@dataclass(frozen=True)
class RankedLmhOptions:
    """Options of the heads on several stages."""

    stage_heads: int = 3
    """Heads: 1 is the high one alone (plain training), 2 adds the middle one, 3 the low one."""
    choice: MetricChoice = field(default_factory=MetricChoice)

    def __post_init__(self) -> None:
        check_number("stage_heads", self.stage_heads, at_least=1, whole=True)
        if self.stage_heads > len(STAGES):
            raise ValueError(f"stage_heads must be at most {len(STAGES)}, got {self.stage_heads}")


class RankedLmh(MetricMethod):
    """A head on each of the last stages, with a loss of its own."""

    Options = RankedLmhOptions
    options: RankedLmhOptions

    def __init__(self, options: RankedLmhOptions, task: Task) -> None:
        super().__init__(options, task)
        size = divide(task.embedding_dim, options.stage_heads, "embedding_dim")
        self.metric_loss = nn.ModuleList(
            options.choice.build_loss(task, embedding_dim=size) for _ in range(options.stage_heads)
        )

    @classmethod
    def check_options(cls, options: RankedLmhOptions, *, train: str, loss: str) -> None:
        """The lower heads have layers on maps, of which a frozen trunk keeps none."""
        super().check_options(options, train=train, loss=loss)
        refuse_proxy_uncertainty(options.choice)
        if train == "heads":
            raise ValueError(
                "method ranked-lmh learns layers on the maps of earlier stages: it needs train last or all"
            )

    @classmethod
    def model_options(cls, options: RankedLmhOptions) -> dict[str, Any]:
        """Branches at the stages, and a linear layer for each."""
        own = {"head": "parts", "branching": "stages", "slices": STAGES[-options.stage_heads :]}
        return {**super().model_options(options), **own}

    def embedding(self, outputs: Embeddings) -> Embeddings:
        """The heads' embeddings, normalised one by one."""
        return Embeddings(unit_slices(outputs.semantic, self.options.stage_heads), outputs.uncertainty)

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The losses of the heads, and the ranking of ‖u‖."""
        unit = self.embedding(embeddings).semantic.unflatten(1, (self.options.stage_heads, -1))
        parts = [
            loss(Embeddings(unit[:, place], embeddings.uncertainty), batch.labels, seed=seed)
            for place, loss in enumerate(self.metric_loss)
        ]
        return {"pairs": torch.stack(parts).sum(), **self.teach(embeddings, batch, len(numbers))}

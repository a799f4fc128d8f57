"""DCML: deep compositional metric learning (Zheng et al., CVPR 2021).

K sub-embeddings are never supervised by themselves. K compositors mix them into K composites, each with a task of its
own (`idml.model.heads.ComposedHead` has the formulas), and each compositor is asked to choose clearly:

    L = Σ_m L(y^m; task m) + w·Σ_m mean_x −log max_k p^m_k(x)        w = 1

The second term is the cross-entropy with the compositor's own choice; it reaches the compositors alone. It soon
falls to 0, and compositors that choose the same sub-embedding then stay so: the log has the usage of each. At test the
composites are normalised and concatenated.

The authors' release does not run, and the tasks of its margin-only row are not known. Our reading of "subtasks":
composite m sees the images of a random half of the classes, drawn anew in every step. Our choice too: at the start
compositor m chooses sub-embedding m.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from idml.data.augment import Batch
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings
from idml.labels import LabelSets
from idml.methods.base import Task
from idml.methods.metric_choice import MetricChoice, MetricMethod, margin_options, refuse_proxy_uncertainty
from idml.methods.options import check_number
from idml.model.heads import divide, unit_slices

COLLAPSED, UNUSED = 0.95, 0.01  # shares of all choices that one sub-embedding gets


def reinforcement(scores: Tensor) -> Tensor:
    """Σ_m mean −log max_k p^m_k: scores [n, M, K] of the compositors."""
    return sum((cross_entropy(part, part.argmax(dim=1)) for part in scores.unbind(dim=1)), start=scores.new_zeros(()))


def subtask_rows(labels: LabelSets, classes: int, generator: torch.Generator) -> Tensor:
    """The images [m] of a random half of the classes in the batch; of a label set, its first label decides."""
    own = labels.ids[:, 0]
    present = own.unique()
    order = torch.randperm(len(present), generator=generator).to(own.device)
    chosen = torch.zeros(classes, dtype=torch.bool, device=own.device)
    chosen[present[order[: max(2, (len(present) + 1) // 2)]]] = True
    return chosen[own].nonzero().squeeze(1)


@dataclass(frozen=True)
class DcmlOptions:
    """Options of DCML."""

    composites: int = 4
    """Sub-embeddings, and composites that mix them."""
    reinforcement_weight: float = 1.0
    """Weight of the term by which each compositor chooses clearly."""
    choice: MetricChoice = field(default_factory=MetricChoice)

    def __post_init__(self) -> None:
        check_number("composites", self.composites, at_least=1, whole=True)
        check_number("reinforcement_weight", self.reinforcement_weight, at_least=0)


class Dcml(MetricMethod):
    """A loss for each of several composites, on a random half of the classes."""

    Options = DcmlOptions
    options: DcmlOptions

    def __init__(self, options: DcmlOptions, task: Task) -> None:
        super().__init__(options, task)
        self.size = divide(task.embedding_dim, options.composites, "embedding_dim")
        self.metric_loss = nn.ModuleList(
            options.choice.build_loss(task, embedding_dim=self.size, **margin_options(task))
            for _ in range(options.composites)
        )

    @classmethod
    def check_options(cls, options: DcmlOptions, *, train: str, loss: str) -> None:
        """The composites share u, so their proxies cannot have one."""
        super().check_options(options, train=train, loss=loss)
        refuse_proxy_uncertainty(options.choice)

    @classmethod
    def model_options(cls, options: DcmlOptions) -> dict[str, Any]:
        """The composed head."""
        names = tuple(f"composite {m + 1}" for m in range(options.composites))
        return {**super().model_options(options), "head": "composed", "slices": names}

    def embedding(self, outputs: Embeddings) -> Embeddings:
        """The composites, normalised one by one."""
        composites = outputs.semantic[:, : self.task.embedding_dim]
        return Embeddings(unit_slices(composites, self.options.composites), outputs.uncertainty)

    def _scores(self, outputs: Embeddings) -> Tensor:
        count = self.options.composites
        scores: Tensor = outputs.semantic[:, self.task.embedding_dim :]
        return scores.reshape(-1, count, count)

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The losses of the composites, the clear choices, and the ranking of ‖u‖."""
        parts = []
        for m, part_loss in enumerate(self.metric_loss):
            rows = torch.arange(len(batch.labels), device=embeddings.semantic.device)
            if self.options.composites > 1:
                rows = subtask_rows(batch.labels, self.task.classes, random_stream("subtask", seed, m))
            part = embeddings.semantic[rows, m * self.size : (m + 1) * self.size]
            parts.append(part_loss(Embeddings(part, embeddings.uncertainty[rows]), batch.labels[rows], seed=seed))
        return {
            "pairs": torch.stack(parts).sum(),
            "reinforcement": self.options.reinforcement_weight * reinforcement(self._scores(embeddings)),
            **self.teach(embeddings, batch, len(numbers)),
        }

    @torch.no_grad()
    def measure(self, embeddings: Embeddings, batch: Batch) -> dict[str, float]:
        """The share of images and compositors that choose each sub-embedding, and the largest of these shares."""
        chosen = self._scores(embeddings).argmax(dim=2).flatten()
        counts = chosen.bincount(minlength=self.options.composites).tolist()
        shares = {f"choice_{k + 1}": count / len(chosen) for k, count in enumerate(counts)}
        return {**super().measure(embeddings, batch), **shares, "largest_choice": max(shares.values())}

    def warn(self, rows: list[dict[str, Any]]) -> list[str]:
        """Whether all compositors choose the same sub-embedding, or none chooses some of them."""
        count, tail = self.options.composites, rows[-max(1, len(rows) // 4) :]
        told = super().warn(rows)
        if count == 1 or not tail:
            return told
        if sum(row["largest_choice"] for row in tail) / len(tail) >= COLLAPSED:
            return [*told, "all compositors choose the same sub-embedding (largest_choice in the log): one is in use"]
        shares = [sum(row[f"choice_{k + 1}"] for row in tail) / len(tail) for k in range(count)]
        unused = sum(share < UNUSED for share in shares)
        if unused:
            told = [*told, f"no compositor chooses {unused} of the {count} sub-embeddings (choice_1 … in the log)"]
        return told

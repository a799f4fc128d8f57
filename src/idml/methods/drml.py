"""DRML: deep relational metric learning (Zheng et al., ICCV 2021).

The features are split into K parts, each with a small embedding (node) of its own. An image trains only the node
whose decoder reconstructs its part best; a relation module mixes all nodes into the embedding f
(`idml.model.heads.RelationHead` has the formulas):

    L = Σ_k L_k({v_k(x) : argmin_j e_j(x) = k}) + w_f·L(f) + w_e·mean e        w_f = 10, w_e = 1

L_k and L are the run's loss, with proxies of their own; the authors use ProxyAnchor with α = 64 and margin 0.2. Edges
and decoders pass no gradient to the trunk, and the choice of a node has none. The introspective metric is for f alone.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from idml.data.augment import Batch
from idml.embeddings import Embeddings
from idml.losses import LOSSES, ProxyLoss
from idml.methods.base import Task
from idml.methods.metric_choice import PLAIN, MetricChoice, MetricMethod
from idml.methods.options import check_number
from idml.model.heads import divide


@dataclass(frozen=True)
class DrmlOptions:
    """Options of DRML."""

    nodes: int = 4
    """Parts K of the features, each with a node."""
    whole_weight: float = 10.0
    """Weight of the loss of the whole embedding."""
    reconstruction_weight: float = 1.0
    """Weight of the reconstruction of each part from its node."""
    choice: MetricChoice = field(default_factory=MetricChoice)

    def __post_init__(self) -> None:
        check_number("nodes", self.nodes, at_least=1, whole=True)
        check_number("whole_weight", self.whole_weight, at_least=0)
        check_number("reconstruction_weight", self.reconstruction_weight, at_least=0)


class Drml(MetricMethod):
    """A loss for each node over the images that it reconstructs best, and one for their mix."""

    Options = DrmlOptions
    options: DrmlOptions

    def __init__(self, options: DrmlOptions, task: Task) -> None:
        super().__init__(options, task)
        self.size = divide(task.embedding_dim, options.nodes, "embedding_dim")
        self.metric_loss = options.choice.build_loss(task)
        self.node_losses = nn.ModuleList(task.build_loss(PLAIN, embedding_dim=self.size) for _ in range(options.nodes))

    @classmethod
    def check_options(cls, options: DrmlOptions, *, train: str, loss: str) -> None:
        """A node sees few images of a batch, so the loss must compare them with proxies."""
        super().check_options(options, train=train, loss=loss)
        if not issubclass(LOSSES.get(loss, ProxyLoss), ProxyLoss):
            raise ValueError(f"method drml needs a loss with proxies: {loss} has none (try --loss proxy_anchor)")

    @classmethod
    def model_options(cls, options: DrmlOptions) -> dict[str, Any]:
        """The relation head."""
        names = tuple(f"node {k + 1}" for k in range(options.nodes))
        return {**super().model_options(options), "head": "relations", "slices": names}

    def embedding(self, outputs: Embeddings) -> Embeddings:
        """The mixed nodes."""
        return Embeddings(outputs.semantic[:, : self.task.embedding_dim], outputs.uncertainty)

    def _split(self, outputs: Embeddings) -> tuple[Tensor, Tensor]:
        """The nodes [n, K, size] and their errors [n, K]."""
        dim = self.task.embedding_dim
        nodes, errors = outputs.semantic[:, dim : 2 * dim], outputs.semantic[:, 2 * dim :]
        return nodes.unflatten(1, (self.options.nodes, -1)), errors

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The losses of the nodes, of the whole, of the decoders, and the ranking of ‖u‖."""
        nodes, errors = self._split(embeddings)
        chosen, parts = errors.detach().argmin(dim=1), []
        for k, node_loss in enumerate(self.node_losses):
            rows = (chosen == k).nonzero().squeeze(1)
            if len(rows):
                parts.append(node_loss(nodes[rows, k], batch.labels[rows], seed=seed))
        whole = self.metric_loss(self.embedding(embeddings), batch.labels, seed=seed)
        return {
            "nodes": torch.stack(parts).sum(),
            "pairs": self.options.whole_weight * whole,
            "reconstruction": self.options.reconstruction_weight * errors.mean(),
            **self.teach(embeddings, batch, len(numbers)),
        }

    @torch.no_grad()
    def measure(self, embeddings: Embeddings, batch: Batch) -> dict[str, float]:
        """The largest share of images that one node gets: a part of small variance can win them all."""
        chosen = self._split(embeddings)[1].argmin(dim=1)
        share = float(chosen.bincount(minlength=self.options.nodes).max()) / len(chosen)
        return {**super().measure(embeddings, batch), "largest_node": share}

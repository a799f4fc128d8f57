"""The introspective metric as a distance for pytorch-metric-learning's losses (``pip install idml[pml]``).

Its losses take one tensor of embeddings and a distance. Here the tensor is [s; u], the semantic and the uncertainty
embedding side by side, and the distance is the introspective metric on the two halves.

    loss = losses.TripletMarginLoss(distance=IntrospectiveDistance(semantic_dim=512))
    loss(joined(embeddings), labels)

Which of its losses accept these distances is listed in docs/losses.md.
"""

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

from idml.embeddings import Embeddings
from idml.metric import IntrospectiveMetric

_BLOCK = 64  # rows compared at a time if only the diagonal is needed


def joined(embeddings: Embeddings) -> Tensor:
    """Join s and u of each image to [s; u], which the distances of this module read: [n, d + d']."""
    return torch.cat([embeddings.semantic, embeddings.uncertainty], dim=1)


class _Introspective(BaseDistance):
    def __init__(self, semantic_dim: int, metric: IntrospectiveMetric | None = None, *, inverted: bool) -> None:
        super().__init__(normalize_embeddings=False, is_inverted=inverted)
        if type(semantic_dim) is not int or semantic_dim < 1:
            raise ValueError(f"semantic_dim must be a positive whole number, got {semantic_dim!r}")
        self.semantic_dim = semantic_dim
        self.metric = IntrospectiveMetric() if metric is None else metric

    def _split(self, x: Tensor) -> Embeddings:
        if x.shape[1] < self.semantic_dim:
            raise ValueError(f"embeddings are {x.shape[1]}-d, less than the {self.semantic_dim} semantic dimensions")
        s, u = x[:, : self.semantic_dim], x[:, self.semantic_dim :]
        return Embeddings(s, u)  # of semantic_dim alone: certain, as proxies are

    def _matrix(self, e: Embeddings, other: Embeddings | None) -> Tensor:
        return self.metric.cosines(e, other) if self.is_inverted else self.metric.distances(e, other)

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor | None) -> Tensor:
        """Every query against every reference."""
        if ref_emb is None or ref_emb is query_emb:
            return self._matrix(self._split(query_emb), None)
        return self._matrix(self._split(query_emb), self._split(ref_emb))

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        """Query i against reference i."""
        blocks = zip(query_emb.split(_BLOCK), ref_emb.split(_BLOCK), strict=True)
        return torch.cat([self._matrix(self._split(q), self._split(r)).diagonal() for q, r in blocks])


class IntrospectiveDistance(_Introspective):
    """D = α·exp(−(β + γ)/(τα)) on [s; u], as a pytorch-metric-learning distance."""

    def __init__(self, semantic_dim: int, metric: IntrospectiveMetric | None = None) -> None:
        super().__init__(semantic_dim, metric, inverted=False)


class IntrospectiveSimilarity(_Introspective):
    """C' = 1 − (1 − C)·exp(−(β + γ)/(τα)) on [s; u], as a pytorch-metric-learning similarity."""

    def __init__(self, semantic_dim: int, metric: IntrospectiveMetric | None = None) -> None:
        super().__init__(semantic_dim, metric, inverted=True)

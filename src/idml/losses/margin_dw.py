"""Margin loss with distance-weighted sampling (Wu et al., 2017)."""

import torch
from torch import Tensor

from idml.labels import pair_masks
from idml.losses.base import PairLoss, require_pairs
from idml.losses.reduce import mean_of_nonzero
from idml.mining import distance_weighted


def margin_dw(
    distances: Tensor,
    matches: Tensor,
    others: bool = False,
    *,
    dim: int,
    seed: int | None = None,
    beta: float = 1.2,
    margin: float = 0.2,
    closest: float = 0.5,
    farthest: float = 1.4,
) -> Tensor:
    """J_m = (Σ₊ [D − (β − m)]₊ + Σ₋ [(β + m) − D]₊) / number of non-zero terms.

    Σ₊ runs over all positive pairs, Σ₋ over one sampled negative for each of them, p(d) as in
    `idml.mining.distance_weighted` in ``dim`` dimensions. (The paper prints a minus before Σ₋; that
    would reward near negatives.)
    """
    require_pairs(distances, matches, square=not others)
    anchors, negatives = distance_weighted(
        distances.detach(), matches, dim, others, closest=closest, farthest=farthest, seed=seed
    )
    positive, _ = pair_masks(matches, others)
    return margin_of_pairs(distances[positive], distances[anchors, negatives], beta=beta, margin=margin)


def margin_of_pairs(positives: Tensor, negatives: Tensor, *, beta: float, margin: float) -> Tensor:
    """The margin loss of given positive and negative distances."""
    terms = torch.cat([(positives - (beta - margin)).relu(), ((beta + margin) - negatives).relu()])
    return mean_of_nonzero(terms)


class MarginDW(PairLoss):
    """Margin loss; the sampled negatives are fixed by the ``seed`` of the call."""

    form = "distance"
    function = staticmethod(margin_dw)

    def _loss(self, pairs: Tensor, matches: Tensor, others: bool, dim: int, seed: int | None) -> Tensor:
        parameters = {**self.parameters_of_loss, "seed": seed}
        return margin_dw(pairs, matches, others, dim=dim, **parameters)

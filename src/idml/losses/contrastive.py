"""Contrastive loss (Hadsell et al., 2006)."""

from torch import Tensor

from idml.labels import pair_masks
from idml.losses.base import PairLoss, require_pairs


def contrastive(
    distances: Tensor,
    matches: Tensor,
    others: bool = False,
    *,
    positive_margin: float = 0.0,
    negative_margin: float = 0.5,
    power: float = 1.0,
) -> Tensor:
    """mean⁺ [D_ij^p − m₊]₊ over positive pairs + mean⁺ [m₋ − D_ij^p]₊ over negative pairs; mean⁺ skips zeros.

    ``power`` p is 1; with 2 the distances are squared, as in ABE.

    >>> import torch
    >>> d = torch.tensor([[0.0, 0.4, 0.3], [0.4, 0.0, 0.9], [0.3, 0.9, 0.0]])
    >>> same = torch.tensor([[True, True, False], [True, True, False], [False, False, True]])
    >>> contrastive(d, same)  # 0.4 + (0.5 − 0.3)
    tensor(0.6000)
    """
    require_pairs(distances, matches, square=not others)
    if power < 1:
        raise ValueError(f"power must be at least 1, got {power}")
    distances = distances if power == 1 else distances**power
    positive, negative = pair_masks(matches, others)
    pulled = positive.logical_and_(distances.detach() > positive_margin)
    pushed = negative.logical_and_(distances.detach() < negative_margin)
    pulls, pushes = (mask.sum(dtype=distances.dtype) for mask in (pulled, pushed))
    # linear in D once the active pairs are known: each has the weight 1 / (number of active pairs of its kind)
    pull, push = pulled / pulls.clamp_min(1.0), pushed / pushes.clamp_min(1.0)
    constant = negative_margin * pushes.clamp_max(1.0) - positive_margin * pulls.clamp_max(1.0)
    return (pull.sub_(push) * distances).sum() + constant


class Contrastive(PairLoss):
    """Contrastive loss over all pairs of a batch."""

    form = "distance"
    function = staticmethod(contrastive)

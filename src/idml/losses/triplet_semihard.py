"""Triplet loss with semi-hard negatives (Schroff et al., 2015)."""

from torch import Tensor

from idml.losses.base import PairLoss, require_pairs
from idml.mining import semihard


def triplet_semihard(distances: Tensor, matches: Tensor, others: bool = False, *, margin: float = 0.1) -> Tensor:
    """mean (D_ap − D_an + margin) over all triplets with D_ap < D_an < D_ap + margin.

    >>> import torch
    >>> d = torch.tensor([[0.0, 0.50, 0.54], [0.50, 0.0, 0.90], [0.54, 0.90, 0.0]])
    >>> same = torch.tensor([[True, True, False], [True, True, False], [False, False, True]])
    >>> triplet_semihard(d, same)  # one semi-hard triplet: 0.50 − 0.54 + 0.1
    tensor(0.0600)
    """
    require_pairs(distances, matches, square=not others)
    counts, triplets = semihard(distances.detach(), matches, margin, others)
    return ((counts * distances).sum() + margin * triplets) / triplets.clamp_min(1.0)


class TripletSemihard(PairLoss):
    """Triplet loss over every semi-hard triplet of a batch."""

    form = "distance"
    function = staticmethod(triplet_semihard)

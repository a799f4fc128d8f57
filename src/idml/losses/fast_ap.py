"""FastAP (Cakir et al., 2019)."""

import torch
from torch import Tensor

from idml.labels import pair_masks
from idml.losses.base import PairLoss, require_pairs


def fast_ap(distances: Tensor, matches: Tensor, others: bool = False, *, bins: int = 10) -> Tensor:
    """1 − mean average precision, AP_i = (1/N⁺_i) Σ_l h⁺_l·H⁺_l / H_l over a soft histogram of D² in [0, 4].

    h⁺ and h are the histograms of anchor i's positives and of all its pairs, H⁺ and H their cumulative
    sums. Each D² is shared between the two nearest of bins + 1 centres in proportion to its nearness.
    Anchors without a positive do not count.
    """
    require_pairs(distances, matches, square=not others)
    if bins < 1:
        raise ValueError(f"bins must be 1 or larger, got {bins}")
    positive, negative = pair_masks(matches, others)
    position = (distances.square() * (bins / 4.0)).clamp_max(bins)
    lower = position.detach().floor().clamp_max(bins - 1)
    upper_share = position - lower
    index = lower.long()

    def histogram(mask: Tensor) -> Tensor:
        count = mask.to(distances.dtype)
        empty = torch.zeros(len(distances), bins + 1, dtype=distances.dtype, device=distances.device)
        return empty.scatter_add(1, index, (1.0 - upper_share) * count).scatter_add(1, index + 1, upper_share * count)

    hits, misses = histogram(positive), histogram(negative)
    cumulative_hits = hits.cumsum(dim=1)
    seen = (cumulative_hits + misses.cumsum(dim=1)).clamp_min(torch.finfo(distances.dtype).tiny)
    wanted = positive.sum(dim=1)
    precision = (hits * cumulative_hits / seen).sum(dim=1) / wanted.clamp_min(1)
    has_positive = wanted > 0
    return ((1.0 - precision) * has_positive).sum() / has_positive.sum().clamp_min(1)


class FastAP(PairLoss):
    """FastAP over all pairs of a batch."""

    form = "distance"
    function = staticmethod(fast_ap)

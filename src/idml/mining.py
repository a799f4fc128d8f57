"""Miners: they choose the pairs of a batch that a loss uses.

Miners read the loss's own pair matrix (D or C', not α), pass no gradient and use a few [n, n] tensors at most.
With ``others`` the columns of the matrix are other images than its rows; else an image is never paired with itself.
"""

import torch
from torch import Tensor

from idml.labels import pair_masks


@torch.no_grad()
def semihard(distances: Tensor, matches: Tensor, margin: float, others: bool = False) -> tuple[Tensor, Tensor]:
    """Semi-hard triplets (a, p, n): D_ap < D_an < D_ap + margin, counted instead of listed.

    The triplet loss Σ (D_ap − D_an + margin) is linear in D. So it needs only how often each pair occurs in a
    triplet, a matrix [n, n] of counts, positive for (a, p) and negative for (a, n), and the number of triplets.
    Negatives are sorted once per anchor; every positive then finds its range by bisection.
    """
    positive, negative = pair_masks(matches, others)
    ordered, order = distances.masked_fill(~negative, torch.inf).sort(dim=1)
    start = torch.searchsorted(ordered, distances, right=True)  # the first negative beyond the positive
    stop = torch.searchsorted(ordered, distances + margin)
    per_positive = (stop - start).clamp_min_(0) * positive
    used = (per_positive > 0).to(start.dtype)
    steps = torch.zeros(len(distances), distances.shape[1] + 1, dtype=start.dtype, device=start.device)
    steps.scatter_add_(1, start, used).scatter_add_(1, stop, -used)  # +1 where a range begins, −1 where it ends
    per_negative = torch.zeros_like(start).scatter_(1, order, steps.cumsum(dim=1)[:, :-1])
    return (per_positive - per_negative).to(distances.dtype), per_positive.sum(dtype=distances.dtype)


@torch.no_grad()
def multi_similarity(cosines: Tensor, matches: Tensor, epsilon: float, others: bool = False) -> tuple[Tensor, Tensor]:
    """Return the informative pairs of Wang et al. (2019), as two masks [n, n].

    A positive is kept if C_ap − ε < the largest negative of its anchor; a negative if C_an + ε > the
    smallest positive of its anchor.
    """
    positive, negative = pair_masks(matches, others)
    hardest_negative = cosines.masked_fill(~negative, -torch.inf).amax(dim=1, keepdim=True)
    hardest_positive = cosines.masked_fill(~positive, torch.inf).amin(dim=1, keepdim=True)
    return (
        positive.logical_and_(cosines < hardest_negative + epsilon),
        negative.logical_and_(cosines > hardest_positive - epsilon),
    )


def log_inverse_density(distances: Tensor, dim: int) -> Tensor:
    """Return log p(d) up to a constant, p(d) ∝ d^(2−n)·(1 − d²/4)^((3−n)/2).

    p is the inverse density of the distance of random points on the unit sphere in n dimensions (Wu et al., 2017).
    """
    return (2.0 - dim) * distances.log() + (3.0 - dim) / 2.0 * torch.log1p(-0.25 * distances.square())


@torch.no_grad()
def distance_weighted(
    distances: Tensor,
    matches: Tensor,
    dim: int,
    others: bool = False,
    *,
    closest: float = 0.5,
    farthest: float = 1.4,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one negative for each positive pair, with probability p(d) among the anchor's negatives.

    Distances below ``closest`` count as ``closest``; negatives beyond ``farthest`` are left out. Returns
    the pairs (anchors, negatives), in the order of the positive pairs; an anchor with no negative in
    reach draws none. ``seed`` fixes the draw; without it torch's global generator is used.
    """
    positive, negative = pair_masks(matches, others)
    reachable = negative & (distances <= farthest)
    d = distances.clamp(closest, farthest)
    weight = log_inverse_density(d, dim).masked_fill(~reachable, -torch.inf)
    weight = (weight - weight.amax(dim=1, keepdim=True)).exp_()  # NaN where there is no negative: not drawn from
    wanted = positive.sum(dim=1) * reachable.any(dim=1)
    return _draw(weight, wanted, seed)


def histogram_bins(distances: Tensor, bins: int, low: float, high: float) -> Tensor:
    """Return the bin of each distance, of ``bins`` equal ones between ``low`` and ``high``; the ends take the rest.

    >>> histogram_bins(torch.tensor([0.0, 0.15, 0.35, 9.0]), 3, 0.1, 0.4)
    tensor([0, 0, 2, 2])
    """
    places = (distances - low) * (bins / (high - low))
    return places.floor().long().clamp_(0, bins - 1)


@torch.no_grad()
def histogram_negatives(
    distances: Tensor,
    matches: Tensor,
    histogram: Tensor,
    *,
    low: float = 0.1,
    high: float = 1.4,
    whole_batch: bool = False,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one negative for each positive pair, with probability ∝ histogram[bin of its distance to the anchor].

    With ``whole_batch`` positives can be drawn too, as in PADS (Roth et al., 2020), but never the anchor itself.
    Returns the pairs (anchors, drawn), in the order of the positive pairs; an anchor without a candidate draws none.
    """
    positive, negative = pair_masks(matches)
    candidates = (positive | negative) if whole_batch else negative
    weight = histogram[histogram_bins(distances, len(histogram), low, high)] * candidates
    wanted = positive.sum(dim=1) * (weight.sum(dim=1) > 0)
    return _draw(weight, wanted, seed)


def _draw(weight: Tensor, wanted: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Draw ``wanted`` [n] columns of each row with probability ∝ ``weight`` [n, m]; return their rows and columns."""
    most = int(wanted.max()) if len(wanted) else 0
    if most == 0:
        none = torch.empty(0, dtype=torch.long, device=weight.device)
        return none, none
    generator = None if seed is None else torch.Generator(weight.device).manual_seed(seed)
    rows = wanted.nonzero().squeeze(1)
    drawn = torch.multinomial(weight[rows], most, replacement=True, generator=generator)
    keep = torch.arange(most, device=drawn.device) < wanted[rows].unsqueeze(1)
    return rows.unsqueeze(1).expand_as(drawn)[keep], drawn[keep]

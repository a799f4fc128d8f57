"""Sums that several losses share."""

import torch
from torch import Tensor


def mean_of_nonzero(values: Tensor) -> Tensor:
    """The mean over the values above 0; 0, still part of the graph, when there is none."""
    return values.sum() / (values.detach() > 0).sum().clamp_min(1)


def log_sum_exp(values: Tensor, mask: Tensor, dim: int) -> Tensor:
    """log Σ e^v over the masked-in values along ``dim``, −∞ and without gradient where there are none."""
    empty = ~mask.any(dim=dim)
    filled = values.masked_fill(~mask, -torch.inf).masked_fill(empty.unsqueeze(dim), 0.0)
    return torch.logsumexp(filled, dim=dim).masked_fill(empty, -torch.inf)


def log_share_of_matches(logits: Tensor, matches: Tensor) -> Tensor:
    """log(Σ over the matches e^z / Σ over all e^z) for each row [n]; every row needs a match."""
    rows, columns = matches.nonzero(as_tuple=True)
    chosen = logits[rows, columns]
    top = torch.full((len(logits),), -torch.inf, dtype=logits.dtype, device=logits.device)
    top = top.scatter_reduce(0, rows, chosen.detach(), "amax")
    sums = torch.zeros_like(top).index_add(0, rows, (chosen - top[rows]).exp())
    return sums.log() + top - logits.logsumexp(dim=1)

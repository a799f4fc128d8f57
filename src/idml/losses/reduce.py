"""Reductions that several losses share."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def mean_of_nonzero(values: Tensor) -> Tensor:
    """Return the mean over the values above 0; 0, still part of the graph, if there is none."""
    return values.sum() / (values.detach() > 0).sum().clamp_min(1)


def log_sum_exp(values: Tensor, dim: int, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Return log Σ e^(scale·v) along ``dim``, over the values that ``mask`` keeps.

    If it keeps none, the result is a very large negative number, whose softplus and gradient are 0.
    """
    out: Tensor = _LogSumExp.apply(values, dim, scale, mask)
    return out


def log_share_of_matches(values: Tensor, matches: Tensor, *, scale: float) -> Tensor:
    """Return log(Σ over the matches e^(scale·v) / Σ over all e^(scale·v)) of each row [n]; every row needs a match."""
    rows, columns = matches.nonzero(as_tuple=True)
    if torch.equal(rows, torch.arange(len(matches), device=rows.device)):  # plain labels: one match per row
        return values.gather(1, columns.unsqueeze(1)).squeeze(1) * scale - log_sum_exp(values, 1, scale=scale)
    if len(rows.unique_consecutive()) < len(matches):
        raise ValueError("an image matches none of the proxies")
    chosen = values[rows, columns] * scale
    top = torch.full((len(values),), -torch.inf, dtype=values.dtype, device=values.device)
    top = top.scatter_reduce(0, rows, chosen.detach(), "amax")
    sums = torch.zeros_like(top).index_add(0, rows, (chosen - top[rows]).exp())
    return sums.log() + top - log_sum_exp(values, 1, scale=scale)


class _LogSumExp(torch.autograd.Function):
    """Scaling, mask and sum as one step, which stores one matrix instead of five."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, scale: float, mask: Tensor | None) -> Tensor:
        scaled = values * scale
        if mask is not None:
            scaled.masked_fill_(~mask, torch.finfo(values.dtype).min / 4)
        top = scaled.amax(dim=dim, keepdim=True)
        exponentials = scaled.sub_(top).exp_()
        sums = exponentials.sum(dim=dim, keepdim=True)
        ctx.save_for_backward(exponentials, sums)
        ctx.dim, ctx.scale = dim, scale
        return sums.log().add_(top).squeeze(dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, sums = ctx.saved_tensors
        return exponentials * (grad.unsqueeze(ctx.dim) * ctx.scale / sums), None, None, None

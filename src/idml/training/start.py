"""Where the semantic head starts: at the principal components of the trunk's features.

A random head throws away most of what a pretrained trunk knows before it has learned anything; this one begins at the
trunk's own quality.
"""

import torch
from torch import Tensor

from idml.model import Model


@torch.no_grad()
def start_at_principal_components(model: Model, features: Tensor) -> None:
    """s = W(f − f̄), the rows of W the directions in which the features [n, width] vary most.

    With more dimensions than the features have, the rest of s starts at 0.
    """
    x = features.cpu().double()
    mean = x.mean(dim=0)
    x = x - mean
    rows = _directions(x)[: model.config.embedding_dim]
    largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
    rows = rows * largest.sign()  # a direction has no sign of its own
    weight, bias = model.semantic.weight, model.semantic.bias
    weight.zero_()
    bias.zero_()
    weight[: len(rows)] = rows.to(weight)
    bias[: len(rows)] = -(rows @ mean).to(bias)


def _directions(x: Tensor) -> Tensor:
    """Orthonormal rows, those along which ``x`` varies most first."""
    rows: Tensor
    try:
        rows = torch.linalg.eigh(x.T @ x)[1].T.flip(0)  # eigenvalues ascend
    except RuntimeError:  # not found, on some CPUs, where a few images span less than the features' width
        rows = torch.linalg.svd(x)[2]
    return rows

"""Decorrelation of two embeddings by an adversary, as in MIC and DiVA.

An MLP g tries to predict the target c from the source a: it raises the correlation d·Σ_k (ĉ_k·unit(g(â))_k)². The
gradient of both embeddings is reversed, so they lower what g raises:

    L_adv = −mean_i d·Σ_k (ĉ_ik·unit(g(â_i))_k)²

(MIC writes 1/d instead of the factor d. The squares of unit vectors shrink with d², so with the factor d the same
weight suits every size: MIC's γ = 2500 at 128 dimensions is the weight 2500/128² = 0.15.)

L_adv compares column by column, so it depends on the basis of the embeddings. At principal components most of their
length lies in the first columns, and L_adv would remove what varies most. So the methods with this term start at
rotated ones (`Method.rotated_start`), whose columns are all alike.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize


class ReverseGradient(torch.autograd.Function):
    """The identity, whose gradient is turned around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return −gradient."""
        return -gradients[0]


class Decorrelation(nn.Module):
    """L_adv of a target and a source embedding; its MLP is d → hidden → d."""

    def __init__(self, dim: int, hidden: int = 512) -> None:
        super().__init__()
        self.predict = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        """Return L_adv of unit rows [n, d]."""
        target, source = ReverseGradient.apply(target), ReverseGradient.apply(source)
        predicted = normalize(self.predict(source), dim=1)
        return -target.shape[1] * (target * predicted).square().sum(dim=1).mean()

"""Structural similarity of two images: an optimal transport between their position maps (DIML, Zhao et al., ICCV 2021).

X, Y are the R positions of two images (unit rows), x̄, ȳ their embeddings (unit):

    S_ab = X_a·Y_b      μ_a ∝ [X_a·ȳ]₊      ν_b ∝ [Y_b·x̄]₊      (each image is weighted by the other's embedding)
    T = argmin ⟨T, 1 − S⟩ − ε·H(T) over the plans with marginals μ and ν,   ε = 0.05
    similarity = Σ_ab T_ab·S_ab

A marginal whose products are all negative is uniform. The plan is found by Sinkhorn's iteration in logarithms, with a
fixed number of rounds, so the similarity of a pair does not depend on the others that are computed with it.
"""

import torch
from torch import Tensor

EPSILON = 0.05
ROUNDS = 100


@torch.no_grad()
def transport_plans(cost: Tensor, mu: Tensor, nu: Tensor, *, epsilon: float = EPSILON, rounds: int = ROUNDS) -> Tensor:
    """The plans T [b, r, q] with rows of sums ``mu`` [b, r] and columns of sums ``nu`` [b, q] for costs [b, r, q].

    >>> plan = transport_plans(torch.zeros(1, 2, 2), torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]]))
    >>> plan
    tensor([[[0.1250, 0.3750],
             [0.1250, 0.3750]]])
    """
    kernel, log_mu, log_nu = -cost / epsilon, mu.log(), nu.log()
    columns = torch.zeros_like(nu)
    for _ in range(rounds):
        rows = log_mu - torch.logsumexp(kernel + columns.unsqueeze(1), dim=2)
        columns = log_nu - torch.logsumexp(kernel + rows.unsqueeze(2), dim=1)
    return (kernel + rows.unsqueeze(2) + columns.unsqueeze(1)).exp()


def marginals(products: Tensor) -> Tensor:
    """[x]₊ / Σ [x]₊ along the last dimension, uniform where no x is positive.

    >>> marginals(torch.tensor([[3.0, 1.0, -2.0], [-1.0, -1.0, 0.0]]))
    tensor([[0.7500, 0.2500, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    kept = products.relu()
    total = kept.sum(dim=-1, keepdim=True)
    return torch.where(total > 1e-6, kept / total.clamp_min(1e-6), 1.0 / products.shape[-1])


@torch.no_grad()
def structural_similarities(x: Tensor, x_whole: Tensor, y: Tensor, y_whole: Tensor) -> Tensor:
    """Σ T·S for pairs of images [b]: maps [b, r, d] and embeddings [b, d], all unit rows."""
    similarity = x @ y.transpose(1, 2)
    mu, nu = marginals((x @ y_whole.unsqueeze(2)).squeeze(2)), marginals((y @ x_whole.unsqueeze(2)).squeeze(2))
    return (transport_plans(1.0 - similarity, mu, nu) * similarity).sum(dim=(1, 2))

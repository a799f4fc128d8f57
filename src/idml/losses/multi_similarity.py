"""Multi-similarity loss with its own mining (Wang et al., 2019)."""

from torch import Tensor
from torch.nn.functional import softplus

from idml import mining
from idml.losses.base import PairLoss, require_pairs
from idml.losses.reduce import log_sum_exp


def multi_similarity(
    cosines: Tensor,
    matches: Tensor,
    others: bool = False,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    epsilon: float = 0.1,
) -> Tensor:
    """mean_i ( (1/α)·log(1 + Σ₊ e^(−α(C_ij − λ))) + (1/β)·log(1 + Σ₋ e^(β(C_ij − λ))) ), λ = ``base``.

    The sums run over the pairs that `idml.mining.multi_similarity` keeps with ``epsilon``.
    """
    require_pairs(cosines, matches, square=not others)
    positive, negative = mining.multi_similarity(cosines.detach(), matches, epsilon, others)
    pull = softplus(log_sum_exp(cosines, 1, scale=-alpha, mask=positive) + alpha * base) / alpha
    push = softplus(log_sum_exp(cosines, 1, scale=beta, mask=negative) - beta * base) / beta
    return (pull + push).mean()


class MultiSimilarity(PairLoss):
    """Multi-similarity loss over the mined pairs of a batch."""

    form = "cosine"
    function = staticmethod(multi_similarity)

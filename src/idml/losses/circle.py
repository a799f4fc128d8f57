"""Circle loss over pairs (Sun et al., 2020)."""

from torch import Tensor
from torch.nn.functional import softplus

from idml.labels import pair_masks
from idml.losses.base import PairLoss, require_pairs
from idml.losses.reduce import log_sum_exp, mean_of_nonzero


def circle(
    cosines: Tensor, matches: Tensor, others: bool = False, *, relaxation: float = 0.4, scale: float = 80.0
) -> Tensor:
    """mean⁺_i softplus( log Σ₊ e^(−γ·a₊·(C − (1 − m))) + log Σ₋ e^(γ·a₋·(C − m)) ), γ = ``scale``.

    m = ``relaxation``; the self-paced weights a₊ = [1 + m − C]₊ and a₋ = [C + m]₊ get no gradient. Anchors
    without a positive or without a negative count nothing; mean⁺ skips zeros.
    """
    require_pairs(cosines, matches, square=not others)
    positive, negative = pair_masks(matches, others)
    pace = cosines.detach()
    pull = -scale * (1.0 + relaxation - pace).relu() * (cosines - (1.0 - relaxation))
    push = scale * (pace + relaxation).relu() * (cosines - relaxation)
    return mean_of_nonzero(softplus(log_sum_exp(pull, 1, mask=positive) + log_sum_exp(push, 1, mask=negative)))


class Circle(PairLoss):
    """Circle loss over all pairs of a batch."""

    form = "cosine"
    function = staticmethod(circle)

"""Normalised softmax over proxies: the paper's J_s with a lower bound."""

from torch import Tensor

from idml.losses.base import ProxyLoss, require_pairs
from idml.losses.reduce import log_share_of_matches


def softmax(cosines: Tensor, matches: Tensor, *, scale: float = 20.0) -> Tensor:
    """mean_i −log( Σ over the set's proxies e^(scale·C_ij) / Σ over all proxies e^(scale·C_ij) ).

    In the paper's J_s only the negatives are in the denominator, so it has no lower bound.
    """
    require_pairs(cosines, matches)
    return -log_share_of_matches(cosines, matches, scale=scale).mean()


class Softmax(ProxyLoss):
    """Normalised softmax with one proxy per class."""

    form = "cosine"
    function = staticmethod(softmax)

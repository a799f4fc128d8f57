"""Normalised softmax over proxies, the paper's J_s made bounded."""

from torch import Tensor

from idml.losses.base import ProxyLoss, require_pairs
from idml.losses.reduce import log_share_of_matches


def softmax(cosines: Tensor, matches: Tensor, *, scale: float = 20.0) -> Tensor:
    """mean_i −log( Σ over the set's proxies e^(scale·C_ij) / Σ over all proxies e^(scale·C_ij) ).

    The paper's J_s has the negatives alone below the line, which has no lower bound.
    """
    require_pairs(cosines, matches)
    return -log_share_of_matches(cosines, matches, scale=scale).mean()


class Softmax(ProxyLoss):
    """Normalised softmax with one proxy a class."""

    form = "cosine"
    function = staticmethod(softmax)

"""ProxyNCA (Movshovitz-Attias et al., 2017), with the positive proxy in the denominator as well."""

from torch import Tensor

from idml.losses.base import ProxyLoss, require_pairs
from idml.losses.reduce import log_share_of_matches


def proxy_nca(distances: Tensor, matches: Tensor, *, scale: float = 32.0) -> Tensor:
    """mean_i −log( Σ over the set's proxies e^(−scale·D²) / Σ over all proxies e^(−scale·D²) )."""
    require_pairs(distances, matches)
    return -log_share_of_matches(distances.square(), matches, scale=-scale).mean()


class ProxyNCA(ProxyLoss):
    """ProxyNCA with one proxy per class."""

    form = "distance"
    function = staticmethod(proxy_nca)
    proxy_lr = 1.0  # as its authors train; 100 belongs to ProxyAnchor

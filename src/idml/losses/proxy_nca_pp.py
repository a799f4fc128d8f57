"""ProxyNCA++ (Teh et al., 2020)."""

from torch import Tensor

from idml.losses.base import ProxyLoss
from idml.losses.proxy_nca import proxy_nca


def proxy_nca_pp(distances: Tensor, matches: Tensor, *, temperature: float = 1.0 / 9.0) -> Tensor:
    """mean_i −log( Σ over the set's proxies e^(−D²/T) / Σ over all proxies e^(−D²/T) ), T = 1/9.

    The proxy assignment probability of ProxyNCA++; of its other changes, max pooling and fast proxies
    belong to the model and the optimiser.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return proxy_nca(distances, matches, scale=1.0 / temperature)


class ProxyNCAPlusPlus(ProxyLoss):
    """ProxyNCA++ with one proxy per class."""

    form = "distance"
    function = staticmethod(proxy_nca_pp)

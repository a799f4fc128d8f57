"""ProxyAnchor (Kim et al., 2020)."""

from torch import Tensor
from torch.nn.functional import softplus

from idml.losses.base import ProxyLoss, require_pairs
from idml.losses.reduce import log_sum_exp


def proxy_anchor(cosines: Tensor, matches: Tensor, *, alpha: float = 32.0, margin: float = 0.1) -> Tensor:
    """1/|P⁺| Σ_p∈P⁺ log(1 + Σ₊ e^(−α(C_ip − δ))) + 1/|P| Σ_p log(1 + Σ₋ e^(α(C_ip + δ))), δ = ``margin``.

    ``cosines`` [n, classes] are images against proxies, the sums run over the images; P⁺ are the proxies
    with a positive image in the batch. Both proxies of a mixed image are its positives.
    """
    require_pairs(cosines, matches)
    present = matches.any(dim=0).nonzero().squeeze(1)
    near = log_sum_exp(cosines[:, present], 0, scale=-alpha, mask=matches[:, present])
    far = log_sum_exp(cosines, 0, scale=alpha, mask=~matches)
    pull, push = softplus(near + alpha * margin), softplus(far + alpha * margin)
    return pull.sum() / max(len(present), 1) + push.mean()


class ProxyAnchor(ProxyLoss):
    """ProxyAnchor with one proxy per class."""

    form = "cosine"
    function = staticmethod(proxy_anchor)

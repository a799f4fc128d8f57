"""SoftTriple (Qian et al., 2019), without the regulariser that merges centres."""

from torch import Tensor

from idml.losses.base import ProxyLoss, require_pairs
from idml.losses.reduce import log_share_of_matches


def soft_triple(
    cosines: Tensor,
    matches: Tensor,
    *,
    centers_per_class: int = 10,
    scale: float = 20.0,
    entropy: float = 0.1,
    margin: float = 0.01,
) -> Tensor:
    """Softmax loss on the relaxed similarity to a class, S_ic = Σ_k softmax_k(C_ick / γ)·C_ick, γ = ``entropy``.

    −log( Σ over the set e^(λ(S_ic − δ)) / (that + Σ over the other classes e^(λ·S_ic)) ) with λ = ``scale`` and
    δ = ``margin``. ``cosines`` [n, classes·centres] holds the centres of a class side by side; ``matches``
    is [n, classes].
    """
    if centers_per_class < 1 or cosines.shape[1] != matches.shape[1] * centers_per_class:
        raise ValueError(
            f"{cosines.shape[1]} centres do not divide into {matches.shape[1]} classes of {centers_per_class}"
        )
    centers = cosines.view(len(cosines), -1, centers_per_class)
    similarity = ((centers / entropy).softmax(dim=2) * centers).sum(dim=2)
    require_pairs(similarity, matches)
    return -log_share_of_matches(scale * (similarity - margin * matches), matches).mean()


class SoftTriple(ProxyLoss):
    """SoftTriple with several centres a class."""

    form = "cosine"
    function = staticmethod(soft_triple)

"""Ranked list loss (Wang et al., CVPR 2019 and TPAMI 2021)."""

from typing import Any

from torch import Tensor

from idml.embeddings import Embeddings
from idml.labels import pair_masks
from idml.losses.base import PairLoss, require_pairs


def ranked_list(
    distances: Tensor,
    matches: Tensor,
    others: bool = False,
    *,
    alpha: float = 1.2,
    margin: float = 0.4,
    temperature: float = 10.0,
    positive_temperature: float = 0.0,
    positive_weight: float = 1.0,
    negative_weight: float = 1.0,
) -> Tensor:
    """1/n Σ_i ( λ₊·Σ_j∈P* w_ij (D_ij − (α − m)) / Σ w_ij + λ₋·Σ_j∈N* w_ij (α − D_ij) / Σ w_ij ).

    P* are the positives of image i with D > α − m, weighted by w = e^(T₊·(D − (α − m))); N* are its negatives with
    D < α, weighted by w = e^(T·(α − D)). The weights are constants to the gradient; an empty set counts 0. The defaults
    are the form of CVPR 2019 (T₊ = 0: the mean). That of TPAMI 2021 has λ₊ = 1 − λ and λ₋ = λ, and α = 1 + m/2.
    """
    require_pairs(distances, matches, square=not others)
    positive, negative = pair_masks(matches, others)
    d, inner = distances.detach(), alpha - margin
    pulled, pushed = positive.logical_and_(d > inner), negative.logical_and_(d < alpha)
    pull = _shares(d * positive_temperature, pulled).mul_(positive_weight)
    push = _shares(d * -temperature, pushed).mul_(negative_weight)
    # linear in D once the weights are known
    constant = push.sum() * alpha - pull.sum() * inner
    return ((pull.sub_(push) * distances).sum() + constant) / len(distances)


def _shares(scores: Tensor, mask: Tensor) -> Tensor:
    """e^score / Σ e^score along each row, over the scores that ``mask`` keeps; 0 for the others."""
    scores.masked_fill_(~mask, -1e30)
    exponentials = scores.sub_(scores.amax(dim=1, keepdim=True)).exp_().mul_(mask)
    return exponentials.div_(exponentials.sum(dim=1, keepdim=True).clamp_min_(1e-30))


class RankedList(PairLoss):
    """Ranked list loss over all pairs of a batch.

    ``gallery_gradient`` is the share of the gradient that a pair passes to its second image: 1 moves both, 0 only the
    query i, as the authors do. The value of the loss does not depend on it.
    """

    form = "distance"
    function = staticmethod(ranked_list)

    def __init__(self, *, gallery_gradient: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        if not 0 <= gallery_gradient <= 1:
            raise ValueError(f"gallery_gradient must lie in 0 … 1, got {gallery_gradient!r}")
        self.gallery_gradient = gallery_gradient

    @classmethod
    def known(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return the same parameters; one that the loss does not have is a ``ValueError``."""
        super().known({name: value for name, value in parameters.items() if name != "gallery_gradient"})
        return parameters

    def pairs(self, e: Embeddings, other: Embeddings | None = None) -> Tensor:
        """Return D of every pair, with the share of the gradient that its second image gets."""
        pairs, share = super().pairs(e, other), self.gallery_gradient
        if share == 1:
            return pairs
        # D_ij + (1 − g)·(D(s_i, constant s_j) − constant): the gradient of the gallery side is g times as long
        both = share * pairs + (1.0 - share) * super().pairs(e, (e if other is None else other).detach())
        return pairs.detach() + both - both.detach()

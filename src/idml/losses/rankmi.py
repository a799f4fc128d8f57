"""RankMI (Kemertas et al., CVPR 2020): a critic tells positive from negative distances, the embedding helps it.

The paper's abstract describes two networks that take turns. A small critic V estimates the divergence between the
distances of matching and of other pairs, by the Jensen–Shannon bound

    J = mean₊ −sp(−V(D)) − mean₋ sp(V(D)),      sp(x) = log(1 + e^x)

and the embedding is changed to raise the estimate on sampled negatives. No code was released. These details are our
choice: V(D) = f(D) + a·(b − D) with f an MLP 1 → 64 → 64 → 1 that starts at 0; a = 4, b = 1.2; the critic sees all
negatives of a batch (the mean of uniform draws), the embedding those of distance-weighted sampling; both learn in the
same step.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus

from idml.labels import pair_masks
from idml.losses.base import PairLoss, require_pairs
from idml.mining import distance_weighted

_WIDTH = 64


def rankmi(
    distances: Tensor,
    matches: Tensor,
    others: bool = False,
    *,
    critic: Callable[[Tensor, bool], Tensor],
    dim: int,
    seed: int | None = None,
    slope: float = 4.0,
    offset: float = 1.2,
    closest: float = 0.5,
    farthest: float = 1.4,
) -> Tensor:
    """−J(V; D constant, all negatives) − J(V constant; D, one sampled negative for each positive pair).

    V(D) = critic(D, learns) + slope·(offset − D); ``critic`` gets the distances and whether its own parameters learn.
    The negatives of the second term are drawn as in `idml.mining.distance_weighted` in ``dim`` dimensions.
    """
    require_pairs(distances, matches, square=not others)
    positive, negative = pair_masks(matches, others)
    drawn = distance_weighted(distances.detach(), matches, dim, others, closest=closest, farthest=farthest, seed=seed)

    def cost(pulled: Tensor, pushed: Tensor, learns: bool) -> Tensor:
        values = (critic(d, learns) + slope * (offset - d) for d in (pulled, pushed))
        return sum(
            (softplus(sign * v).sum() / max(len(v), 1) for sign, v in zip((-1.0, 1.0), values, strict=True)),
            start=distances.new_zeros(()),
        )

    constant = distances.detach()
    return cost(constant[positive], constant[negative], True) + cost(distances[positive], distances[drawn], False)


class RankMI(PairLoss):
    """RankMI, which learns a critic with the embeddings.

    The critic is a part of the loss. The sampled negatives are fixed by the ``seed`` of the call.
    """

    form = "distance"
    function = staticmethod(rankmi)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        last = nn.Linear(_WIDTH, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        hidden = nn.Linear(_WIDTH, _WIDTH)
        self.critic = nn.Sequential(nn.Linear(1, _WIDTH), nn.ReLU(), hidden, nn.ReLU(), last)

    def _value(self, distances: Tensor, learns: bool) -> Tensor:
        rows = distances.unsqueeze(1)
        if learns:
            out: Tensor = self.critic(rows)
        else:
            out = functional_call(self.critic, {k: p.detach() for k, p in self.critic.named_parameters()}, (rows,))
        return out.squeeze(1)

    def loss_of_pairs(self, pairs: Tensor, matches: Tensor, others: bool, dim: int, seed: int | None) -> Tensor:
        """Return the loss of a pair matrix in ``dim`` dimensions; ``others``: its columns are other images."""
        parameters = {**self.parameters_of_loss, "seed": seed}
        return rankmi(pairs, matches, others, critic=self._value, dim=dim, **parameters)

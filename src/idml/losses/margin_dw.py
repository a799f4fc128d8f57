"""Margin loss with distance-weighted sampling (Wu et al., 2017)."""

from typing import Any

import torch
from torch import Tensor, nn

from idml.embeddings import Embeddings
from idml.labels import LabelSets, pair_masks
from idml.losses.base import PairLoss, require_pairs
from idml.losses.reduce import mean_of_nonzero
from idml.mining import distance_weighted


def margin_dw(
    distances: Tensor,
    matches: Tensor,
    others: bool = False,
    *,
    dim: int,
    seed: int | None = None,
    beta: float | Tensor = 1.2,
    margin: float = 0.2,
    closest: float = 0.5,
    farthest: float = 1.4,
) -> Tensor:
    """J_m = (Σ₊ [D − (β − m)]₊ + Σ₋ [(β + m) − D]₊) / number of non-zero terms.

    Σ₊ runs over all positive pairs, Σ₋ over one sampled negative for each of them, p(d) as in
    `idml.mining.distance_weighted` in ``dim`` dimensions. (The paper prints a minus before Σ₋; that
    would reward near negatives.) ``beta`` may be a tensor with one β for each image [n], its β as an anchor.
    """
    require_pairs(distances, matches, square=not others)
    anchors, negatives = distance_weighted(
        distances.detach(), matches, dim, others, closest=closest, farthest=farthest, seed=seed
    )
    positive, _ = pair_masks(matches, others)
    rows, columns = positive.nonzero(as_tuple=True)
    return margin_of_anchors(distances, (rows, columns), (anchors, negatives), beta, margin)


def margin_of_anchors(
    distances: Tensor,
    positives: tuple[Tensor, Tensor],
    negatives: tuple[Tensor, Tensor],
    beta: float | Tensor,
    margin: float,
) -> Tensor:
    """The margin loss of given pairs (anchor, other) of a pair matrix; ``beta`` is one number or one for each image."""
    if not isinstance(beta, Tensor):
        return margin_of_pairs(distances[positives], distances[negatives], beta=beta, margin=margin)
    pulls = (distances[positives] - (beta[positives[0]] - margin)).relu()
    return mean_of_nonzero(torch.cat([pulls, ((beta[negatives[0]] + margin) - distances[negatives]).relu()]))


def margin_of_pairs(positives: Tensor, negatives: Tensor, *, beta: float, margin: float) -> Tensor:
    """The margin loss of given positive and negative distances."""
    terms = torch.cat([(positives - (beta - margin)).relu(), ((beta + margin) - negatives).relu()])
    return mean_of_nonzero(terms)


class MarginDW(PairLoss):
    """Margin loss with negatives sampled by distance.

    The sampled negatives are fixed by the ``seed`` of the call.

    With ``learned_beta`` every class has a β of its own, which starts at ``beta`` and learns. An image with a label set
    has the mean β of its classes.
    """

    form = "distance"
    function = staticmethod(margin_dw)

    def __init__(self, *, learned_beta: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.class_beta = None
        if learned_beta:
            if self.num_classes is None:
                raise ValueError("MarginDW learns a β for each class: it needs num_classes")
            self.class_beta = nn.Parameter(torch.full((self.num_classes,), float(self.parameters_of_loss["beta"])))

    def forward(
        self, embeddings: Embeddings | Tensor, labels: LabelSets | Tensor, seed: int | None = None, **other: Any
    ) -> Tensor:
        """Return the loss of a batch, a scalar; ``seed`` fixes the sampled negatives."""
        if self.class_beta is None:
            return super().forward(embeddings, labels, seed, **other)
        if other:
            raise ValueError("a margin loss with learned β compares the images of a batch with each other alone")
        e, sets = self._checked(embeddings, labels)
        parameters = {**self.parameters_of_loss, "beta": self.anchor_betas(sets), "seed": seed}
        return margin_dw(self.pairs(e), sets.matches(), dim=e.semantic.shape[1], **parameters)

    def anchor_betas(self, labels: LabelSets) -> Tensor:
        """The learned β of each image [n]."""
        assert self.class_beta is not None
        member = labels.in_classes(len(self.class_beta)).to(self.class_beta.dtype)
        return (member @ self.class_beta) / member.sum(dim=1)

    def loss_of_pairs(self, pairs: Tensor, matches: Tensor, others: bool, dim: int, seed: int | None) -> Tensor:
        """Return the loss of a pair matrix in ``dim`` dimensions; ``others``: its columns are other images."""
        parameters = {**self.parameters_of_loss, "seed": seed}
        return margin_dw(pairs, matches, others, dim=dim, **parameters)

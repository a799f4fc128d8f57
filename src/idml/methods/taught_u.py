"""An uncertainty that is taught by ranking: images with a larger pair loss get a larger ‖u‖.

    ℓ_i = log Σ_{j≠i} e^(κC_ij) − log Σ_{j≠i, same class} e^(κC_ij)      κ = 16, C the cosine of s
    L_u = mean of softplus((log‖u_j‖ − log‖u_i‖)/T) over the pairs of images with ℓ_i > ℓ_j      T = 0.25

L_u is a smooth form of 1 − AUROC. It does not depend on the scale of u. Its gradient reaches the uncertainty head
alone: the features are detached or frozen. Only the original images of a batch are ranked, not mixtures.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from idml.embeddings import Embeddings
from idml.methods.options import check_number, check_types
from idml.metric import plain_cosines

TEMPERATURE = 0.25
SHARPNESS = 16.0
HIDDEN = 64


@dataclass(frozen=True)
class TeachingOptions:
    """Whether and how u is taught beside the loss."""

    teach_u: Literal["none", "ranking"] = "ranking"
    """What teaches u beside the loss: ranking orders ‖u‖ by the pair loss of each image."""
    u_hidden: int | None = None
    """Width of a hidden layer in the uncertainty head; 0: it is linear. By default 64 if u is taught, else 0."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.u_hidden is not None:
            check_number("u_hidden", self.u_hidden, at_least=0, whole=True)

    @property
    def hidden(self) -> int:
        """The width of the hidden layer that the head gets."""
        if self.u_hidden is not None:
            return self.u_hidden
        return 0 if self.teach_u == "none" else HIDDEN

    def model_options(self, *, detach: bool) -> dict[str, Any]:
        """The fields of `ModelConfig` that these options set."""
        return {"u_hidden": self.hidden, "detach": detach}

    def check(self, *, loss_teaches_u: bool, detached: bool) -> None:
        """Raise ``ValueError`` where the ranking would move the trunk, or where nothing teaches a hidden layer."""
        if self.teach_u != "none" and not detached:
            raise ValueError(
                f"teach_u {self.teach_u} needs detach or train heads: it may teach u, but not change the trunk"
            )
        if self.hidden and self.teach_u == "none" and not loss_teaches_u:
            raise ValueError("u_hidden is for an uncertainty that is taught: set teach_u to ranking")

    def terms(self, embeddings: Embeddings, labels: Tensor) -> dict[str, Tensor]:
        """The term L_u of the original images, or nothing; ``labels`` [n] are theirs, and they come first."""
        if self.teach_u == "none":
            return {}
        originals = embeddings[: len(labels)]
        return {"u": rank_levels(originals.level, pair_losses(originals.detach(), labels))}


def rank_levels(level: Tensor, target: Tensor) -> Tensor:
    """mean softplus((log‖u_j‖ − log‖u_i‖)/T) over the pairs with target_i > target_j; 0 if there is none.

    >>> rank_levels(torch.tensor([1.0, 1.0, 1e9]), torch.tensor([0.0, 1.0, 2.0]))
    tensor(0.2310)
    """
    z = level.clamp_min(1e-12).log() / TEMPERATURE
    above = target[:, None] > target
    terms = softplus(z - z[:, None]) * above
    return terms.sum() / above.sum().clamp_min(1)


@torch.no_grad()
def pair_losses(embeddings: Embeddings, labels: Tensor) -> Tensor:
    """ℓ of each image [n]: small where its own class is near.

    It is NaN for an image without another of its class in the batch, which ranks neither above nor below any other.
    """
    scores = SHARPNESS * plain_cosines(embeddings)
    scores.fill_diagonal_(-torch.inf)
    own = torch.logsumexp(scores.masked_fill(labels[:, None] != labels, -torch.inf), dim=1)
    return torch.where(own.isinf(), torch.nan, torch.logsumexp(scores, dim=1) - own)

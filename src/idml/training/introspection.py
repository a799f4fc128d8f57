"""What teaches u beside the loss: ‖u‖ is ranked by something that makes an image hard.

    signal      an image should be more uncertain, the larger                            which images
    ranking     its own pair loss ℓ within the batch                                     originals
    error       [its nearest neighbour among all training images is of another class]    originals
    graded      the strength of a degradation (blur, low resolution, another image)      degraded copies and originals

The term is the mean of softplus((log‖u_j‖ − log‖u_i‖)/T) over the pairs in which i should be the more uncertain one: a
smooth form of 1 − AUROC. It knows no scale, so the mean level of u stays the metric's business. It reaches the
uncertainty head alone (the features are detached or frozen).

With ``error`` the classes are in five parts, and in each epoch one of them does not enter the loss. After it the
neighbours of that part are looked up anew: what u learns from was measured when the loss had not just seen the class,
which is nearer to classes that it never sees. Before the first epoch, all of them are.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from idml.data.augment import Batch
from idml.data.pixel_cache import Pixels
from idml.embeddings import Embeddings
from idml.evaluation.knn import nearest
from idml.metric import plain_cosines
from idml.training.config import TrainConfig

TEMPERATURE = 0.25
PARTS = 5
SHARPNESS = 16.0


class Introspection(nn.Module):
    """The signal of a run. ``wrong`` [images] is what ``error`` learns from: 1 a wrong neighbour, 0 a right one."""

    wrong: Tensor

    def __init__(self, config: TrainConfig, labels: Tensor) -> None:
        super().__init__()
        self.signal, self.epoch = config.introspection, 0
        self.register_buffer("wrong", torch.zeros(len(labels), dtype=torch.uint8))
        if self.signal == "error" and len(labels.unique()) < 2 * PARTS:
            raise ValueError(f"introspection error holds out a fifth of the classes: it needs {2 * PARTS} or more")

    def look(self, embeddings: Embeddings, pixels: Pixels) -> None:
        """Find out, before an epoch, which training images of the part that was held out have a wrong neighbour."""
        labels = pixels.images.labels[pixels.usable]
        first = nearest(embeddings.detach(), 1).indices[:, 0].cpu()
        known = _held_out(labels, self.epoch - 1) if self.epoch else torch.ones_like(labels, dtype=torch.bool)
        self.wrong[pixels.usable[known]] = (labels[first] != labels)[known].to(self.wrong)

    def enters(self, batch: Batch) -> Tensor | None:
        """Which rows of a batch the loss sees; None means all of them."""
        return ~_held_out(batch.labels.ids, self.epoch).any(dim=1) if self.signal == "error" else None

    def term(self, embeddings: Embeddings, batch: Batch, numbers: Tensor) -> Tensor:
        """The term of a batch; ``embeddings`` are all of its rows, ``numbers`` those of the originals' images."""
        level, count = embeddings.level, len(numbers)  # the originals come first
        if self.signal == "ranking":
            return ranked(level[:count], own_losses(embeddings[:count].detach(), batch.labels.ids[:count, 0]))
        if self.signal == "error":
            return ranked(level[:count], self.wrong[numbers.to(self.wrong.device)])
        assert batch.degraded is not None
        copies, kind, strength = level[-count:], batch.degraded.kind, batch.degraded.strength
        alike = torch.cat([kind, kind])
        own = torch.arange(count, device=level.device)
        own = torch.cat([own, own])
        first = torch.arange(2 * count, device=level.device) < count
        comparable = (own[:, None] == own) | ((alike[:, None] == alike) & ~first[:, None] & ~first)
        return ranked(torch.cat([level[:count], copies]), torch.cat([torch.zeros_like(strength), strength]), comparable)


def _held_out(classes: Tensor, epoch: int) -> Tensor:
    """Which classes do not enter the loss in an epoch; padding (−1) is no class."""
    return ((classes + epoch) % PARTS == 0) & (classes >= 0)


def ranked(level: Tensor, target: Tensor, comparable: Tensor | None = None) -> Tensor:
    """mean softplus((log‖u_j‖ − log‖u_i‖)/T) over the pairs with target_i > target_j; 0 if there is none.

    >>> ranked(torch.tensor([1.0, 1.0, 1e9]), torch.tensor([0.0, 1.0, 2.0]))
    tensor(0.2310)
    """
    z = level.clamp_min(1e-12).log() / TEMPERATURE
    above = target[:, None] > target
    if comparable is not None:
        above &= comparable
    terms = softplus(z - z[:, None]) * above
    return terms.sum() / above.sum().clamp_min(1)


@torch.no_grad()
def own_losses(embeddings: Embeddings, labels: Tensor) -> Tensor:
    """ℓ_i = log Σ_{j≠i} e^(κC_ij) − log Σ_{j≠i, same class} e^(κC_ij), κ = 16: small where its own class is near [n].

    An image without another of its class in the batch has no loss of its own: NaN, which ranks neither above nor below.
    """
    scores = SHARPNESS * plain_cosines(embeddings)
    scores.fill_diagonal_(-torch.inf)
    own = torch.logsumexp(scores.masked_fill(labels[:, None] != labels, -torch.inf), dim=1)
    return torch.where(own.isinf(), torch.nan, torch.logsumexp(scores, dim=1) - own)

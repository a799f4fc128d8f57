"""MIC: mining interclass characteristics (Roth, Brattoli, Ommer, ICCV 2019).

Two heads read the trunk: c learns the classes, and a learns what varies across classes (pose, light, background) from
clusters κ of the images. An adversary keeps what a knows out of c (`idml.methods.adversary`):

    L = L(c, y) over a batch of classes + w_a·L(a, κ) over a batch of clusters + γ·L_adv over both

The first clusters are those of the embedding standardised within each class, (s − μ_y)/σ_y; later ones those of â. The
first half of every batch is drawn by class, the second by cluster. A share of the second half has the cluster of
another image. At test c is used alone.

Our choice: both halves make one step, and w_a is a weight; the authors make two steps and leave out the second with
probability 1 − w_a. Mixtures are those of the first half, with label sets; the clusters learn from images alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from idml.data.augment import Batch
from idml.data.sampling import class_batches, random_stream
from idml.embeddings import Embeddings, unit_rows
from idml.labels import LabelSets
from idml.losses import MetricLoss
from idml.methods.adversary import Decorrelation
from idml.methods.base import Task
from idml.methods.clusters import cluster_images
from idml.methods.metric_choice import PLAIN, MetricChoice, MetricMethod, margin_options
from idml.methods.options import check_number


def standardise_within_classes(points: Tensor, labels: Tensor) -> Tensor:
    """(x − μ_y)/σ_y: the rows [n, d] without the mean of their class, divided by its spread (1 where it has none)."""
    classes = int(labels.max()) + 1
    counts = labels.bincount(minlength=classes).clamp_min(1).to(points.dtype).unsqueeze(1)
    means = points.new_zeros(classes, points.shape[1]).index_add_(0, labels, points) / counts
    centred = points - means[labels]
    spread = (points.new_zeros(means.shape).index_add_(0, labels, centred.square()) / counts).sqrt()
    spread = torch.where(spread > 1e-6, spread, 1.0)
    return centred / spread[labels]


@dataclass(frozen=True)
class MicOptions:
    """Options of MIC."""

    clusters: int = 30
    """Clusters of the images (the release: 30 CUB, 150 Cars, 50 SOP)."""
    per_cluster: int = 4
    """Images of each cluster in the second half of a batch."""
    recluster_epochs: int = 4
    """Epochs between two clusterings."""
    cluster_weight: float = 0.8
    """Weight of the loss of the clusters."""
    cluster_noise: float = 0.2
    """Share of the images that get the cluster of another one."""
    adversary_weight: float = 0.15
    """Weight of the term that decorrelates both embeddings (MIC's γ/128²: 0.15 CUB, 0.03 Cars, 0.015 SOP)."""
    choice: MetricChoice = field(default_factory=MetricChoice)

    def __post_init__(self) -> None:
        for name in ("clusters", "per_cluster"):
            check_number(name, getattr(self, name), at_least=2, whole=True)
        check_number("recluster_epochs", self.recluster_epochs, at_least=1, whole=True)
        for name in ("cluster_weight", "adversary_weight"):
            check_number(name, getattr(self, name), at_least=0)
        check_number("cluster_noise", self.cluster_noise, at_least=0, at_most=1)


class Mic(MetricMethod):
    """The loss of classes and that of clusters on two heads, decorrelated by an adversary."""

    Options = MicOptions
    options: MicOptions
    plans_batches = True
    rotated_start = True
    kappa: Tensor

    def __init__(self, options: MicOptions, task: Task) -> None:
        super().__init__(options, task)
        extra = margin_options(task)
        self.metric_loss = options.choice.build_loss(task, **extra)
        self.cluster_loss = task.build_loss(PLAIN, num_classes=options.clusters, **extra)
        self.adversary = Decorrelation(task.embedding_dim)
        self.register_buffer("kappa", torch.arange(len(task.labels)) % options.clusters)

    @classmethod
    def model_options(cls, options: MicOptions) -> dict[str, Any]:
        """A second head of the same size, in training alone."""
        own = {"head": "slices", "slices": ("class",), "training_slices": ("clusters",)}
        return {**super().model_options(options), **own}

    @classmethod
    def count_added(cls, options: Any, ambiguity: Sequence[str], n: int) -> int:
        """Mixtures of the first half of a batch, if there are any."""
        return super().count_added(options, ambiguity, n) // 2

    def add_images(self, images: Tensor, labels: Tensor, *, seed: int, epoch: int, step: int) -> Batch:
        """The images, then mixtures of those that are drawn by class."""
        half = len(images) // 2
        first = super().add_images(images[:half], labels[:half], seed=seed, epoch=epoch, step=step)
        sets = LabelSets.cat([LabelSets(labels), first.labels[half:]])
        unmixed = torch.zeros(len(images), dtype=torch.bool, device=images.device)
        mixed = torch.cat([unmixed, first.mixed[half:]])
        return Batch(torch.cat([images, first.images[half:]]), sets, mixed, first.lam)

    def learning_rate_factors(self) -> dict[str, float]:
        """The adversary learns as fast as the model."""
        rates = super().learning_rate_factors()
        return {name: 1.0 if name.startswith("adversary.") else rate for name, rate in rates.items()}

    def embedding(self, outputs: Embeddings) -> Embeddings:
        """The head of the classes."""
        return Embeddings(outputs.semantic[:, : self.task.embedding_dim], outputs.uncertainty)

    def compared(self, outputs: Embeddings, batch: Batch) -> list[tuple[MetricLoss, Embeddings]]:
        """The images that are drawn by class."""
        ((loss, originals),) = super().compared(outputs, batch)
        return [(loss, originals[: len(originals) // 2])]

    def start_epoch(self, epoch: int, embed: Callable[[], tuple[Tensor, Embeddings]]) -> None:
        """Cluster the images."""
        if epoch % self.options.recluster_epochs:
            return
        numbers, outputs = embed()
        if epoch == 0:
            points = standardise_within_classes(self.embedding(outputs).semantic, self.task.labels[numbers])
        else:
            points = unit_rows(outputs.semantic[:, self.task.embedding_dim :])
        found = cluster_images(points, self.options.clusters, self.task.seed)
        self.kappa[numbers] = found.to(self.kappa.device)

    def plan(self, usable: Tensor, *, batch_size: int, per_class: int, epoch: int) -> list[Tensor]:
        """Batches whose first half is drawn by class and whose second half by cluster."""
        half, seed = batch_size // 2, self.task.seed
        if batch_size % 2 or half % max(per_class, 1) or half % self.options.per_cluster:
            raise ValueError(
                f"method mic draws half a batch by class and half by cluster: batch_size {batch_size} / 2 must be a "
                f"multiple of per_class {per_class} and of per_cluster {self.options.per_cluster}"
            )
        first = super().plan(usable, batch_size=half, per_class=per_class, epoch=epoch)
        kappa = self.kappa.cpu()[usable]
        try:
            second = class_batches(kappa, half, self.options.per_cluster, seed=seed + 1, epoch=epoch)
        except ValueError as error:
            raise ValueError(f"the clusters of the images do not fill half a batch (as classes): {error}") from None
        return [torch.cat([batch, usable[second[i % len(second)]]]) for i, batch in enumerate(first)]

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The losses of both halves, the adversary, and the ranking of ‖u‖."""
        n, dim = len(numbers), self.task.embedding_dim
        rest = embeddings.semantic[:, dim:]
        places = torch.arange(len(batch.labels), device=rest.device)
        by_class, by_cluster = torch.cat([places[: n // 2], places[n:]]), places[n // 2 : n]  # mixtures come last
        kappa = self._noisy(self.kappa[numbers[n // 2 :].to(self.kappa.device)], seed)
        clustered = self.cluster_loss(rest[by_cluster], LabelSets(kappa), seed=seed)
        target, source = unit_rows(embeddings.semantic[:, :dim]), unit_rows(rest)
        adversary = self.adversary(target[by_class], source[by_class])
        adversary = adversary + self.adversary(target[by_cluster], source[by_cluster])
        return {
            "pairs": self.metric_loss(self.embedding(embeddings)[by_class], batch.labels[by_class], seed=seed),
            "clusters": self.options.cluster_weight * clustered,
            "adversary": self.options.adversary_weight * adversary,
            **self.teach(embeddings, batch, len(numbers)),
        }

    def _noisy(self, kappa: Tensor, seed: int) -> Tensor:
        """The clusters, some of them those of another image."""
        generator = random_stream("cluster noise", seed)
        other = kappa[torch.randperm(len(kappa), generator=generator).to(kappa.device)]
        chosen = torch.rand(len(kappa), generator=generator) < self.options.cluster_noise
        return torch.where(chosen.to(kappa.device), other, kappa)

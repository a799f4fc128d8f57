"""DiVA: diverse visual feature aggregation (Milbich et al., ECCV 2020).

Four slices of s learn four kinds of features, and an adversary (`idml.methods.adversary`) keeps the others out of the
first:

    discriminative    the run's loss on the classes
    shared            the run's loss on the labels of the batch in random order: what classes have in common
    intra             margin loss of triplets whose three images are of one class
    sample            DaNCE: an image against another view of itself and a queue of old views

    L = L_disc + α·(L_shared + L_intra + L_sample) + ρ·Σ_t L_adv(disc, t)

DaNCE compares the slice q_i of an image with the key k_i⁺ of a second view of it, by a copy of the network whose
weights are a moving average, and with the keys k_q of earlier batches:

    ℓ_i = −log e^(q·k⁺/T) / (e^(q·k⁺/T) + Σ_q e^(w_iq·(q_i·k_q)/T)),   T = 0.01

w_iq ∝ the inverse density of the distance (`idml.mining.log_inverse_density`, d from 0.5; 0 beyond 1.4), Σ_q w_iq = 1.
At test all slices count alike (the authors choose weights on the test classes). A second view is a crop of at
least 3/4 of the first, resized, and mirrored with probability ½. Mixtures take part in all tasks, with label sets.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import affine_grid, grid_sample

from idml.data.augment import Batch
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings, unit_rows
from idml.labels import LabelSets, pair_masks
from idml.losses import MetricLoss
from idml.losses.margin_dw import margin_of_pairs
from idml.methods.adversary import Decorrelation
from idml.methods.base import Task
from idml.methods.metric_choice import (
    PLAIN,
    MetricChoice,
    MetricMethod,
    margin_options,
    refuse_proxy_uncertainty,
)
from idml.methods.options import check_number
from idml.mining import log_inverse_density
from idml.model import Model
from idml.model.heads import divide, unit_slices

SLICES = ("discriminative", "shared", "intra", "sample")
_CLOSEST, _FARTHEST = 0.5, 1.4


def second_view(images: Tensor, generator: torch.Generator) -> Tensor:
    """Another view of each image [n, c, h, w]: a crop of 3/4 to all of it, resized; every other one is mirrored."""
    n = len(images)
    scale = torch.rand(n, generator=generator) * 0.25 + 0.75  # of the side
    shift = (torch.rand(n, 2, generator=generator) * 2 - 1) * (1 - scale).unsqueeze(1)
    flip = torch.where(torch.rand(n, generator=generator) < 0.5, -1.0, 1.0)
    places = torch.zeros(n, 2, 3)
    places[:, 0, 0], places[:, 1, 1] = scale * flip, scale
    places[:, :, 2] = shift
    grid = affine_grid(places.to(images), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


def intra_class_triplets(labels: LabelSets, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """For each image with two others of its class in the batch: the image, and two of them at random."""
    positive, _ = pair_masks(labels.matches())
    anchors = (positive.sum(dim=1) >= 2).nonzero().squeeze(1)
    scores = torch.rand(positive.shape, generator=generator).to(positive.device).masked_fill_(~positive, -1.0)
    chosen = scores[anchors].topk(min(2, len(positive)), dim=1).indices if len(positive) > 1 else scores[:, :0].long()
    return (anchors, chosen[:, 0], chosen[:, 1]) if len(anchors) else (anchors, anchors, anchors)


def noise_contrast(queries: Tensor, keys: Tensor, queue: Tensor, temperature: float, weights: Tensor) -> Tensor:
    """mean −log e^(q·k⁺/T) / (e^(q·k⁺/T) + Σ_q e^(w·(q·k_q)/T)): unit rows [n, d], [n, d], [m, d]; weights [n, m]."""
    own = (queries * keys).sum(dim=1, keepdim=True)
    scores = torch.cat([own, weights * (queries @ queue.T)], dim=1) / temperature
    return (torch.logsumexp(scores, dim=1) - scores[:, 0]).mean()


@torch.no_grad()
def queue_weights(queries: Tensor, queue: Tensor) -> Tensor:
    """w [n, m]: the inverse density of the distances, normalised over the queue; 0 beyond 1.4."""
    distances = (2.0 - 2.0 * queries @ queue.T).clamp_min(0.0).sqrt()
    scores = log_inverse_density(distances.clamp(_CLOSEST, _FARTHEST), queries.shape[1])
    scores = scores.masked_fill(distances > _FARTHEST, -1e30)
    return torch.where(distances > _FARTHEST, 0.0, scores.softmax(dim=1))


@dataclass(frozen=True)
class DivaOptions:
    """Options of DiVA."""

    task_weight: float = 0.3
    """Weight α of each further task (the release: 0.3 CUB, 0.15 Cars, 0.2 SOP)."""
    diva_adversary: float = 0.09
    """Weight ρ of the terms that decorrelate the slices (the release's ρ/128²: 0.09 CUB, 0.006 Cars, 0.009 SOP)."""
    temperature: float = 0.01
    """Temperature T of DaNCE."""
    key_momentum: float = 0.9
    """Share of its own weights that the network of the keys keeps in a step."""
    queue: int = 3360
    """Keys of earlier batches that an image is compared with."""
    choice: MetricChoice = field(default_factory=MetricChoice)

    def __post_init__(self) -> None:
        for name in ("task_weight", "diva_adversary"):
            check_number(name, getattr(self, name), at_least=0)
        check_number("key_momentum", self.key_momentum, at_least=0, at_most=1)
        check_number("temperature", self.temperature, above=0)
        check_number("queue", self.queue, at_least=1, whole=True)


class Diva(MetricMethod):
    """Four slices with four tasks: classes, shared and intra-class features, single images."""

    Options = DivaOptions
    options: DivaOptions
    rotated_start = True
    keys_of_queue: Tensor
    filled: Tensor
    cursor: Tensor
    started: Tensor

    def __init__(self, options: DivaOptions, task: Task) -> None:
        super().__init__(options, task)
        self.size = divide(task.embedding_dim, len(SLICES), "embedding_dim")
        extra = margin_options(task)
        self.metric_loss = options.choice.build_loss(task, embedding_dim=self.size, **extra)
        self.shared_loss = task.build_loss(PLAIN, embedding_dim=self.size, **extra)
        self.adversaries = nn.ModuleList(Decorrelation(self.size) for _ in SLICES[1:])
        self.register_buffer("keys_of_queue", torch.zeros(options.queue, self.size))
        for name in ("filled", "cursor"):
            self.register_buffer(name, torch.tensor(0))
        self.register_buffer("started", torch.tensor(False))
        self.model: tuple[Model, ...] = ()  # in a tuple: it is not a part of the method

    @classmethod
    def check_options(cls, options: DivaOptions, *, train: str, loss: str) -> None:
        """The slices share u, so their proxies cannot have one."""
        super().check_options(options, train=train, loss=loss)
        refuse_proxy_uncertainty(options.choice)

    @classmethod
    def model_options(cls, options: DivaOptions) -> dict[str, Any]:
        """A slice for each task."""
        return {**super().model_options(options), "head": "slices", "slices": SLICES}

    def learning_rate_factors(self) -> dict[str, float]:
        """The adversaries learn as fast as the model."""
        rates = super().learning_rate_factors()
        return {name: 1.0 if name.startswith("adversaries.") else rate for name, rate in rates.items()}

    def attach(self, model: Model) -> None:
        """Keep the model, and a copy of what learns in it for the keys."""
        self.model = (model,)
        self.key_head = copy.deepcopy(model.semantic).requires_grad_(False)
        if self.task.train != "heads":
            self.key_trunk = copy.deepcopy(model.trunk).requires_grad_(False)

    # ---- the second view of each image ----

    @classmethod
    def count_added(cls, options: Any, ambiguity: Sequence[str], n: int) -> int:
        """The mixtures, if there are any, and a second view of each image and mixture."""
        return n + 2 * super().count_added(options, ambiguity, n)

    def added_key(self) -> tuple[Any, ...]:
        """The second views depend on nothing else than the mixtures do."""
        return ("second view", *super().added_key())

    def add_images(self, images: Tensor, labels: Tensor, *, seed: int, epoch: int, step: int) -> Batch:
        """The images and their mixtures, then a second view of each."""
        seen = super().add_images(images, labels, seed=seed, epoch=epoch, step=step)
        views = second_view(seen.images, random_stream("second view", seed, epoch, step))
        mixed = torch.cat([seen.mixed, seen.mixed])
        return Batch(torch.cat([seen.images, views]), LabelSets.cat([seen.labels, seen.labels]), mixed, seen.lam)

    def warn(self, rows: list[dict[str, Any]]) -> list[str]:
        """Whether the third slice learned nothing."""
        idle = bool(rows) and not any(row["loss_intra"] for row in rows) and self.options.task_weight > 0
        told = "no batch had three images of one class, the slice intra learned nothing: per_class must be at least 3"
        return [*super().warn(rows), *([told] if idle else [])]

    # ---- the network and the queue of the keys ----

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the weights of the keys' network towards those of the model; in the first step, copy them."""
        model, keep = self.model[0], self.options.key_momentum if bool(self.started) else 0.0
        pairs = [(self.key_head, model.semantic)]
        if self.task.train != "heads":
            pairs.append((self.key_trunk, model.trunk))
        for own, followed in pairs:
            state = followed.state_dict()
            for name, value in own.state_dict().items():
                if value.is_floating_point():
                    value.mul_(keep).add_(state[name], alpha=1 - keep)
                else:
                    value.copy_(state[name])
        self.started.fill_(True)

    @torch.no_grad()
    def _keys(self, views: Tensor) -> Tensor:
        """The unit keys of images, or of what the frozen part of the trunk made of them [n, size]."""
        if self.task.train != "heads":
            self.key_trunk.eval()
            with_stage = self.task.train == "last"
            views = self.key_trunk.split().features(views) if with_stage else self.key_trunk(views)
        return unit_rows(self.key_head.outputs(views)[:, 3 * self.size : 4 * self.size])

    @torch.no_grad()
    def _remember(self, keys: Tensor) -> None:
        """Put keys into the queue, in place of the oldest."""
        length = len(self.keys_of_queue)
        keys = keys[-length:]
        places = (int(self.cursor) + torch.arange(len(keys), device=keys.device)) % length
        self.keys_of_queue[places] = keys.to(self.keys_of_queue.dtype)
        self.cursor.fill_((int(self.cursor) + len(keys)) % length)
        self.filled.fill_(min(int(self.filled) + len(keys), length))

    # ---- what is minimised ----

    def embedding(self, outputs: Embeddings) -> Embeddings:
        """All slices, normalised one by one."""
        return Embeddings(unit_slices(outputs.semantic, len(SLICES)), outputs.uncertainty)

    def compared(self, outputs: Embeddings, batch: Batch) -> list[tuple[MetricLoss, Embeddings]]:
        """The slice of the classes; second views are not compared."""
        seen = outputs[: len(batch.labels) // 2][~batch.mixed[: len(batch.labels) // 2]]
        return [(self.metric_loss, Embeddings(seen.semantic[:, : self.size], seen.uncertainty))]

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The four tasks, the adversaries, and the ranking of ‖u‖."""
        n, weight = len(batch.labels) // 2, self.options.task_weight  # the second views come last
        seen, labels = embeddings[:n], batch.labels[:n]
        raw = seen.semantic.unflatten(1, (len(SLICES), -1))
        unit = self.embedding(seen).semantic.unflatten(1, (len(SLICES), -1))
        generator = random_stream("tasks", seed)
        order = torch.randperm(n, generator=generator).to(raw.device)
        distances = PLAIN.distances(raw[:, 2])
        anchors, nearer, farther = intra_class_triplets(labels, generator)
        intra = margin_of_pairs(distances[anchors, nearer], distances[anchors, farther], beta=1.2, margin=0.2)
        adversary = torch.stack([part(unit[:, 0], unit[:, t + 1]) for t, part in enumerate(self.adversaries)]).sum()
        return {
            "pairs": self.metric_loss(Embeddings(raw[:, 0], seen.uncertainty), labels, seed=seed),
            "shared": weight * self.shared_loss(raw[:, 1], labels[order], seed=seed),
            "intra": weight * intra,
            "sample": weight * self._sample_loss(unit[:, 3], batch.images[n:]),
            "adversary": self.options.diva_adversary * adversary,
            **self.teach(seen, batch, len(numbers)),
        }

    def _sample_loss(self, queries: Tensor, views: Tensor) -> Tensor:
        """DaNCE of the queries; their keys enter the queue."""
        self._follow()
        keys = self._keys(views)
        queue = self.keys_of_queue[: int(self.filled)].to(queries.dtype, copy=True)
        loss = noise_contrast(queries, keys, queue, self.options.temperature, queue_weights(queries, queue))
        self._remember(keys)
        return loss

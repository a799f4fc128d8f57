"""DREML: deep randomised ensembles for metric learning (Xuan, Souvenir, Pless, ECCV 2018).

Each of L members groups the training classes at random into D bags of nearly equal size, and learns to tell the bags:

    L = mean over members l and images of −log softmax(f_l(x))[g_l(y)],    f_l(x) ∈ R^D not normalised

At test the members' outputs are normalised one by one and concatenated, so the cosine of two images is the mean of the
members' cosines. The members are slices of s: D = embedding_dim / members. For a label set the loss is
−log(Σ over its bags e^f / Σ over all bags e^f).

``shared_trunk`` trains L heads on one trunk: cheap, but no longer the paper's ensemble. Without it each member has a
trunk of its own; all see the same batches.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from idml.data.augment import Batch
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings
from idml.labels import LabelSets
from idml.methods.base import Task
from idml.methods.metric_choice import MetricChoice, MetricMethod
from idml.methods.options import check_number, check_types
from idml.model.heads import divide, unit_slices


def draw_bags(classes: int, bags: int, seed: int, member: int) -> Tensor:
    """The bag of each class [classes]: ⌊classes/bags⌋ or ⌈classes/bags⌉ classes in each.

    >>> draw_bags(5, 2, seed=0, member=0).bincount()
    tensor([3, 2])
    """
    order = torch.randperm(classes, generator=random_stream("bags of classes", seed, member))
    return torch.empty_like(order).scatter_(0, order, torch.arange(classes) % bags)


def bag_loss(logits: Tensor, labels: LabelSets, bags: Tensor) -> Tensor:
    """mean −log(Σ over the bags of the set / Σ over all bags): logits [n, L, D], ``bags`` [L, classes]."""
    member = labels.in_classes(bags.shape[1])
    chosen = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    rows, classes = member.nonzero(as_tuple=True)
    for place in range(len(bags)):
        chosen[rows, place, bags[place, classes]] = 1.0
    return (torch.logsumexp(logits, dim=2) - torch.logsumexp(logits.masked_fill(chosen == 0, -1e30), dim=2)).mean()


@dataclass(frozen=True)
class DremlOptions:
    """Options of DREML."""

    members: int = 48
    """Members L of the ensemble; each has embedding_dim / L outputs (the paper: 48 of 12, embedding_dim 576)."""
    shared_trunk: bool = True
    """Train all members as heads of one trunk; false: each has a trunk of its own, as in the paper."""
    choice: ClassVar[MetricChoice] = MetricChoice()

    def __post_init__(self) -> None:
        check_types(self)
        check_number("members", self.members, at_least=1, whole=True)


class Dreml(MetricMethod):
    """An ensemble of slices, each with a random grouping of the classes."""

    Options = DremlOptions
    options: DremlOptions
    bags: Tensor

    def __init__(self, options: DremlOptions, task: Task) -> None:
        super().__init__(options, task)
        size = divide(task.embedding_dim, options.members, "embedding_dim")
        if not 2 <= size <= task.classes:
            raise ValueError(
                f"{options.members} members of embedding_dim {task.embedding_dim} tell {size} bags of classes each: "
                f"there must be at least 2, and at most as many as classes ({task.classes})"
            )
        bags = [draw_bags(task.classes, size, task.seed, member) for member in range(options.members)]
        self.register_buffer("bags", torch.stack(bags))

    @classmethod
    def check_options(cls, options: DremlOptions, *, train: str, loss: str) -> None:
        """The loss is its own; frozen trunks of an ensemble would be equal."""
        if loss != "softmax":
            raise ValueError(f"method dreml minimises a cross-entropy of its own, not {loss}: say --loss softmax")
        if not options.shared_trunk and train != "all":
            raise ValueError(f"an ensemble of trunks needs train all: with train {train} they would be alike")

    @classmethod
    def model_options(cls, options: DremlOptions) -> dict[str, Any]:
        """A slice for each member, and a trunk for each if asked for."""
        names = tuple(f"member {i + 1}" for i in range(options.members))
        own = {"head": "logits"} if options.shared_trunk else {"head": "logit_parts", "branching": "ensemble"}
        return {**super().model_options(options), **own, "slices": names}

    def embedding(self, outputs: Embeddings) -> Embeddings:
        """The members' outputs, normalised one by one."""
        return Embeddings(unit_slices(outputs.semantic, self.options.members), outputs.uncertainty)

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The cross-entropy of all members, and the ranking of ‖u‖."""
        logits = embeddings.semantic.unflatten(1, (self.options.members, -1))
        return {
            "bags": bag_loss(logits, batch.labels, self.bags),
            **self.teach(embeddings, batch, len(numbers)),
        }

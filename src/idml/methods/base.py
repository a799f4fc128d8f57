"""What a method is: everything that differs between plain training, IDML, PEL and other ways to train.

The training loop knows no method by name. It asks a method, in this order:

    Options                  the options that exist only with this method, as a frozen dataclass
    check_options            whether they make sense together with the loss and with what is trained
    model_options            what the method needs of the model, as fields of `ModelConfig`
    attach                   the model that is trained, for a method that reads it
    learning_rate_factors    how fast the method's own parameters learn
    start_epoch              what it does before an epoch, such as clustering the training images
    plan                     which images are in each batch of an epoch
    add_images               what it adds to a batch, such as mixtures
    loss                     the loss of a batch from its embeddings, in named terms
    measure, warn            what it adds to the log, and what a person should be told

A method is a ``torch.nn.Module``. Its parameters are trained, and all of its state (parameters and buffers) goes into
the checkpoint: what a method has to remember between two steps is a buffer. Random choices are functions of the seed
that a hook gets. Then a run that was killed ends with the same weights as one that was not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from idml.data.augment import Batch, apply_ambiguity
from idml.data.sampling import class_batches, random_batches
from idml.embeddings import Embeddings
from idml.losses import MetricLoss, build_loss
from idml.metric import IntrospectiveMetric
from idml.model import Model


@dataclass(frozen=True, eq=False)
class Task:
    """What a run gives its method: the loss, the size of the embeddings, and the training images."""

    loss: str
    """Name of the metric loss."""
    classes: int
    """How many classes are trained on."""
    embedding_dim: int
    """Size of s and of u."""
    loss_parameters: Mapping[str, float] = field(default_factory=dict)
    """Parameters of the loss that differ from its defaults."""
    ambiguity: tuple[str, ...] = ()
    """The kinds of ambiguous images that the user asked for."""
    proxy_lr: float = 100.0
    """Learning rate of the loss's own parameters, in units of the model's."""
    labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    """The class of every training image. `Method.loss` gets the places of a batch's images in it."""
    seed: int = 0
    """The seed of the run."""
    epochs: int = 1
    """How many epochs the run has."""
    train: str = "all"
    """What learns: all, last or heads."""

    def build_loss(self, metric: IntrospectiveMetric, **options: Any) -> MetricLoss:
        """The metric loss of the run, with pairs compared by ``metric``.

        ``options`` may hold another ``embedding_dim`` or ``num_classes``, for a loss over a slice of the embedding.
        """
        parameters: dict[str, Any] = {**self.loss_parameters, **options}
        sizes: dict[str, Any] = {"num_classes": self.classes, "embedding_dim": self.embedding_dim}
        return build_loss(self.loss, metric=metric, **{**sizes, **parameters})


LEARNING_RATES = {"proxy_uncertainty": 1.0, "critic": 10.0, "class_beta": 5.0}
"""Learning rates of parts of losses, in units of the model's. Proxies learn at ``proxy_lr``: an uncertainty of theirs
would grow too long within a few steps at that rate."""


def learning_rate_factor(name: str, otherwise: float) -> float:
    """The learning rate of a parameter with this name, in units of the model's."""
    known = [rate for part, rate in LEARNING_RATES.items() if part in name.split(".")]
    return known[0] if known else otherwise


class Method(nn.Module):
    """The hooks of a method, with what plain training does as their defaults; `loss` is the one each method writes."""

    Options: ClassVar[type]
    """The method's own options: a frozen dataclass whose fields all have a default."""
    options: Any
    plans_batches: ClassVar[bool] = False
    """Whether `plan` depends on the method's state. Its frozen features are then kept for each image, without
    mixtures."""
    rotated_start: ClassVar[bool] = False
    """Whether the parts of the head start at rotated principal components, for a loss that depends on the basis."""
    embed: Callable[[], tuple[Tensor, Embeddings]] | None = None
    """What `start_epoch` gets, at any time of a training run; None outside of one."""

    def __init__(self, options: Any, task: Task) -> None:
        super().__init__()
        self.options, self.task = options, task

    @classmethod
    def check_options(cls, options: Any, *, train: str, loss: str) -> None:
        """Raise ``ValueError`` where the options contradict each other, what is trained, or the loss."""

    @classmethod
    def model_options(cls, options: Any) -> dict[str, Any]:
        """Fields of `ModelConfig` that the method needs."""
        return {}

    def learning_rate_factors(self) -> dict[str, float]:
        """The learning rate of each of the method's own parameters, in units of the model's.

        Parts of losses have those of `LEARNING_RATES`, everything else that of the proxies.
        """
        names = [name for name, _ in self.named_parameters()]
        return {name: learning_rate_factor(name, self.task.proxy_lr) for name in names}

    def start_epoch(self, epoch: int, embed: Callable[[], tuple[Tensor, Embeddings]]) -> None:
        """Prepare an epoch; ``embed`` gives the places in ``task.labels`` of all readable images, and their embeddings.

        These are what `loss` gets of images that are seen as in a test. A resumed epoch is not started again: what it
        needs is in the method's buffers.
        """

    def attach(self, model: Model) -> None:
        """Get to know the model that is trained; it is complete, but its weights may still be replaced."""

    # ---- what a batch consists of ----

    def plan(self, usable: Tensor, *, batch_size: int, per_class: int, epoch: int) -> list[Tensor]:
        """The places in ``task.labels`` of the images of each batch of an epoch; ``usable`` are those of all images.

        A resumed epoch is planned again, so the plan follows from the seed, the epoch and the method's buffers.
        """
        labels, seed = self.task.labels[usable], self.task.seed
        if per_class:
            batches = class_batches(labels, batch_size, per_class, seed=seed, epoch=epoch)
        else:
            batches = random_batches(labels, batch_size, seed=seed, epoch=epoch)
        return [usable[batch] for batch in batches]

    @classmethod
    def mixture_kinds(cls, ambiguity: Sequence[str]) -> tuple[str, ...]:
        """The kinds of mixtures in a batch; none for a method without mixtures."""
        return ()

    @property
    def mixture_beta(self) -> float:
        """The parameter b of λ ~ Beta(b, b), the share of the first image in a mixture."""
        return 1.0

    @classmethod
    def count_added(cls, options: Any, ambiguity: Sequence[str], n: int) -> int:
        """How many images `add_images` adds to a batch of n."""
        return n if cls.mixture_kinds(ambiguity) else 0

    def added_key(self) -> tuple[Any, ...]:
        """What the added images depend on, beside the batch itself. A frozen trunk keeps their features under it."""
        kinds = self.mixture_kinds(self.task.ambiguity)
        return (*kinds, self.mixture_beta) if kinds and self.mixture_beta != 1 else kinds

    def add_images(self, images: Tensor, labels: Tensor, *, seed: int, epoch: int, step: int) -> Batch:
        """The images of a step [n, c, h, w] with their label sets, followed by those that the method adds.

        What is added, and how it is labelled, may depend on the labels and the three numbers, but not on the pixels.
        """
        kinds = self.mixture_kinds(self.task.ambiguity)
        return apply_ambiguity(images, labels, kinds, beta=self.mixture_beta, seed=seed, epoch=epoch, step=step)

    # ---- what is minimised ----

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The terms of a batch's loss by name; their sum is minimised.

        ``embeddings`` has one row for each image of ``batch``, those that were added last. With slices, or whatever
        else `model_options` asked for, they are `Model.outputs` and not yet normalised. ``numbers`` are the places
        of the others in ``task.labels``. ``seed`` fixes random choices.
        """
        raise NotImplementedError

    @torch.no_grad()
    def measure(self, embeddings: Embeddings, batch: Batch) -> dict[str, float]:
        """Figures of a step for the log, beside the loss and ‖u‖."""
        return {}

    def warn(self, rows: list[dict[str, Any]]) -> list[str]:
        """What a person should know about an epoch; ``rows`` are its rows in the log."""
        return []

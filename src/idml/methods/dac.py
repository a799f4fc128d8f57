"""Divide and conquer the embedding space (Sanakoyeu et al., CVPR 2019).

The training images are clustered into K groups and s is cut into K slices. A batch comes from one group k, and its
loss is the run's loss on slice k alone, ŝ_k = unit(E_k·h). The images are clustered again every few epochs; new groups
take the names of the old ones that they share most images with. In the last epochs the loss sees the whole embedding
(ŝ₁ … ŝ_K) and batches of all images. At test s is (ŝ₁ … ŝ_K).

Groups take turns, and smaller ones are repeated. Images that are alone in their class within a group are left out of
its batches. The clusters are those of the embedding, as in the paper (the release clusters the features before it).
Both parents of a mixture are in one batch, so in one group. All slices share u.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from idml.data.augment import Batch
from idml.data.sampling import class_batches, random_batches, random_stream
from idml.embeddings import Embeddings
from idml.losses import MetricLoss, ProxyLoss
from idml.methods.base import Task
from idml.methods.clusters import cluster_images, match_clusters
from idml.methods.metric_choice import MetricChoice, MetricMethod, refuse_proxy_uncertainty
from idml.methods.options import check_number
from idml.model.heads import divide, unit_slices


@dataclass(frozen=True)
class DacOptions:
    """Options of divide and conquer."""

    groups: int = 4
    """Groups of images K, and slices of the embedding."""
    regroup_epochs: int = 2
    """Epochs between two clusterings of the images."""
    whole_epochs: float = 0.2
    """Share of the epochs, at the end, in which the whole embedding learns from all images."""
    choice: MetricChoice = field(default_factory=MetricChoice)

    def __post_init__(self) -> None:
        check_number("groups", self.groups, at_least=1, whole=True)
        check_number("regroup_epochs", self.regroup_epochs, at_least=1, whole=True)
        check_number("whole_epochs", self.whole_epochs, at_least=0)
        if self.whole_epochs > 1:
            raise ValueError(f"whole_epochs is a share of the epochs, at most 1, got {self.whole_epochs}")


class Dac(MetricMethod):
    """Divide and conquer: each slice learns from one group of images; at the end, all together."""

    Options = DacOptions
    options: DacOptions
    plans_batches = True
    groups: Tensor
    whole: Tensor

    def __init__(self, options: DacOptions, task: Task) -> None:
        super().__init__(options, task)
        self.size = divide(task.embedding_dim, options.groups, "embedding_dim")
        self.metric_loss = nn.ModuleList(
            options.choice.build_loss(task, embedding_dim=self.size) for _ in range(options.groups)
        )
        whole = options.choice.build_loss(task)
        # in a tuple, it has no parameters of its own: its proxies are those of the slices
        self.whole_loss: Any = (whole,) if isinstance(whole, ProxyLoss) else nn.ModuleList([whole])
        self.group = 0  # of the last batch
        self.register_buffer("groups", torch.zeros(len(task.labels), dtype=torch.long))
        self.register_buffer("whole", torch.tensor(options.groups == 1))

    @classmethod
    def check_options(cls, options: DacOptions, *, train: str, loss: str) -> None:
        """The slices share u, so proxies of a slice cannot have one."""
        super().check_options(options, train=train, loss=loss)
        refuse_proxy_uncertainty(options.choice)

    @classmethod
    def model_options(cls, options: DacOptions) -> dict[str, Any]:
        """A slice for each group."""
        names = tuple(f"group {k + 1}" for k in range(options.groups))
        return {**super().model_options(options), "head": "slices", "slices": names}

    def embedding(self, outputs: Embeddings) -> Embeddings:
        """All slices, normalised one by one."""
        return Embeddings(unit_slices(outputs.semantic, self.options.groups), outputs.uncertainty)

    def start_epoch(self, epoch: int, embed: Callable[[], tuple[Tensor, Embeddings]]) -> None:
        """Cluster the images, or begin with the whole embedding."""
        count, epochs = self.options.groups, self.task.epochs
        begin = math.ceil(round(epochs * (1 - self.options.whole_epochs), 6))  # 10·(1 − 0.7) is a little above 3
        self.whole.fill_(count == 1 or epoch >= begin)
        if bool(self.whole) or epoch % self.options.regroup_epochs:
            return
        numbers, outputs = embed()
        found = cluster_images(self.embedding(outputs).semantic, count, self.task.seed)
        if epoch:
            found = match_clusters(self.groups[numbers].cpu(), found, count)
        self.groups[numbers] = found.to(self.groups.device)

    def plan(self, usable: Tensor, *, batch_size: int, per_class: int, epoch: int) -> list[Tensor]:
        """Batches of one group each, the groups in turn; of all images in the last epochs."""
        if bool(self.whole):
            return super().plan(usable, batch_size=batch_size, per_class=per_class, epoch=epoch)
        groups = self.groups.cpu()
        plans = []
        for k in range(self.options.groups):
            members = usable[groups[usable] == k]
            plans.append(self._plan_group(k, members, batch_size, per_class, epoch))
        steps = max(len(plan) for plan in plans)
        if not steps:
            raise ValueError(
                f"none of the {self.options.groups} groups has two classes with two images each: use fewer groups"
            )
        return [plan[i % len(plan)] for i in range(steps) for plan in plans if plan]

    def _plan_group(self, k: int, members: Tensor, batch_size: int, per_class: int, epoch: int) -> list[Tensor]:
        """Batches of the images of a group; smaller batches where it has too few classes to fill one."""
        labels, seed = self.task.labels[members], self.task.seed * self.options.groups + k
        if not per_class:
            size = min(batch_size, len(members))
            batches = random_batches(labels, size, seed=seed, epoch=epoch) if size > 1 else []
        else:
            classes = int((labels.bincount() >= min(per_class, 2)).sum()) if len(labels) else 0
            size = min(batch_size // per_class, classes) * per_class
            if classes < 2:
                return []
            batches = class_batches(labels, size, per_class, seed=seed, epoch=epoch)
        return [self._fill(members[batch], batch_size, epoch, i) for i, batch in enumerate(batches)]

    def _fill(self, batch: Tensor, size: int, epoch: int, place: int) -> Tensor:
        """A batch of the usual size: images of a small one are repeated, so that processes get equal shares."""
        if len(batch) == size:
            return batch
        order = torch.randperm(len(batch), generator=random_stream("fill", self.task.seed, epoch, place))
        return torch.cat([batch, batch[order.repeat(math.ceil(size / len(batch)))[: size - len(batch)]]])

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The loss of the batch's slice or of the whole embedding, and the ranking of ‖u‖."""
        if bool(self.whole):
            pairs = self._whole(self.embedding(embeddings), batch, seed)
        else:
            self.group = k = int(self.groups[numbers[0]]) if len(self.groups) else 0
            part = embeddings.semantic[:, k * self.size : (k + 1) * self.size]
            pairs = self.metric_loss[k](Embeddings(part, embeddings.uncertainty), batch.labels, seed=seed)
        return {"pairs": pairs, **self.teach(embeddings, batch, len(numbers))}

    def _whole(self, embeddings: Embeddings, batch: Batch, seed: int) -> Tensor:
        """The loss of all slices together; its proxies are the unit proxies of the slices side by side."""
        out: Tensor = functional_call(self.whole_loss[0], self._proxies(), (embeddings, batch.labels, seed))
        return out

    def _proxies(self) -> dict[str, Tensor]:
        if not isinstance(self.whole_loss[0], ProxyLoss):
            return {}
        parts: list[Any] = list(self.metric_loss)
        return {"proxies": unit_slices(torch.cat([part.proxies for part in parts], dim=1), len(parts))}

    def compared(self, outputs: Embeddings, batch: Batch) -> list[tuple[MetricLoss, Embeddings]]:
        """The slice of the last batch's group, or all slices together."""
        if not bool(self.whole):
            return super().compared(outputs, batch)[self.group : self.group + 1]
        loss: MetricLoss = self.whole_loss[0]
        if isinstance(loss, ProxyLoss):
            loss.proxies.data = self._proxies()["proxies"].detach()
        return [(loss, self.embedding(outputs)[~batch.mixed])]

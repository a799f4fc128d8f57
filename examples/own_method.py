"""Write a training method of your own: everything between a batch of images and its loss.

    python examples/own_method.py

The training loop knows no method by name. It asks for options, state and the loss of a batch; `idml.methods.base` lists
all hooks. To keep a method in idml, put it into a file of src/idml/methods: see CONTRIBUTING.md.
"""

from dataclasses import dataclass

import torch

import idml
from idml.methods import METHODS
from idml.methods.base import Method
from idml.methods.options import check_number
from idml.metric import IntrospectiveMetric
from pictures import draw_pictures


@dataclass(frozen=True)
class CentredOptions:
    """Options that exist with this method alone."""

    centre_weight: float = 0.1
    """Weight of the term that keeps embeddings away from their mean."""

    def __post_init__(self) -> None:
        check_number("centre_weight", self.centre_weight, at_least=0)


class Centred(Method):
    """L = loss(s, labels) + w·mean_i ŝ_i·m, with m the mean ŝ of all training images before the epoch."""

    Options = CentredOptions

    def __init__(self, options, task) -> None:
        super().__init__(options, task)
        self.metric_loss = task.build_loss(IntrospectiveMetric(rule="off"))  # its parameters are trained and saved
        self.register_buffer("mean", torch.zeros(task.embedding_dim))  # state: a killed run resumes with it

    def start_epoch(self, epoch, embed) -> None:
        """Measure the mean embedding."""
        _, embeddings = embed()
        self.mean.copy_(embeddings.unit.mean(dim=0))

    def loss(self, embeddings, batch, numbers, seed):
        """Return the terms of the loss by name; the log shows each of them."""
        towards_mean = (embeddings.unit @ self.mean).mean()
        return {
            "pairs": self.metric_loss(embeddings, batch.labels, seed=seed),
            "centre": self.options.centre_weight * towards_mean,
        }


METHODS["centred"] = f"{__name__}:Centred"  # a module and a class in it

folder = draw_pictures("pictures", classes=24, each=6)
small = {"trunk": "conv4", "pretrained": False, "image_size": 32, "embedding_dim": 32, "batch_size": 24, "lr": 1e-3}
figures = idml.train(
    data=f"folder:{folder}", out="runs/centred", method="centred", centre_weight=0.3, epochs=4, **small
)
print(f"right first results on the test classes: {figures['selected']['recall@1']:.0%}")

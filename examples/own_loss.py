"""Write a loss of your own and train with it.

    python examples/own_loss.py

A loss is a pure function of two matrices: how near the pairs of a batch are, and which of them match. The class
around it says which of the two forms it reads. It then works with plain labels and label sets, and with the
introspective metric. To keep it in idml, put it into a file of src/idml/losses: see CONTRIBUTING.md.
"""

import torch
from torch import Tensor

import idml
from idml import IntrospectiveMetric
from idml.losses import LOSSES, PairLoss, build_loss
from pictures import draw_pictures


def logistic(cosines: Tensor, matches: Tensor, others: Tensor | None = None, *, scale: float = 10.0) -> Tensor:
    """L = mean over pairs of log(1 + exp(∓scale·(C' − ½))): matching pairs should be above ½, others below."""
    signs = torch.where(matches, -1.0, 1.0)
    terms = torch.nn.functional.softplus(scale * signs * (cosines - 0.5))
    pairs = torch.ones_like(matches) if others is not None else ~torch.eye(len(matches), dtype=torch.bool)
    return (terms * pairs).sum() / pairs.sum()  # an image is not its own pair


class Logistic(PairLoss):
    """The loss over all pairs of a batch."""

    form = "cosine"
    function = staticmethod(logistic)


LOSSES["logistic"] = Logistic  # now every command and method knows it by name

# Check it by hand first: three images, two of them of one class.
loss = build_loss("logistic", metric=IntrospectiveMetric(rule="off"), scale=2.0)
print("three images:", loss(torch.eye(3), torch.tensor([0, 0, 1])).item())

folder = draw_pictures("pictures", classes=24, each=6)
small = {"trunk": "conv4", "pretrained": False, "image_size": 32, "embedding_dim": 32, "batch_size": 24, "lr": 1e-3}
for method in ("plain", "idml"):
    figures = idml.train(
        data=f"folder:{folder}", out=f"runs/{method}", loss="logistic", method=method, epochs=4, **small
    )
    print(f"{method}: right first results on the test classes: {figures['selected']['recall@1']:.0%}")

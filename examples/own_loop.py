"""Use the losses in a training loop of your own, with a network of your own.

    python examples/own_loop.py

A loss takes `Embeddings` (s and u) and labels. A mixture of two images carries the set of both labels.
"""

import torch
from torch import nn

from idml import Embeddings, IntrospectiveMetric, LabelSets
from idml.evaluation import evaluate_retrieval
from idml.losses import build_loss

torch.manual_seed(0)
CLASSES, DIMENSIONS = 10, 16


class Network(nn.Module):
    """Any trunk with two linear heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 64), nn.ReLU())
        self.semantic = nn.Linear(64, DIMENSIONS)
        self.uncertainty = nn.Linear(64, DIMENSIONS)
        nn.init.normal_(self.uncertainty.weight, std=1e-3)  # begin with little uncertainty

    def forward(self, images: torch.Tensor) -> Embeddings:
        """Embed a batch of images."""
        features = self.trunk(images)
        return Embeddings(self.semantic(features), self.uncertainty(features))


def draw_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy copies of one random pattern for each class; put your data loader here."""
    labels = torch.arange(size) % CLASSES
    return patterns[labels] + 0.8 * torch.randn(size, 3, 16, 16), labels


patterns = torch.randn(CLASSES, 3, 16, 16)
model = Network()
loss = build_loss("proxy_anchor", metric=IntrospectiveMetric(tau=5.0), num_classes=CLASSES, embedding_dim=DIMENSIONS)
optimiser = torch.optim.AdamW(
    [{"params": model.parameters(), "lr": 1e-3}, {"params": loss.parameters(), "lr": 1e-1}]  # proxies learn faster
)

for step in range(60):
    images, labels = draw_batch(40)
    partner = torch.randperm(len(images))
    mixed = 0.5 * images + 0.5 * images[partner]
    value = loss(model(images), labels) + loss(model(mixed), LabelSets.mixed(labels, labels[partner]))
    optimiser.zero_grad()
    value.backward()
    optimiser.step()
    if step % 20 == 0:
        print(f"step {step}: loss {value.item():.3f}")

with torch.no_grad():
    images, labels = draw_batch(200)
    figures = evaluate_retrieval(model(images), labels)
print(f"right first results: {figures['recall@1']:.0%}, MAP@R {figures['map@r']:.2f}")

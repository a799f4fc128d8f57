"""Use the introspective metric as a distance of pytorch-metric-learning.

    pip install 'idml[pml]'
    python examples/with_pytorch_metric_learning.py

Its losses and miners take one tensor for each image. `joined` puts s and u side by side, and the distance knows where
s ends. docs/losses.md lists the losses that accept it.
"""

import torch
from pytorch_metric_learning import losses, miners
from torch import nn

from idml import Embeddings, IntrospectiveMetric
from idml.pml import IntrospectiveDistance, joined

torch.manual_seed(0)
DIMENSIONS = 16
patterns = torch.randn(10, 32)
network = nn.Linear(32, 2 * DIMENSIONS)  # s and u of an image; put your network here

distance = IntrospectiveDistance(semantic_dim=DIMENSIONS, metric=IntrospectiveMetric(tau=5.0))
miner = miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard", distance=distance)
loss = losses.TripletMarginLoss(margin=0.2, distance=distance)
optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)

for step in range(60):
    labels = torch.arange(40) % 10
    images = patterns[labels] + torch.randn(40, 32)
    semantic, uncertainty = network(images).split(DIMENSIONS, dim=1)
    embeddings = joined(Embeddings(semantic, 0.1 * uncertainty))
    value = loss(embeddings, labels, miner(embeddings, labels))
    optimiser.zero_grad()
    value.backward()
    optimiser.step()
    if step % 20 == 0:
        print(f"step {step}: loss {value.item():.3f}, triplets {miner.num_triplets}")

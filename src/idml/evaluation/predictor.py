"""A small network that learns from labelled images which answers will be wrong: a query-only rival of ‖u‖."""

from typing import Self

import torch
from torch import Tensor, nn

from idml.evaluation.scores import feature_rows

_HIDDEN, _EPOCHS, _BATCH, _RATE = 64, 20, 256, 1e-3


class ErrorPredictor:
    """logit P(first neighbour is wrong) = W₂·relu(W₁·f̂ + b₁) + b₂, f̂ the features standardised over the fit.

    What labelled data give without an uncertainty embedding: fit it by cross-entropy on some classes, ask about others.
    Half of f̂ and of the hidden layer drop out in training; without this it learns a few thousand images by heart.

    >>> features = torch.randn(512, 4, generator=torch.Generator().manual_seed(0))
    >>> predictor = ErrorPredictor(seed=0).fit(features, features[:, 0] > 1)
    >>> bool(predictor.scores(torch.tensor([[2.0, 0, 0, 0]])) > predictor.scores(torch.zeros(1, 4)))
    True
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed, self.network = seed, nn.Sequential()  # empty until fit

    @torch.enable_grad()
    def fit(self, features: Tensor, wrong: Tensor) -> Self:
        """Learn from features [n, width] and a bool mask [n]: the leave-one-out nearest neighbour is wrong."""
        x = feature_rows(features).detach().float()
        if wrong.dtype != torch.bool or wrong.shape != x.shape[:1]:
            raise ValueError(f"wrong must be a bool mask [{len(x)}], got {wrong.dtype} {list(wrong.shape)}")
        if bool(wrong.all()) or not bool(wrong.any()):
            raise ValueError("an error predictor needs both right and wrong answers to learn from")
        self.mean, self.deviation = x.mean(dim=0), x.std(dim=0, correction=0)
        self.deviation[self.deviation <= 1e-6 * self.mean.abs()] = 1.0  # a constant feature says nothing
        x, target = (x - self.mean) / self.deviation, wrong.to(x)
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(self.seed)
            layers = (nn.Dropout(), nn.Linear(x.shape[1], _HIDDEN), nn.ReLU(), nn.Dropout(), nn.Linear(_HIDDEN, 1))
            self.network = nn.Sequential(*layers).to(x.device)
            optimizer = torch.optim.AdamW(self.network.parameters(), lr=_RATE)
            for _ in range(_EPOCHS):
                for rows in torch.randperm(len(x)).split(_BATCH):
                    logits = self.network(x[rows]).squeeze(1)
                    loss = nn.functional.binary_cross_entropy_with_logits(logits, target[rows])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        self.network.eval()
        return self

    @torch.no_grad()
    def scores(self, features: Tensor) -> Tensor:
        """The logit for each row [n]."""
        if len(self.network) == 0:
            raise ValueError("fit the error predictor before asking it for scores")
        x = feature_rows(features).float()
        if x.shape[1] != len(self.mean):
            raise ValueError(f"the error predictor was fit on {len(self.mean)} features, got {x.shape[1]}")
        out: Tensor = self.network((x - self.mean) / self.deviation).squeeze(1)
        return out

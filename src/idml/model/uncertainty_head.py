"""The head that gives an image its uncertainty embedding u, or the σ of the PEL baseline."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from idml.embeddings import full_precision
from idml.probabilistic import LOG_VARIANCE_START, standard_deviation

if TYPE_CHECKING:
    from idml.model import ModelConfig

START_LEVEL = 0.05  # mean ‖u‖ of the first batch; for log σ², the root mean square of what is added to −12


def squash(u: Tensor, bound: float) -> Tensor:
    """u·b·tanh(‖u‖/b)/‖u‖: the length pressed below ``bound``, the direction and zero kept."""
    scale = u.detach().abs().amax(dim=1, keepdim=True).clamp_min(1.0)  # squares must not overflow
    small = u / scale
    length: Tensor = torch.linalg.vector_norm(small, dim=1, keepdim=True).clamp_min(1e-12)
    return small * (bound * (length * (scale / bound)).tanh() / length)


class UncertaintyHead(nn.Module):
    """The linear map u = c·W·features + b (raw, never normalised), or the one to σ.

    It starts small whatever the scale of the trunk's features: the first batch it sees fixes c so that the mean of
    ‖u‖ is 0.05. Training then begins at the plain metric. (For σ: log σ² begins at −12.) The smallness lies in c and
    not in W, because an optimiser like Adam moves every weight by the learning rate whatever its size: small weights
    on large features would send ‖u‖ to 60 within ten steps.

    With ``u_hidden`` the features are standardised by the first batch and go through a hidden layer before W. Half of
    them and half of the layer drop out in training; without this a few thousand images are learned by heart.
    """

    started: Tensor
    scale: Tensor
    centre: Tensor
    spread: Tensor

    def __init__(self, width: int, config: "ModelConfig") -> None:
        super().__init__()
        self.hidden = nn.Linear(width, config.u_hidden) if config.u_hidden else None
        if self.hidden is not None:
            self.register_buffer("centre", torch.zeros(width))
            self.register_buffer("spread", torch.ones(width))
        self.linear = nn.Linear(config.u_hidden or width, config.embedding_dim)
        nn.init.constant_(self.linear.bias, LOG_VARIANCE_START if config.uncertainty == "gaussian" else 0.0)
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("scale", torch.tensor(1.0))
        self._known_started = False  # the same for Python, so that a GPU is not asked at every step
        self.gaussian, self.bound, self.detach = config.uncertainty == "gaussian", config.bound, config.detach

    def forward(self, features: Tensor) -> Tensor:
        """u or σ for each row of features [n, dim]."""
        if self.detach:
            features = features.detach()
        if not self._known_started:
            if not bool(self.started):
                self._start(features)
            self._known_started = bool(self.started)
        features = self._behind(features)
        out = full_precision(nn.functional.linear(features, self.linear.weight)) * self.scale + self.linear.bias
        if self.gaussian:
            return standard_deviation(out)
        return out if self.bound is None else squash(out, self.bound)

    @torch.no_grad()
    def silence(self) -> None:
        """Give every image u = 0, for a metric with a fixed uncertainty."""
        self.linear.weight.zero_()
        self.linear.bias.zero_()
        self.started.fill_(True)

    @torch.no_grad()
    def _start(self, features: Tensor) -> None:
        if self.hidden is not None:
            self._standardise(features)
            features = self._behind(features, drop=False)
        raw = full_precision(nn.functional.linear(features, self.linear.weight.to(features.dtype)))
        level = _over_processes(torch.linalg.vector_norm(raw, dim=1).mean())
        if bool(torch.isfinite(level)) and float(level) > 0:
            wanted = START_LEVEL * (raw.shape[1] ** 0.5 if self.gaussian else 1.0)
            self.scale.copy_(wanted / level)
            self.started.fill_(True)

    def _behind(self, features: Tensor, drop: bool = True) -> Tensor:
        """What the last layer reads: the features, or the hidden layer over them."""
        if self.hidden is None:
            return features
        drop = drop and self.training
        x = dropout((full_precision(features) - self.centre) / self.spread, training=drop)
        return dropout(self.hidden(x).relu(), training=drop)

    def _standardise(self, features: Tensor) -> None:
        x = full_precision(features)
        centre = _over_processes(x.mean(dim=0))
        spread = _over_processes((x - centre).square().mean(dim=0)).sqrt()
        if bool(torch.isfinite(spread).all()):
            self.centre.copy_(centre)
            self.spread.copy_(torch.where(spread > 1e-6 * centre.abs(), spread, 1.0))  # a constant feature says nothing


def _over_processes(share: Tensor) -> Tensor:
    """The mean over all processes, each of which sees its share of the batch."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(share)
        share = share / torch.distributed.get_world_size()
    return share

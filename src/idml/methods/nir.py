"""NIR: non-isotropy regularisation of proxy losses (Roth, Vinyals, Akata, CVPR 2022).

A proxy loss sees only the angle between an image and its proxy, so images may lie around it in the same way in all
directions. NIR asks that each ŝ be a translation of its class's proxy ρ that can be inverted: a normalising flow,
conditioned on ρ̂, maps ŝ to z, and the energy of z under N(0, I) is minimised:

    E_i = ½‖z_i‖² − log|det ∂z_i/∂ŝ_i|,   z_i = flow(ŝ_i | ρ̂_y)

    energy         L = L_proxy + (ω/d)·mean_i E_i              the paper's text (which prints ‖z‖² without the ½)
    exponential    L = mean_i exp(E_i) + ω_p·L_proxy           the authors' release

The flow has 5 blocks of a fixed permutation and a coupling. For a label set, E_i = −log mean over the set of e^(−E). u
does not enter the flow, and the flow is dropped after training.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from idml.data.augment import Batch
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings, unit_rows
from idml.labels import LabelSets
from idml.losses import LOSSES, ProxyLoss
from idml.methods.base import Task
from idml.methods.metric_choice import MetricChoice, MetricMethod
from idml.methods.options import check_number, check_types

BLOCKS, WIDTH, LAYERS = 5, 128, 8
CLAMP = 2.0  # of the log-scales
_LARGEST = 60.0  # exp continues as a straight line from here: float32 ends at 88


class Coupling(nn.Module):
    """A GLOW coupling: y₁ = x₁·e^a(h₂) + t₂ with (h₂, t₂) = net₂(x₂, c), then y₂ = x₂·e^a(h₁) + t₁ from net₁(y₁, c).

    a(h) = 2·0.636·atan(h) bounds the log-scales to about ±2; their sum is log|det|.
    """

    def __init__(self, size: int, condition: int) -> None:
        super().__init__()
        self.sizes = size - size // 2, size // 2
        first, second = self.sizes
        self.net1, self.net2 = _network(first + condition, 2 * second), _network(second + condition, 2 * first)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and log|det ∂y/∂x| [n]."""
        x1, x2 = x.split(self.sizes, dim=1)
        scale2, shift2 = self._scale_and_shift(self.net2, x2, condition)
        y1 = x1 * scale2.exp() + shift2
        scale1, shift1 = self._scale_and_shift(self.net1, y1, condition)
        y2 = x2 * scale1.exp() + shift1
        return torch.cat([y1, y2], dim=1), scale1.sum(dim=1) + scale2.sum(dim=1)

    def invert(self, y: Tensor, condition: Tensor) -> Tensor:
        """Return the x of which ``forward`` makes y."""
        y1, y2 = y.split(self.sizes, dim=1)
        scale1, shift1 = self._scale_and_shift(self.net1, y1, condition)
        x2 = (y2 - shift1) * (-scale1).exp()
        scale2, shift2 = self._scale_and_shift(self.net2, x2, condition)
        return torch.cat([(y1 - shift2) * (-scale2).exp(), x2], dim=1)

    def _scale_and_shift(self, network: nn.Module, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        h, shift = network(torch.cat([x, condition], dim=1)).chunk(2, dim=1)
        return CLAMP * 0.636 * torch.atan(h), shift


class ConditionalFlow(nn.Module):
    """Blocks of a fixed random permutation and a coupling, all with the same condition."""

    orders: Tensor

    def __init__(self, size: int, condition: int, seed: int) -> None:
        super().__init__()
        orders = [torch.randperm(size, generator=random_stream("flow", seed, block)) for block in range(BLOCKS)]
        self.register_buffer("orders", torch.stack(orders))
        self.couplings = nn.ModuleList(Coupling(size, condition) for _ in range(BLOCKS))

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Return z and log|det ∂z/∂x| [n]."""
        log_det = x.new_zeros(len(x))
        for order, coupling in zip(self.orders, self.couplings, strict=True):
            x, change = coupling(x[:, order], condition)
            log_det = log_det + change
        return x, log_det

    def invert(self, z: Tensor, condition: Tensor) -> Tensor:
        """Return the x of which ``forward`` makes z."""
        for order, coupling in zip(reversed(self.orders), reversed(list(self.couplings)), strict=True):
            assert isinstance(coupling, Coupling)
            z = coupling.invert(z, condition)[:, order.argsort()]
        return z


def _network(inputs: int, outputs: int) -> nn.Sequential:
    widths = [inputs, *[WIDTH] * (LAYERS - 1), outputs]
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def energies(flow: ConditionalFlow, unit: Tensor, labels: LabelSets, proxies: Tensor) -> Tensor:
    """E of each image [n]: ``unit`` its ŝ, ``proxies`` [classes, d] those of the classes."""
    member = labels.in_classes(len(proxies))
    rows, classes = member.nonzero(as_tuple=True)
    z, log_det = flow(unit[rows], unit_rows(proxies)[classes])
    each: Tensor = 0.5 * z.square().sum(dim=1) - log_det
    sizes = member.sum(dim=1)
    if len(rows) == len(unit):
        return each
    table = each.new_full(member.shape, torch.inf).index_put((rows, classes), each)
    return sizes.log() - torch.logsumexp(-table, dim=1)


def bounded_exp(x: Tensor) -> Tensor:
    """e^x, continued as a straight line above 60.

    >>> bounded_exp(torch.tensor([0.0, 1.0]))
    tensor([1.0000, 2.7183])
    """
    low = x.clamp_max(_LARGEST)
    return low.exp() * (1.0 + (x - low))


@dataclass(frozen=True)
class NirOptions:
    """Options of NIR."""

    nir_form: Literal["energy", "exponential"] = "energy"
    """energy: L_proxy + (ω/d)·mean E, the paper's text; exponential: mean e^E + ω_p·L_proxy, the authors' release."""
    nir_weight: float | None = None
    """With nir_form energy alone: the weight ω of the energy per dimension, by default 0.1; 0 is plain training."""
    align_weight: float | None = None
    """With nir_form exponential alone: the weight ω_p of the proxy loss, by default 0.0075 (release: 0.0075 CUB, 0.01
    Cars, 0.3 SOP)."""
    flow_lr: float = 5.0
    """Learning rate of the flow, in units of lr."""
    choice: MetricChoice = field(default_factory=MetricChoice)

    def __post_init__(self) -> None:
        check_types(self)
        for name, form in (("nir_weight", "energy"), ("align_weight", "exponential")):
            value = getattr(self, name)
            if value is not None:
                check_number(name, value, at_least=0)
                if self.nir_form != form:
                    raise ValueError(f"{name} belongs to nir_form {form}: nir_form {self.nir_form} does not use it")
        check_number("flow_lr", self.flow_lr, above=0)

    @property
    def energy_weight(self) -> float:
        """The weight ω of the energy per dimension."""
        return 0.1 if self.nir_weight is None else self.nir_weight

    @property
    def proxy_weight(self) -> float:
        """The weight ω_p of the proxy loss."""
        return 0.0075 if self.align_weight is None else self.align_weight


class Nir(MetricMethod):
    """Non-isotropy regularisation: a proxy loss, and a flow that is conditioned on the proxies."""

    Options = NirOptions
    options: NirOptions
    metric_loss: ProxyLoss

    def __init__(self, options: NirOptions, task: Task) -> None:
        super().__init__(options, task)
        loss = options.choice.build_loss(task)
        assert isinstance(loss, ProxyLoss)
        self.metric_loss = loss
        self.flow = ConditionalFlow(task.embedding_dim, task.embedding_dim, task.seed)

    @classmethod
    def check_options(cls, options: NirOptions, *, train: str, loss: str) -> None:
        """The loss must have proxies."""
        super().check_options(options, train=train, loss=loss)
        if not issubclass(LOSSES.get(loss, ProxyLoss), ProxyLoss):
            raise ValueError(f"method nir regularises losses with proxies: {loss} has none (try --loss proxy_anchor)")

    def learning_rate_factors(self) -> dict[str, float]:
        """The flow has a rate of its own."""
        rates = super().learning_rate_factors()
        return {name: self.options.flow_lr if name.startswith("flow.") else rate for name, rate in rates.items()}

    def loss(self, embeddings: Embeddings, batch: Batch, numbers: Tensor, seed: int) -> dict[str, Tensor]:
        """The proxy loss, the energy, and the ranking of ‖u‖."""
        pairs = self.metric_loss(embeddings, batch.labels, seed=seed)
        centres = self.metric_loss.proxies.unflatten(0, (self.task.classes, -1)).mean(dim=1)  # several: their mean
        energy = energies(self.flow, embeddings.unit, batch.labels, centres)
        taught = self.teach(embeddings, batch, len(numbers))
        if self.options.nir_form == "exponential":
            return {"pairs": self.options.proxy_weight * pairs, "nir": bounded_exp(energy).mean(), **taught}
        return {"pairs": pairs, "nir": self.options.energy_weight / self.task.embedding_dim * energy.mean(), **taught}

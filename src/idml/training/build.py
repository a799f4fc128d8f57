"""The model, the method and the optimiser that the options of a run describe."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from idml.data.sampling import random_stream
from idml.losses import find_loss
from idml.methods import find_method
from idml.methods.base import Method, Task
from idml.model import Model, build_model
from idml.model.bn_folding import fold_frozen_normalisation
from idml.training.config import TrainConfig

# ---- model and method ----


def build_method(config: TrainConfig, labels: Tensor, classes: int) -> Method:
    """The method of a run, without its model."""
    task = Task(
        loss=config.loss,
        classes=classes,
        embedding_dim=config.embedding_dim,
        loss_parameters=_loss_parameters(config),
        ambiguity=config.ambiguity,
        proxy_lr=find_loss(config.loss).proxy_lr if config.proxy_lr is None else config.proxy_lr,
        labels=labels,
        seed=config.seed,
        epochs=config.epochs,
        train=config.train,
    )
    return find_method(config.method)(config.method_options, task)


def build(config: TrainConfig, labels: Tensor, classes: int) -> tuple[Model, Method]:
    """A new model and the method that trains it on images with these ``labels`` [n] of ``classes`` classes."""
    method = build_method(config, labels, classes)
    model = build_model(
        config.trunk,
        pretrained=config.pretrained,
        weights=config.weights,
        embedding_dim=config.embedding_dim,
        image_size=config.image_size,
        **method.model_options(config.method_options),
    )
    if config.starts_from_weights and not config.pca:
        start_at_random(model, random_stream("semantic head", config.seed))
    if config.train == "last":
        model.trunk.split()  # refuses a trunk whose last stage is not known
    fold_as_trained(model, config)
    method.attach(model)
    return model, method


def _loss_parameters(config: TrainConfig) -> dict[str, float]:
    """The parameters that words like negative_margin=0.75 give the loss; whole numbers stay whole."""
    found: dict[str, float] = {}
    for word in config.loss_parameters:
        name, _, value = word.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not name or not math.isfinite(number):
            raise ValueError(f"loss_parameters are of the form name=number, got {word!r}")
        if name in found:
            raise ValueError(f"loss_parameters give {name} twice")
        found[name] = int(value) if value.strip("+-").isdigit() else number
    return find_loss(config.loss).known(found)


def fold_as_trained(model: Model, config: TrainConfig) -> Model:
    """The model, with frozen batch normalisation folded into the layers before it if the run trains those.

    A folded model is also faster in tests.
    """
    if config.train != "heads" and config.keeps_bn_statistics:
        fold_frozen_normalisation(model.trunk)
    return model


@torch.no_grad()
def start_at_random(model: Model, generator: torch.Generator) -> None:
    """Start the semantic head at random weights of variance 2/d and no bias, as ProxyAnchor and IDML were trained.

    The weights of ``nn.Linear`` are five times as small at the paper's sizes, so an optimiser like Adam, whose steps do
    not depend on their size, would turn the head five times as fast.
    """
    for block in model.semantic.start_blocks():
        nn.init.normal_(block.weight, std=(2.0 / model.config.embedding_dim) ** 0.5, generator=generator)
        nn.init.zeros_(block.bias)


@torch.no_grad()
def start_at_principal_components(model: Model, features: Tensor, *, rotation_seed: int | None = None) -> None:
    """Start the semantic head at s = W(f − f̄), the rows of W the directions in which the features [n, width] vary most.

    A random head would lose most of what a pretrained trunk knows. With more dimensions than the features have, the
    rest of s starts at 0. Slices that read the same features share the directions; slices that read a part of them
    start at the directions of that part.

    With a ``rotation_seed`` each slice is multiplied by a random orthogonal matrix of its own: distances within a slice
    stay the same, and its variance is spread over all its columns.
    """
    directions: dict[tuple[int | None, int | None], tuple[Tensor, Tensor]] = {}
    for number, block in enumerate(model.semantic.start_blocks()):
        place = block.columns.start, block.columns.stop
        if place not in directions:
            x = features[:, block.columns].cpu().double()
            mean = x.mean(dim=0)
            rows = _principal_directions(x - mean)
            largest = rows.gather(1, rows.abs().argmax(dim=1, keepdim=True))
            directions[place] = rows * largest.sign(), mean  # a direction has no sign of its own
        rows, mean = directions[place]
        rows = rows[block.first :: block.step][: len(block.weight)]
        if rotation_seed is not None:
            rotation = _random_rotation(len(block.weight), random_stream("rotated start", rotation_seed, number))
            rows = rotation[:, : len(rows)] @ rows
        block.weight.zero_()
        block.bias.zero_()
        block.weight[: len(rows)] = rows.to(block.weight)
        block.bias[: len(rows)] = -(rows @ mean).to(block.bias)


def _principal_directions(x: Tensor) -> Tensor:
    """Orthonormal rows, those along which ``x`` varies most first."""
    rows: Tensor
    try:
        rows = torch.linalg.eigh(x.T @ x)[1].T.flip(0)  # eigenvalues ascend
    except RuntimeError:  # not found, on some CPUs, where a few images span less than the features' width
        rows = torch.linalg.svd(x)[2]
    return rows


def _random_rotation(size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix, all of them equally likely."""
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    rotation: Tensor = q * r.diagonal().sign()
    return rotation


# ---- what learns, and how fast ----


def build_optimiser(model: Model, method: Method, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over what learns of the trunk, the heads, and the method's own parameters, each with its learning rate."""
    heads = [*model.semantic.parameters(), *model.uncertainty.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": trunk_parameters(model, config), "factor": 1.0},
        {"params": heads, "factor": 1.0},
    ]
    own = {name: parameter for name, parameter in method.named_parameters() if parameter.requires_grad}
    factors = {name: factor for name, factor in method.learning_rate_factors().items() if name in own}
    for factor in sorted(set(factors.values())):
        groups.append({"params": [own[name] for name in own if factors[name] == factor], "factor": factor})
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, weight_decay=config.weight_decay)


def trunk_parameters(model: Model, config: TrainConfig) -> list[nn.Parameter]:
    """The parameters of the trunk that learn."""
    if config.train == "last":
        return list(model.stages.last.parameters())
    return list(model.trunk.parameters()) if config.train == "all" else []


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, epoch: int, share_done: float) -> None:
    """Set the learning rate of a step, when ``share_done`` of the steps of its epoch are done.

    Epochs may differ in length, so the cosine falls by as much in each of them as in epochs of one length.
    """
    if config.schedule == "step":
        share = config.step_factor ** (epoch // config.step_epochs)
    elif config.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * (epoch + share_done) / config.epochs))
    else:
        share = 1.0
    for group in optimizer.param_groups:
        group["lr"] = config.lr * group["factor"] * share


def set_modes(model: Model, config: TrainConfig, epoch: int) -> None:
    """Freeze what does not learn in an epoch: the trunk during warm-up, and frozen batch normalisation always.

    With ``warmup_u`` off the uncertainty head is frozen during warm-up too.
    """
    model.train()
    model.uncertainty.requires_grad_(config.warmup_u or epoch >= config.warmup_epochs)
    model.trunk.requires_grad_(False)
    for parameter in trunk_parameters(model, config):
        parameter.requires_grad_(epoch >= config.warmup_epochs)
    if config.keeps_bn_statistics:
        for module in model.trunk.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()

"""What learns, and how fast: parameter groups, learning rate, frozen parts."""

import math
from typing import Any

import torch
from torch import nn

from idml.model import Model
from idml.training.config import TrainConfig


def build_optimiser(model: Model, loss: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over what learns of the trunk, the heads, and the loss's own parameters, each with its learning rate.

    Proxies learn faster than the rest. Their uncertainty, if they have one, learns as fast as the images' own: with the
    proxies' rate it would leave any sensible length within a few steps.
    """
    own = dict(loss.named_parameters())
    uncertain = {name for name in own if name.endswith("proxy_uncertainty")}
    groups: list[dict[str, Any]] = [
        {"params": trunk_parameters(model, config), "factor": 1.0},
        {"params": list(model.semantic.parameters()), "factor": 1.0},
        {"params": list(model.uncertainty.parameters()), "factor": config.u_lr},
        {"params": [p for name, p in own.items() if name not in uncertain], "factor": config.proxy_lr},
        {"params": [own[name] for name in uncertain], "factor": config.u_lr},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, weight_decay=config.weight_decay)


def trunk_parameters(model: Model, config: TrainConfig) -> list[nn.Parameter]:
    """The parameters of the trunk that learn."""
    if config.part == "last":
        return list(model.stages.last.parameters())
    return list(model.trunk.parameters()) if config.part == "all" else []


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, epoch: int, steps: int, step: int) -> None:
    """The learning rate is a function of the step alone; ``steps`` is how many an epoch has."""
    if config.schedule == "step":
        share = config.step_factor ** (epoch // config.step_epochs)
    elif config.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * step / (steps * config.epochs)))
    else:
        share = 1.0
    for group in optimizer.param_groups:
        group["lr"] = config.lr * group["factor"] * share


def set_modes(model: Model, config: TrainConfig, epoch: int) -> None:
    """During warm-up and with a frozen trunk the heads alone learn; batch normalisation may keep its statistics."""
    model.train()
    model.trunk.requires_grad_(False)
    for parameter in trunk_parameters(model, config):
        parameter.requires_grad_(epoch >= config.warmup_epochs)
    if config.normalises_frozen:
        for module in model.trunk.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()

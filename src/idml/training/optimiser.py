"""What learns, and how fast: parameter groups, learning rate, frozen parts."""

import math
from typing import Any

import torch
from torch import nn

from idml.model import Model
from idml.training.config import TrainConfig


def build_optimiser(model: Model, loss: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over the trunk, the heads, and the loss's own parameters (proxies) with their larger learning rate."""
    heads = [*model.semantic.parameters(), *model.uncertainty.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [] if config.freeze_trunk else list(model.trunk.parameters()), "factor": 1.0},
        {"params": heads, "factor": 1.0},
        {"params": list(loss.parameters()), "factor": config.proxy_lr},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, weight_decay=config.weight_decay)


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
    for parameter in model.trunk.parameters():
        parameter.requires_grad_(not config.freeze_trunk and epoch >= config.warmup_epochs)
    if config.freeze_bn and config.starts_from_weights:
        for module in model.trunk.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()

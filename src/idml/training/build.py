"""The model and the loss that the options of a run describe."""

import math
from typing import Any

import torch
from torch import nn

from idml.losses import LOSSES, MetricLoss, ProxyLoss, build_loss
from idml.metric import IntrospectiveMetric
from idml.model import Model, build_model
from idml.model.backbones import Stages
from idml.model.bn_folding import fold_frozen_normalisation
from idml.probabilistic import ProbabilisticLoss
from idml.training.config import TrainConfig


def build(config: TrainConfig, classes: int) -> tuple[Model, MetricLoss | ProbabilisticLoss]:
    """A new model and its loss over ``classes`` classes."""
    options: dict[str, Any] = _parameters(config)
    if config.proxy_uncertainty:
        if not issubclass(LOSSES.get(config.loss, ProxyLoss), ProxyLoss):
            raise ValueError(f"proxy_uncertainty is for losses with proxies: {config.loss} has none")
        options["proxy_uncertainty"] = True
    rule = config.rule if config.introspective else "off"
    metric = IntrospectiveMetric(config.tau, config.gamma, rule, config.beta, config.fit)
    loss = build_loss(config.loss, metric=metric, num_classes=classes, embedding_dim=config.embedding_dim, **options)
    model = build_model(
        config.trunk,
        pretrained=config.pretrained,
        embedding_dim=config.embedding_dim,
        uncertainty="gaussian" if config.probabilistic else "introspective",
        bound=config.bound,
        detach=config.detached,
        u_hidden=config.u_hidden or 0,
        image_size=config.image_size,
    )
    if config.part == "last":
        Stages(model.trunk)  # refuses a trunk whose last stage is not known
    fold_as_trained(model, config)
    if config.constant:
        model.uncertainty.silence()
    return model, ProbabilisticLoss(loss) if config.probabilistic else loss


def _parameters(config: TrainConfig) -> dict[str, float]:
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
    return LOSSES[config.loss].known(found) if config.loss in LOSSES else {}


def fold_as_trained(model: Model, config: TrainConfig) -> Model:
    """The model, its frozen normalisation folded if the run trains what lies around it; its tests are faster too."""
    if config.part != "heads" and config.normalises_frozen:
        fold_frozen_normalisation(model.trunk)
    return model


# -------------------- optimiser --------------------
# What learns, and how fast: parameter groups, learning rate, frozen parts.


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

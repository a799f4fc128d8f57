"""The model and the loss that the options of a run describe."""

import math
from typing import Any

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

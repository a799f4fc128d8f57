"""Which training options go together; a combination that makes no sense is refused with one line."""

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from idml.training.config import TrainConfig


def require_sense(config: "TrainConfig") -> None:
    """Raise ``ValueError`` where two options contradict each other, or one could change nothing."""
    _require_batches(config)
    _require_trunk(config)
    _require_uncertainty(config)


def idle_options(config: "TrainConfig") -> list[str]:
    """What is not refused and yet changes nothing, since a preset may bring it: the metric's options without it."""
    given = [name for name in ("tau", "gamma") if getattr(config, name) != getattr(type(config), name)]
    if config.introspective or not given:
        return []
    return [f"{' and '.join(given)}: for the introspective metric, which method {config.method} does not use"]


def fitted_to(labels: "Tensor", config: "TrainConfig") -> "TrainConfig":
    """The options for these training labels: few classes, which cannot fill the default batch, get a smaller one."""
    if not config.per_class or config.batch_size != type(config).batch_size:
        return config
    classes = int((labels.bincount() >= min(config.per_class, 2)).sum())
    fill = classes * config.per_class
    return replace(config, batch_size=fill) if classes > 1 and fill < config.batch_size else config


def _require_batches(config: "TrainConfig") -> None:
    for name, rate in (("lr", 1.0), ("lr · proxy_lr", config.proxy_lr), ("lr · u_lr", config.u_lr)):
        if config.lr * rate > 1e35:
            raise ValueError(f"{name} must be at most 1e35, got {config.lr * rate:g}")
    for name in ("holdout", "label_noise"):
        if getattr(config, name) >= 1:
            raise ValueError(f"{name} must be below 1, got {getattr(config, name)}")
    if config.mixtures > 1:
        raise ValueError(f"mixtures must be at most 1, one for each image, got {config.mixtures}")
    if config.mixtures < 1 and not config.mixed_images:
        raise ValueError(f"mixtures is for runs that mix images, which method {config.method} does not")
    if config.per_class and config.batch_size % config.per_class:
        raise ValueError(f"batch_size {config.batch_size} is not a multiple of per_class {config.per_class}")


def _require_trunk(config: "TrainConfig") -> None:
    if config.micro_batch and not config.normalises_frozen:
        raise ValueError(
            "micro_batch needs frozen batch normalisation (pretrained weights and freeze_bn): otherwise each part "
            "would be normalised by itself and the result would differ from the whole batch"
        )
    if config.freeze_trunk and config.train == "last":
        raise ValueError("freeze_trunk trains the heads alone: leave it out to train the last stage too")
    if config.part != "all" and not config.starts_from_weights:
        option = "freeze_trunk" if config.freeze_trunk else f"train {config.train}"
        raise ValueError(f"{option} needs pretrained weights: a random trunk has nothing to keep")


def _require_uncertainty(config: "TrainConfig") -> None:
    method = config.method
    if config.constant:
        if not config.gamma > 0:
            raise ValueError(f"method {method} compares with a fixed β, which is gamma: it must be above 0")
        if config.rule == "release":
            raise ValueError(f"method {method} goes with the rules similar and dissimilar: release has its own γ")
    if config.introspection != "none":
        if config.constant or config.probabilistic:
            raise ValueError(f"introspection teaches u, which method {method} does not have")
        if config.part != "heads" and not config.detached:
            raise ValueError("introspection needs detach or a frozen trunk: it may teach u, but not pull at the trunk")
    if config.beta != "sum":
        if not config.introspective or config.constant:
            raise ValueError(f"beta {config.beta} is about the u of pairs, which method {method} does not compare")
        if config.rule == "release":
            raise ValueError("rule release adds the vectors, as the released code does: beta must be sum")
    if config.fit and not (config.introspective and config.rule == "similar"):
        raise ValueError(f"fit divides what the rule similar softens, which method {config.method} does not use")
    if config.proxy_uncertainty and (not config.introspective or config.constant):
        raise ValueError(f"proxy_uncertainty gives the proxies a u, which method {method} does not compare")
    for name, idle in (("u_penalty", 0), ("u_lr", 1), ("u_hidden", 0)):
        if getattr(config, name) != idle and not config.learns_u:
            raise ValueError(f"{name} is for methods that learn u (idml, ism) or introspection, not {method}")

"""Whole sets of options under one name: --preset paper, --preset release. Files and flags override them."""

from typing import Any

_PAPER: dict[str, Any] = {
    "method": "idml", "introspection": "none", "u_hidden": 0,
    "trunk": "resnet50", "image_size": 224, "embedding_dim": 512, "batch_size": 120, "per_class": 0, "epochs": 60,
    "warmup_epochs": 5, "pca": False, "tau": 5.0, "gamma": 0.0, "weight_decay": 1e-4, "freeze_bn": True, "clip": 10.0,
    "lr": 6e-4, "schedule": "step", "step_epochs": 5, "step_factor": 0.5,
}  # fmt: skip
_BY_DATA: dict[str, dict[str, Any]] = {
    "cars": {"lr": 2.5e-4, "step_epochs": 10, "gamma": 3.0},
    "sop": {"step_epochs": 10, "step_factor": 0.25},
}
_RELEASE: dict[str, Any] = {"loss": "proxy_anchor", "rule": "release", "tau": 5.0, "gamma": 4.0, "labels": "weighted"}
NAMES = ("paper", "release")


def preset(name: str, data: str) -> dict[str, Any]:
    """The options of a preset for a data set.

    ``paper`` is the paper's training with the learning rates of its authors' commands (the text says 1e-5).
    ``release`` is what the authors' released code does, for comparison: u normalised, squared norms, γ = 4, Mixup with
    a λ-weighted loss, proxy-anchor.

    >>> preset("paper", "cars:images")["gamma"]
    3.0
    """
    if name not in NAMES:
        raise ValueError(f"unknown preset {name!r}; known are {' and '.join(NAMES)}")
    options = {**_PAPER, **_BY_DATA.get(data.partition(":")[0], {})}
    return options if name == "paper" else {**options, **_RELEASE}

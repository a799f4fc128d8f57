"""The flags of `idml train`: the options of a run, grouped, with a line for each loss, method and trunk."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from idml.cli_parser import list_choices
from idml.losses import LOSSES
from idml.methods import METHODS, find_method
from idml.methods.options import Option
from idml.training.config import (
    PRESETS,
    Ambiguity,
    TrainConfig,
    common_options,
    from_dict,
    methods_with,
    options_of,
    read_yaml,
)

GROUPS: dict[str, tuple[str, ...]] = {
    "data": ("data", "split", "holdout", "strict_data", "image_size", "crop", "ambiguity", "workers"),
    "what is trained": (
        "method", "loss", "loss_parameters", "trunk", "pretrained", "weights", "train", "freeze_trunk", "crops",
        "embedding_dim", "pca",
    ),
    "how it is trained": (
        "epochs", "batch_size", "per_class", "micro_batch", "lr", "proxy_lr", "weight_decay", "schedule",
        "step_epochs", "step_factor", "warmup_epochs", "warmup_u", "freeze_bn", "clip", "precision", "seed",
    ),
    "the run": ("out", "preset", "checkpoint_every"),
}  # fmt: skip
"""The options that all methods share, as `idml train --help` groups them."""
SPECS = {
    "glyphs": "the embedded data set: letters and signs",
    "folder:PATH": "your images, one sub-folder for each class",
    "csv:FILE": "a file with the columns path, label and, if you like, split",
    "cub:PATH": "CUB-200-2011",
    "cars:PATH": "Cars196",
    "sop:PATH": "Stanford Online Products",
    "inshop:PATH": "In-Shop Clothes Retrieval",
}
TRUNKS = {
    "tf_efficientnet_lite0": "small and fast; its ImageNet weights are installed with idml",
    "conv4": "four convolutions for images of 28 to 64 pixels, without weights",
    "resnet50": "the paper's; weights from the model hub or from --weights",
    "NAME": "any other model of timm",
}
_PRESET_LINES = {
    "paper": "the paper's training",
    "release": "what the authors' released code does",
}
_METAVARS = {
    "data": "SPEC", "split": "SPLIT", "out": "RUN", "loss": "NAME", "method": "NAME", "trunk": "NAME",
    "weights": "FILE", "ambiguity": "KIND", "loss_parameters": "NAME=X",
}  # fmt: skip
_SEVERAL = ("ambiguity", "loss_parameters")  # options with several values
_EXTRA = (
    Option("freeze_trunk", bool, None, "Train the heads alone, in seconds: as --train heads."),
    Option("preset", str, None, "Begin with the options of a preset; others override them."),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each option that all methods share, ``image_size`` as --image-size."""
    options = {option.name: option for option in (*common_options(), *_EXTRA)}
    named = {"loss": _describe(LOSSES), "method": _describe({name: find_method(name) for name in METHODS})}
    named |= {"preset": {name: _PRESET_LINES[name] for name in PRESETS}}
    shown = {**named, "data": SPECS, "trunk": TRUNKS}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            option = options[name]
            default = "" if option.default in (dataclasses.MISSING, (), None) else f" (default {option.default})"
            _add_flag(group, option, default, named.get(name), shown.get(name))


def add_method_options(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each option that only some methods have, grouped by the methods that have it."""
    groups: dict[tuple[str, ...], Any] = {}
    for name in {name: None for method in METHODS for name in options_of(method)}:
        methods = methods_with(name)
        if tuple(methods) not in groups:
            groups[tuple(methods)] = parser.add_argument_group(f"options of method {', '.join(methods)}")
        defaults: dict[object, list[str]] = {}
        for method in methods:
            defaults.setdefault(options_of(method)[name].default, []).append(method)
        words = [f"{value} with {', '.join(own)}" for value, own in defaults.items()]
        only = next(iter(defaults))
        default = f" (default {'; '.join(words) if len(words) > 1 else only})"
        _add_flag(groups[tuple(methods)], options_of(methods[0])[name], "" if only is None else default)


def chosen_options(namespace: argparse.Namespace) -> TrainConfig:
    """Build the configuration from the flags and the file given by --config; flags win."""
    values = read_yaml(Path(namespace.config)) if getattr(namespace, "config", None) else {}
    ignored = {"command", "handler", "config", "resume", "json", "dry_run"}
    return from_dict(values | {key: value for key, value in vars(namespace).items() if key not in ignored})


def _describe(classes: Mapping[str, type]) -> dict[str, str]:
    """Return the first line of the documentation of each class, without its full stop."""
    return {name: (own.__doc__ or "").partition("\n")[0].rstrip(".") for name, own in classes.items()}


def _add_flag(
    parser: Any,
    option: Option,
    default: str,
    choices: Mapping[str, str] | None = None,
    shown: Mapping[str, str] | None = None,
) -> None:
    """Add a flag; ``choices`` are the values that it takes, ``shown`` those that its help describes."""
    flag, text = f"--{option.name.replace('_', '-')}", (option.text + default).replace("%", "%%")
    if shown is not None:
        text += "\n" + list_choices(shown).replace("%", "%%")
    if option.type is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    convert = next((t for t in (int, float) if option.type is t or t in get_args(option.type)), str)
    metavar = _METAVARS.get(option.name) or {int: "N", float: "X"}.get(convert, "WORD")
    settings: dict[str, Any] = {"type": convert, "metavar": metavar, "default": argparse.SUPPRESS, "help": text}
    words = list(get_args(option.type) if get_origin(option.type) is Literal else choices or ())
    if option.name in _SEVERAL:
        settings["nargs"] = "*"
        words = list(get_args(Ambiguity)) if option.name == "ambiguity" else []
    elif choices is None and words:
        settings["metavar"] = f"{{{','.join(words)}}}"
    parser.add_argument(flag, **settings, **({"choices": words} if words else {}))

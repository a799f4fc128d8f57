"""The options of a training run. Flags, YAML files and a run's config.yaml all come from here.

`TrainConfig` holds the options that all methods share, and in ``method_options`` those of its method. Outside of Python
all options are flat: `from_dict` and `to_dict` convert between `TrainConfig` and the mapping that a YAML file holds.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from idml.errors import unknown_name
from idml.losses import find_loss
from idml.methods import METHODS, find_method
from idml.methods.options import (
    Option,
    build_options,
    check_choice,
    check_number,
    check_types,
    flatten_options,
    list_options,
)

if TYPE_CHECKING:
    from torch import Tensor


Ambiguity = Literal["mixup", "cutmix", "low_resolution", "blur", "occlusion"]
Schedule = Literal["constant", "step", "cosine"]
Precision = Literal["float32", "bfloat16"]
Train = Literal["all", "last", "heads"]
Crop = Literal["window", "resized"]


@dataclass(frozen=True)
class TrainConfig:
    """Options of one training run."""

    data: str
    """The data set, a SPEC such as glyphs or folder:PATH."""
    out: str
    """The run directory."""
    loss: str = "multi_similarity"
    """Name of the loss."""
    loss_parameters: tuple[str, ...] = ()
    """Parameters of the loss that differ from its defaults, as name=value (contrastive: negative_margin=0.75)."""
    method: str = "plain"
    """How a batch becomes a loss; docs/methods.md describes them."""
    method_options: Any = None
    """The options of the method alone, as its ``Options`` dataclass; None means their defaults."""
    ambiguity: tuple[str, ...] = ()
    """Kinds of ambiguous images to train on: low_resolution, blur, occlusion; mixup and cutmix add mixtures."""
    trunk: str = "tf_efficientnet_lite0"
    """The network below the heads: any timm model, or conv4 for small images."""
    pretrained: bool = True
    """Start from ImageNet weights (conv4 has none)."""
    weights: str | None = None
    """A safetensors file that the trunk starts from instead, in timm's names; its classifier is ignored."""
    train: Train = "all"
    """What learns: all; heads; or last, which is the trunk's last stage and the heads. The rest is computed once."""
    crops: int = 4
    """With train heads or last: how many epochs have crops and mixtures of their own before they repeat."""
    embedding_dim: int = 512
    """Size of s and of u."""
    pca: bool = True
    """Start the semantic head at the principal components of the features, not at random (with pretrained weights)."""
    image_size: int | None = None
    """Pixels; by default what the trunk was made for."""
    crop: Crop = "window"
    """What training sees of an image: window: a random square of the image size; resized: a random part, 8 to 100 % of
    the area, with sides 3 : 4 to 4 : 3, enlarged to the image size."""
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 120
    """Images in a step, before mixtures double them; the default shrinks where there are too few classes for it."""
    per_class: int = 4
    """Images of each class in a batch; 0 draws images without regard to classes."""
    micro_batch: int = 0
    """Images the trunk sees at once, to save memory; the loss still sees the whole batch. 0: all of them."""
    lr: float = 1e-4
    """Learning rate of the trunk and the heads."""
    proxy_lr: float | None = None
    """Learning rate of the proxies, in units of lr; by default 100, for proxy_nca 1, as their authors train."""
    weight_decay: float = 1e-4
    """Weight decay of AdamW."""
    schedule: Schedule = "step"
    """How the learning rate falls: constant, step or cosine."""
    step_epochs: int = 5
    """With schedule step: epochs between two falls."""
    step_factor: float = 0.5
    """With schedule step: what is left of the learning rate after each fall."""
    warmup_epochs: int = 0
    """Epochs in which only the heads (and proxies) learn."""
    warmup_u: bool = True
    """Whether the uncertainty head learns in those epochs too."""
    freeze_bn: bool = True
    """Keep the statistics of batch normalisation as they are (ignored without pretrained weights)."""
    clip: float = 10.0
    """Gradient values are clipped at this."""
    precision: Precision = "float32"
    """What the network computes in: float32, or bfloat16 (its weights stay float32; a GPU, or a CPU that has it)."""
    holdout: float = 0.1
    """Share of the training classes kept for choosing the best epoch."""
    split: str = "official"
    """Which classes train: official, all, or a share such as 0.8."""
    strict_data: bool = False
    """An incomplete data set is an error."""
    checkpoint_every: int = 100
    """Steps between two checkpoints."""
    workers: int = 0
    """Processes that prepare batches."""
    seed: int = 0
    """Fixes everything random."""

    def __post_init__(self) -> None:
        check_types(self)
        for name, what in (("ambiguity", "kinds"), ("loss_parameters", "name=value")):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or not all(isinstance(word, str) for word in value):
                raise ValueError(f"{name} must be a list of {what}, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        for value in self.ambiguity:
            check_choice("ambiguity", value, get_args(Ambiguity))
        for name in ("epochs", "batch_size", "embedding_dim", "step_epochs", "checkpoint_every", "crops"):
            check_number(name, getattr(self, name), at_least=1, whole=True)
        for name in ("per_class", "micro_batch", "warmup_epochs", "workers", "seed"):
            check_number(name, getattr(self, name), at_least=0, whole=True)
        for name in ("lr", "clip", "step_factor", *(("proxy_lr",) if self.proxy_lr is not None else ())):
            check_number(name, getattr(self, name), above=0)
        for name in ("weight_decay", "holdout"):
            check_number(name, getattr(self, name), at_least=0)
        if self.weights is not None and not (isinstance(self.weights, str) and self.weights):
            raise ValueError(f"weights must be the name of a safetensors file, got {self.weights!r}")
        find_loss(self.loss)
        method = find_method(self.method)
        if self.method_options is None:
            object.__setattr__(self, "method_options", method.Options())
        elif not isinstance(self.method_options, method.Options):
            raise ValueError(f"method {self.method} has {method.Options.__name__}, got {self.method_options!r}")
        _check_combinations(self)
        method.check_options(self.method_options, train=self.train, loss=self.loss)

    @property
    def added_images(self) -> int:
        """How many images the method adds to a batch."""
        method = find_method(self.method)
        return method.count_added(self.method_options, self.ambiguity, self.batch_size)

    @property
    def starts_from_weights(self) -> bool:
        """Whether the trunk begins with pretrained weights or those of a file."""
        return self.weights is not None or (self.pretrained and self.trunk != "conv4")

    @property
    def keeps_bn_statistics(self) -> bool:
        """Whether batch normalisation keeps the statistics of the pretrained weights."""
        return self.freeze_bn and self.starts_from_weights

    @property
    def warm_up_note(self) -> str | None:
        """What to say if the trunk never learns because the run ends with its warm-up."""
        if self.train == "heads" or self.warmup_epochs < self.epochs:
            return None
        return f"the trunk does not learn: warm-up has {self.warmup_epochs} epochs, and the run {self.epochs}"


def _check_combinations(config: TrainConfig) -> None:
    """Raise ``ValueError`` where two options contradict each other."""
    for name, rate in (("lr", 1.0), ("lr · proxy_lr", config.proxy_lr or 1.0)):
        if config.lr * rate > 1e35:
            raise ValueError(f"{name} must be at most 1e35, got {config.lr * rate:g}")
    if config.holdout >= 1:
        raise ValueError(f"holdout must be below 1, got {config.holdout}")
    if config.per_class and config.batch_size % config.per_class:
        raise ValueError(f"batch_size {config.batch_size} is not a multiple of per_class {config.per_class}")
    if config.micro_batch and not config.keeps_bn_statistics:
        raise ValueError(
            "micro_batch needs frozen batch normalisation (pretrained weights and freeze_bn): otherwise each part "
            "would be normalised by itself and the result would differ from the whole batch"
        )
    mixtures = [kind for kind in config.ambiguity if kind in ("mixup", "cutmix")]
    if mixtures and not find_method(config.method).mixture_kinds(mixtures):
        raise ValueError(
            f"method {config.method} has no mixtures: leave out {mixtures[0]}, or use the method mixup or idml"
        )
    if config.train != "all" and not config.starts_from_weights:
        raise ValueError(f"train {config.train} needs pretrained weights: a random trunk has nothing to keep")
    if config.train != "all" and find_method(config.method).plans_batches and config.added_images:
        raise ValueError(
            f"method {config.method} chooses its batches as it learns, so mixtures cannot be computed before: "
            f"train {config.train} needs a run without mixup and cutmix"
        )


def fit_batch_size(config: TrainConfig, labels: "Tensor", *, chosen: bool = False) -> TrainConfig:
    """The options for these training labels: the default batch shrinks where there are too few classes to fill it.

    With ``chosen``, a batch size that the user chose shrinks too.
    """
    if not config.per_class or (config.batch_size != TrainConfig.batch_size and not chosen):
        return config
    classes = int((labels.bincount() >= min(config.per_class, 2)).sum())
    fill = classes * config.per_class
    return replace(config, batch_size=fill) if classes > 1 and fill < config.batch_size else config


# ---- the flat form ----

_COMMON = tuple(f.name for f in fields(TrainConfig) if f.name != "method_options")
_REMOVED = ("bound", "u_penalty", "u_lr", "beta", "mixtures", "label_noise", "introspection")


def common_options() -> list[Option]:
    """The options that all methods share."""
    return [option for option in list_options(TrainConfig) if option.name != "method_options"]


def options_of(method: str) -> dict[str, Option]:
    """The options of one method alone, by name."""
    return {option.name: option for option in list_options(find_method(method).Options)}


def methods_with(option: str) -> list[str]:
    """The names of the methods that have an option of their own with this name."""
    return [method for method in METHODS if option in options_of(method)]


def from_dict(values: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a flat mapping, as a YAML file holds it.

    The key ``preset`` stands for the options of that preset; the others override them. ``freeze_trunk: true`` is
    another name of ``train: heads``.

    >>> from_dict({"data": "glyphs", "out": "run", "method": "idml", "tau": 3.0}).method_options.metric.tau
    3.0
    """
    values = dict(values)
    name = values.pop("preset", None)
    if name is not None:
        values = _with_preset(name, values)
    method = values.get("method", TrainConfig.method)
    frozen = values.pop("freeze_trunk", False)
    if not isinstance(frozen, bool):
        raise ValueError(f"freeze_trunk must be true or false, got {frozen!r}")
    if frozen:
        if values.get("train") == "last":
            raise ValueError("freeze_trunk trains the heads alone: leave it out to train the last stage too")
        values["train"] = "heads"
    own = options_of(method)
    for key in values:
        if key not in _COMMON and key not in own:
            raise ValueError(_unknown_option(str(key), method))
    missing = [f.name for f in fields(TrainConfig) if f.default is MISSING and f.name not in values]
    if missing:
        raise ValueError(f"the option {missing[0]!r} is missing")
    chosen = build_options(find_method(method).Options, {key: values[key] for key in values if key in own})
    return TrainConfig(**{key: values[key] for key in values if key in _COMMON}, method_options=chosen)


def from_stored(values: Mapping[str, Any]) -> TrainConfig:
    """The configuration that a run wrote. Those of version 0.1 also name the weight of nir that its form ignores.

    >>> from_stored({"data": "glyphs", "out": "run", "method": "nir", "loss": "proxy_anchor", "nir_form": "energy",
    ...     "nir_weight": 0.2, "align_weight": 0.0075}).method_options.align_weight is None
    True
    """
    ignored = {"energy": "align_weight", "exponential": "nir_weight"}.get(str(values.get("nir_form")))
    return from_dict({key: value for key, value in values.items() if key != ignored})


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the options in a YAML file."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {str(path)!r}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a YAML file ({str(error).splitlines()[0]})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold options as 'name: value' lines")
    return values


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """All options as one flat mapping of plain values: what config.yaml holds, and what `from_dict` reads."""
    flat = {name: getattr(config, name) for name in _COMMON} | flatten_options(config.method_options)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flat.items()}


def list_differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """What differs between two configurations, one line for each option; where a run lies does not count.

    Nor does it count where a file of weights lies: `load_checkpoint` compares what is in it.
    """
    a, b = to_dict(old), to_dict(new)
    if old.weights is not None and new.weights is not None:
        a["weights"] = b["weights"]
    keys = [key for key in {**a, **b} if key not in ("out", "workers") and a.get(key) != b.get(key)]
    return [f"{key}: {a.get(key)!r} → {b.get(key)!r}" for key in keys]


def _unknown_option(key: str, method: str) -> str:
    if key in _REMOVED:
        return f"the option {key!r} was removed: leave it out, or use the version of idml that the file is from"
    having = methods_with(key)
    if having:
        return f"method {method} has no option {key!r}: it belongs to {' and '.join(_joined(having))}"
    known = ["preset", *_COMMON, *options_of(method)]
    return unknown_name("option", key, known, choices="idml train --help lists them")


def _joined(names: list[str]) -> list[str]:
    """All names but the last as one word, for "a, b and c"."""
    return [", ".join(names[:-1]), names[-1]] if len(names) > 1 else names


# ---- presets ----

PRESETS = ("paper", "release")
_PAPER: dict[str, Any] = {
    "method": "idml", "teach_u": "none", "u_hidden": 0,
    "trunk": "resnet50", "image_size": 224, "embedding_dim": 512, "batch_size": 120, "per_class": 0, "epochs": 60,
    "warmup_epochs": 5, "pca": False, "tau": 5.0, "gamma": 0.0, "weight_decay": 1e-4, "freeze_bn": True, "clip": 10.0,
    "lr": 6e-4, "schedule": "step", "step_epochs": 5, "step_factor": 0.5,
}  # fmt: skip
_PAPER_FORM: dict[str, Any] = {"mixing": "separate", "labels": "sets"}
"""How mixtures enter the loss of the paper's method; other methods with mixtures keep their own default."""
_BY_DATA: dict[str, dict[str, Any]] = {
    "cars": {"lr": 2.5e-4, "step_epochs": 10, "gamma": 3.0},
    "sop": {"step_epochs": 10, "step_factor": 0.25},
}
_RELEASE: dict[str, Any] = {
    "loss": "proxy_anchor", "rule": "release", "tau": 5.0, "gamma": 4.0, "mixing": "separate", "labels": "weighted",
    "crop": "resized", "warmup_u": False,
}  # fmt: skip


def preset(name: str, data: str) -> dict[str, Any]:
    """The options of a preset for a data set, flat.

    ``paper`` is the paper's training with the learning rates of its authors' commands (the text says 1e-5).
    ``release`` is what the authors' released code does, for comparison: u normalised, squared norms, γ = 4,
    L(originals) + λ·L(mixtures, l₁) + (1 − λ)·L(mixtures, l₂), crops of random size, an uncertainty head that is frozen
    during warm-up, images drawn without regard to classes, proxy-anchor.

    >>> preset("paper", "cars:images")["gamma"]
    3.0
    """
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, PRESETS))
    options = {**_PAPER, **_BY_DATA.get(data.partition(":")[0], {})}
    return options if name == "paper" else {**options, **_RELEASE}


def _with_preset(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A preset's options, overridden by ``values``; with another method, that method's share of the preset."""
    given = preset(name, str(values.get("data", "")))
    method = values.get("method", given["method"])
    own = options_of(method)
    if method == given["method"]:
        given = {**_PAPER_FORM, **given}
    return {**{key: value for key, value in given.items() if key in _COMMON or key in own}, **values}

"""The one place where a training option exists: flags, YAML files and a run's config.yaml all come from here."""

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from idml.errors import unknown_name

if TYPE_CHECKING:
    from torch import Tensor


Method = Literal["idml", "ism", "mixup", "plain", "constant", "constant-mixup", "pel", "pel-mixup"]
Ambiguity = Literal["mixup", "cutmix", "low_resolution", "blur", "occlusion"]
Schedule = Literal["constant", "step", "cosine"]
Rule = Literal["similar", "dissimilar", "release"]
Labels = Literal["sets", "weighted", "main"]
Precision = Literal["float32", "bfloat16"]
Beta = Literal["sum", "norms", "relative"]
Train = Literal["all", "last", "heads"]
Introspection = Literal["none", "ranking", "error", "graded"]
_UNTAUGHT = ("plain", "mixup")  # methods whose loss never sees u
_HIDDEN = 64
_WITH_MIXUP = ("idml", "mixup", "constant-mixup", "pel-mixup")


@dataclass(frozen=True)
class TrainConfig:
    """Options of one training run."""

    data: str
    """What to train on: glyphs, cub:PATH, cars:PATH, sop:PATH, inshop:PATH, folder:PATH, csv:FILE."""
    out: str
    """The run directory."""
    loss: str = "multi_similarity"
    """Name of the loss."""
    loss_parameters: tuple[str, ...] = ()
    """Parameters of the loss that differ from its defaults, as name=value (contrastive: negative_margin=0.75)."""
    method: Method = "plain"
    """plain; idml: metric and Mixup; ism: metric alone; constant: metric with u = 0; pel: Gaussians; or with -mixup."""
    ambiguity: tuple[Ambiguity, ...] = ()
    """Kinds of ambiguous images to train on, beside those of the method."""
    labels: Labels = "sets"
    """A mixture has the set of its parents' labels; main: but not that of a parent with less than a quarter; weighted:
    the λ-weighted mean of the losses with each."""
    mixtures: float = 1.0
    """Mixtures in a batch, for each image of it (mixup, cutmix)."""
    rule: Rule = "similar"
    """How methods idml and ism soften: similar is the method, dissimilar and release are for comparison."""
    tau: float = 5.0
    """Temperature of the metric."""
    gamma: float = 0.0
    """Introspective bias of the metric (the paper: 3 for Cars196, else 0)."""
    beta: Beta = "sum"
    """Uncertainty of a pair: sum is ‖u₁ + u₂‖, norms is ‖u₁‖ + ‖u₂‖, relative is sum over its mean in the batch."""
    fit: bool = False
    """Divide by the mean weight of the batch, so that the loss's thresholds fit the metric as they do the plain one."""
    proxy_uncertainty: bool = False
    """Give the proxies an uncertainty that is learned, instead of u = 0 (proxy losses)."""
    trunk: str = "tf_efficientnet_lite0"
    """Any timm model, or conv4 for small images."""
    pretrained: bool = True
    """Start from ImageNet weights (conv4 has none)."""
    train: Train = "all"
    """What learns: all, the heads, or last: the trunk's last stage and the heads, on activations that are kept."""
    freeze_trunk: bool = False
    """Train the heads alone, in seconds, on features that are computed once and kept: the same as train heads."""
    crops: int = 4
    """With freeze_trunk or train last: for how many epochs the images are cropped and mixed anew."""
    embedding_dim: int = 512
    """Size of s and of u."""
    bound: float | None = None
    """Squash the length of u below this."""
    detach: bool = False
    """Keep the gradient of u out of the trunk (methods plain and mixup always do)."""
    u_hidden: int | None = None
    """Width of a hidden layer in the uncertainty head; 0: it is linear. By default 64 with introspection, else 0."""
    u_penalty: float = 0.0
    """Times the mean of ‖u‖², added to the loss."""
    introspection: Introspection | None = None
    """What else teaches u: ranking (by its pair loss), error (a wrong nearest neighbour), graded (degraded copies). By
    default ranking where the loss does not teach it (plain, mixup), else none."""
    pca: bool = True
    """Start the semantic head at the principal components of the features (only with pretrained weights)."""
    image_size: int | None = None
    """Pixels; by default what the trunk was made for."""
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 120
    """Images a step, before mixtures double them; the default shrinks where few classes cannot fill it."""
    per_class: int = 4
    """Images of each class in a batch; 0 draws images without regard to classes."""
    micro_batch: int = 0
    """Images the trunk sees at once, to save memory; the loss still sees the whole batch. 0: all of them."""
    lr: float = 1e-4
    """Learning rate of the trunk and the heads."""
    proxy_lr: float = 100.0
    """Learning rate of the proxies, in units of lr."""
    u_lr: float = 1.0
    """Learning rate of the uncertainty head, in units of lr."""
    weight_decay: float = 1e-4
    """Weight decay of AdamW."""
    schedule: Schedule = "step"
    """How the learning rate falls."""
    step_epochs: int = 5
    """With schedule step: epochs between two falls."""
    step_factor: float = 0.5
    """With schedule step: what is left of the learning rate after each."""
    warmup_epochs: int = 0
    """Epochs in which only the heads (and proxies) learn."""
    freeze_bn: bool = True
    """Keep the statistics of batch normalisation as they are (ignored without pretrained weights)."""
    clip: float = 10.0
    """Gradient values are clipped at this."""
    precision: Precision = "float32"
    """What the network computes in; bfloat16 needs a GPU."""
    holdout: float = 0.1
    """Share of the training classes kept for choosing the best epoch."""
    label_noise: float = 0.0
    """Share of the training labels that are made wrong; the classes kept for choosing stay right."""
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
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool and type(value) is not bool:
                raise ValueError(f"{field.name} must be true or false, got {value!r}")
            if field.type is str and not isinstance(value, str):
                raise ValueError(f"{field.name} must be a word, got {value!r}")
        for name, what in (("ambiguity", "kinds"), ("loss_parameters", "name=value")):
            value = getattr(self, name)
            if not isinstance(value, tuple | list) or not all(isinstance(word, str) for word in value):
                raise ValueError(f"{name} must be a list of {what}, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        if self.introspection is None:
            object.__setattr__(self, "introspection", "ranking" if self.method in _UNTAUGHT else "none")
        if self.u_hidden is None:
            object.__setattr__(self, "u_hidden", 0 if self.introspection == "none" else _HIDDEN)
        choices = (
            ("method", Method),
            ("schedule", Schedule),
            ("rule", Rule),
            ("labels", Labels),
            ("precision", Precision),
            ("beta", Beta),
            ("train", Train),
            ("introspection", Introspection),
        )
        for name, kind in choices:
            _require_choice(name, getattr(self, name), get_args(kind))
        for value in self.ambiguity:
            _require_choice("ambiguity", value, get_args(Ambiguity))
        for name in ("epochs", "batch_size", "embedding_dim", "step_epochs", "checkpoint_every", "crops"):
            _require_number(name, getattr(self, name), at_least=1, whole=True)
        for name in ("per_class", "micro_batch", "u_hidden", "warmup_epochs", "workers", "seed"):
            _require_number(name, getattr(self, name), at_least=0, whole=True)
        for name in ("tau", "lr", "proxy_lr", "u_lr", "clip", "step_factor", "mixtures"):
            _require_number(name, getattr(self, name), above=0)
        for name in ("gamma", "weight_decay", "holdout", "label_noise", "u_penalty"):
            _require_number(name, getattr(self, name), at_least=0)
        require_sense(self)

    @property
    def introspective(self) -> bool:
        """Whether pairs are compared by the introspective metric."""
        return self.method in ("idml", "ism") or self.constant

    @property
    def constant(self) -> bool:
        """Whether every image has u = 0, and gamma is the uncertainty of every pair."""
        return self.method in ("constant", "constant-mixup")

    @property
    def learns_u(self) -> bool:
        """Whether anything teaches u."""
        return self.method in ("idml", "ism") or self.introspection != "none"

    @property
    def detached(self) -> bool:
        """Whether the gradient of u stays out of the trunk; where only introspection has one, it always does."""
        return self.detach or self.method in _UNTAUGHT

    @property
    def part(self) -> Train:
        """What learns: `train`, with the older `freeze_trunk` as another name of heads."""
        return "heads" if self.freeze_trunk else self.train

    @property
    def probabilistic(self) -> bool:
        """Whether the model gives Gaussians."""
        return self.method in ("pel", "pel-mixup")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of ambiguity of this run, the method's own included."""
        own = ("mixup",) if self.method in _WITH_MIXUP and not self._mixes else ()
        return (*self.ambiguity, *own)

    @property
    def mixed_images(self) -> int:
        """How many mixtures a batch has."""
        mixes = {"mixup", "cutmix"} & {*self.kinds}
        return max(1, round(self.mixtures * self.batch_size)) if mixes else 0

    @property
    def starts_from_weights(self) -> bool:
        """Whether the trunk begins with pretrained weights."""
        return self.pretrained and self.trunk != "conv4"

    @property
    def normalises_frozen(self) -> bool:
        """Whether batch normalisation keeps the statistics of the pretrained weights."""
        return self.freeze_bn and self.starts_from_weights

    @property
    def _mixes(self) -> bool:
        return "mixup" in self.ambiguity or "cutmix" in self.ambiguity


def from_dict(values: dict[str, Any]) -> TrainConfig:
    """The configuration of a mapping, as a YAML file holds it; an unknown key names the nearest known one.

    The key ``preset`` stands for the options of that preset; the others override them.
    """
    known = ["preset", *(f.name for f in dataclasses.fields(TrainConfig))]
    for key in values:
        if key not in known:
            raise ValueError(unknown_name("option", key, known, choices="idml train --help lists them"))
    missing = [
        f.name for f in dataclasses.fields(TrainConfig) if f.default is dataclasses.MISSING and f.name not in values
    ]
    if missing:
        raise ValueError(f"the option {missing[0]!r} is missing")
    values = dict(values)
    if name := values.pop("preset", None):
        values = {**preset(name, str(values["data"])), **values}
    return TrainConfig(**values)


def difference(old: TrainConfig, new: TrainConfig) -> list[str]:
    """What differs between two configurations, a line each; where a run lies does not count."""
    a, b = dataclasses.asdict(old), dataclasses.asdict(new)
    return [f"{key}: {a[key]!r} → {b[key]!r}" for key in a if key not in ("out", "workers") and a[key] != b[key]]


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(unknown_name(name, value, choices))


def _require_number(
    name: str, value: object, *, at_least: float = -math.inf, above: float = -math.inf, whole: bool = False
) -> None:
    sound = type(value) is int or (type(value) is float and not whole and math.isfinite(value))
    if not sound or not (isinstance(value, int | float) and value >= at_least and value > above):
        what = "a whole number" if whole else "a number"
        limit = f" of at least {at_least:g}" if at_least > -math.inf else f" above {above:g}"
        raise ValueError(f"{name} must be {what}{limit}, got {value!r}")


# -------------------- together --------------------
# Which training options go together; a combination that makes no sense is refused with one line.


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


# -------------------- presets --------------------
# Whole sets of options under one name: --preset paper, --preset release. Files and flags override them.


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
        raise ValueError(unknown_name("preset", name, NAMES))
    options = {**_PAPER, **_BY_DATA.get(data.partition(":")[0], {})}
    return options if name == "paper" else {**options, **_RELEASE}

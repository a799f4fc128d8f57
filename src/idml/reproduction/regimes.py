"""Regimes and arms: how much of the network a table trains, and which runs it compares.

| regime | trains | on |
| --- | --- | --- |
| frozen | the heads, on cached features of the pretrained trunk | a laptop; the default for photographs |
| last | the last stage and the heads, on cached activations | a laptop |
| full | everything, from pretrained weights | a laptop, for chosen rows |
| resnet50 | everything: the paper's own network at 224 pixels, for few epochs | a laptop, for one loss and one seed |
| scratch | a small trunk, from random weights | a laptop; the default for glyphs |
| paper | everything, ResNet-50 at 224 pixels, 60 epochs | GPUs |

Every regime tunes every arm over the same learning rates; `full` and `resnet50` have one rate, 1e-4.

Options are flat, as in a run's config.yaml. An arm is stored under its options alone, so a change of the defaults of
`idml train` does not lose stored rows. So arms with mixtures always say which pairs mixtures form and how they are
labelled (`FORMS`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from idml.errors import unknown_name
from idml.training.config import TrainConfig, common_options, preset

SCALES = ("laptop", "paper")
LOSSES = {
    "triplet_semihard": "Triplet-SH",
    "proxy_nca": "ProxyNCA",
    "fast_ap": "FastAP",
    "contrastive": "Contrastive",
    "margin_dw": "Margin-DW",
    "multi_similarity": "Multi-Sim",
    "proxy_anchor": "ProxyAnchor",
}
"""The paper's seven losses and their names in the paper."""
TWICE = "plain, twice the images"
BATCH_SIZE, STEP_EPOCHS = 120, 5
"""What a run has where neither its regime nor its arm says otherwise."""
UNTAUGHT_U: dict[str, Any] = {"teach_u": "none", "u_hidden": 0}
"""All arms but those that ask for it: nothing beside the loss teaches u. (`idml train` has another default.)"""
TAUGHT_U: dict[str, Any] = {"teach_u": "ranking", "u_hidden": 64}
"""A u that is taught by ranking beside the loss, the default of `idml train`. In plain training s stays the same."""
FORMS: dict[str, dict[str, Any]] = {
    "sets": {"mixing": "separate", "labels": "sets"},
    "weighted": {"mixing": "separate", "labels": "weighted"},
    "against-clean": {"mixing": "against-clean", "labels": "sets"},
    "joint": {"mixing": "joint", "labels": "sets"},
}
"""How mixtures enter the loss. `sets` is the paper's text, `weighted` ordinary Mixup."""
CHOSEN_FORM: str | None = "weighted"
"""The form that `idml reproduce default-form` chose by held-out classes; None: not chosen yet."""


# -------------------- regimes --------------------


@dataclass(frozen=True)
class Speed:
    """The expected cost of a run on one core (or GPU).

    ``images`` a second in training, ``fixed`` seconds beside it, and with a frozen trunk ``features`` a second, which
    are computed once for each seed and kind of images.
    """

    images: float
    fixed: float
    on: str
    features: float = float("inf")


@dataclass(frozen=True)
class Regime:
    """The options that all arms share, the learning rates each of them tries, and the number of seeds of a table."""

    name: str
    base: Mapping[str, Any]
    speed: Speed
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    seeds: int = 3
    longer: tuple[str, ...] = ("epochs", "step_epochs")
    """The options that are doubled for an arm that sees as many images as Mixup shows."""
    study_rate: float = 3e-4
    """The learning rate of studies, which tune nothing."""

    def hours(self, images: float) -> float:
        """Return the expected time of a run that sees this many images in training."""
        return (images / self.speed.images + self.speed.fixed) / 3600


_CORE = "one core of a 2-core CPU"
_PHOTOS = {**UNTAUGHT_U, "image_size": 112, "embedding_dim": 512}
LAPTOP = {
    "frozen": Regime(
        "frozen",
        {**_PHOTOS, "train": "heads", "crops": 2, "epochs": 12},
        Speed(6000, 20, _CORE, features=300),
        longer=("epochs", "step_epochs", "crops"),
    ),
    "last": Regime(
        "last",
        {**_PHOTOS, "train": "last", "crops": 2, "epochs": 6},
        Speed(140, 130, _CORE),
        rates=(1e-4, 3e-4),
    ),
    "full": Regime("full", {**_PHOTOS, "epochs": 8}, Speed(50, 150, _CORE), rates=(1e-4,), seeds=2, study_rate=1e-4),
    "resnet50": Regime(
        "resnet50",
        {
            **UNTAUGHT_U, "trunk": "resnet50", "image_size": 224, "embedding_dim": 512, "batch_size": BATCH_SIZE,
            "per_class": 0, "pca": False, "schedule": "constant", "warmup_epochs": 1, "epochs": 6,
            "checkpoint_every": 10, "precision": "bfloat16",
        },
        Speed(6, 1800, _CORE),
        rates=(1e-4,),
        seeds=1,
        study_rate=1e-4,
    ),
    "scratch": Regime(
        "scratch",
        {**UNTAUGHT_U, "trunk": "conv4", "pretrained": False, "image_size": 28, "embedding_dim": 64, "epochs": 2},
        Speed(800, 22, _CORE),
        rates=(1e-3, 3e-3),
        study_rate=1e-3,
    ),
}  # fmt: skip
_AT_224 = {"cub": Speed(6000, 20, _CORE, features=100)}
"""Data sets whose frozen regime has 224 pixels. (Cars has 112: the images in use have 128 pixels on the short side.)"""


def regime_for(data: str, scale: str = "laptop", name: str | None = None) -> Regime:
    """Return the regime of a scale for a data set; ``name`` chooses another regime of the laptop scale.

    >>> regime_for("glyphs").name, regime_for("cub:images").name, regime_for("cub:images", "paper").base["trunk"]
    ('scratch', 'frozen', 'resnet50')
    """
    if scale not in SCALES:
        raise ValueError(unknown_name("scale", scale, SCALES))
    if scale == "paper":
        if name is not None:
            raise ValueError(f"the paper's scale trains the whole network: leave out the regime {name!r}")
        return _paper_regime(data)
    if name is None:
        name = "scratch" if data == "glyphs" else "frozen"
    if name not in LAPTOP:
        raise ValueError(unknown_name("regime", name, LAPTOP))
    regime, kind = LAPTOP[name], data.partition(":")[0]
    if name == "frozen" and kind in _AT_224:
        return replace(regime, base={**regime.base, "image_size": 224}, speed=_AT_224[kind])
    return regime


def named_regime(name: str, data: str) -> Regime:
    """Return the regime that a file of results is named after."""
    return _paper_regime(data) if name == "paper" else regime_for(data, name=name)


def _paper_regime(data: str) -> Regime:
    """The preset ``paper``. Its rates: the paper's text, its authors' commands, and one between."""
    options = preset("paper", data)
    shared = {option.name for option in common_options()} - {"lr", "method"}
    base = {key: value for key, value in options.items() if key in shared}
    speed = Speed(400, 300, "one NVIDIA A100, assumed: ResNet-50 trains on 400 images/s at 224 px in float32")
    return Regime("paper", {**base, **UNTAUGHT_U}, speed, rates=(1e-5, 1e-4, float(options["lr"])), seeds=5)


# -------------------- arms --------------------


_NOT_THE_RELEASE = (
    "loss", "lr", "trunk", "image_size", "embedding_dim", "batch_size", "epochs", "warmup_epochs", "schedule",
    "step_epochs", "step_factor",
)  # fmt: skip
"""Options of the preset `release` that its regime decides for all arms: the network and the length of training."""


@dataclass(frozen=True)
class Arm:
    """A row of a table: a loss, a name that the paper's figures share, and the options beyond the regime's."""

    loss: str
    name: str
    options: Mapping[str, Any]
    tested: str = "euclidean"
    """What compares the test images: "euclidean" on s, or "introspective"."""
    against: str = "plain"
    """The plain arm of the same loss that this one has to beat."""

    @property
    def key(self) -> tuple[str, str]:
        """What no other arm of a table has."""
        return self.loss, self.name

    def __str__(self) -> str:
        return f"{LOSSES.get(self.loss, self.loss)}, {self.name}"


def method_options(method: str) -> dict[str, Any]:
    """Return the options that an arm has by its method.

    Mixup without the metric is ordinary Mixup (`weighted`), IDML is the paper's text (`sets`), both `separate`.
    """
    form = {"mixup": FORMS["weighted"], "pel-mixup": FORMS["weighted"], "idml": FORMS["sets"]}.get(method, {})
    return {"method": method, **form}


class Arms:
    """Builds the arms for a data set in a regime."""

    def __init__(self, data: str, regime: Regime) -> None:
        self.data, self.regime = data.partition(":")[0], regime
        self.gamma = float(preset("paper", self.data)["gamma"])
        """The paper's γ for this data set."""

    def arm(
        self, loss: str, method: str, name: str = "", tested: str = "euclidean", against: str = "plain", **options: Any
    ) -> Arm:
        """Return an arm, with the data set's γ for the metric and `method_options` unless ``options`` say otherwise."""
        if method in ("idml", "ism") and self.gamma:
            options = {"gamma": self.gamma, **options}
        return Arm(loss, name or method, {**method_options(method), **options}, tested, against)

    def plain(self, loss: str) -> Arm:
        """Return the loss as it is, tuned and stopped early like every other arm."""
        return self.arm(loss, "plain")

    def twice(self, loss: str) -> Arm:
        """Return plain with as many images as Mixup shows: twice the epochs, the learning rate falls half as fast."""
        usual = {"step_epochs": STEP_EPOCHS, **self.regime.base}
        return self.arm(loss, "plain", TWICE, **{key: 2 * usual[key] for key in self.regime.longer})

    def form(self, loss: str, form: str, **options: Any) -> Arm:
        """Return IDML with another form of mixtures than the paper's text."""
        return self.arm(loss, "idml", "idml" if form == "sets" else f"idml, {form}", **FORMS[form], **options)

    def release(self) -> Arm:
        """Return what the authors' released code does, with the network and the length of training of the regime."""
        usual = {field.name: field.default for field in fields(TrainConfig)}
        options = {
            key: value
            for key, value in preset("release", self.data).items()
            if key not in _NOT_THE_RELEASE
            and key not in UNTAUGHT_U
            and value != self.regime.base.get(key, usual.get(key))
        }
        return Arm("proxy_anchor", "release", options)

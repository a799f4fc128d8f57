"""Regimes and arms: how much of the network a table trains, and which runs it compares.

| regime | trains | on |
| --- | --- | --- |
| frozen | the heads, on cached features of the pretrained trunk | a laptop; the default for photographs |
| last | the last stage and the heads, on cached activations | a laptop |
| full | everything, from pretrained weights | a laptop, for a few rows |
| scratch | a small trunk, from random weights | a laptop; the default for glyphs |
| paper | everything, ResNet-50 at 224 pixels | GPUs |

Every regime tunes every arm over the same learning rates. `last` was measured on CUB: 37 seconds of one core for an
epoch of 5,280 images, and 80 for the activations. All of Table 1 would take one core 17 hours (its dry run); frozen
takes 2. So frozen is the main regime, and `last` is for chosen rows.

Options are flat, as in a run's config.yaml. An arm is stored under its options alone, so a change of the defaults of
`idml train` does not lose stored rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from idml.errors import unknown_name
from idml.training.config import preset

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


# -------------------- regimes --------------------


@dataclass(frozen=True)
class Speed:
    """The expected cost of a run: ``images`` a second in training, and ``fixed`` seconds beside it."""

    images: float
    fixed: float
    on: str


@dataclass(frozen=True)
class Regime:
    """The options that all arms share, the learning rates each of them tries, and the number of seeds of a table."""

    name: str
    base: Mapping[str, Any]
    speed: Speed
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    seeds: int = 5
    longer: tuple[str, ...] = ("epochs", "step_epochs")
    """The options that are doubled for an arm that sees as many images as Mixup shows."""
    study_rate: float = 3e-4
    """The learning rate of studies, which tune nothing."""

    def hours(self, images: float) -> float:
        """Return the expected time of a run that sees this many images in training."""
        return (images / self.speed.images + self.speed.fixed) / 3600


_ONE_CORE = "one core of a 2-core CPU"
_PHOTOS = {**UNTAUGHT_U, "image_size": 112, "embedding_dim": 512}
_LAPTOP = {
    "frozen": Regime(
        "frozen",
        {**_PHOTOS, "train": "heads", "crops": 2, "epochs": 12},
        Speed(6000, 10, f"{_ONE_CORE}; plus the trunk's features, about 3 minutes for each seed and kind of images"),
        longer=("epochs", "step_epochs", "crops"),
    ),
    "last": Regime(
        "last",
        {**_PHOTOS, "train": "last", "crops": 2, "epochs": 6},
        Speed(140, 130, _ONE_CORE),
        rates=(1e-4, 3e-4),
        seeds=3,
    ),
    "full": Regime("full", {**_PHOTOS, "epochs": 6}, Speed(55, 100, _ONE_CORE), rates=(1e-4, 3e-4), seeds=2),
    "scratch": Regime(
        "scratch",
        {**UNTAUGHT_U, "trunk": "conv4", "pretrained": False, "image_size": 28, "embedding_dim": 64, "epochs": 2},
        Speed(800, 22, _ONE_CORE),
        rates=(1e-3, 3e-3),
        seeds=3,
        study_rate=1e-3,
    ),
}


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
    if name not in _LAPTOP:
        raise ValueError(unknown_name("regime", name, _LAPTOP))
    return _LAPTOP[name]


def named_regime(name: str, data: str) -> Regime:
    """Return the regime that a file of results is named after."""
    return _paper_regime(data) if name == "paper" else regime_for(data, name=name)


def _paper_regime(data: str) -> Regime:
    """The preset ``paper``. Its rates: the paper's text, its authors' commands, and one between."""
    options = preset("paper", data)
    apart = ("lr", "tau", "gamma", "method")
    base = {key: value for key, value in options.items() if key not in apart}
    speed = Speed(400, 300, "one NVIDIA A100, assumed: ResNet-50 trains on 400 images/s at 224 px in float32")
    return Regime("paper", {**base, **UNTAUGHT_U}, speed, rates=(1e-5, 1e-4, float(options["lr"])))


# -------------------- arms --------------------


_RETIRED: dict[str, tuple[Any, ...]] = {
    "method": ("constant", "constant-mixup"),
    "labels": ("main",),
    "teach_u": ("error", "graded"),
}
_RETIRED_KEYS = ("beta", "bound", "u_penalty", "mixtures", "label_noise")
_CONSTANT = 1.0  # β of the arm constant where the paper's γ is 0


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

    @property
    def retired(self) -> bool:
        """Whether the options left the code: the stored rows are shown, and none can be made."""
        chosen = any(value in _RETIRED.get(key, ()) for key, value in self.options.items())
        return chosen or any(key in self.options for key in _RETIRED_KEYS)

    def __str__(self) -> str:
        return f"{LOSSES.get(self.loss, self.loss)}, {self.name}"


class Arms:
    """Builds the arms for a data set in a regime."""

    def __init__(self, data: str, regime: Regime) -> None:
        self.data, self.regime = data.partition(":")[0], regime
        self.gamma = float(preset("paper", self.data)["gamma"])
        """The paper's γ for this data set."""

    def arm(
        self, loss: str, method: str, name: str = "", tested: str = "euclidean", against: str = "plain", **options: Any
    ) -> Arm:
        """Return an arm; methods with the metric take the data set's γ unless ``options`` give one."""
        if method in ("idml", "ism") and self.gamma:
            options = {"gamma": self.gamma, **options}
        if method.startswith("constant"):
            options = {"gamma": self.gamma or _CONSTANT, **options}
        return Arm(loss, name or method, {"method": method, **options}, tested, against)

    def plain(self, loss: str) -> Arm:
        """Return the loss as it is, tuned and stopped early like every other arm."""
        return self.arm(loss, "plain")

    def twice(self, loss: str) -> Arm:
        """Return plain with as many images as Mixup shows: twice the epochs, the learning rate falls half as fast."""
        usual = {"step_epochs": STEP_EPOCHS, **self.regime.base}
        return self.arm(loss, "plain", TWICE, **{key: 2 * usual[key] for key in self.regime.longer})

    def release(self) -> Arm:
        """Return what the authors' released code does."""
        return Arm("proxy_anchor", "release", {"method": "idml", "rule": "release", "gamma": 4.0, "labels": "weighted"})

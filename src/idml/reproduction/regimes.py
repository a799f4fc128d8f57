"""How much of the network a table trains, and with what: the two scales, and the regimes of the laptop scale.

| regime | trains | on |
| --- | --- | --- |
| frozen | the heads, on kept features of the pretrained trunk | a laptop; the default for photographs |
| last | the last stage and the heads, on kept activations | a laptop |
| full | everything, from pretrained weights | a laptop, for a few rows |
| scratch | a small trunk, from random weights | a laptop; the default for glyphs |
| paper | everything, ResNet-50 at 224 pixels | GPUs |

Every regime tunes every arm over the same learning rates. `last` was measured on CUB before it was decided on: 37
seconds of a core for an epoch of 5,280 images, 80 for the activations. All of Table 1 would take a core 17 hours (its
dry run) where frozen takes 2. It is there for chosen rows; frozen is the main regime.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from idml.errors import unknown_name
from idml.reproduction.first import FROZEN, SCRATCH
from idml.reproduction.grid import UNTAUGHT
from idml.training.config import preset

SCALES = ("laptop", "paper")
_RATES = (1e-4, 3e-4, 1e-3)
_PHOTOS = {**UNTAUGHT, **{key: FROZEN[key] for key in ("image_size", "embedding_dim")}}


@dataclass(frozen=True)
class Speed:
    """What a run is expected to cost: ``images`` a second in training, and ``fixed`` seconds beside it."""

    images: float
    fixed: float
    on: str


@dataclass(frozen=True)
class Regime:
    """The options that all arms share, the learning rates each of them tries, and how many seeds a table has."""

    name: str
    base: Mapping[str, Any]
    speed: Speed
    rates: tuple[float, ...] = _RATES
    seeds: int = 5
    longer: tuple[str, ...] = field(default=("epochs", "step_epochs"))
    """What is doubled for an arm that sees as many images as Mixup shows."""

    def hours(self, images: float) -> float:
        """The expected time of a run that sees this many images in training."""
        return (images / self.speed.images + self.speed.fixed) / 3600


_TWO_CORES = "one core of a 2-core CPU"
_LAPTOP = {
    "frozen": Regime(
        "frozen",
        {**UNTAUGHT, **{key: value for key, value in FROZEN.items() if key != "lr"}},
        Speed(6000, 10, f"{_TWO_CORES}; the trunk's features apart, about 3 minutes for each seed and kind of images"),
        longer=("epochs", "step_epochs", "crops"),
    ),
    "last": Regime(
        "last",
        {**_PHOTOS, "train": "last", "crops": 2, "epochs": 6},
        Speed(140, 130, _TWO_CORES),
        rates=(1e-4, 3e-4),
        seeds=3,
    ),
    "full": Regime("full", {**_PHOTOS, "epochs": 6}, Speed(55, 100, _TWO_CORES), rates=(1e-4, 3e-4), seeds=2),
    "scratch": Regime(
        "scratch",
        {**UNTAUGHT, **{key: value for key, value in SCRATCH.items() if key != "lr"}},
        Speed(800, 22, _TWO_CORES),
        rates=(1e-3, 3e-3),
        seeds=3,
    ),
}


def regime_for(data: str, scale: str = "laptop", name: str | None = None) -> Regime:
    """The regime of a scale for a data set; ``name`` chooses another one of the laptop scale.

    >>> regime_for("glyphs").name, regime_for("cub:images").name, regime_for("cub:images", "paper").base["trunk"]
    ('scratch', 'frozen', 'resnet50')
    """
    if scale not in SCALES:
        raise ValueError(unknown_name("scale", scale, SCALES))
    if scale == "paper":
        if name is not None:
            raise ValueError(f"the paper's scale trains the whole network: leave out the regime {name!r}")
        return _paper(data)
    if name is None:
        name = "scratch" if data == "glyphs" else "frozen"
    if name not in _LAPTOP:
        raise ValueError(unknown_name("regime", name, _LAPTOP))
    return _LAPTOP[name]


def _paper(data: str) -> Regime:
    """The preset ``paper``; its rates are those of the paper's text, of its authors' commands, and one between."""
    base = {key: value for key, value in preset("paper", data).items() if key not in ("lr", "tau", "gamma", "method")}
    rates = (1e-5, 1e-4, float(preset("paper", data)["lr"]))
    speed = Speed(400, 300, "one NVIDIA A100, assumed: ResNet-50 trains on 400 images/s at 224 px in float32")
    return Regime("paper", base, speed, rates=rates)


def known_regime(name: str, data: str) -> Regime:
    """The regime of a folder of results."""
    return _paper(data) if name == "paper" else regime_for(data, name=name)

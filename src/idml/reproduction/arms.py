"""The arms of the tables: what is compared, as options on top of a regime's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from idml.reproduction.regimes import Regime
from idml.training.config import TrainConfig, preset

LOSSES = {
    "triplet_semihard": "Triplet-SH",
    "proxy_nca": "ProxyNCA",
    "fast_ap": "FastAP",
    "contrastive": "Contrastive",
    "margin_dw": "Margin-DW",
    "multi_similarity": "Multi-Sim",
    "proxy_anchor": "ProxyAnchor",
}
"""The paper's seven losses and how it calls them."""
TWICE = "plain, twice the images"
_CONSTANT = 1.0  # β of the arm constant where the paper's γ is 0


@dataclass(frozen=True)
class Arm:
    """A row of a table: a loss, a name that the paper's numbers know too, and options beyond the regime's."""

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


class Arms:
    """The arms for a data set in a regime."""

    def __init__(self, data: str, regime: Regime) -> None:
        self.data, self.regime = data.partition(":")[0], regime
        self.gamma = float(preset("paper", self.data)["gamma"])
        """The paper's γ for this data set."""

    def arm(
        self, loss: str, method: str, name: str = "", tested: str = "euclidean", against: str = "plain", **options: Any
    ) -> Arm:
        """An arm; methods with the metric take the data set's γ unless ``options`` give one."""
        if method in ("idml", "ism") and self.gamma:
            options = {"gamma": self.gamma, **options}
        if method.startswith("constant"):
            options = {"gamma": self.gamma or _CONSTANT, **options}
        return Arm(loss, name or method, {"method": method, **options}, tested, against)

    def plain(self, loss: str) -> Arm:
        """The loss as it is, tuned and stopped early like every other arm."""
        return self.arm(loss, "plain")

    def twice(self, loss: str) -> Arm:
        """Plain, with as many images as Mixup shows: twice the epochs, the learning rate falling half as fast."""
        usual = {"step_epochs": TrainConfig.step_epochs, **self.regime.base}
        return self.arm(loss, "plain", TWICE, **{key: 2 * usual[key] for key in self.regime.longer})

    def release(self) -> Arm:
        """What the authors' released code does."""
        paper, release = preset("paper", self.data), preset("release", self.data)
        own = {key: value for key, value in release.items() if paper.get(key) != value and key != "loss"}
        return Arm(str(release["loss"]), "release", {"method": "idml", **own})

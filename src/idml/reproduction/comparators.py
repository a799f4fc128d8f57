"""The other systems of Table 1 as arms: `idml reproduce table1 --comparators`.

All of them have the network, the batches and the learning rates of the regime, tuned and stopped on held-out classes
like every other arm. The authors of most of them kept the epoch with the best R@1 on the test classes.

A frozen trunk cannot train two of them. `--regime last` trains these two, and the plain arms that they are compared
with; the others are not trained there again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from idml.reproduction.claims import Gain, Key
from idml.reproduction.paper_tables import Table
from idml.reproduction.regimes import Arm, Arms

NAME = "table1-comparators"
COMMAND = "table1 --comparators"
_PA, _MDW = "proxy_anchor", "margin_dw"
PROXY_ANCHOR: Key = (_PA, "plain")
"""The arm that every system is compared with."""


@dataclass(frozen=True)
class Comparator:
    """A system: its name in the paper, the loss and the method that stand for it, and a remark for the reader."""

    name: str
    loss: str
    method: str = "plain"
    options: Mapping[str, Any] = field(default_factory=dict)
    by_data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    frozen: bool = True
    """Whether it can be trained on a frozen trunk."""
    network: str = "512R"
    """The network of the paper's row: dimensions, and R ResNet-50, BN BN-Inception or G GoogLeNet."""
    remark: str = ""

    def arm(self, arms: Arms) -> Arm:
        """Return its arm; a loss alone has no plain arm to beat."""
        options = {**self.options, **self.by_data.get(arms.data, {})}
        against = self.name if self.method == "plain" else self.plain(arms).name
        return arms.arm(self.loss, self.method, self.name, against=against, **options)

    def plain(self, arms: Arms) -> Arm:
        """Return the plain arm of its loss, with the same parameters of the loss."""
        parameters = self.options.get("loss_parameters")
        if parameters is None:
            return arms.plain(self.loss)
        name = f"plain, {', '.join(parameters)}"
        return arms.arm(self.loss, "plain", name, against=name, loss_parameters=parameters)


COMPARATORS = (
    Comparator(
        "ABE-8", "contrastive", "abe", {"loss_parameters": ("negative_margin=1.0", "power=2")}, frozen=False,
        network="512G", remark="masks by 1×1 convolutions instead of copies of layers",
    ),
    Comparator(
        "Ranked", "ranked_list", by_data={"cub": {"loss_parameters": ("alpha=1.4", "margin=0.2")}}, network="1536BN",
        remark="the paper's row has heads on three stages (1536-d), ours one (RLL-H: 57.4 CUB, 74.0 Cars)",
    ),
    Comparator(
        "DREML", "softmax", "dreml", {"embedding_dim": 576}, network="576, ResNet-18 (printed 9216R)",
        remark="heads of one trunk, not the paper's ensemble; 576-d on CUB and Cars, though printed as 9216",
    ),
    Comparator("SoftTriple", "soft_triple", network="512BN", remark="without the regulariser that merges centres"),
    Comparator("D&C", _MDW, "dac", network="128R"),
    Comparator(
        "MIC", _MDW, "mic", by_data={"cars": {"clusters": 150, "adversary_weight": 0.03}}, network="128R",
        remark="one step for both heads, where the authors make two",
    ),
    Comparator(
        "RankMI", "rankmi", network="128R",
        remark="no code was released: the critic, its settings and the sampler are ours",
    ),
    Comparator("CircleLoss", "circle"),
    Comparator(
        "PADS", _MDW, "pads", network="128R (printed 128BN)",
        remark="printed as BN-Inception, but its figures are those of a ResNet-50 (66.6 CUB, 81.7 Cars with BN)",
    ),
    Comparator(
        "DIML", "multi_similarity", "diml", frozen=False,
        remark="the paper's RP and MAP@R count the query itself: the bounds are what remains of them without it; its "
        "87.0 on Cars is ProxyAnchor + DIML; ours is tested without re-ranking",
    ),
    Comparator("DCML", _MDW, "dcml", remark="its tasks are our reading: the release does not run"),
    Comparator(
        "DRML", _PA, "drml", {"loss_parameters": ("alpha=64", "margin=0.2")}, network="512BN",
        remark="the paper's row is ProxyAnchor + DRML",
    ),
    Comparator(
        "ProxyNCA++", "proxy_nca_pp", remark="its loss alone, with our pooling and sampler instead of the authors'"
    ),
    Comparator(
        "DiVA", _MDW, "diva", by_data={"cars": {"task_weight": 0.15, "diva_adversary": 0.006}},
        remark="the authors choose the weights of the slices on the test classes",
    ),
    Comparator(
        "NIR", _PA, "nir",
        remark="the energy of the paper's text; its release has another form; the paper's row is ProxyAnchor + NIR",
    ),
)  # fmt: skip
"""The fifteen systems, in the order of the paper's table."""


def comparators_table(arms: Arms) -> Table:
    """The systems that the regime can train, against plain ProxyAnchor and the plain form of their losses.

    In the regime ``last`` these are the ones that a frozen trunk cannot train.
    """
    wanted = {"frozen": (True,), "last": (False,)}.get(arms.regime.name, (True, False))
    chosen = [each for each in COMPARATORS if each.frozen in wanted]
    left_out = [each.name for each in COMPARATORS if each not in chosen]
    own = [each.arm(arms) for each in chosen]
    plain = [arms.plain(_PA), *(each.plain(arms) for each in chosen if each.method != "plain")]
    rows = [*{arm.key: arm for arm in plain}.values(), *own]
    claims = [Gain(f"{arm.name} is above plain ProxyAnchor", arm.key, PROXY_ANCHOR, own=True) for arm in own]
    notes = [f"{each.name}: {each.remark}." for each in chosen if each.remark]
    if left_out and arms.regime.name == "frozen":
        notes.append(
            f"{' and '.join(left_out)} need --regime last: they learn within the trunk, or on maps of positions."
        )
    elif left_out:
        notes.append(f"The other {len(left_out)} systems are trained on a frozen trunk (--regime frozen).")
    return Table("Table 1: the other systems, under one protocol", tuple(rows), tuple(claims), notes=tuple(notes))

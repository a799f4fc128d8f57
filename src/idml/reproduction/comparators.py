"""The other systems of Table 1 as arms: `idml reproduce table1 --comparators`.

All of them have the network, the batches and the learning rates of the regime, tuned and stopped on held-out classes
like every other arm. The authors of most of them kept the epoch with the best R@1 on the test classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from idml.reproduction.claims import Gain
from idml.reproduction.paper_tables import Table
from idml.reproduction.regimes import Arm, Arms

NAME = "table1-comparators"
_PA, _MDW = "proxy_anchor", "margin_dw"


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
    remark: str = ""

    def arm(self, arms: Arms) -> Arm:
        """Return its arm; a loss alone has no plain arm to beat."""
        options = {**self.options, **self.by_data.get(arms.data, {})}
        against = self.name if self.method == "plain" else "plain"
        return arms.arm(self.loss, self.method, self.name, against=against, **options)


COMPARATORS = (
    Comparator(
        "Ranked", "ranked_list", by_data={"cub": {"loss_parameters": ("alpha=1.4", "margin=0.2")}},
        remark="the paper's row has heads on three stages (1536-d), ours one (RLL-H: 57.4 CUB, 74.0 Cars)",
    ),
    Comparator("RankMI", "rankmi", remark="no code was released: the critic, its settings and the sampler are ours"),
    Comparator("NIR", _PA, "nir", remark="the energy of the paper's text; its release has another form"),
    Comparator(
        "DREML", "softmax", "dreml", {"embedding_dim": 576},
        remark="heads of one trunk, not the paper's ensemble; 576-d on CUB and Cars, though printed as 9216",
    ),
    Comparator(
        "DIML", "multi_similarity", "diml", frozen=False,
        remark="the paper's RP and MAP@R count the query itself; its 87.0 on Cars is ProxyAnchor + DIML",
    ),
    Comparator("DRML", _PA, "drml", {"loss_parameters": ("alpha=64", "margin=0.2")}),
    Comparator("D&C", _MDW, "dac"),
    Comparator("MIC", _MDW, "mic", by_data={"cars": {"clusters": 150, "adversary_weight": 0.03}}),
    Comparator(
        "DiVA", _MDW, "diva", by_data={"cars": {"task_weight": 0.15, "diva_adversary": 0.006}},
        remark="the authors choose the weights of the slices on the test classes",
    ),
    Comparator("DCML", _MDW, "dcml", remark="its tasks are our reading: the release does not run"),
    Comparator("PADS", _MDW, "pads", remark="printed as BN-Inception, but its figures are those of a ResNet-50"),
    Comparator("ABE-8", "contrastive", "abe", {"loss_parameters": ("negative_margin=1.0",)}, frozen=False),
)  # fmt: skip


def comparators_table(arms: Arms) -> Table:
    """The systems that the regime can train, against plain ProxyAnchor and the plain form of their losses."""
    chosen = [each for each in COMPARATORS if each.frozen or arms.regime.name != "frozen"]
    left_out = [each.name for each in COMPARATORS if each not in chosen]
    own = [each.arm(arms) for each in chosen]
    losses = dict.fromkeys([_PA, _MDW, *(arm.loss for arm in own if arm.against == "plain")])
    rows = [*(arms.plain(loss) for loss in losses), *own]
    claims = [Gain(f"{arm.name} is above plain ProxyAnchor", arm.key, (_PA, "plain"), own=True) for arm in own]
    notes = [f"{each.name}: {each.remark}." for each in chosen if each.remark]
    if left_out:
        notes.append(
            f"{' and '.join(left_out)} need --regime last: they learn within the trunk, or on maps of positions."
        )
    return Table("Table 1: the other systems, under one protocol", tuple(rows), tuple(claims), notes=tuple(notes))

"""The paper's tables and figures, and those beyond it, as data: the arms of each and what it claims.

Every table holds, beside its own rows, the raw features and for each of its losses the plain arm, tuned and stopped
early like the others. What a table costs follows from its arms; `idml reproduce TABLE --dry-run` says it.
"""

from collections.abc import Callable
from typing import Any

from idml.reproduction import tables_beyond
from idml.reproduction.arms import LOSSES, Arm, Arms
from idml.reproduction.claims import Claim, Gain, LevelFalls, MixedAbove
from idml.reproduction.table import Table
from idml.reproduction.tables_beyond import as_many_images
from idml.training.config import TrainConfig

_PA, _MS, _MDW = "proxy_anchor", "multi_similarity", "margin_dw"
AMBIGUITIES = ("low_resolution", "blur", "occlusion")
BATCHES = (40, 60, 80, 100, 120, 140, 160, 180)
TAUS, GAMMAS = (1.0, 3.0, 5.0, 7.0, 9.0), (0.0, 1.0, 2.0, 3.0, 4.0)
SIZES = (64, 128, 256, 512)


def _table1(arms: Arms) -> Table:
    rows: list[Arm] = []
    for loss in LOSSES:
        rows += [arms.plain(loss), arms.twice(loss), arms.arm(loss, "idml"), arms.arm(loss, "constant-mixup")]
    rows.append(arms.release())
    claims = [Gain(f"IDML improves {name}", (loss, "idml")) for loss, name in LOSSES.items()]
    learned = [
        Gain(f"a learned u adds to a constant one, {name}", (loss, "idml"), (loss, "constant-mixup"), own=True)
        for loss, name in LOSSES.items()
    ]
    images = [as_many_images(loss, name) for loss, name in LOSSES.items()]
    return Table("Table 1: seven losses, plain and with IDML", tuple(rows), (*claims, *images, *learned))


def _table2(arms: Arms) -> Table:
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in (_MDW, _PA):
        methods = ("mixup", "ism", "constant", "pel", "pel-mixup", "idml", "constant-mixup")
        rows += [arms.plain(loss), arms.twice(loss), *(arms.arm(loss, method) for method in methods)]
        name = LOSSES[loss]
        claims += [
            Gain(f"Mixup improves {name}", (loss, "mixup")),
            Gain(f"the metric improves {name}", (loss, "ism")),
            Gain(f"IDML improves {name} beyond Mixup", (loss, "idml"), (loss, "mixup")),
            Gain(f"IDML improves {name} beyond the metric", (loss, "idml"), (loss, "ism")),
            Gain(f"PEL is below plain {name}", (loss, "plain"), (loss, "pel")),
            Gain(f"the metric's learned u adds to a constant one, {name}", (loss, "ism"), (loss, "constant"), own=True),
        ]
    return Table("Table 2: the parts of IDML, and PEL", tuple(rows), tuple(claims))


def _table3(arms: Arms) -> Table:
    rows = [arms.plain(_PA), arms.arm(_PA, "ism")]
    claims: list[Claim] = [Gain("the metric helps without ambiguous images", (_PA, "ism"), (_PA, "plain"))]
    for kind in AMBIGUITIES:
        rows.append(arms.arm(_PA, "plain", kind, ambiguity=(kind,)))
        rows.append(arms.arm(_PA, "ism", f"{kind}+ism", ambiguity=(kind,)))
        claims.append(Gain(f"the metric helps with {kind.replace('_', ' ')}", (_PA, f"{kind}+ism"), (_PA, kind)))
    rows += [arms.arm(_PA, "mixup"), arms.arm(_PA, "idml")]
    claims.append(Gain("the metric helps with Mixup", (_PA, "idml"), (_PA, "mixup")))
    return Table("Table 3: forms of ambiguous images, without and with the metric", tuple(rows), tuple(claims))


def _table4(arms: Arms) -> Table:
    other = arms.arm(_PA, "idml", "idml dissimilar", rule="dissimilar")
    claims = (
        Gain("treating uncertain pairs as similar improves training", (_PA, "idml")),
        Gain("similar is better than dissimilar", (_PA, "idml"), other.key),
    )
    rows = (arms.plain(_PA), arms.arm(_PA, "mixup"), other, arms.arm(_PA, "idml"))
    return Table("Table 4: how the metric treats uncertain pairs in training", rows, claims)


def _table5(arms: Arms) -> Table:
    other = arms.arm(_PA, "idml", "idml tested by ism", "introspective")
    claims = (
        Gain("Euclidean distance on s tests better than the metric", (_PA, "idml"), other.key),
        Gain("tested by the metric, IDML is still above plain", other.key),
    )
    rows = (arms.plain(_PA), other, arms.arm(_PA, "idml"))
    return Table("Table 5: what compares images in the test", rows, claims)


def _table6(arms: Arms) -> Table:
    rows = [arms.plain(_PA)]
    for size in BATCHES:
        options: dict[str, Any] = {} if size == TrainConfig.batch_size else {"batch_size": size}
        rows.append(arms.arm(_PA, "idml", f"idml batch {size}" if options else "", **options))
    claims = (
        Gain("batches of 120 are better than batches of 40", (_PA, "idml"), (_PA, "idml batch 40")),
        Gain("batches of 180 are no better than batches of 120", (_PA, "idml batch 180"), (_PA, "idml"), wanted=False),
    )
    return Table("Table 6: batch sizes", tuple(rows), claims, ("batch size", tuple(map(float, BATCHES))))


def _sweep(arms: Arms, symbol: str, key: str, values: tuple[float, ...], best: float, **fixed: Any) -> Table:
    """One row for each value; the claim is that ``best`` is above all others."""
    varied: list[dict[str, Any]] = [{**fixed, key: value} for value in values]
    rows = [arms.arm(_PA, "idml", f"{symbol} = {options[key]:g}", **options) for options in varied]
    own = (_PA, f"{symbol} = {best:g}")
    claims = [Gain(f"{symbol} = {best:g} is above {row.name}", own, row.key) for row in rows if row.key != own]
    claims += [Gain(f"{symbol} = {best:g} is above plain", own)]
    return Table(f"Figure: {symbol}", (arms.plain(_PA), *rows), tuple(claims), (symbol, values))


def _embedding_size(arms: Arms) -> Table:
    rows, plain = [], []
    for size in SIZES:
        options: dict[str, Any] = {} if size == arms.regime.base["embedding_dim"] else {"embedding_dim": size}
        name = f"plain {size}-d" if options else "plain"
        plain.append(arms.arm(_PA, "plain", name, against=name, **options))
        rows.append(arms.arm(_PA, "idml", f"idml {size}-d" if options else "idml", against=name, **options))
    claims = [
        Gain(f"IDML improves {size}-d", row.key, own.key) for size, row, own in zip(SIZES, rows, plain, strict=True)
    ]
    title = "Figure: size of the embeddings"
    return Table(title, (*plain, *rows), tuple(claims), ("dimensions", tuple(map(float, SIZES))))


def _trend(arms: Arms) -> Table:
    rows = (arms.plain(_PA), arms.arm(_PA, "idml"))
    claims = (
        MixedAbove("in training, mixed images have a larger ‖u‖ than clean ones", (_PA, "idml"), training=True),
        LevelFalls("‖u‖ falls during training, of clean and of mixed images", (_PA, "idml")),
    )
    return Table("Figure: ‖u‖ during training", rows, claims)


def _levels(arms: Arms) -> Table:
    losses = (_PA, _MS, _MDW)
    rows = [arm for loss in losses for arm in (arms.plain(loss), arms.arm(loss, "idml"))]
    claims = [MixedAbove(f"mixed test images have a larger ‖u‖, {LOSSES[loss]}", (loss, "idml")) for loss in losses]
    return Table("Figure: ‖u‖ of clean and mixed test images", tuple(rows), tuple(claims))


OWN = ("noise", "beta", "proxies", "introspection", "settings", "fit", "found", "margins")
"""Tables whose claims are questions of our own, not the paper's."""
TABLES: dict[str, Callable[[Arms], Table]] = {
    "table1": _table1,
    "table2": _table2,
    "table3": _table3,
    "table4": _table4,
    "table5": _table5,
    "table6": _table6,
    "tau": lambda arms: _sweep(arms, "τ", "tau", TAUS, 5.0, gamma=0.0),
    "gamma": lambda arms: _sweep(arms, "γ", "gamma", GAMMAS, arms.gamma),
    "embedding-size": _embedding_size,
    "trend": _trend,
    "levels": _levels,
    "noise": tables_beyond.noise,
    "beta": tables_beyond.beta,
    "proxies": tables_beyond.proxies,
    "introspection": tables_beyond.introspection,
    "settings": tables_beyond.settings,
    "fit": tables_beyond.fit,
    "found": tables_beyond.found,
    "margins": tables_beyond.margins,
    "finetune": tables_beyond.finetune,
}

"""The paper's tables and figures, and those beyond it, as data: the arms of each and what it claims.

Every table holds, beside its own rows, the raw features and for each of its losses the plain arm, tuned and stopped
early like the others. What a table costs follows from its arms; `idml reproduce TABLE --dry-run` says it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from idml.experiments.arms import LOSSES, Arm, Arms
from idml.experiments.claims import Claim, ErrorsRanked, Gain, LevelFalls, MixedAbove
from idml.training.config import TrainConfig

_PA, _MS, _MDW = "proxy_anchor", "multi_similarity", "margin_dw"
AMBIGUITIES = ("low_resolution", "blur", "occlusion")
BATCHES = (40, 60, 80, 100, 120, 140, 160, 180)
TAUS, GAMMAS = (1.0, 3.0, 5.0, 7.0, 9.0), (0.0, 1.0, 2.0, 3.0, 4.0)
SIZES = (64, 128, 256, 512)
NOISES = (0.0, 0.1, 0.2, 0.4)
SIGNALS = ("ranking", "error", "graded")
CONSTANTS = (1.0, 2.0, 4.0)
_HIDDEN = 64  # width of the hidden layer of a u that a signal teaches


@dataclass(frozen=True)
class Table:
    """Rows to fill, in order, and the claims that are judged by them."""

    title: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...] = ()
    sweep: tuple[str, tuple[float, ...]] | None = None
    """Of a figure: what is varied in its second to last rows, and its values."""


def table_of(what: str, arms: Arms) -> Table:
    """A table for a data set and regime, by name."""
    return TABLES[what](arms)


def _table1(arms: Arms) -> Table:
    rows: list[Arm] = []
    for loss in LOSSES:
        rows += [arms.plain(loss), arms.twice(loss), arms.arm(loss, "idml"), arms.arm(loss, "constant-mixup")]
    rows.append(arms.release())
    claims = [Gain(f"IDML improves {name}", (loss, "idml")) for loss, name in LOSSES.items()]
    learned = [
        Gain(f"a learned u adds to a constant one, {name}", (loss, "idml"), (loss, "constant-mixup"))
        for loss, name in LOSSES.items()
    ]
    return Table("Table 1: seven losses, plain and with IDML", tuple(rows), (*claims, *learned))


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
            Gain(f"the learned u of the metric adds to a constant one, {name}", (loss, "ism"), (loss, "constant")),
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


def _noise(arms: Arms) -> Table:
    rows: list[Arm] = []
    claims: list[Claim] = []
    for share in NOISES:
        mark = f", {share:.0%} wrong" if share else ""
        options: dict[str, Any] = {"label_noise": share} if share else {}
        for method in ("plain", "ism", "idml"):
            rows.append(arms.arm(_PA, method, f"{method}{mark}", against=f"plain{mark}", **options))
        if share:
            for method in ("ism", "idml"):
                text = f"with {share:.0%} wrong labels, {method} is above plain"
                claims.append(Gain(text, (_PA, f"{method}{mark}"), (_PA, f"plain{mark}")))
    return Table("Wrong training labels", tuple(rows), tuple(claims))


def _beta(arms: Arms) -> Table:
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in (_MS, _MDW):  # against proxies without u the two are the same
        other = arms.arm(loss, "idml", "idml, ‖u₁‖+‖u₂‖", beta="norms")
        rows += [arms.plain(loss), arms.arm(loss, "idml"), other]
        claims.append(Gain(f"‖u₁+u₂‖ is better than ‖u₁‖+‖u₂‖, {LOSSES[loss]}", (loss, "idml"), other.key))
    return Table("‖u₁+u₂‖ against ‖u₁‖+‖u₂‖", tuple(rows), tuple(claims))


def _proxies(arms: Arms) -> Table:
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in (_PA, "proxy_nca"):
        other = arms.arm(loss, "idml", "idml, proxies with u", proxy_uncertainty=True)
        rows += [arms.plain(loss), arms.arm(loss, "idml"), other]
        claims.append(Gain(f"proxies gain by a u of their own, {LOSSES[loss]}", other.key, (loss, "idml")))
    return Table("Learned uncertainty of proxies", tuple(rows), tuple(claims))


def _introspection(arms: Arms) -> Table:
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in (_MS, _PA):
        rows += [arms.plain(loss), arms.arm(loss, "idml")]
        for signal in SIGNALS:
            for method in ("plain", "idml"):
                rows.append(arms.arm(loss, method, f"{method}, {signal}", **_taught(arms, signal)))
            claims.append(ErrorsRanked(f"{signal} teaches ‖u‖ to rank errors, {LOSSES[loss]}", rows[-2].key))
            keeps = f"{signal} costs no R@1, {LOSSES[loss]}"
            claims.append(Gain(keeps, (loss, "plain"), rows[-2].key, wanted=False))
    return Table("Signals that teach u", tuple(rows), tuple(claims))


def _taught(arms: Arms, signal: str) -> dict[str, Any]:
    """Options of a u that a signal teaches; the signal may not pull at the trunk."""
    apart: dict[str, Any] = {} if arms.regime.name == "frozen" else {"detach": True}
    return {"introspection": signal, "u_hidden": _HIDDEN, **apart}


def _settings(arms: Arms) -> Table:
    """Ways to use the metric beside the paper's: a constant u, a bounded one, one that spreads because it is taught."""
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in ("contrastive", _MS, _PA):
        name = LOSSES[loss]
        constants = [arms.arm(loss, "constant", f"constant, γ = {g:g}", gamma=g) for g in CONSTANTS]
        bounded = arms.arm(loss, "ism", "ism, u bounded by 1", gamma=0.0, bound=1.0, detach=True)
        relative: dict[str, Any] = {"beta": "relative", "gamma": 0.0, "tau": 2.5}  # on average as the constant γ = 2
        free = arms.arm(loss, "ism", "ism, relative", **relative)
        taught = [
            arms.arm(loss, method, f"{method}, relative, error", **relative, **_taught(arms, "error"))
            for method in ("ism", "idml")
        ]
        own = [*constants, bounded, free, *taught]
        rows += [arms.plain(loss), arms.arm(loss, "mixup"), arms.arm(loss, "ism"), *own]
        claims += [Gain(f"{row.name} improves {name}", row.key) for row in own]
        text = f"a u that is taught and spreads adds to a constant one, {name}"
        claims.append(Gain(text, taught[0].key, (loss, "constant, γ = 2")))
    return Table("Other settings of the metric", tuple(rows), tuple(claims))


def _finetune(arms: Arms) -> Table:
    rows: list[Arm] = []
    for loss in (_MS, _PA):
        rows += [arms.plain(loss), arms.twice(loss), arms.arm(loss, "idml")]
    part = {"last": "the last stage", "frozen": "only the heads"}.get(arms.regime.name, "everything")
    claims = [Gain(f"IDML improves {LOSSES[loss]} with {part} trained", (loss, "idml")) for loss in (_MS, _PA)]
    return Table(f"Chosen rows of Table 1, {part} trained", tuple(rows), tuple(claims))


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
    "noise": _noise,
    "beta": _beta,
    "proxies": _proxies,
    "introspection": _introspection,
    "settings": _settings,
    "finetune": _finetune,
}

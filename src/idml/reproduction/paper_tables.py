"""The tables and figures, as data: the arms of each table and its claims. The paper's first, then our own.

Every table also has the raw features and, for each of its losses, the plain arm, tuned and stopped early like the
others. The cost of a table follows from its arms; `idml reproduce TABLE --dry-run` estimates it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from idml.reproduction import regimes
from idml.reproduction.claims import Claim, ErrorsRanked, Gain, LevelFalls, MixedAbove
from idml.reproduction.regimes import BATCH_SIZE, LOSSES, STEP_EPOCHS, TAUGHT_U, TWICE, Arm, Arms

_PA, _MS, _MDW = "proxy_anchor", "multi_similarity", "margin_dw"
AMBIGUITIES = ("low_resolution", "blur", "occlusion")
BATCHES = (40, 60, 80, 100, 120, 140, 160, 180)
TAUS, GAMMAS = (1.0, 3.0, 5.0, 7.0, 9.0), (0.0, 1.0, 2.0, 3.0, 4.0)
SIZES = (64, 128, 256, 512)
TRAINED_FORMS = ("sets", "weighted", "against-clean")
"""The forms of IDML that are compared with everything trained; `default-form` chooses one of them."""
LONG_EPOCHS = 24
WANTED_R_AUROC = 0.70


@dataclass(frozen=True)
class Table:
    """Rows to fill, in order, and the claims that are decided by them."""

    title: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...] = ()
    sweep: tuple[str, tuple[float, ...]] | None = None
    """For a figure: what is varied in its last rows, and its values."""
    seeds: int | None = None
    """How many seeds it has, if not as many as its regime says. With one, intervals are over classes alone."""
    notes: tuple[str, ...] = ()
    """What a reader must know about its rows."""


# -------------------- the paper's tables and figures --------------------


def _table1(arms: Arms) -> Table:
    rows: list[Arm] = []
    for loss in LOSSES:
        rows += [arms.plain(loss), arms.twice(loss), arms.arm(loss, "idml")]
    rows.append(arms.release())
    claims = [Gain(f"IDML improves {name}", (loss, "idml")) for loss, name in LOSSES.items()]
    images = [_as_many_images(loss, name) for loss, name in LOSSES.items()]
    return Table("Table 1: seven losses, plain and with IDML", tuple(rows), (*claims, *images))


def _table2(arms: Arms) -> Table:
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in (_MDW, _PA):
        methods = ("mixup", "ism", "pel", "pel-mixup", "idml")
        forms = [arms.form(loss, form) for form in ("joint", "weighted", "against-clean")]
        rows += [arms.plain(loss), arms.twice(loss), *(arms.arm(loss, method) for method in methods), *forms]
        name = LOSSES[loss]
        claims += [
            Gain(f"Mixup improves {name}", (loss, "mixup")),
            Gain(f"the metric improves {name}", (loss, "ism")),
            Gain(f"IDML improves {name} beyond Mixup", (loss, "idml"), (loss, "mixup")),
            Gain(f"IDML improves {name} beyond the metric", (loss, "idml"), (loss, "ism")),
            Gain(f"PEL is below plain {name}", (loss, "plain"), (loss, "pel")),
        ]
        claims += [Gain(f"{form.name} improves {name}", form.key, own=True) for form in forms]
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
        options: dict[str, Any] = {} if size == BATCH_SIZE else {"batch_size": size}
        rows.append(arms.arm(_PA, "idml", f"idml batch {size}" if options else "", **options))
    claims = (
        Gain("batches of 120 are better than batches of 40", (_PA, "idml"), (_PA, "idml batch 40")),
        Gain("batches of 180 are no better than batches of 120", (_PA, "idml batch 180"), (_PA, "idml"), wanted=False),
    )
    return Table("Table 6: batch sizes", tuple(rows), claims, ("batch size", tuple(map(float, BATCHES))), seeds=1)


def _sweep(arms: Arms, symbol: str, key: str, values: tuple[float, ...], best: float, **fixed: Any) -> Table:
    """One row for each value; the claim is that ``best`` is above all others."""
    varied: list[dict[str, Any]] = [{**fixed, key: value} for value in values]
    rows = [arms.arm(_PA, "idml", f"{symbol} = {options[key]:g}", **options) for options in varied]
    own = (_PA, f"{symbol} = {best:g}")
    claims = [Gain(f"{symbol} = {best:g} is above {row.name}", own, row.key) for row in rows if row.key != own]
    claims += [Gain(f"{symbol} = {best:g} is above plain", own)]
    return Table(f"Figure: {symbol}", (arms.plain(_PA), *rows), tuple(claims), (symbol, values), seeds=1)


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
    return Table(title, (*plain, *rows), tuple(claims), ("dimensions", tuple(map(float, SIZES))), seeds=1)


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
    claims = [
        MixedAbove(f"mixed test images have a larger ‖u‖, {LOSSES[loss]}", (loss, "idml"), (loss, "plain"))
        for loss in losses
    ]
    return Table("Figure: ‖u‖ of clean and mixed test images", tuple(rows), tuple(claims))


# -------------------- tables of our own --------------------


def _as_many_images(loss: str, name: str) -> Gain:
    """The claim that IDML gains more than plain training gains from as many images."""
    return Gain(f"IDML is above plain with as many images, {name}", (loss, "idml"), (loss, TWICE), own=True)


def _u(arms: Arms) -> Table:
    """Does ‖u‖ of a query alone rank errors? The default method of `idml train`, and IDML."""
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in (_MS, _PA):
        taught = arms.arm(loss, "plain", "plain, ranking", **TAUGHT_U)
        rows += [arms.plain(loss), taught, arms.arm(loss, "idml")]
        for arm in rows[-2:]:
            text = f"‖u‖ of a query ranks errors, {LOSSES[loss]}, {arm.name}"
            claims.append(ErrorsRanked(text, arm.key, WANTED_R_AUROC))
    return Table("What ‖u‖ of a query says", tuple(rows), tuple(claims))


def _finetune(arms: Arms) -> Table:
    """The forms of IDML with more trained. The plain arms teach u beside the loss, which leaves s as it is."""
    rows: list[Arm] = []
    claims: list[Claim] = []
    part = {"last": "the last stage", "frozen": "only the heads"}.get(arms.regime.name, "everything")
    for loss in (_PA, _MS):
        rows.append(_plain_taught(arms, loss))
        if loss == _PA:
            rows += [arms.twice(loss), arms.arm(loss, "mixup")]
            claims.append(Gain(f"Mixup improves {LOSSES[loss]} with {part} trained", (loss, "mixup")))
            claims.append(_as_many_images(loss, LOSSES[loss]))
        forms = [arms.form(loss, form) for form in TRAINED_FORMS]
        rows += forms
        for form in forms:
            text = f"{'IDML' if form.name == 'idml' else form.name} improves {LOSSES[loss]} with {part} trained"
            claims.append(Gain(text, form.key, own=form.name != "idml"))
    rows.append(arms.release())
    claims.append(Gain(f"the release improves {LOSSES[_PA]} with {part} trained", (_PA, "release"), own=True))
    return Table(f"{part[0].upper()}{part[1:]} trained: forms of IDML", tuple(rows), tuple(claims))


def _plain_taught(arms: Arms, loss: str) -> Arm:
    return arms.arm(loss, "plain", **TAUGHT_U)


def _long_schedule(arms: Arms) -> Table:
    """Plain and the chosen form of IDML, as long as in `finetune` and three times as long: does the gap shrink?"""
    form = arms.form(_PA, regimes.CHOSEN_FORM or "sets")
    mark, name = f", {LONG_EPOCHS} epochs", f"plain, {LONG_EPOCHS} epochs"
    longer = {"epochs": LONG_EPOCHS, "step_epochs": LONG_EPOCHS // int(arms.regime.base["epochs"]) * STEP_EPOCHS}
    plain = _plain_taught(arms, _PA)
    long_plain = Arm(_PA, name, {**plain.options, **longer}, against=name)
    long_form = Arm(_PA, f"{form.name}{mark}", {**form.options, **longer}, against=name)
    claims = (
        Gain(f"{form.name} improves {LOSSES[_PA]} after {LONG_EPOCHS} epochs", long_form.key, long_plain.key, own=True),
    )
    return Table("Everything trained, three times as long", (plain, form, long_plain, long_form), claims, seeds=1)


OWN = ("u", "finetune-long")
"""Tables whose claims are our own questions, not the paper's."""
OF_VERSION_1 = ("noise", "beta", "proxies", "teach-u", "settings", "fit", "found", "margins")
"""Tables that only version 1 of the protocol has; docs/results-v1.md shows their rows."""
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
    "u": _u,
    "finetune": _finetune,
    "finetune-long": _long_schedule,
}
FULL = ("finetune", "finetune-long")
"""Tables of the regime `full`, unless another one is asked for."""

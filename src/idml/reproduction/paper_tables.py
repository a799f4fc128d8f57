"""The tables and figures, as data: the arms of each table and its claims. The paper's first, then our own.

Every table also has the raw features and, for each of its losses, the plain arm, tuned and stopped early like the
others. The cost of a table follows from its arms; `idml reproduce TABLE --dry-run` estimates it.

Some arms are *retired*: they need options that idml no longer has. Their rows stay stored and are shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from idml.reproduction.claims import Claim, ErrorsRanked, Gain, LevelFalls, MixedAbove
from idml.reproduction.regimes import BATCH_SIZE, LOSSES, TWICE, Arm, Arms

_PA, _MS, _MDW = "proxy_anchor", "multi_similarity", "margin_dw"
AMBIGUITIES = ("low_resolution", "blur", "occlusion")
BATCHES = (40, 60, 80, 100, 120, 140, 160, 180)
TAUS, GAMMAS = (1.0, 3.0, 5.0, 7.0, 9.0), (0.0, 1.0, 2.0, 3.0, 4.0)
SIZES = (64, 128, 256, 512)
NOISES = (0.0, 0.1, 0.2, 0.4)
SIGNALS = ("ranking", "error", "graded")
CONSTANTS = (1.0, 2.0, 4.0)
FOUND = {"contrastive": "constant, γ = 4", _MS: "constant, γ = 1", _PA: "ism, relative, error"}
"""The setting of each loss with the best held-out score on CUB with a frozen trunk, of those that are not plain."""
MARGINS = ((0.0, 0.75), (0.0, 1.06), (0.5, 0.75), (0.5, 1.06))
"""Contrastive's margins for positives and negatives; 1.06 is the distance whose D is the usual 0.5 under γ = 4."""
_HIDDEN = 64  # width of the hidden layer of a u that a signal teaches


@dataclass(frozen=True)
class Table:
    """Rows to fill, in order, and the claims that are decided by them."""

    title: str
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...] = ()
    sweep: tuple[str, tuple[float, ...]] | None = None
    """For a figure: what is varied in its last rows, and its values."""


# -------------------- the paper's tables and figures --------------------


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
    images = [_as_many_images(loss, name) for loss, name in LOSSES.items()]
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
        options: dict[str, Any] = {} if size == BATCH_SIZE else {"batch_size": size}
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


# -------------------- tables of our own --------------------


def _as_many_images(loss: str, name: str) -> Gain:
    """The claim that IDML gains more than plain training gains from as many images."""
    return Gain(f"IDML is above plain with as many images, {name}", (loss, "idml"), (loss, TWICE), own=True)


def _noise(arms: Arms) -> Table:
    """Wrong training labels, the paper's motivation: plain, the metric, IDML."""
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
    """β of a pair: the norm of the sum of both u, or the sum of both norms."""
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in (_MS, _MDW):  # against proxies without u the two are the same
        other = arms.arm(loss, "idml", "idml, ‖u₁‖+‖u₂‖", beta="norms")
        rows += [arms.plain(loss), arms.arm(loss, "idml"), other]
        claims.append(Gain(f"‖u₁+u₂‖ is better than ‖u₁‖+‖u₂‖, {LOSSES[loss]}", (loss, "idml"), other.key))
    return Table("‖u₁+u₂‖ against ‖u₁‖+‖u₂‖", tuple(rows), tuple(claims))


def _proxies(arms: Arms) -> Table:
    """Proxies with a learned u of their own."""
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in (_PA, "proxy_nca"):
        other = arms.arm(loss, "idml", "idml, proxies with u", proxy_uncertainty=True)
        rows += [arms.plain(loss), arms.arm(loss, "idml"), other]
        claims.append(Gain(f"proxies gain by a u of their own, {LOSSES[loss]}", other.key, (loss, "idml")))
    return Table("Learned uncertainty of proxies", tuple(rows), tuple(claims))


def _teach_u(arms: Arms) -> Table:
    """Signals that teach ‖u‖ to rank errors, beside the loss."""
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
    """Options of a u that a signal teaches; the gradient of the signal does not reach the trunk."""
    apart: dict[str, Any] = {} if arms.regime.name == "frozen" else {"detach": True}
    return {"teach_u": signal, "u_hidden": _HIDDEN, **apart}


def _settings_table(arms: Arms) -> Table:
    """Other ways to use the metric; each removes one reason why it may not help."""
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in FOUND:
        own = _settings(arms, loss)
        rows += [arms.plain(loss), arms.arm(loss, "mixup"), arms.arm(loss, "ism"), arms.arm(loss, "idml"), *own]
        claims += [Gain(f"{row.name} improves {LOSSES[loss]}", row.key) for row in own]
        text = f"a u that is taught and spreads adds to a constant one, {LOSSES[loss]}"
        claims.append(Gain(text, (loss, "ism, relative, error"), (loss, "constant, γ = 2")))
    return Table("Other settings of the metric", tuple(rows), tuple(claims))


def _settings(arms: Arms, loss: str) -> list[Arm]:
    constants = [arms.arm(loss, "constant", f"constant, γ = {g:g}", gamma=g) for g in CONSTANTS]
    relative: dict[str, Any] = {"beta": "relative", "gamma": 0.0, "tau": 2.5}  # on average as the constant γ = 2
    taught = {**relative, **_taught(arms, "error")}
    return [
        *constants,
        arms.arm(loss, "constant", "constant, γ = 2, fitted", gamma=2.0, fit=True),
        arms.arm(loss, "ism", "ism, u bounded by 1", gamma=0.0, bound=1.0, detach=True),
        arms.arm(loss, "ism", "ism, u penalised", u_penalty=0.1),
        arms.arm(loss, "ism", "ism, relative", **relative),
        arms.arm(loss, "ism", "ism, relative, error", **taught),
        arms.arm(loss, "idml", "idml, relative, error", **taught),
        arms.arm(loss, "idml", "idml, main labels", labels="main"),
        arms.arm(loss, "idml", "idml, a quarter mixed", mixtures=0.25),
        arms.arm(loss, "idml", "idml, all of these", **taught, labels="main", mixtures=0.25),
    ]


def _fit(arms: Arms) -> Table:
    """Thresholds that fit the scale of D and C' under the data set's γ, for the losses that lose most with γ = 3."""
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in ("triplet_semihard", _MDW, _PA):
        rows.append(arms.plain(loss))
        for method in ("ism", "idml"):
            usual, fitted = arms.arm(loss, method), arms.arm(loss, method, f"{method}, fitted", fit=True)
            rows += [usual, fitted]
            claims.append(Gain(f"fitted thresholds help {method}, {LOSSES[loss]}", fitted.key, usual.key))
            claims.append(Gain(f"{fitted.name} improves {LOSSES[loss]}", fitted.key))
    return Table("Thresholds that fit the metric", tuple(rows), tuple(claims))


def _found_table(arms: Arms) -> Table:
    """The setting of each loss that was chosen on CUB with a frozen trunk: does it help elsewhere?"""
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in FOUND:
        own = _found(arms, loss)
        rows += [arms.plain(loss), own]
        claims.append(Gain(f"the setting found ({own.name}) improves {LOSSES[loss]}", own.key))
    return Table("The settings found on CUB with a frozen trunk", tuple(rows), tuple(claims))


def _margins(arms: Arms) -> Table:
    """Does a constant u give contrastive more than other margins do?"""
    loss = "contrastive"
    own, rows = _found(arms, loss), []
    for pull, push in (
        MARGINS if arms.regime.name == "frozen" else MARGINS[:2]
    ):  # the others are expensive where more is trained
        words = (f"positive_margin={pull:g}", f"negative_margin={push:g}")
        rows.append(arms.arm(loss, "plain", f"plain, margins {pull:g} and {push:g}", loss_parameters=words))
    claims: list[Claim] = [Gain(f"{own.name} improves {LOSSES[loss]}", own.key)]
    for row in rows:
        claims.append(Gain(f"{row.name} improves {LOSSES[loss]}", row.key))
        claims.append(Gain(f"{own.name} is above {row.name}", own.key, row.key))
    return Table("Other margins of contrastive", (arms.plain(loss), own, *rows), tuple(claims))


def _found(arms: Arms, loss: str) -> Arm:
    return next(arm for arm in _settings(arms, loss) if arm.name == FOUND[loss])


def _finetune(arms: Arms) -> Table:
    """Chosen rows of Table 1, the setting found, and the default of `idml train`, in a regime that trains more."""
    rows: list[Arm] = []
    for loss in (_MS, _PA):
        rows += [arms.plain(loss), arms.twice(loss), arms.arm(loss, "idml"), _found(arms, loss)]
    mixup, default = arms.arm(_MS, "mixup"), arms.arm(_MS, "plain", "plain, ranking", **_taught(arms, "ranking"))
    part = {"last": "the last stage", "frozen": "only the heads"}.get(arms.regime.name, "everything")
    claims: list[Claim] = []
    claims += [Gain(f"IDML improves {LOSSES[loss]} with {part} trained", (loss, "idml")) for loss in (_MS, _PA)]
    claims += [_as_many_images(loss, LOSSES[loss]) for loss in (_MS, _PA)]
    claims.append(Gain(f"the metric adds to Mixup with {part} trained, {LOSSES[_MS]}", (_MS, "idml"), mixup.key))
    claims.append(ErrorsRanked(f"ranking teaches ‖u‖ to rank errors with {part} trained, {LOSSES[_MS]}", default.key))
    return Table(f"Chosen rows of Table 1, {part} trained", (*rows, mixup, default), tuple(claims))


OWN = ("noise", "beta", "proxies", "teach-u", "settings", "fit", "found", "margins")
"""Tables whose claims are our own questions, not the paper's."""
RETIRED = ("noise", "beta", "settings", "found")
"""Tables that are only shown: what they compare needs options that idml no longer has."""
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
    "teach-u": _teach_u,
    "settings": _settings_table,
    "fit": _fit,
    "found": _found_table,
    "margins": _margins,
    "finetune": _finetune,
}

"""Tables beyond the paper's: wrong labels, forms of β, uncertain proxies, signals and settings, everything trained."""

from typing import Any

from idml.reproduction.arms import LOSSES, TWICE, Arm, Arms
from idml.reproduction.claims import Claim, ErrorsRanked, Gain
from idml.reproduction.table import Table

_PA, _MS, _MDW = "proxy_anchor", "multi_similarity", "margin_dw"
NOISES = (0.0, 0.1, 0.2, 0.4)
SIGNALS = ("ranking", "error", "graded")
CONSTANTS = (1.0, 2.0, 4.0)
FOUND = {"contrastive": "constant, γ = 4", _MS: "constant, γ = 1", _PA: "ism, relative, error"}
"""The setting of each loss with the best held-out score on CUB with a frozen trunk, of those not plain in disguise."""
MARGINS = ((0.0, 0.75), (0.0, 1.06), (0.5, 0.75), (0.5, 1.06))
"""Contrastive's margins for positives and negatives; 1.06 is the distance whose D is the usual 0.5 under γ = 4."""
_HIDDEN = 64  # width of the hidden layer of a u that a signal teaches


def as_many_images(loss: str, name: str) -> Gain:
    """Whether what IDML gains is more than plain training gains by as many images."""
    return Gain(f"IDML is above plain with as many images, {name}", (loss, "idml"), (loss, TWICE), own=True)


def noise(arms: Arms) -> Table:
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


def beta(arms: Arms) -> Table:
    """Vectors added before the norm is taken, or norms added."""
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in (_MS, _MDW):  # against proxies without u the two are the same
        other = arms.arm(loss, "idml", "idml, ‖u₁‖+‖u₂‖", beta="norms")
        rows += [arms.plain(loss), arms.arm(loss, "idml"), other]
        claims.append(Gain(f"‖u₁+u₂‖ is better than ‖u₁‖+‖u₂‖, {LOSSES[loss]}", (loss, "idml"), other.key))
    return Table("‖u₁+u₂‖ against ‖u₁‖+‖u₂‖", tuple(rows), tuple(claims))


def proxies(arms: Arms) -> Table:
    """Proxies with a learned u of their own."""
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in (_PA, "proxy_nca"):
        other = arms.arm(loss, "idml", "idml, proxies with u", proxy_uncertainty=True)
        rows += [arms.plain(loss), arms.arm(loss, "idml"), other]
        claims.append(Gain(f"proxies gain by a u of their own, {LOSSES[loss]}", other.key, (loss, "idml")))
    return Table("Learned uncertainty of proxies", tuple(rows), tuple(claims))


def introspection(arms: Arms) -> Table:
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
    """Options of a u that a signal teaches; the signal may not pull at the trunk."""
    apart: dict[str, Any] = {} if arms.regime.name == "frozen" else {"detach": True}
    return {"introspection": signal, "u_hidden": _HIDDEN, **apart}


def settings(arms: Arms) -> Table:
    """Ways to use the metric beside the paper's, each of which takes away one reason for which it may not help."""
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


def fit(arms: Arms) -> Table:
    """Thresholds that fit the scale of D and C' under the data set's γ, for the losses that γ = 3 costs most."""
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


def found(arms: Arms) -> Table:
    """The setting of each loss that was chosen on CUB with a frozen trunk: does it help elsewhere?"""
    rows: list[Arm] = []
    claims: list[Claim] = []
    for loss in FOUND:
        own = _found(arms, loss)
        rows += [arms.plain(loss), own]
        claims.append(Gain(f"the setting found ({own.name}) improves {LOSSES[loss]}", own.key))
    return Table("The settings found on CUB with a frozen trunk", tuple(rows), tuple(claims))


def margins(arms: Arms) -> Table:
    """Whether what a constant u gives contrastive is more than other margins give it."""
    loss = "contrastive"
    own, rows = _found(arms, loss), []
    for pull, push in MARGINS if arms.regime.name == "frozen" else MARGINS[:2]:  # all are dear where more is trained
        words = (f"positive_margin={pull:g}", f"negative_margin={push:g}")
        rows.append(arms.arm(loss, "plain", f"plain, margins {pull:g} and {push:g}", loss_parameters=words))
    claims: list[Claim] = [Gain(f"{own.name} improves {LOSSES[loss]}", own.key)]
    for row in rows:
        claims.append(Gain(f"{row.name} improves {LOSSES[loss]}", row.key))
        claims.append(Gain(f"{own.name} is above {row.name}", own.key, row.key))
    return Table("Other margins of contrastive", (arms.plain(loss), own, *rows), tuple(claims))


def _found(arms: Arms, loss: str) -> Arm:
    return next(arm for arm in _settings(arms, loss) if arm.name == FOUND[loss])


def finetune(arms: Arms) -> Table:
    """Chosen rows of Table 1, the setting found, and the default of `idml train`, in a regime that trains more."""
    rows: list[Arm] = []
    for loss in (_MS, _PA):
        rows += [arms.plain(loss), arms.twice(loss), arms.arm(loss, "idml"), _found(arms, loss)]
    mixup, default = arms.arm(_MS, "mixup"), arms.arm(_MS, "plain", "plain, ranking", **_taught(arms, "ranking"))
    part = {"last": "the last stage", "frozen": "only the heads"}.get(arms.regime.name, "everything")
    claims: list[Claim] = []
    claims += [Gain(f"IDML improves {LOSSES[loss]} with {part} trained", (loss, "idml")) for loss in (_MS, _PA)]
    claims += [as_many_images(loss, LOSSES[loss]) for loss in (_MS, _PA)]
    claims.append(Gain(f"the metric adds to Mixup with {part} trained, {LOSSES[_MS]}", (_MS, "idml"), mixup.key))
    claims.append(ErrorsRanked(f"ranking teaches ‖u‖ to rank errors with {part} trained, {LOSSES[_MS]}", default.key))
    return Table(f"Chosen rows of Table 1, {part} trained", (*rows, mixup, default), tuple(claims))

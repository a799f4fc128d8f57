"""The study `live-u`: what keeps u alive inside the metric? ProxyAnchor, everything trained, the chosen form of IDML.

In IDML as it is u collapses with ProxyAnchor: the mean weight ends near 1, and the metric is the plain one. Three ways
to keep u alive are tried, each alone:

    ranking    u is taught by ranking *inside* the metric. τ is chosen so that the mean weight lies near 0.8: short
               runs (2 epochs, seed 0) try five values, and the one whose weight ends nearest to 0.8 is taken
    γ = 3      the introspective bias of the paper's Cars196
    proxies    a learned u for every proxy

A metric whose mean weight is above 0.98 is called *not introspective*, whatever its retrieval.

Expected cost on one core: 0.8 hours of short runs, then half an hour for each run, on CUB at 112 px.
"""

from typing import Any

from idml.reproduction import regimes
from idml.reproduction.claims import NOT_INTROSPECTIVE, SAME_AS_PLAIN, estimate, gain, interval_text
from idml.reproduction.regimes import TAUGHT_U, Arm, Arms
from idml.reproduction.runner import Cell, Measures, Store
from idml.reproduction.stored_results import Row
from idml.reproduction.studies import Study, StudyTable

LOSS = "proxy_anchor"
TAUS = (0.05, 0.15, 0.5, 1.5, 5.0)
WANTED_WEIGHT, PILOT_EPOCHS = 0.8, 2
PILOT = "live-u-tau"
_COLUMNS = [
    "arm",
    "τ",
    "R@1",
    "gain over plain",
    "mean weight",
    "spread of ‖u‖",
    "R-AUROC",
    "AUROC mixed",
    "the metric is",
]


def live_u_arms(arms: Arms, tau: float | None) -> list[Arm]:
    """Return plain, the chosen form as it is, and the three ways; ranking only if its τ is known."""
    if regimes.CHOSEN_FORM is None:
        raise ValueError(
            "live-u needs the form of mixtures: `idml reproduce default-form` chooses it, and CHOSEN_FORM in "
            "idml/reproduction/regimes.py holds it"
        )
    own = arms.form(LOSS, regimes.CHOSEN_FORM)
    found = [arms.arm(LOSS, "plain", **TAUGHT_U), own, _changed(own, "γ = 3", gamma=3.0)]
    found.append(_changed(own, "u of proxies", proxy_uncertainty=True))
    return found if tau is None else [*found, _changed(own, "ranking", **TAUGHT_U, detach=True, tau=tau)]


def _changed(arm: Arm, name: str, **options: Any) -> Arm:
    return Arm(arm.loss, f"{arm.name}, {name}", {**arm.options, **options})


def live_u_cells(store: Store, seeds: int) -> list[Cell]:
    """Return what can be made now: the short runs first; the runs with ranking once these have chosen τ."""
    arms = Arms(store.data, store.regime)
    live_u_arms(arms, None)  # refuses to begin without a form
    pilots = [_pilot(store, arms, tau) for tau in TAUS]
    rows = [row for cell in pilots if (row := store.read(cell)) is not None]
    tau = choose_tau(rows) if len(rows) == len(pilots) else None
    chosen = live_u_arms(arms, tau)
    rate = store.regime.study_rate
    return [*pilots, *(store.cell(LOSS, arm.options, rate, seed) for seed in range(seeds) for arm in chosen)]


def _pilot(store: Store, arms: Arms, tau: float) -> Cell:
    ranking = live_u_arms(arms, tau)[-1]
    short = {**ranking.options, "epochs": PILOT_EPOCHS}
    return store.cell(LOSS, short, store.regime.study_rate, 0, study=PILOT)


def choose_tau(rows: list[Row]) -> float:
    """Return the τ of the run whose mean weight at the end of training is nearest to 0.8.

    >>> choose_tau([{"options": {"tau": 0.5}, "weight": 0.95}, {"options": {"tau": 0.1}, "weight": 0.7}])
    0.1
    """
    known = [row for row in rows if "weight" in row]
    if not known:
        raise ValueError("no short run of live-u has a mean weight: all of them failed")
    nearest = min(known, key=lambda row: abs(row["weight"] - WANTED_WEIGHT))
    return float(nearest["options"].get("tau", 5.0))


def live_u_tables(rows: list[Row]) -> list[StudyTable]:
    """Return the table of the ways, and that of the short runs that chose τ."""
    pilots = [row for row in rows if row["name"].startswith(PILOT)]
    groups: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row not in pilots and "failed" not in row:
            groups.setdefault(_way(row), {})[row["options"]["seed"]] = row
    plain, lines = groups.get("plain", {}), []
    for name, runs in groups.items():
        weights = [run["weight"] for run in runs.values() if "weight" in run]
        change = "" if name == "plain" or not plain else gain(runs, plain).text(sign=True)
        cells = [
            interval_text([run[key] for run in runs.values()], 2) for key in ("level_spread", "r_auroc", "auroc_mixed")
        ]
        weight = interval_text(weights, 3) if weights else ""
        word = (
            "" if not weights else NOT_INTROSPECTIVE if sum(weights) / len(weights) > SAME_AS_PLAIN else "introspective"
        )
        tau = next(iter(runs.values()))["options"].get("tau", 5.0)
        lines.append([name, "" if name == "plain" else f"{tau:g}", estimate(runs).text(), change, weight, *cells, word])
    short = [
        [f"{row['options'].get('tau', 5.0):g}", f"{row['weight']:.3f}", f"{row['level_clean']:.3f}"]
        for row in pilots
        if "weight" in row
    ]
    title = f"What keeps u alive? ProxyAnchor, everything trained, {regimes.CHOSEN_FORM or 'no form chosen yet'}"
    return [
        StudyTable("table", title, _COLUMNS, lines),
        StudyTable("tau", "The short runs that chose τ", ["τ", "mean weight", "mean ‖u‖"], short),
    ]


def _way(row: Row) -> str:
    options = row["options"]
    if options["method"] == "plain":
        return "plain"
    if options["teach_u"] == "ranking":
        return "ranking inside the metric"
    if options.get("proxy_uncertainty"):
        return "learned u of proxies"
    return f"γ = {options['gamma']:g}" if options.get("gamma") else "as it is"


LIVE_U = Study(live_u_cells, Measures(), live_u_tables, regime="full", seeds=2)

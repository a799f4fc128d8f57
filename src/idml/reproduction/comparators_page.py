"""How the table of the other systems is shown: its columns, and what a reader should take from it.

Both follow from the stored rows and the measured costs alone, so they are true whatever the figures are.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from idml.reproduction.claims import Estimate, Key, TableRuns, estimate, gain, paper_figure
from idml.reproduction.comparator_costs import Cost, read_costs
from idml.reproduction.comparators import COMPARATORS, PROXY_ANCHOR
from idml.reproduction.paper_tables import Table
from idml.reproduction.regimes import LOSSES, Arm
from idml.reproduction.render import remark_of
from idml.reproduction.runner import ArmProgress

HEADER = [
    "system", "loss", "R@1", "paper", "RP", "paper", "MAP@R", "paper", "NMI", "paper", "R@1 over ProxyAnchor",
    "R@1 over its loss", "time of a step", "memory", "held-out", "lr", "seeds", "the paper's network", "remark",
]  # fmt: skip
_IMAGES_OF_CLASS = {"cub": 5924 / 100, "cars": 8131 / 98, "sop": 60502 / 11316}
"""Test images of a class, on average."""


# -------------------- columns --------------------


def comparators_columns(made: Table, found: TableRuns, costs: Mapping[Key, Cost]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: the raw features, plain arms, then the systems in the order of the paper's table."""
    rows = [_raw_row(found), *(_row(found, found.progress[arm.key], costs) for arm in made.arms)]
    kept = [i for i in range(len(HEADER)) if HEADER[i] in ("system", "loss") or any(row[i] for row in rows)]
    return [HEADER[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _raw_row(found: TableRuns) -> list[str]:
    row = ["raw features", *[""] * (len(HEADER) - 1)]
    if found.raw is None:
        return [*row[:-1], "missing"]
    runs, selected = {0: found.raw}, found.raw["selected"]
    row[2], row[4], row[6] = (
        estimate(runs).text(),
        f"{100 * selected['r_precision']:.1f}",
        estimate(runs, "MAP@R").text(),
    )
    row[8] = f"{100 * found.raw['nmi']:.1f}"
    return row


def _row(found: TableRuns, progress: ArmProgress, costs: Mapping[Key, Cost]) -> list[str]:
    arm, runs = progress.arm, progress.runs
    system = next((each for each in COMPARATORS if each.name == arm.name), None)
    row = [arm.name, LOSSES.get(arm.loss, arm.loss)]
    for figure, text in _figures(progress).items():
        row += [text, _paper_text(found.data, arm, figure)]
    row += [_gain_text(found, arm, PROXY_ANCHOR), _gain_text(found, arm, (arm.loss, arm.against))]
    usual, own = costs.get(PROXY_ANCHOR), costs.get(arm.key)
    row += ["", ""] if usual is None or own is None else own.text(usual)
    row.append(f"{100 * statistics.mean(run['selected_score'] for run in runs.values()):.1f}" if runs else "")
    row += ["" if progress.rate is None else f"{progress.rate:g}", str(len(runs))]
    remarks = [remark_of(progress, None), "" if system is None else system.remark]
    return [*row, "" if system is None else system.network, "; ".join(text for text in remarks if text)]


def _figures(progress: ArmProgress) -> dict[str, str]:
    runs = progress.runs
    if not runs:
        return dict.fromkeys(("R@1", "RP", "MAP@R", "NMI"), "")
    precision, nmi = (
        f"{100 * statistics.mean(values):.1f}"
        for values in (
            [run["selected"]["r_precision"] for run in runs.values()],
            [run["nmi"] for run in runs.values()],
        )
    )
    return {"R@1": estimate(runs).text(), "RP": precision, "MAP@R": estimate(runs, "MAP@R").text(), "NMI": nmi}


def _paper_text(data: str, arm: Arm, figure: str) -> str:
    """The paper's figure; of DIML's RP and MAP@R, which count the query, the bounds without it."""
    value = paper_figure(data, arm.key, figure)
    if value is None:
        return ""
    bounds = uncounted_bounds(data, arm.key).get(figure) if arm.name == "DIML" else None
    return f"{value:.1f}" if bounds is None else f"{value:.1f} (without the query {bounds[0]:.1f} to {bounds[1]:.1f})"


def uncounted_bounds(data: str, key: Key) -> dict[str, tuple[float, float]]:
    """Bounds of RP and MAP@R without the query, from figures (in per cent) whose R counts the query, ranked last.

    With n images of a class, r and m are the means over the first n results. Without the query R is n − 1, and at most
    the n-th result is lost: RP loses at most 1 of n·r hits, MAP@R at most the precision r at that result:

        RP ∈ [(n·r − 1)/(n − 1), n·r/(n − 1)]        MAP@R ∈ [(n·m − r)/(n − 1), n·m/(n − 1)]

    n is the mean over the classes of the data set.

    >>> [round(x, 1) for x in uncounted_bounds("cub", ("multi_similarity", "DIML"))["RP"]]
    [36.8, 38.6]
    """
    r, m = (paper_figure(data, key, figure) for figure in ("RP", "MAP@R"))
    n = _IMAGES_OF_CLASS.get(data)
    if r is None or m is None or n is None:
        return {}
    return {
        "RP": ((n * r - 100) / (n - 1), n * r / (n - 1)),
        "MAP@R": ((n * m - r) / (n - 1), n * m / (n - 1)),
    }


def _gain_text(found: TableRuns, arm: Arm, over: Key) -> str:
    """How much an arm is above another in R@1; empty for the arm itself."""
    runs, other = found.runs(arm.key), found.runs(over)
    return gain(runs, other).text(sign=True) if runs and other and arm.key != over else ""


def cost_table(out: Path) -> tuple[list[str], list[list[str]]]:
    """Return the stored costs: a row for each arm, time and memory for each data set and regime."""
    places = [(data, regime) for data in ("cub", "cars") for regime in ("frozen", "last")]
    found = {place: costs for place in places if (costs := read_costs(out, *place))}
    keys = dict.fromkeys(key for costs in found.values() for key in costs)
    rows = []
    for loss, name in sorted(keys, key=lambda key: key[1] != "plain"):
        texts = [
            text
            for costs in found.values()
            for text in (costs[loss, name].text(costs[PROXY_ANCHOR]) if (loss, name) in costs else ("", ""))
        ]
        rows.append([name, LOSSES.get(loss, loss), *texts])
    columns = [f"{data}, {regime}: {what}" for data, regime in found for what in ("time", "memory")]
    return ["system", "loss", *columns], rows


# -------------------- what to take from it --------------------


def describe_comparison(places: Sequence[tuple[str, Table, TableRuns]]) -> str:
    """Say in one paragraph which systems beat a tuned ProxyAnchor, from the intervals of their gains in R@1.

    ``places`` are tables with their names. A gain of one seed decides nothing.
    """
    judged = [(name, _judge(made, found), found) for name, made, found in places]
    judged = [each for each in judged if any(each[1].values())]
    if not judged:
        return "No system has been compared with ProxyAnchor yet: the runs are not made yet."
    texts = [_describe_place(name, kinds, found) for name, kinds, found in judged]
    texts.append(_describe_all([kinds for _, kinds, _ in judged]))
    texts.append(
        "All have the same network and choice of learning rates, and are tuned and stopped on held-out classes; most "
        "of their authors kept the epoch with the best R@1 on the test classes. Batches are of one size, but D&C, MIC "
        "and PADS choose theirs anew in every epoch, PADS trains without the images by which it chooses, and DREML has "
        "576 dimensions. Options other than the learning rate are the authors'. The network is smaller than theirs and "
        "most of it is frozen, so this says which ideas carry over to such a network, not that a paper is wrong."
    )
    return " ".join(text for text in texts if text)


def has_comparison(made: Table, found: TableRuns) -> bool:
    """Return whether a system and ProxyAnchor have runs: no other table has these arms, so one is worth showing."""
    return bool(found.runs(PROXY_ANCHOR)) and any(found.runs(claim.arm) for claim in made.claims)


_ABOVE, _BELOW, _OPEN = "above", "below", "open"
_Kinds = Mapping[str, Mapping[str, Estimate]]
"""The systems by how they compare with ProxyAnchor: for each kind their names and gains in R@1."""


def _judge(made: Table, found: TableRuns) -> _Kinds:
    kinds: dict[str, dict[str, Estimate]] = {kind: {} for kind in (_ABOVE, _BELOW, _OPEN)}
    usual = found.runs(PROXY_ANCHOR)
    for claim in made.claims:
        runs = found.runs(claim.arm)
        if not usual or not runs:
            continue
        change = gain(runs, usual)
        several = len(runs.keys() & usual.keys()) > 1
        kind = _ABOVE if change.low > 0 and several else _BELOW if change.high < 0 and several else _OPEN
        kinds[kind][claim.arm[1]] = change
    return kinds


def _describe_place(name: str, kinds: _Kinds, found: TableRuns) -> str:
    above, below, undecided = (
        [f"{system} ({change.text(sign=True)})" for system, change in kinds[kind].items()]
        for kind in (_ABOVE, _BELOW, _OPEN)
    )
    count = len(above) + len(below) + len(undecided)
    parts = [
        f"On {name}, plain ProxyAnchor has R@1 {estimate(found.runs(PROXY_ANCHOR)).text()}.",
        f"Of {count} {'system' if count == 1 else 'systems'} {_are(above)} above it with an interval above 0"
        + (f": {_join(above)}." if above else "."),
    ]
    if below:
        parts.append(f"{_join(below)} {'is' if len(below) == 1 else 'are'} below it with an interval below 0.")
    if undecided:
        parts.append(f"For {_join(undecided)} the table cannot tell.")
    return " ".join(parts)


def _describe_all(places: Sequence[_Kinds]) -> str:
    """Which of the systems that were trained in several places are above ProxyAnchor in all of them."""
    trained = Counter(name for kinds in places for kind in kinds.values() for name in kind)
    above = Counter(name for kinds in places for name in kinds[_ABOVE])
    several = [each.name for each in COMPARATORS if trained[each.name] > 1]
    kept = [name for name in several if above[name] == trained[name]]
    if not several:
        return ""
    return f"In all places where it was trained, of {len(several)} in several places, {_are(kept)} above it" + (
        f": {_join(kept)}." if kept else "."
    )


def _are(names: Sequence[str]) -> str:
    return "none is" if not names else f"{len(names)} {'is' if len(names) == 1 else 'are'}"


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

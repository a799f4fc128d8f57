"""The two tables of README.md that come from stored rows: what to expect of a search, and the paper's main claims.

`idml reproduce results` writes them between marks of the form ``<!-- name -->`` and ``<!-- end of name -->``. A test
compares the README with the stored rows.
"""

import json
from pathlib import Path
from typing import Any

from idml.files import write_atomic
from idml.reproduction.render import RUNNING, markdown_table

PROMISES = "promises.json"
_NONE, _SHARE, _RATE = "0", "0.25", "0.05"  # shares of unknown queries; of wrong matches that are accepted
_FEW = 0.005  # a smaller share of answers says nothing about their errors
_DATA = {
    "cub": "CUB-200-2011: birds",
    "cars": "Cars196: cars",
    "cub+cars": "birds and cars together",
    "glyphs": "glyphs: letters and signs",
}
_UNLABELLED = {"cub": "birds without labels: the same picture again, changed"}
_MODELS = {"pretrained": "pretrained, no training", "trained": "trained"}


def expectation_table(out: Path) -> str:
    """Return what a calibrated gallery answers, for each collection of `idml reproduce promises`."""
    path = out / PROMISES
    cells: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    rows = []
    for data, words in _DATA.items():
        for model, how in _MODELS.items():
            cell = cells.get(f"draws {data} {model} by class {_SHARE}")
            certain = cells.get(f"draws {data} {model} by class {_NONE}")
            if cell is not None:
                size = f"{cell['images']:,} / {cell['classes']:,}"
                rates = None if certain is None else certain["rates"]
                figures = _figures(cell["rates"], rates, cell["draws"])
                rows.append([words, size, how, _percent(cell["right"]), *figures])
    for data, words in _UNLABELLED.items():
        for model, how in _MODELS.items():
            cell = cells.get(f"unlabelled {data} {model}")
            if cell is not None:
                shares = cell["shares"]
                figures = _figures(shares[_SHARE]["rates"], shares[_NONE]["rates"], cell["draws"])
                rows.append([words, f"{cell['pictures']:,} / –", how, "–", *figures])
    if not rows:
        return "These figures are not measured yet (`idml reproduce promises`)."
    header = [
        "collection", "images / classes", "model", "right first results", "*match*, no unknown queries",
        "*match*, a quarter unknown", "of these wrong", "calibrations that refuse", "unknown recognised",
    ]  # fmt: skip
    return markdown_table(header, rows)


def _figures(rates: dict[str, Any], certain: dict[str, Any] | None, draws: int) -> list[str]:
    """Means over the draws with some unknown queries; of those without any the share that is answered."""
    sums = rates[_RATE]
    answered = sums["coverage"] / draws
    return [
        "–" if certain is None else _percent(certain[_RATE]["coverage"] / draws),
        _percent(answered),
        _percent(sums["fresh_wrong"] / sums["fresh_answered"]) if answered >= _FEW else "too few",
        _percent(sums["refused"] / draws),
        _percent(sums["recognised"] / draws),
    ]


def _percent(share: float) -> str:
    return "under 1 %" if 0 < share < _FEW else f"{100 * share:.0f} %"


def claim_table(header: list[str], rows: list[list[str]]) -> str:
    """Return the lines of the main claims that are decided, a table for each place; and say which are not decided.

    The last two columns are the verdict and the place where it was measured.
    """
    decided, waiting = dict[str, list[list[str]]](), dict[str, list[str]]()
    for *line, verdict, place in rows:
        if verdict == RUNNING:
            waiting.setdefault(place, []).append(line[0])
        else:
            decided.setdefault(place, []).append([*line, verdict])
    parts = []
    for place, lines in decided.items():
        parts += [f"Measured on {place}:", markdown_table(header[:-1], lines)]
    if waiting:
        listed = [f"- {place}: {', '.join(claims)}" for place, claims in waiting.items()]
        parts.append("\n".join([f"Not decided, because {RUNNING}:", "", *listed]))
    return "\n\n".join(parts)


def write_front_page(readme: Path, claims: str, out: Path) -> None:
    """Write both parts between their marks; ``claims`` is the text about the main claims.

    A file without marks, such as the README of another project, is left alone.
    """
    if not readme.exists() or "<!-- claims -->" not in readme.read_text():
        return
    text = replace_between_marks(readme.read_text(), "expectations", expectation_table(out))
    write_atomic(readme, replace_between_marks(text, "claims", claims).encode())


def replace_between_marks(text: str, name: str, new: str) -> str:
    """Replace what stands between the marks called ``name``.

    >>> replace_between_marks("a <!-- x --> b <!-- end of x --> c", "x", "new")
    'a <!-- x -->\\nnew\\n<!-- end of x --> c'
    """
    first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(first)
    _, ended, after = rest.partition(last)
    if not (found and ended):
        raise ValueError(f"the page lacks the marks {first} and {last}")
    return f"{before}{first}\n{new}\n{last}{after}"

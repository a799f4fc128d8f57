"""The page of version 1 of the protocol (docs/results-v1.md): its stored rows, without verdicts.

Version 1 put originals and mixtures into one pair matrix, and its images of CUB-200-2011 had 128 pixels on the short
side. Its rows stay, so that nothing is lost; nothing is argued from them. Many of them need options that idml no longer
has: the commit of a row has the code.
"""

import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from idml.reproduction.claims import estimate
from idml.reproduction.regimes import LOSSES
from idml.reproduction.render import markdown_table
from idml.reproduction.stored_results import Row, StoredRows

_HEADER = ["loss", "method", "options", "lr", "seeds", "R@1", "MAP@R", "held-out", "old weight", "R-AUROC"]
_INTRO = (
    "# Results of version 1",
    "These rows were made by version 1 of the protocol and are kept for the record. **Nothing is argued from them**: "
    "they put originals and mixtures into one pair matrix (`mixing joint`), which starves the originals, so they say "
    "nothing about Mixup, IDML or PEL with Mixup as the paper means them. [Results](results.md) are those of version "
    "2.",
    "The images of CUB-200-2011 had 128 pixels on the short side, not 256. *old weight* is the mean weight by the old "
    "definition: e^(−x) of the rule `similar` over pairs of images, whatever the loss applied (proxies, or another "
    "rule). The learning rate of proxies was 100 times the model's with every loss.",
    "A row is an arm at the learning rate that was chosen on held-out classes with seed 0; R@1 and MAP@R have 95 % "
    "intervals over classes and seeds. *options* are those that most arms of the table do not have. Every run with its "
    "commit is in results/*.jsonl. `idml reproduce results` makes this page.",
)


def version1_markdown(out: Path) -> str:
    """Return the page from the stored rows of version 1."""
    parts = list(_INTRO)
    for path in sorted(out.glob("*-*.jsonl")):
        rows = [row for row in StoredRows(path) if row["version"] == 1 and "classes" in row]
        if rows:
            data, regime = path.stem.rsplit("-", 1)
            parts += [f"## {data}, {regime}", markdown_table(_HEADER, _lines(rows))]
    return "\n\n".join(parts) + "\n"


def _lines(rows: list[Row]) -> list[list[str]]:
    raw = [row for row in rows if "method" not in row["options"]]
    groups: dict[str, dict[float, dict[int, Row]]] = {}
    for row in (row for row in rows if "method" in row["options"]):
        options = {key: value for key, value in row["options"].items() if key not in ("lr", "seed")}
        rates = groups.setdefault(json.dumps(options, sort_keys=True), {})
        rates.setdefault(row["options"]["lr"], {})[row["options"]["seed"]] = row
    chosen = []
    for key, rates in groups.items():
        rate = max(rates, key=lambda lr: (len(rates[lr]), rates[lr].get(0, {}).get("selected_score", 0.0)))
        chosen.append((json.loads(key), rate, rates[rate]))
    usual = {key: Counter(_text(o.get(key)) for o, *_ in chosen).most_common(1)[0][0] for o, *_ in chosen for key in o}
    lines = [_line({}, {"method": "raw features"}, None, {0: row}) for row in raw]
    return [*lines, *(_line(usual, options, rate, runs) for options, rate, runs in chosen)]


def _line(usual: dict[str, str], options: dict[str, Any], rate: float | None, runs: dict[int, Row]) -> list[str]:
    own = [f"{k} {_text(v)}" for k, v in options.items() if k not in ("loss", "method") and usual.get(k) != _text(v)]
    loss = options.get("loss", "")
    return [
        LOSSES.get(loss, loss),
        options["method"],
        ", ".join(own),
        "" if rate is None else f"{rate:g}",
        str(len(runs)),
        estimate(runs).text(),
        estimate(runs, "MAP@R").text(),
        _mean(runs, "selected_score", 1, 100.0),
        _mean(runs, "weight", 3),
        _mean(runs, "r_auroc", 2),
    ]


def _text(value: object) -> str:
    return (
        " ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _mean(runs: dict[int, Row], key: str, digits: int, factor: float = 1.0) -> str:
    values = [run[key] for run in runs.values() if run.get(key) is not None]
    return f"{factor * statistics.mean(values):.{digits}f}" if values else ""

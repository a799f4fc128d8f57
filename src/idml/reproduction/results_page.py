"""docs/results.md and docs/results.html: every table and figure from stored cells, and what became of each claim.

Nothing is trained and nothing is written by hand; what is missing is said to be missing.
"""

import html
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idml.files import write_atomic
from idml.progress import Note, silent
from idml.report_html import drawing, page, prose, table
from idml.reproduction import step
from idml.reproduction.arms import Arms
from idml.reproduction.claims import Claim, Found, Verdict
from idml.reproduction.compare import ROUNDS
from idml.reproduction.drawing import plot_of
from idml.reproduction.regimes import Regime, known_regime
from idml.reproduction.reproduce import found_of
from idml.reproduction.shapes import (
    GRADIENTS,
    METRICS,
    gradient_figure,
    gradient_rows,
    metric_figure,
    metric_rows,
    texts,
)
from idml.reproduction.store import VERSION, Store
from idml.reproduction.summary import shown_columns
from idml.reproduction.table import Table
from idml.reproduction.tables import OWN, TABLES
from idml.reproduction.verdicts import WORDS, by_place, coloured, counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHOSEN = ("last", "full")  # regimes that are too dear for more than the chosen rows
_OF_CHOSEN = ("finetune", "found", "margins")
_STYLE = """<style>
table { width: max-content; max-width: calc(100vw - 4rem); font-size: .85rem; line-height: 1.35 }
td { max-width: 16rem } .confirmed { color: #176b2c } .not { color: #a3261b } .cannot, .missing { color: #666 }
</style>"""
_INTRO = (
    "Made by `idml reproduce results` from the stored runs in results/cells-*, never by hand. The paper's figures are "
    "of ResNet-50 at 224 pixels; ours, unless a heading says otherwise, of a much smaller network on smaller images: "
    "differences between arms can be compared, levels cannot.",
    "Every arm is trained at the same learning rates with seed 0; the one with the best MAP@R on held-out training "
    "classes serves all seeds, and the epoch is chosen by the same score. A gain counts only over the better of the "
    f"raw features and the plain arm. Intervals hold 95 % of {ROUNDS} rounds that draw classes and seeds together.",
    "*weight* is the mean of e^(−x) over pairs at the end of training: above 0.98 the metric is plain in disguise. "
    "*R-AUROC* is that of ‖u‖ for wrong nearest neighbours, *AUROC mixed* that for mixed against clean test images; "
    "0.5 is chance, and arms that do not train u show what an untrained u gives. *held-out* is the MAP@R on held-out "
    "training classes, the only figure by which anything is chosen.",
    "A claim is *confirmed* if the interval of its gain in R@1 lies above 0 (and, for the metric, not in disguise). It "
    "is *not confirmed* if the interval does not, and ends below half of the paper's gain (below half a point where "
    "the paper gives none). Otherwise the table *cannot tell at this scale*.",
)


@dataclass(frozen=True)
class Section:
    """A table with what was found for it."""

    what: str
    table: Table
    found: Found
    store: Store
    seeds: int

    @property
    def name(self) -> str:
        """Which table, on what, trained how."""
        return f"{self.table.title} ({self.place})"

    @property
    def place(self) -> str:
        """On what, trained how."""
        return f"{self.found.data}, {self.store.regime.name}"

    @property
    def runs(self) -> list[dict[str, Any]]:
        """All runs, once each."""
        return [run for at in self.found.courses.values() for run in at.runs.values()]

    @cached_property
    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows; the intervals in them take most of the time of a page."""
        return shown_columns(self.table, self.found)

    def facts(self) -> str:
        """The command, seeds, machine, dates and time."""
        regime, data = self.store.regime.name, self.found.data
        option = {"paper": " --scale paper", "last": " --regime last", "full": " --regime full"}.get(regime, "")
        spec = "glyphs" if data == "glyphs" else f"{data}:PATH"
        dates = sorted({run["date"] for run in self.runs})
        span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        hours = sum(run["seconds"] for run in self.runs) / 3600
        machines = "; ".join(sorted({run["machine"] for run in self.runs}))
        tested = sum(self.runs[0]["classes"]["queries"])
        return (
            f"`idml reproduce {self.what} --data {spec}{option} --seeds {self.seeds}`; {len(self.runs)} runs of the "
            f"chosen learning rates, {tested:,} test images, {hours:.1f} hours, {span}, on {machines}."
        )


def write_results(out: Path, docs: Path, *, note: Note = silent) -> dict[str, Any]:
    """Write both pages into ``docs``; returns the verdicts."""
    sections, missing = list[Section](), list[Section]()
    for data, regime in stored_regimes(out):
        store = Store(out, data, regime, note)
        for what, build in TABLES.items():
            if regime.name in _CHOSEN and what not in _OF_CHOSEN:
                continue
            if what == "finetune" and regime.name not in (*_CHOSEN, "paper"):
                continue
            made = build(Arms(data, regime))
            section = Section(what, made, found_of(made, store, regime.seeds), store, regime.seeds)
            run = sum(bool(at.runs) for at in section.found.courses.values())
            (sections if 4 * run >= 3 * len(made.arms) else missing).append(section)  # rows are shared: some say little
    verdicts = [(s, claim, claim.judge(s.found)) for s in sections for claim in s.table.claims]
    docs.mkdir(parents=True, exist_ok=True)
    drawn = _drawn(out)
    write_atomic(docs / "results.md", _markdown(sections, missing, verdicts, drawn).encode())
    write_atomic(docs / "results.html", _html(sections, missing, verdicts, drawn))
    counts = {word: sum(v.word == word for *_, v in verdicts) for word in WORDS}
    told = ", ".join(f"{count} {word}" for word, count in counts.items())
    text = f"{len(sections)} tables, {len(verdicts)} claims: {told}; {docs / 'results.md'}, {docs / 'results.html'}"
    return {
        "table": text,
        "verdicts": [[s.name, claim.text, v.word, v.reason] for s, claim, v in verdicts],
        "counts": counts,
    }


def stored_regimes(out: Path) -> list[tuple[str, Regime]]:
    """The data sets and regimes that ``out`` holds cells of."""
    names = [folder.name.split("-", 2)[1:] for folder in sorted(out.glob("cells-*-*")) if any(folder.glob("*.json"))]
    return [(data, known_regime(name, data)) for data, name in names]


def _claims(verdicts: list[tuple[Section, Claim, Verdict]]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The paper's claims and our own questions: for each a title with their counts, the header and the rows."""
    out = []
    for title, own in (("The paper's claims", False), ("Questions of our own", True)):
        told = dict.fromkeys(
            (claim.text, section.place, verdict)
            for section, claim, verdict in verdicts
            if (section.what in OWN or getattr(claim, "own", False)) == own
        )
        if told:
            out.append((f"{title}: {counted(v for *_, v in told)}", *by_place(list(told))))
    return out


def _missing_line(missing: list[Section]) -> str:
    names = [f"{s.what} ({s.place})" for s in missing]
    return f"Not run yet, or less than three quarters: {', '.join(names)}." if names else "Nothing is missing."


Drawn = tuple[str, list[str], list[list[str]], "Figure", str]


def _drawn(out: Path) -> list[Drawn]:
    """The figures that no cells are needed for: title, header, rows, drawing, a sentence."""
    same = "The formulas and autograd agree." if _agree() else "The formulas and autograd DISAGREE."
    kl = "The Gaussian KL grows when one image is uncertain; the introspective distance falls."
    shapes = [
        ("Gradient left by uncertainty", GRADIENTS, texts(gradient_rows()), gradient_figure(), same),
        ("Three metrics as uncertainty grows", METRICS, texts(metric_rows()), metric_figure(), kl),
    ]
    for folder in sorted(out.glob("step-tsne-*")):
        data = folder.name.removeprefix("step-tsne-")
        if found := step.stored_step(out, data):
            title = f"One gradient step around an ambiguous image ({data})"
            shapes.append((title, [], [], step.step_figure(found), step.sentence(found)))
    return shapes


def _agree() -> bool:
    return all(abs(row[1] - row[2]) + abs(row[3] - row[4]) < 1e-6 for row in gradient_rows())


def _markdown(
    sections: list[Section],
    missing: list[Section],
    verdicts: list[tuple[Section, Claim, Verdict]],
    drawn: list[Drawn],
) -> str:
    parts = ["# Results", *_INTRO, "The same with plots: [results.html](results.html)."]
    for title, header, rows in _claims(verdicts):
        parts += [f"## {title}", _md(header, rows)]
    parts += [_missing_line(missing), f"Version {VERSION} of the protocol."]
    for section in sections:
        parts += [f"## {section.name}", section.facts(), _md(*section.columns)]
    for title, header, rows, _, text in drawn:
        parts += [f"## {title}", text, *([_md(header, rows)] if rows else [])]
    return "\n\n".join(parts) + "\n"


def _html(
    sections: list[Section],
    missing: list[Section],
    verdicts: list[tuple[Section, Claim, Verdict]],
    drawn: list[Drawn],
) -> bytes:
    titles = [*(s.name for s in sections), *(title for title, *_ in drawn)]
    links = [f"<li><a href='#{i}'>{html.escape(title)}</a></li>" for i, title in enumerate(titles)]
    heads = (f"<h2 id='{i}'>{html.escape(title)}</h2>" for i, title in enumerate(titles))
    parts = [_STYLE, "<h1>Results</h1>", *map(prose, _INTRO)]
    parts += [f"<details><summary>{len(titles)} tables and figures</summary><ul>{''.join(links)}</ul></details>"]
    for title, header, rows in _claims(verdicts):
        parts += [f"<h2>{html.escape(title)}</h2>", coloured(table(header, rows))]
    parts += [prose(_missing_line(missing)), prose(f"Version {VERSION} of the protocol.")]
    for section in sections:
        parts += [next(heads), prose(section.facts())]
        if (figure := plot_of(section.what, section.table, section.found)) is not None:
            parts.append(drawing(figure, section.name))
        parts.append(table(*section.columns))
    for title, header, rows, figure, text in drawn:
        parts += [next(heads), prose(text), drawing(figure, title)]
        parts += [table(header, rows)] if rows else []
    return page("Results", *parts)


def _md(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])

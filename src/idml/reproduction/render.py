"""Tables as text, and the page of all results (docs/results.md, docs/results.html), from stored rows alone.

Nothing is trained here and nothing is written by hand; what is missing is said to be missing.
"""

import csv
import html
import io
import statistics
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idml.files import write_atomic
from idml.progress import Note, silent
from idml.report_html import drawing, page, prose, table
from idml.reproduction.claims import (
    ROUNDS,
    SAME_AS_PLAIN,
    WORDS,
    Claim,
    TableRuns,
    Verdict,
    count_verdicts,
    estimate,
    gain,
    mean_weight,
    paper_figure,
    paper_gain,
    verdict_table,
)
from idml.reproduction.figures import figures_without_runs, plot_table
from idml.reproduction.paper_tables import OWN, RETIRED, TABLES, Table
from idml.reproduction.regimes import LOSSES, Arms, Regime, named_regime
from idml.reproduction.runner import VERSION, ArmProgress, Store, read_progress
from idml.reproduction.stored_results import CELLS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = [
    "loss", "arm", "R@1", "paper", "RP", "paper", "MAP@R", "paper", "NMI", "paper", "R@1 gain", "MAP@R gain", "over",
    "paper's R@1 gain", "weight", "spread of ‖u‖", "AUROC mixed", "R-AUROC", "AUROC wrong labels", "held-out",
    "images seen", "lr", "seeds", "s", "remark",
]  # fmt: skip
_FIGURES = {"R@1": "recall@1", "RP": "r_precision", "MAP@R": "map@r"}
_CHOSEN = ("last", "full")  # regimes that are too expensive for more than the chosen rows
_OF_CHOSEN = ("finetune", "found", "margins")


# -------------------- one table --------------------


def read_table(made: Table, store: Store, seeds: int) -> tuple[Table, TableRuns]:
    """Return a table and what is stored of it; retired arms without stored rows are left out, with their claims."""
    progress = {arm.key: read_progress(store, arm, seeds) for arm in made.arms}
    arms = tuple(arm for arm in made.arms if progress[arm.key].runs or not arm.retired)
    left_out = progress.keys() - {arm.key for arm in arms}
    claims = tuple(c for c in made.claims if not {c.arm, getattr(c, "over", None)} & left_out)
    found = TableRuns(store.data.partition(":")[0], {arm.key: progress[arm.key] for arm in arms}, store.raw())
    return replace(made, arms=arms, claims=claims), found


def mostly_stored(made: Table, found: TableRuns) -> bool:
    """Return whether three quarters of the arms have runs: tables share arms, so fewer do not make a table."""
    return 4 * sum(bool(at.runs) for at in found.progress.values()) >= 3 * len(made.arms)


def table_columns(made: Table, found: TableRuns) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, without empty columns; a remark says what is missing or cannot be run."""
    rows = [_raw_row(found), *(_row(found, found.progress[arm.key]) for arm in made.arms)]
    kept = [i for i in range(len(HEADER)) if HEADER[i] in ("loss", "arm", "remark") or any(row[i] for row in rows)]
    return [HEADER[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _raw_row(found: TableRuns) -> list[str]:
    figures = [""] * 8
    if found.raw is not None:
        own, selected = {0: found.raw}, found.raw["selected"]
        precision, nmi = f"{100 * selected['r_precision']:.1f}", f"{100 * found.raw['nmi']:.1f}"
        figures[::2] = [estimate(own).text(), precision, estimate(own, "MAP@R").text(), nmi]
    rest = [""] * (len(HEADER) - 11)
    return ["raw features", "", *figures, *rest, "missing" if found.raw is None else ""]


def _row(found: TableRuns, progress: ArmProgress) -> list[str]:
    arm, runs = progress.arm, list(progress.runs.values())
    row = [LOSSES.get(arm.loss, arm.loss), arm.name]
    ours = _our_figures(progress) if runs else dict.fromkeys((*_FIGURES, "NMI"), "")
    for figure, text in ours.items():
        paper = paper_figure(found.data, arm.key, figure)
        row += [text, "" if paper is None else f"{paper:.1f}"]
    row += _gain_columns(found, progress)
    theirs = paper_gain(found.data, arm.key, (arm.loss, arm.against))
    row.append("" if theirs is None or arm.name == arm.against else f"{theirs:+.1f}")
    weight = mean_weight(progress.runs)
    row.append("" if weight is None else f"{weight:.3f}")
    row += [_mean(runs, key, 2) for key in ("level_spread", "auroc_mixed", "r_auroc", "auroc_wrong")]
    row.append(f"{100 * statistics.mean(run['selected_score'] for run in runs):.1f}" if runs else "")
    row.append(f"{statistics.mean(run['images_seen'] for run in runs):,.0f}" if runs else "")
    row += ["" if progress.rate is None else f"{progress.rate:g}", str(len(runs)), _mean(runs, "seconds", 0)]
    return [*row, _remark(progress, weight)]


def _our_figures(progress: ArmProgress) -> dict[str, str]:
    runs, tested = progress.runs, progress.arm.tested
    if tested == "introspective":
        selected = [run["introspective"]["selected"] for run in runs.values()]
        nmi = "not defined"
    else:
        selected = [run["selected"] for run in runs.values()]
        nmi = f"{100 * statistics.mean(run['nmi'] for run in runs.values()):.1f}"
    precision = f"{100 * statistics.mean(each['r_precision'] for each in selected):.1f}"
    r1, map_r = (estimate(runs, figure, tested=tested).text() for figure in ("R@1", "MAP@R"))
    return {"R@1": r1, "RP": precision, "MAP@R": map_r, "NMI": nmi}


def _gain_columns(found: TableRuns, progress: ArmProgress) -> list[str]:
    """The gains in R@1 and MAP@R over the better of the raw features and plain; and which that is, by R@1."""
    arm, texts, names = progress.arm, [], []
    if not progress.runs or arm.name == arm.against:
        return ["", "", ""]
    for figure in ("R@1", "MAP@R"):
        rival = found.rival(arm.key, figure)
        if rival is None:
            return ["", "", "missing"]
        names.append(rival[0])
        texts.append(gain(progress.runs, rival[1], figure, tested=arm.tested).text(sign=True))
    return [*texts, names[0] if names[0] == names[1] else " / ".join(names)]


def _mean(runs: list[dict[str, Any]], key: str, digits: int) -> str:
    values = [run[key] for run in runs if key in run]
    return f"{statistics.mean(values):.{digits}f}" if values else ""


def _remark(progress: ArmProgress, weight: float | None) -> str:
    if progress.refused:
        return f"left out: {progress.refused}"
    words = ["almost plain"] if weight is not None and weight > SAME_AS_PLAIN else []
    return "; ".join([*words, *([f"{progress.left} runs missing"] if progress.left else [])])


def retired_commits(found: TableRuns) -> str:
    """Name the commits that made the runs of retired arms."""
    runs = [run for at in found.progress.values() if at.arm.retired for run in at.runs.values()]
    commits = list(dict.fromkeys(run["commit"] for run in sorted(runs, key=lambda run: str(run["date"]))))
    more = f" and {len(commits) - 3} more (per_seed.csv has each)" if len(commits) > 3 else ""
    return f"commit{'s' * (len(commits) > 1)} {', '.join(commits[:3])}{more}" if commits else ""


def per_seed_csv(made: Table, found: TableRuns) -> str:
    """Return the figures of every run, and the commit that made it, as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    last = [f"last {name}" for name in _FIGURES]
    facts = ["weight", "level_clean", "level_mixed", "level_spread", "auroc_mixed", "images_seen", "seconds", "date"]
    writer.writerow(["loss", "arm", "lr", "seed", "selected step", *_FIGURES, *last, "NMI", *facts, "commit"])
    for arm in made.arms:
        progress = found.progress[arm.key]
        for seed, run in sorted(progress.runs.items()):
            selected = run["introspective"]["selected"] if arm.tested == "introspective" else run["selected"]
            figures = [f"{100 * part[name]:.2f}" for part in (selected, run["last"]) for name in _FIGURES.values()]
            row = [arm.loss, arm.name, progress.rate, seed, run["selected_step"], *figures, f"{100 * run['nmi']:.2f}"]
            writer.writerow([*row, *(run.get(fact, "") for fact in (*facts, "commit"))])
    return file.getvalue()


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a table as Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def write_table(
    folder: Path, name: str, header: list[str], rows: list[list[str]], figure: "Figure | None" = None
) -> str:
    """Write a table as Markdown, CSV and HTML into ``folder``; return the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([header, *rows])
    write_atomic(folder / f"{name}.csv", file.getvalue().encode())
    markdown = markdown_table(header, rows)
    write_atomic(folder / f"{name}.md", f"{markdown}\n".encode())
    title = f"{folder.name}, {name}"
    drawn = [] if figure is None else [drawing(figure, title)]
    write_atomic(folder / f"{name}.html", page(title, f"<h1>{title}</h1>", *drawn, table(header, rows)))
    return markdown


# -------------------- the page of all results --------------------


_STYLE = """<style>
table { width: max-content; max-width: calc(100vw - 4rem); font-size: .85rem; line-height: 1.35 }
td { max-width: 16rem } .confirmed { color: #176b2c } .not { color: #a3261b } .cannot, .missing { color: #666 }
</style>"""
_INTRO = (
    "`idml reproduce results` makes this page from the rows in results/; nothing is written by hand. It also writes "
    "results.html, with plots. The paper's figures are those of ResNet-50 at 224 pixels. Ours, unless a heading says "
    "otherwise, are those of a much smaller network on smaller images. Compare differences between arms, not levels.",
    "All rows are of version {version} of the protocol. The images of CUB-200-2011 had 128 pixels on the short side.",
    "With seed 0 every arm is trained at the same learning rates. The rate with the best MAP@R on held-out training "
    "classes is used for all seeds, and the epoch is chosen by the same score. A gain counts only over the better of "
    f"the raw features and the plain arm. Intervals are 95 % of {ROUNDS} rounds that draw classes and seeds together.",
    "*weight* is the mean of e^(−x) over pairs at the end of training; above 0.98 the metric is *almost plain*. "
    "*R-AUROC* is the AUROC of ‖u‖ for wrong nearest neighbours, *AUROC mixed* its AUROC for mixed against clean test "
    "images; 0.5 is chance. Arms that do not train u show the figures of an untrained u. *held-out* is the MAP@R on "
    "held-out training classes, the only figure by which anything is chosen.",
    "A claim is *confirmed* if the interval of its gain in R@1 lies above 0 (and, for the metric, the weight is not "
    "above 0.98). It is *not confirmed* if the interval does not, and ends below half of the paper's gain (below half "
    "a point where the paper gives none). Otherwise the table *cannot tell at this scale*.",
)


@dataclass(frozen=True)
class Section:
    """A table with what was found for it."""

    what: str
    table: Table
    found: TableRuns
    regime: Regime

    @property
    def name(self) -> str:
        """The title, the data set and the regime."""
        return f"{self.table.title} ({self.place})"

    @property
    def place(self) -> str:
        """The data set and the regime."""
        return f"{self.found.data}, {self.regime.name}"

    @property
    def runs(self) -> list[dict[str, Any]]:
        """All runs."""
        return [run for at in self.found.progress.values() for run in at.runs.values()]

    @cached_property
    def columns(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows; the intervals in them take most of the time of a page."""
        return table_columns(self.table, self.found)

    def facts(self) -> str:
        """The command, seeds, machine, dates and time."""
        regime, data = self.regime.name, self.found.data
        option = {"paper": " --scale paper", "last": " --regime last", "full": " --regime full"}.get(regime, "")
        spec = "glyphs" if data == "glyphs" else f"{data}:PATH"
        dates = sorted({run["date"] for run in self.runs})
        span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        hours = sum(run["seconds"] for run in self.runs) / 3600
        machines = "; ".join(sorted({run["machine"] for run in self.runs}))
        tested = sum(self.runs[0]["classes"]["queries"])
        return (
            f"`idml reproduce {self.what} --data {spec}{option} --seeds {self.regime.seeds}`; {len(self.runs)} runs of "
            f"the chosen learning rates, {tested:,} test images, {hours:.1f} hours, {span}, on {machines}."
            + (f" Retired arms were made by {commits}." if (commits := retired_commits(self.found)) else "")
        )


@dataclass(frozen=True)
class Results:
    """Everything the page shows."""

    sections: list[Section]
    missing: list[Section]
    """Tables of which less than three quarters are there."""
    verdicts: list[tuple[Section, Claim, Verdict]]

    def verdict_tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Return the paper's claims and our own questions: for each a title with counts, the header and the rows."""
        tables = []
        for title, own in (("The paper's claims", False), ("Our own questions", True)):
            judged = dict.fromkeys(
                (claim.text, section.place, verdict)
                for section, claim, verdict in self.verdicts
                if (section.what in OWN or getattr(claim, "own", False)) == own
            )
            if judged:
                tables.append((f"{title}: {count_verdicts(v for *_, v in judged)}", *verdict_table(list(judged))))
        return tables

    def missing_line(self) -> str:
        """Say which tables are not shown."""
        names = [f"{s.what} ({s.place})" for s in self.missing]
        return f"Not run yet, or less than three quarters: {', '.join(names)}." if names else "Nothing is missing."


def stored_regimes(out: Path) -> list[tuple[str, Regime]]:
    """Return the data sets and regimes that ``out`` holds rows of."""
    names = {path.stem for path in out.glob("*-*.jsonl")}
    names |= {path.name for path in (out / CELLS).glob("*-*") if any(path.glob("*.json"))}
    pairs = [name.rsplit("-", 1) for name in sorted(names)]
    return [(data, named_regime(name, data)) for data, name in pairs]


def stored_results(out: Path, note: Note = silent) -> Results:
    """Read every table that is stored, and decide its claims."""
    sections, missing = list[Section](), list[Section]()
    for data, regime in stored_regimes(out):
        store = Store(out, data, regime, note)
        for what, build in TABLES.items():
            if regime.name in _CHOSEN and what not in _OF_CHOSEN:
                continue
            if what == "finetune" and regime.name not in (*_CHOSEN, "paper"):
                continue
            made = build(Arms(data, regime))
            section = Section(what, *read_table(made, store, regime.seeds), regime)
            if mostly_stored(made, section.found):
                sections.append(section)
            elif what not in RETIRED:
                missing.append(section)
    return Results(sections, missing, [(s, claim, claim.decide(s.found)) for s in sections for claim in s.table.claims])


def write_results(out: Path, docs: Path, *, note: Note = silent) -> dict[str, Any]:
    """Write both pages into ``docs``; return the verdicts."""
    results = stored_results(out, note)
    docs.mkdir(parents=True, exist_ok=True)
    write_atomic(docs / "results.md", results_markdown(results, out).encode())
    write_atomic(docs / "results.html", _results_html(results, out))
    counts = {word: sum(v.word == word for *_, v in results.verdicts) for word in WORDS}
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    written = f"{docs / 'results.md'}, {docs / 'results.html'}"
    return {
        "table": f"{len(results.sections)} tables, {len(results.verdicts)} claims: {words}; {written}",
        "verdicts": [[s.name, claim.text, v.word, v.reason] for s, claim, v in results.verdicts],
        "counts": counts,
    }


def _intro() -> list[str]:
    return [text.replace("{version}", str(VERSION)) for text in _INTRO]


def results_markdown(results: Results, out: Path) -> str:
    """Return the page as Markdown."""
    parts = ["# Results", *_intro()]
    for title, header, rows in results.verdict_tables():
        parts += [f"## {title}", markdown_table(header, rows)]
    parts.append(results.missing_line())
    for section in results.sections:
        parts += [f"## {section.name}", section.facts(), markdown_table(*section.columns)]
    for drawn in figures_without_runs(out):
        parts += [f"## {drawn.title}", drawn.text, *([markdown_table(drawn.header, drawn.rows)] if drawn.rows else [])]
    return "\n\n".join(parts) + "\n"


def _results_html(results: Results, out: Path) -> bytes:
    shapes = figures_without_runs(out)
    titles = [*(s.name for s in results.sections), *(drawn.title for drawn in shapes)]
    links = [f"<li><a href='#{i}'>{html.escape(title)}</a></li>" for i, title in enumerate(titles)]
    heads = (f"<h2 id='{i}'>{html.escape(title)}</h2>" for i, title in enumerate(titles))
    parts = [_STYLE, "<h1>Results</h1>", *map(prose, _intro())]
    parts += [f"<details><summary>{len(titles)} tables and figures</summary><ul>{''.join(links)}</ul></details>"]
    for title, header, rows in results.verdict_tables():
        parts += [f"<h2>{html.escape(title)}</h2>", colour_verdicts(table(header, rows))]
    parts.append(prose(results.missing_line()))
    for section in results.sections:
        parts += [next(heads), prose(section.facts())]
        if (figure := plot_table(section.what, section.table, section.found)) is not None:
            parts.append(drawing(figure, section.name))
        parts.append(table(*section.columns))
    for drawn in shapes:
        parts += [next(heads), prose(drawn.text), drawing(drawn.figure(), drawn.title)]
        parts += [table(drawn.header, drawn.rows)] if drawn.rows else []
    return page("Results", *parts)


def colour_verdicts(text: str) -> str:
    """Return the HTML of a table of verdicts with a colour for each kind of verdict."""
    for word in WORDS:
        text = text.replace(f">{word}: ", f"><b class='{word.split()[0]}'>{word}</b><br>")
    return text

"""The page of all results (docs/results.md, docs/results.html), from stored rows alone; nothing is written by hand.

What a visitor wants comes first: the paper's own network, then a line for each of the paper's main claims, then what
follows from them. The tables and the studies come after that. Version 1 of the protocol has a page of its own.
"""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from idml.files import write_atomic
from idml.progress import Note, silent
from idml.report_html import drawing, page, prose, table
from idml.reproduction import regimes
from idml.reproduction.claims import (
    MISSING,
    NOT_INTROSPECTIVE,
    ROUNDS,
    SAME_AS_PLAIN,
    WORDS,
    Claim,
    Gain,
    Key,
    TableRuns,
    Verdict,
    count_verdicts,
    interval_text,
    mean_weight,
    verdict_table,
)
from idml.reproduction.comparator_costs import Cost, read_costs
from idml.reproduction.comparators import COMMAND, comparators_table
from idml.reproduction.comparators import NAME as COMPARED
from idml.reproduction.comparators_page import comparators_columns, describe_comparison, has_comparison
from idml.reproduction.figures import figures_without_runs, plot_table
from idml.reproduction.front_page import claim_table, write_front_page
from idml.reproduction.live_u import LIVE_U
from idml.reproduction.paper_tables import FULL, OWN, TABLES, WANTED_R_AUROC, Table
from idml.reproduction.regimes import LOSSES, Arms, Regime, named_regime
from idml.reproduction.render import RUNNING, detection_line, markdown_table, mostly_stored, read_table, table_columns
from idml.reproduction.resnet50_study import RESNET50, resnet50_verdict
from idml.reproduction.runner import VERSION, Store
from idml.reproduction.stored_results import Row, cells_folder
from idml.reproduction.studies import Study, StudyTable
from idml.reproduction.version1_page import version1_markdown
from idml.training.config import TrainConfig

_FROZEN = ("table1", "table2", "table3", "table4", "table5", "table6", "tau", "gamma", "embedding-size")
PLAN = (
    *((what, "cub", "frozen") for what in (*_FROZEN, "trend", "levels", "u")),
    *((what, "cars", "frozen") for what in ("table1", "table2")),
    *((what, "glyphs", "scratch") for what in ("table1", "table2")),
    *((what, "cub", "full") for what in FULL),
    *((COMPARED, data, regime) for data, regime in (("cub", "frozen"), ("cars", "frozen"), ("cub", "last"))),
)  # fmt: skip
"""The tables that version 2 of the protocol makes: their names, data sets and regimes."""
_STYLE = """<style>
table { width: max-content; max-width: calc(100vw - 4rem); font-size: .85rem; line-height: 1.35 }
td { max-width: 16rem } .confirmed { color: #176b2c } .not { color: #a3261b } .cannot, .missing { color: #666 }
</style>"""
_SHOWN = (
    "loss", "arm", "R@1", "RP", "MAP@R", "NMI", "R@1 gain", "over", "paper's R@1 gain", "weight", "spread of ‖u‖",
    "AUROC mixed", "R-AUROC", "held-out", "lr", "seeds", "remark",
)  # fmt: skip
"""The columns of a table on this page; `idml reproduce TABLE` writes all of them."""
_COMPARISON = "Which of the other systems beat a tuned ProxyAnchor"


# -------------------- what is stored --------------------


@dataclass(frozen=True)
class Section:
    """A table with what was found for it."""

    what: str
    table: Table
    found: TableRuns
    regime: Regime
    costs: Mapping[Key, Cost] = field(default_factory=dict)
    """Of the table of the other systems: what a step of each arm costs."""

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
        """Header and rows as the page shows them; the intervals in them take most of the time of a page."""
        if self.what == COMPARED:
            return comparators_columns(self.table, self.found, self.costs)
        header, rows = table_columns(self.table, self.found)
        kept = [header.index(name) for name in _SHOWN if name in header]
        return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]

    def facts(self) -> str:
        """The command, seeds, machine, dates and time, and what the table could have detected."""
        regime, data = self.regime.name, self.found.data
        usual = "full" if self.what in FULL else "scratch" if data == "glyphs" else "frozen"
        option = "" if regime == usual else " --scale paper" if regime == "paper" else f" --regime {regime}"
        spec = "glyphs" if data == "glyphs" else f"{data}:PATH"
        command = COMMAND if self.what == COMPARED else self.what
        dates = sorted({run["date"] for run in self.runs})
        span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        hours = sum(run["seconds"] for run in self.runs) / 3600
        machines = "; ".join(sorted({run["machine"] for run in self.runs}))
        tested = sum(self.runs[0]["classes"]["queries"])
        return (
            f"`idml reproduce {command} --data {spec}{option}`; {len(self.runs)} runs of the chosen learning rates, "
            f"{tested:,} test images, {hours:.1f} hours, {span}, on {machines}. "
            + detection_line(self.table, self.found)
        )


@dataclass(frozen=True)
class Results:
    """Everything the page shows."""

    sections: list[Section]
    running: list[str]
    """Tables and studies of the plan of which less than three quarters are there."""
    verdicts: list[tuple[Section, Claim, Verdict]]
    resnet50: list[Row]
    live_u: list[Row]

    def section(self, what: str, data: str, regime: str) -> Section | None:
        """Return a table that is there."""
        same = (s for s in self.sections if (s.what, s.found.data, s.regime.name) == (what, data, regime))
        return next(same, None)

    def verdict_tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Return the paper's claims and our own questions: for each a title with counts, the header and the rows."""
        tables = []
        for title, own in (("All claims of the paper", False), ("Our own questions", True)):
            judged = dict.fromkeys(
                (claim.text, section.place, verdict)
                for section, claim, verdict in self.verdicts
                if (section.what in OWN or getattr(claim, "own", False)) == own
            )
            if judged:
                tables.append((f"{title}: {count_verdicts(v for *_, v in judged)}", *verdict_table(list(judged))))
        return tables

    def comparison(self) -> str:
        """Say what the tables of the other systems show."""
        return describe_comparison([(s.place, s.table, s.found) for s in self.sections if s.what == COMPARED])

    def running_line(self) -> str:
        """Say which tables are not shown."""
        return f"Not run yet: {', '.join(self.running)}." if self.running else "Nothing is missing."


def stored_regimes(out: Path) -> list[tuple[str, Regime]]:
    """Return the data sets and regimes that ``out`` holds rows of."""
    names = {path.stem for path in out.glob("*-*.jsonl")}
    names |= {path.name for path in cells_folder(out).glob("*-*") if any(path.glob("*.json"))}
    pairs = [name.rsplit("-", 1) for name in sorted(names)]
    return [(data, named_regime(name, data)) for data, name in pairs]


def stored_results(out: Path, note: Note = silent) -> Results:
    """Read every table that is stored, and decide its claims."""
    sections, shown = list[Section](), set[tuple[str, str, str]]()
    for data, regime in stored_regimes(out):
        store = Store(out, data, regime, note)
        for what, build in {**TABLES, COMPARED: comparators_table}.items():
            elsewhere = (what in FULL) != (regime.name in ("full", "last")) and what != COMPARED
            if elsewhere or (what in FULL and regimes.CHOSEN_FORM is None):
                continue
            made = build(Arms(data, regime))
            costs = read_costs(out, data, regime.name) if what == COMPARED else {}
            section = Section(what, made, read_table(made, store), regime, costs)
            if mostly_stored(made, section.found):
                shown.add((what, data, regime.name))
            elif what != COMPARED or not has_comparison(made, section.found):
                continue
            sections.append(section)
    running = [f"{what} ({data}, {name})" for what, data, name in PLAN if (what, data, name) not in shown]
    studied = {"resnet50": _study_rows(RESNET50, out, note)}
    studied["live-u"] = [] if regimes.CHOSEN_FORM is None else _study_rows(LIVE_U, out, note)
    for name, study in (("resnet50", RESNET50), ("live-u", LIVE_U)):
        store = Store(out, "cub", named_regime(study.regime or "frozen", "cub"))
        whole = name != "live-u" or regimes.CHOSEN_FORM is not None
        if not whole or len(studied[name]) < len(study.cells(store, study.seeds)):
            running.append(f"{name} (cub)")
    verdicts = [(s, claim, claim.decide(s.found)) for s in sections for claim in s.table.claims]
    return Results(sections, running, verdicts, studied["resnet50"], studied["live-u"])


def _study_rows(study: Study, out: Path, note: Note) -> list[Row]:
    store = Store(out, "cub", named_regime(study.regime or "frozen", "cub"), note)
    return [row for cell in study.cells(store, study.seeds) if (row := store.read(cell)) is not None]


# -------------------- the paper's main claims, a line each --------------------


@dataclass(frozen=True)
class MainClaim:
    """A claim of the paper in one line: the claims of a table that it sums up, named by how their text begins.

    ``figure`` says what was measured if it is not a gain in R@1; its braces are filled with the value or the range.
    """

    text: str
    what: str
    begins: tuple[str, ...]
    data: str = "cub"
    regime: str = "frozen"
    figure: str = "{}"
    form: str = "+.1f"


_BEYOND = tuple(f"IDML improves {LOSSES[loss]} beyond" for loss in ("margin_dw", "proxy_anchor"))
_CARS, _GLYPHS = {"data": "cars"}, {"data": "glyphs", "regime": "scratch"}
_PROXY_ANCHOR = "IDML improves ProxyAnchor"
MAIN_CLAIMS = (
    MainClaim(_PROXY_ANCHOR, "finetune", (_PROXY_ANCHOR,), regime="full"),
    MainClaim("IDML improves Multi-Sim", "finetune", ("IDML improves Multi-Sim",), regime="full"),
    *(
        MainClaim("IDML improves each of seven losses", "table1", ("IDML improves",), **place)
        for place in ({}, _CARS, _GLYPHS)
    ),
    MainClaim("Mixup alone improves ProxyAnchor", "finetune", ("Mixup improves",), regime="full"),
    MainClaim("Mixup alone improves Margin-DW and ProxyAnchor", "table2", ("Mixup improves",)),
    MainClaim("the metric alone improves Margin-DW and ProxyAnchor", "table2", ("the metric improves",)),
    MainClaim("IDML is better than Mixup alone and than the metric alone", "table2", _BEYOND),
    MainClaim("plain training is better than PEL, embeddings as Gaussians", "table2", ("PEL is below",)),
    MainClaim("the metric helps with every form of ambiguous images", "table3", ("the metric helps",)),
    MainClaim("uncertain pairs are better treated as similar than as dissimilar", "table4", ("similar is better",)),
    MainClaim("Euclidean distance on s tests better than the metric", "table5", ("Euclidean distance",)),
    MainClaim("batches of 120 images are best", "table6", ("batches of",)),
    MainClaim("the temperature τ = 5 is best", "tau", ("τ = 5 is above τ",)),
    MainClaim("IDML improves every embedding size", "embedding-size", ("IDML improves",)),
    MainClaim(
        "IDML teaches that mixed images have a larger ‖u‖", "levels", ("mixed test images",),
        figure="AUROC {} over a ‖u‖ that nothing teaches", form="+.2f",
    ),
    MainClaim("‖u‖ falls during training", "trend", ("‖u‖ falls",), figure="falls by {}", form=".0%"),
)  # fmt: skip
MAIN_HEADER = ["the paper says", "gain in the paper", "gain here", "verdict", "where"]
_DATA = {"cub": "CUB-200-2011 (birds)", "cars": "Cars196", "glyphs": "glyphs (letters and signs)"}
_NETWORKS = {
    "tf_efficientnet_lite0": "EfficientNet-Lite0",
    "resnet50": "ResNet-50",
    "conv4": "a network of four convolutions",
}
_TRAINED = {
    "frozen": "only the heads trained",
    "last": "the last stage and the heads trained",
    "scratch": "everything trained from random weights",
}
MAIN_READING = (
    "**R@1** is the share of test images whose nearest neighbour shows the same class. A **gain** is in points of R@1, "
    "over the better of plain training and the pretrained features as they are, or over the rival that the claim "
    "names. Brackets hold the 95 % interval. *a to b* is the range over the losses or settings of the claim.",
    "*Confirmed*: the interval of the gain lies above 0. *Not confirmed*: it does not, and it ends below half of the "
    "paper's gain; or it does, but the metric was almost the plain one. *Cannot tell at this scale*: everything else, "
    "and every comparison with one seed.",
)
"""How the lines of the main claims are read: the figures, and the verdicts."""


def describe_place(data: str, regime: str) -> str:
    """Say in words which data set, network and images a regime has, and what it trains.

    >>> describe_place("cub", "resnet50")
    'CUB-200-2011 (birds), ResNet-50 at 224 pixels, everything trained for 6 epochs'
    """
    base = named_regime(regime, data).base
    trunk = base.get("trunk", TrainConfig.trunk)
    network = f"{_NETWORKS.get(trunk, trunk)} at {base['image_size']} pixels"
    trained = _TRAINED.get(regime, "everything trained")
    return f"{_DATA.get(data, data)}, {network}, {trained} for {base['epochs']} epochs"


def main_claim_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return a line for each main claim: the paper's figure, ours, the verdict, and where it was measured."""
    own = resnet50_verdict(results.resnet50) or ["+1.7", "", RUNNING]
    lines = [[_PROXY_ANCHOR, *own, describe_place("cub", "resnet50")]]
    for main in MAIN_CLAIMS:
        place = describe_place(main.data, main.regime)
        section = results.section(main.what, main.data, main.regime)
        built = TABLES[main.what](Arms(main.data, named_regime(main.regime, main.data)))
        claims = [claim for claim in (section.table if section else built).claims if claim.text.startswith(main.begins)]
        paper = _paper_range(claims, main.data, built)
        if section is None:
            lines.append([main.text, paper, "", RUNNING, place])
            continue
        verdicts = [verdict for s, claim, verdict in results.verdicts if s is section and claim in claims]
        lines.append([main.text, paper, _our_figure(main, claims, verdicts, section.found), _words(verdicts), place])
    return MAIN_HEADER, lines


def _paper_range(claims: list[Claim], data: str, built: Table) -> str:
    """The paper's gains, as a range if there are several."""
    against = {arm.key: (arm.loss, arm.against) for arm in built.arms}
    known = []
    for claim in claims:
        if isinstance(claim, Gain):
            theirs = claim.paper_gain(data, against[claim.arm])
            known += [] if theirs is None else [theirs]
    return _range(known, "+.1f")


def _range(values: list[float], form: str) -> str:
    if not values:
        return ""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _our_figure(main: MainClaim, claims: list[Claim], verdicts: list[Verdict], found: TableRuns) -> str:
    """Our figure: of one gain with its interval, of several claims as a range."""
    if len(claims) == 1 and isinstance(claims[0], Gain) and (change := claims[0].change(found)) is not None:
        return change[2].text(sign=True)
    values = [verdict.value for verdict in verdicts if verdict.value is not None]
    return main.figure.format(_range(values, main.form).replace("%", " %")) if values else ""


def _words(verdicts: list[Verdict]) -> str:
    """The verdict of one claim; of several, how many have which."""
    words = [RUNNING if verdict.word == MISSING else verdict.word for verdict in verdicts]
    if len(words) == 1:
        return words[0]
    return "; ".join(f"{word}: {words.count(word)} of {len(words)}" for word in dict.fromkeys(words))


def conclusion(results: Results) -> str:
    """Say whether IDML's gain was found with everything trained, and what ‖u‖ is good for."""
    own, finetune = resnet50_verdict(results.resnet50), results.section("finetune", "cub", "full")
    parts = []
    if own is not None:
        parts.append(f"With all of ResNet-50 trained, IDML's gain is {own[1]} points of R@1 ({own[2]}).")
    if finetune is None:
        parts.append(
            "Whether IDML gains when everything is trained is not decided yet: the runs with several seeds are not "
            "made. The paper trains everything, for 60 epochs. Runs that train only the heads speak neither for nor "
            "against it at its own scale."
        )
        return " ".join(parts)
    gains = []
    for arm in finetune.table.arms:
        change = Gain("", arm.key).change(finetune.found) if arm.name.startswith("idml") else None
        if change is not None and change[2].low > 0:
            gains.append(f"{arm}: {change[2].text(sign=True)}{_if_not_introspective(finetune.found, arm.key)}")
    epochs = finetune.regime.base["epochs"]
    if gains:
        parts.append(
            f"With all of EfficientNet-Lite0 trained, these forms of IDML are above plain: {'; '.join(gains)}."
        )
    else:
        parts.append(
            f"**With all of EfficientNet-Lite0 trained for {epochs} epochs, IDML's gain was not found**: no form of it "
            "is above plain training with an interval above 0."
        )
    parts += _describe_long_schedule(results)
    if not gains:
        parts.append(
            "‖u‖ is good for something else: taught by ranking, it orders queries by their chance of a wrong answer."
        )
    return " ".join(parts)


def _if_not_introspective(found: TableRuns, key: Key) -> str:
    weight = mean_weight(found.runs(key))
    return f", {NOT_INTROSPECTIVE}" if weight is not None and weight > SAME_AS_PLAIN else ""


def _describe_long_schedule(results: Results) -> list[str]:
    """The gain after the long schedule, which has one seed; nothing while it is not run."""
    section = results.section("finetune-long", "cub", "full")
    claim = section.table.claims[0] if section is not None else None
    if section is None or not isinstance(claim, Gain) or (change := claim.change(section.found)) is None:
        return []
    word = _if_not_introspective(section.found, claim.arm)
    return [
        f"Three times as long, the form that held-out classes chose gains {change[2].text(sign=True)} (observation: "
        f"one seed{word}). It sees twice the images; Mixup alone was not run as long."
    ]


# -------------------- ‖u‖ of a query --------------------

_URL = (
    ("ResNet-50", "trained on ImageNet", "0.57"),
    ("ViT-S", "pretrained visual uncertainties", "0.61"),
    ("ViT-S", "trained on downstream classes that are not tested", "0.62"),
)
_URL_TEXT = (
    "The URL benchmark (Kirchhof et al., 2023) has other rules: its networks learn on ImageNet, not on birds; its "
    "R-AUROC is the mean over CUB, Cars and SOP; a query is right if its nearest neighbour is, as here. Ours learn on "
    "the first 100 classes of CUB and are tested on the other 100, so only its last line is near to ours. Our goal is "
    f"{WANTED_R_AUROC:.2f}."
)


def u_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return R-AUROC of ‖u‖ of the query alone: the default method and IDML, frozen and trained; and the benchmark."""
    lines = []
    for what, regime, pixels, trained in (("u", "frozen", 224, "heads"), ("finetune", "full", 112, "everything")):
        section = results.section(what, "cub", regime)
        for at in section.found.progress.values() if section else ():
            taught = at.arm.options.get("teach_u") == "ranking"
            if at.runs and (taught or at.arm.name == "idml"):
                method = "plain, u taught by ranking (the default)" if taught else "idml"
                values = [run["r_auroc"] for run in at.runs.values()]
                text = f"{interval_text(values, 2)} ({len(values)} seeds)"
                lines.append(["lite0", str(pixels), trained, LOSSES[at.arm.loss], method, text])
    for row in results.resnet50:
        plain = row["options"]["method"] == "plain"
        if plain or row["options"].get("rule") != "release":
            method = "plain, u taught by ranking (the default)" if plain else "idml"
            low, high = row["r_auroc_interval"]
            text = f"{row['r_auroc']:.2f} [{low:.2f}, {high:.2f}] (one seed)"
            lines.append(["ResNet-50", "224", "everything", "ProxyAnchor", method, text])
    lines += [[trunk, "224", "URL benchmark", "", how, value] for trunk, how, value in _URL]
    return ["network", "pixels", "trained", "loss", "method", "R-AUROC of ‖u‖"], lines


# -------------------- the page --------------------


_INTRO = (
    "Which claims of the paper hold in our runs? First comes the paper's own network, then the main claims, then every "
    "table, the studies and the verdict on each single claim.",
    "`idml reproduce results` makes this page from the rows in results/; nothing is written by hand. It also writes "
    "results.html, with plots. [Reproduction](reproduction.md) has the protocol (version {version}) and every command. "
    "[Results of version 1](results-v1.md) are kept apart and are not argued from.",
)
_READING = (
    "A heading names the data set and what was trained: *frozen*, the heads on features of a pretrained network; "
    "*last*, its last stage and the heads; *full*, everything; *scratch*, a small network from random weights. An "
    "*arm* is a row: a loss with a method, at its own learning rate. *Raw features* are those of the pretrained "
    "network without training (on glyphs, the pixels). The [glossary](glossary.md) has the other words.",
    "The paper's figures are those of ResNet-50 at 224 pixels. Ours, unless a heading says otherwise, are those of a "
    "much smaller network. Compare differences between arms, not levels. *Mixup* rows are ordinary Mixup (λ-weighted "
    "losses), *idml* rows the paper's text (label sets), both with a loss of originals plus a loss of mixtures.",
    "With seed 0 every arm is trained at the same learning rates. The rate with the best MAP@R on held-out training "
    "classes is used for all seeds, and the epoch is chosen by the same score (*held-out*, the only figure by which "
    "anything is chosen). A gain counts only over the better of the raw features and the plain arm. Intervals are 95 % "
    f"of {ROUNDS} rounds that draw classes and seeds together; with one seed they are over classes alone.",
    "*weight* is the mean weight e^(−x) that the loss applied at the end of training; above 0.98 the metric is *not "
    "introspective*. *R-AUROC* is the AUROC of ‖u‖ for wrong nearest neighbours, *AUROC mixed* its AUROC for mixed "
    "against clean test images; 0.5 is chance. Arms that do not train u show the figures of an untrained u.",
    "A claim is *confirmed* if the interval of its gain in R@1 lies above 0 (and, for the metric, the weight is not "
    "above 0.98). It is *not confirmed* if the interval does not, and ends below half of the paper's gain (below half "
    "a point where the paper gives none). Otherwise the table *cannot tell at this scale*. A gain is *detected* if its "
    "interval does not hold 0, so the smallest difference that a table could have detected is half the width of that "
    "interval (a true difference of this size is detected in about half of all repetitions, one 1.4 times as large in "
    "80 %).",
)


def write_results(out: Path, docs: Path, *, note: Note = silent) -> dict[str, Any]:
    """Write the pages into ``docs`` and the tables of the README beside it; return the verdicts."""
    results = stored_results(out, note)
    docs.mkdir(parents=True, exist_ok=True)
    write_atomic(docs / "results.md", results_markdown(results, out).encode())
    write_atomic(docs / "results-v1.md", version1_markdown(out).encode())
    write_atomic(docs / "results.html", _results_html(results, out))
    write_front_page(docs.parent / "README.md", describe_claims(results), out)
    counts = {word: sum(v.word == word for *_, v in results.verdicts) for word in WORDS}
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    written = ", ".join(str(docs / name) for name in ("results.md", "results-v1.md", "results.html"))
    return {
        "table": f"{len(results.sections)} tables, {len(results.verdicts)} claims: {words}; {written}",
        "verdicts": [[s.name, claim.text, v.word, v.reason] for s, claim, v in results.verdicts],
        "counts": counts,
    }


def describe_claims(results: Results) -> str:
    """Return what follows from the main claims, how to read them, and their tables, as Markdown."""
    return "\n\n".join([conclusion(results), *MAIN_READING, claim_table(*main_claim_table(results))])


def _intro() -> list[str]:
    return [text.replace("{version}", str(VERSION)) for text in _INTRO]


def _resnet50_part(results: Results) -> tuple[str, str, StudyTable | None]:
    (made,) = RESNET50.tables(results.resnet50)
    if not made.rows:
        return made.title, f"Its three runs are {RUNNING}: plain, IDML and the release, about 63,000 images each.", None
    lacking = 3 - len(results.resnet50)
    missing = f" Of its three runs, {lacking} {'is' if lacking == 1 else 'are'} {RUNNING}." if lacking else ""
    text = (
        "Intervals are over test classes. *The paper* has 60 epochs and the best epoch on the test set; the learning "
        "rate here is constant, with one epoch of warm-up. The *selected* epoch is the one with the best MAP@R on "
        "held-out training classes. Compare selected epochs: last ones also compare how much each arm overfits. An "
        f"R-AUROC below 0.50 means that images with a larger ‖u‖ are answered better.{missing}"
    )
    return made.title, text, made


def results_markdown(results: Results, out: Path) -> str:
    """Return the page as Markdown."""
    title, text, made = _resnet50_part(results)
    parts = ["# Results", *_intro(), f"## {title}", text]
    parts += [] if made is None else [markdown_table(made.header, made.rows)]
    parts += ["## The paper's main claims", describe_claims(results)]
    parts += [results.running_line(), "## How to read the tables", *_READING]
    for section in results.sections:
        parts += [f"## {section.name}", section.facts(), markdown_table(*section.columns)]
    parts += [f"## {_COMPARISON}", results.comparison()]
    parts += ["## Study: what ‖u‖ of a query says", _URL_TEXT, markdown_table(*u_table(results))]
    for study in LIVE_U.tables(results.live_u) if results.live_u else ():
        parts += [f"## Study: {study.title}", markdown_table(study.header, study.rows)]
    for title, header, rows in results.verdict_tables():
        parts += [f"## {title}", markdown_table(header, rows)]
    for drawn in figures_without_runs(out):
        parts += [f"## {drawn.title}", drawn.text, *([markdown_table(drawn.header, drawn.rows)] if drawn.rows else [])]
    return "\n\n".join(parts) + "\n"


def _results_html(results: Results, out: Path) -> bytes:
    shapes = figures_without_runs(out)
    title, text, made = _resnet50_part(results)
    parts = [_STYLE, "<h1>Results</h1>", *map(_linked, _intro()), f"<h2>{html.escape(title)}</h2>", prose(text)]
    parts += [] if made is None else [table(made.header, made.rows)]
    parts += ["<h2>The paper's main claims</h2>", prose(conclusion(results)), *map(prose, MAIN_READING)]
    parts += [table(*main_claim_table(results))]
    parts += [prose(results.running_line()), "<h2>How to read the tables</h2>", *map(_linked, _READING)]
    for section in results.sections:
        parts += [f"<h2>{html.escape(section.name)}</h2>", prose(section.facts())]
        if (figure := plot_table(section.what, section.table, section.found)) is not None:
            parts.append(drawing(figure, section.name))
        parts.append(table(*section.columns))
    parts += [f"<h2>{html.escape(_COMPARISON)}</h2>", prose(results.comparison())]
    parts += ["<h2>Study: what ‖u‖ of a query says</h2>", prose(_URL_TEXT), table(*u_table(results))]
    for study in LIVE_U.tables(results.live_u) if results.live_u else ():
        parts += [f"<h2>Study: {html.escape(study.title)}</h2>", table(study.header, study.rows)]
    for title, header, rows in results.verdict_tables():
        parts += [f"<h2>{html.escape(title)}</h2>", colour_verdicts(table(header, rows))]
    for drawn in shapes:
        parts += [f"<h2>{html.escape(drawn.title)}</h2>", prose(drawn.text), drawing(drawn.figure(), drawn.title)]
        parts += [table(drawn.header, drawn.rows)] if drawn.rows else []
    return page("Results", *parts)


def _linked(text: str) -> str:
    """A paragraph without the links of Markdown, whose targets are Markdown files."""
    return prose(re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text))


def colour_verdicts(text: str) -> str:
    """Return the HTML of a table of verdicts with a colour for each kind of verdict."""
    for word in WORDS:
        text = text.replace(f">{word}: ", f"><b class='{word.split()[0]}'>{word}</b><br>")
    return text

"""The report page of a calibration: what is promised, how reliable P(right) is, and how good every score is."""

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from idml.calibration.confidence import P_RIGHT
from idml.report_html import drawing, page, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PROMISED = (
    "The promises are for queries like these: about {unknown} of them or fewer show something that is not in the "
    "gallery, they show the same kind of images, and the gallery has changed little. "
    "Then, for each error rate, at most that share of the answers <em>match</em> is wrong "
    "(a match of an unknown query is wrong too), with 90 % confidence: one calibration in ten may fail. "
    "A promise that rests on few classes is <em>approximate</em>. "
    "Nothing is promised about a single query, about other kinds of images, or for a gallery that has changed much."
)
_RELIABILITY = (
    "Left: the share of right answers among the queries whose P(right) falls into a bin, with its 95 % interval. On "
    "the dotted line, P equals that share. Larger dots mean more queries in the bin. Right: the share of queries that "
    "is answered <em>match</em> for each error rate; 0 if the rate cannot be promised."
)
_COUNTED = (
    "Both shares are those of the counted queries, with as many unknown ones among them as the promise allows. "
    "The share of wrong matches lies below the error rate, because a promise leaves room for chance."
)
_SCORES = (
    "Each score is measured on classes that were not used for its fit, with 95 % intervals over resampled classes. "
    "R-AUROC: how often a wrong answer has a larger score than a right one (0.5 is chance). AUGRC × 1000: errors, "
    "weighted by how certain they were (smaller is better). Unknown: AUROC for queries of classes outside the gallery."
)


def build_page(title: str, intro: Sequence[str], result: dict[str, Any], parts: dict[str, dict[str, Any]]) -> bytes:
    """Build the page from the ``words`` and ``unknown_share`` of a result, and the figures of each part by title."""
    unknown = f"{result['unknown_share']:.0%}"
    content = [
        f"<h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(line[:1].upper() + line[1:])}</p>" for line in intro),
        "<h2>Summary</h2>",
        "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in result["words"]) + "</ul>",
        f"<h2>What is promised, and what is not</h2><p>{_PROMISED.format(unknown=unknown)}</p>",
    ]
    for name, figures in parts.items():
        content += [f"<h2>{html.escape(name)}</h2>", *_build_part(figures, name)]
    return page(title, *content)


def _build_part(figures: dict[str, Any], title: str) -> list[str]:
    ece = "not known" if figures["ece"] is None else f"{figures['ece']:.3f}"
    novelty = figures["novelty"]
    recognised, rejected = novelty["recognised"], novelty["rejected"]
    shares = [[f"{float(x):.0%}", _percent(recognised[x]), _percent(rejected[x])] for x in recognised]
    return [
        f"<p>P(right) comes from: {html.escape(figures['chosen'])}. Expected calibration error {ece} on "
        f"{figures['counted']:,} queries.</p>",
        drawing(
            draw_calibration(figures),
            f"{title}: reliability diagram of P(right), and queries answered against the error rate",
        ),
        f"<p>{_RELIABILITY}</p>",
        table(["error rate", "answered", "wrong among them", "smallest P", "note"], _promises(figures)),
        f"<p>{_COUNTED}</p>",
        f"<h3>Scores</h3><p>{_SCORES}</p>",
        table(["score", "R-AUROC", "AUGRC × 1000", "unknown", ""], _scores(figures)),
        "<h3>Not in the collection</h3>",
        f"<p>Decided by {html.escape(novelty['score'])}; {novelty['unknown']:,} unknown queries were counted.</p>",
        table(["known queries that may be rejected", "unknown ones recognised", "known ones rejected"], shares),
        "<h3>Result sets that hold a right image</h3>",
        table(["sets of known queries that may hold no right image", "mean size", "why not"], _sets(figures)),
    ]


def _promises(figures: dict[str, Any]) -> list[list[str]]:
    rows = []
    for promise in figures["promises"]:
        cells = ["–", "–", "–", _shorten_reason(promise)]
        if promise["possible"]:
            wrong = f"{promise['observed']:.1%}"
            note = "approximate" if promise["approximate"] else ""
            cells = [f"{promise['coverage']:.1%}", wrong, f"{promise['threshold']:.3f}", note]
        rows.append([f"{promise['max_error']:.0%}", *cells])
    return rows


def _scores(figures: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, values in figures["scores"].items():
        spans = values["intervals"]
        mark = "best single score" if name == figures["best"] else ""
        if name == P_RIGHT and figures["gain"]["r_auroc"] is not None and figures["gain"]["r_auroc"] < 0:
            mark = "below the best single score"
        cells = [(values[k], spans[k], f) for k, f in (("r_auroc", 1), ("augrc", 1000), ("unknown", 1))]
        rows.append([name, *(_value(*cell) for cell in cells), mark])
    return rows


def _sets(figures: dict[str, Any]) -> list[list[str]]:
    return [
        [f"{s['max_missed']:.0%}", f"{s['mean_size']:.1f}" if s["possible"] else "–", _shorten_reason(s)]
        for s in figures["sets"]
    ]


def _shorten_reason(promise: dict[str, Any]) -> str:
    """The reason without its beginning, which repeats the row."""
    return str(promise["reason"]).rpartition(" here: ")[2]


def _value(value: float | None, span: list[float] | None, factor: float) -> str:
    if value is None:
        return "not defined"
    digits = 1 if factor > 1 else 3
    text = f"{factor * value:.{digits}f}"
    return text if span is None else f"{text} [{factor * span[0]:.{digits}f}, {factor * span[1]:.{digits}f}]"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def draw_calibration(figures: Mapping[str, Any]) -> "Figure":
    """Draw the reliability diagram of P(right), and how many queries are answered at each error rate.

    ``figures`` is what `calibrate_gallery` returns.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _reliability(left, figures)
    errors, coverage = zip(*figures["curve"], strict=True)
    right.step([100 * e for e in errors], [100 * c for c in coverage], where="post", color="C0")
    right.set(xlabel="error rate, %", ylabel="queries answered, %", xlim=(0, 50), ylim=(0, 101))
    return figure


def _reliability(axes: "Axes", figures: Mapping[str, Any]) -> None:
    axes.plot([0, 100], [0, 100], color="0.6", linestyle="dotted")
    for b in figures["bins"]:
        x, y, (low, high) = 100 * b["probability"], 100 * b["accuracy"], b["interval"]
        axes.plot([x, x], [100 * low, 100 * high], color="C0", linewidth=1.5)
        axes.plot([x], [y], marker="o", color="C0", markersize=4 + 14 * (b["count"] / figures["counted"]) ** 0.5)
    axes.set(xlabel="P(right), %", ylabel="right, %", xlim=(0, 100), ylim=(0, 101))

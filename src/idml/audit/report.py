"""The files of an audit: audit.csv for a spreadsheet, audit.json for programs, report.html to look at."""

import csv
import html
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from idml.audit.decisions import KINDS, harmless
from idml.files import write_atomic
from idml.report_html import drawing, page, picture, table

FORMAT, VERSION = "idml audit", 1
JSON, CSV, REPORT = "audit.json", "audit.csv", "report.html"
_COLUMNS = (
    "rank", "kind", "image", "split", "label", "suggested label", "score", "why", "partners", "decision", "checksum"
)  # fmt: skip
_TOP = 10  # findings of each list that the report shows
_BESIDE = 4  # images beside each
_TITLES = {
    "mislabelled": ("Likely mislabelled", "Left the image in question, then the nearest images of the two classes."),
    "duplicate": ("Duplicates", "Left the image in question, then the images it repeats."),
    "ambiguous": ("Ambiguous", "Left the image in question, then its nearest images."),
}
Show = Callable[[list[int]], NDArray[np.uint8]]


def write_audit(folder: Path, audit: dict[str, Any], scores: Tensor, show: Show) -> None:
    """Write the three files; ``show`` gives the pixels [n, side, side, 3] of images by their numbers."""
    write_atomic(folder / REPORT, _page(audit, scores, show))
    write_atomic(folder / CSV, _csv(audit["findings"]))
    whole = {"format": FORMAT, "format_version": VERSION, **audit}
    write_atomic(folder / JSON, (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())


def read_audit(folder: Path) -> dict[str, Any]:
    """What audit.json holds; a ``ValueError`` or ``FileNotFoundError`` of one line if it is not there or no audit."""
    path = folder / JSON
    try:
        audit = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path}; run idml audit first") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is damaged: it is not JSON; audit again") from None
    if not isinstance(audit, dict) or (audit.get("format"), audit.get("format_version")) != (FORMAT, VERSION):
        raise ValueError(f"{path} is not an audit of this version; audit again")
    return audit


def _csv(findings: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(_COLUMNS)
    for finding in findings:
        cells = {**finding, "suggested label": finding["suggested"], "score": f"{finding['score']:.4f}"}
        cells["partners"] = " | ".join(partner["image"] for partner in finding["partners"])
        cells["decision"] = _decided(finding)
        rows.writerow(harmless(str(cells[column])) for column in _COLUMNS)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _decided(finding: dict[str, Any]) -> str:
    if finding["decision"] is None:
        return ""
    return " ".join(x for x in (finding["decision"]["decision"], finding["decision"]["new_label"]) if x)


def _page(audit: dict[str, Any], scores: Tensor, show: Show) -> bytes:
    title = f"audit of {audit['data']}"
    lists = {kind: [f for f in audit["findings"] if f["kind"] == kind] for kind in KINDS}
    counts = [[_TITLES[kind][0], f"{c['listed']:,}", f"{c['open']:,}"] for kind, c in audit["counts"].items()]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{audit['images']:,} images, {audit['classes']:,} classes, as {html.escape(audit['model'])} sees them.</p>",
        *(f"<p>{html.escape(line)}</p>" for line in audit["notes"]),
        table(["list", "images", "not decided yet"], counts),
        f"<p>All of them, with reasons: {CSV}. To go through them with the keyboard: idml audit … --review.</p>",
        _histogram(scores),
    ]
    for kind, findings in lists.items():
        heading, legend = _TITLES[kind]
        parts.append(f"<h2>{heading}</h2>")
        shown = [finding for finding in findings if finding["decision"] is None][:_TOP]
        parts.append(f"<p>{legend}</p>" if shown else "<p>There is none that is not decided yet.</p>")
        parts += [_shown(finding, show) for finding in shown]
    return page(title, *parts)


def _shown(finding: dict[str, Any], show: Show) -> str:
    partners = finding["partners"][:_BESIDE]
    text = (
        f"{finding['rank']}. {finding['image']}, labelled {finding['label']!r} ({finding['split']}): {finding['why']}"
    )
    images = show([finding["number"], *(partner["number"] for partner in partners)])
    labels = ", ".join(partner["label"] for partner in partners)
    return picture(images, text) + f"<p>{html.escape(text)}. Beside it: {html.escape(labels)}</p>"


def _histogram(scores: Tensor) -> str:
    """How the scores of all labels lie; those above 0 fit another class better."""
    if len(scores) == 0:
        return ""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    axes.hist(scores.numpy(), 60, color="0.5")
    axes.axvline(0, color="C3")
    axes.set(xlabel="score of a wrong label", ylabel="images", yscale="log")
    above = f"{int((scores > 0).sum()):,} of {len(scores):,} images fit another class better (above 0)"
    return drawing(figure, f"histogram of the scores of all labels: {above}") + f"<p>{above}.</p>"

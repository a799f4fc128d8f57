"""`idml audit`: embed all images of a data set, list the suspicious ones, and write the lists and a report."""

import csv
import hashlib
import html
import io
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.audit.decisions import KINDS, CurrentDecisions, escape_formula, read_decisions, write_cleaned
from idml.audit.duplicates import make_sketches
from idml.audit.findings import AuditImages, AuditInput, Finding, Findings, find_suspicious, image_checksum
from idml.data.augment import View
from idml.data.datasets import load_dataset
from idml.data.pixel_cache import Pixels
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings
from idml.errors import printable
from idml.evaluation.evaluate import ImageCounter, load_model_pixels
from idml.files import write_atomic
from idml.model import Model, build_model, fingerprint, load_model
from idml.model.feature_cache import compute_features, load_features
from idml.model.model import PRETRAINED, resolve_model
from idml.progress import Note, Progress, image_counter, silent
from idml.records import Record
from idml.report_html import drawing, page, picture, table

FORMAT, VERSION = "idml audit", 1
JSON, CSV, REPORT = "audit.json", "audit.csv", "report.html"
_COLUMNS = (
    "rank", "kind", "image", "split", "label", "suggested label", "score", "why", "partners", "decision", "checksum"
)  # fmt: skip
_TOP = 10  # findings of each list in the report
_BESIDE = 4  # images beside each of them
_TITLES = {
    "mislabelled": ("Likely mislabelled", "Left: the image in question. Right: the nearest images of the two classes."),
    "duplicate": ("Duplicates", "Left: the image in question. Right: its duplicates."),
    "ambiguous": ("Ambiguous", "Left: the image in question. Right: its nearest images."),
}
_CROPPED = View("crop", 0.08)  # copies that count as near duplicates …
_COPIES = 128  # … of this many images
Show = Callable[[list[int]], NDArray[np.uint8]]


def audit_run(
    run: str | Path,
    data: str,
    out: str | Path,
    *,
    split: str = "official",
    progress: Progress = silent,
    note: Note = silent,
) -> "AuditResult":
    """List the images of ``data`` that the model in ``run`` finds likely mislabelled, duplicate or ambiguous.

    Args:
        run: a run directory, ``pretrained`` (the default trunk without training), or ``timm:NAME``.
        data: a SPEC as in `idml.data.datasets.load_dataset`; all of its images are audited.
        out: a folder for audit.csv, audit.json and report.html, and for the decisions of a review (decisions.csv).
        split: as in `load_dataset`; duplicates in different splits are reported as such.
        progress: called with the number of images done.
        note: called with lines for the user.

    Images with a decision that have not changed since come last. If there are decisions, cleaned.csv applies them.
    docs/audit.md explains the lists. Returns what --json prints.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; an audit needs a folder")
    decisions = CurrentDecisions(read_decisions(folder))  # report damage before computing anything
    model, name = _load_model(run)
    dataset = load_dataset(data, split=split)
    images = AuditImages.of(dataset)
    notes = list(dataset.notes)
    for line in notes:
        note(line)

    def keep(line: str) -> None:
        notes.append(line)
        note(line)

    counted = partial(image_counter, progress)

    raw = str(run) == PRETRAINED or model.config.head == "none"
    if not raw and images.parts[0][0] in ("train", "all"):
        keep("the model may have learned wrong labels of its training images: they rank lower than they should")
    parts = [load_model_pixels(model, part, counted, keep) for _, part in images.parts]
    found = find_suspicious(_prepare_input(model, raw, images, parts, counted))
    for line in found.notes:
        keep(line)
    findings = _rank(found, images, decisions)
    audit: dict[str, Any] = {
        "data": dataset.name,
        "split": split,
        "model": name,
        "images_version": images.version,
        "images": len(images),
        "classes": len(images.classes),
        "parts": {part: len(members) for part, members in images.parts},
        "counts": {
            kind: {
                "listed": sum(f["kind"] == kind for f in findings),
                "open": sum(f["kind"] == kind and f["decision"] is None for f in findings),
            }
            for kind in KINDS
        },
        "notes": notes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    result = {**audit, **{key: str(folder / file) for key, file in (("csv", CSV), ("json", JSON), ("report", REPORT))}}
    result["cleaned"] = _write_cleaned(images, decisions, folder, keep)
    write_audit(folder, {**audit, "findings": findings}, found.scores, _pixel_reader(parts))
    return AuditResult(result)


class AuditResult(Record):
    """How many images an audit lists, and where the lists and the report are."""

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """For each kind of finding, how many are ``listed`` and how many of them are ``open``."""
        found: dict[str, dict[str, int]] = self["counts"]
        return found

    @property
    def report(self) -> str:
        """The file of the report."""
        return str(self["report"])

    def lines(self) -> list[str]:
        """Return a line for each kind of finding."""
        return [f"{kind}: {n['listed']:,} listed, {n['open']:,} not decided" for kind, n in self.counts.items()]


def _load_model(run: str | Path) -> tuple[Model, str]:
    """Load the model; return it with its name for the report."""
    if str(run) == PRETRAINED:
        model, name = build_model(), "the pretrained trunk"
    else:
        path = Path(resolve_model(run))
        model = load_model(path)
        name = f"{path.name if path.is_dir() else path.parent.name} ({model.config.trunk}, model {fingerprint(path)})"
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model, name


def _prepare_input(
    model: Model, raw: bool, images: AuditImages, parts: list[Pixels], counted: ImageCounter
) -> AuditInput:
    """Embed all readable images and hash their pixels; ``raw``: use the features of the trunk, without u."""
    numbers, embeddings, checksums, sketches, start = [], [], [], [], 0
    for pixels in parts:
        features = load_features(model, pixels, progress=counted(f"of {pixels.images.name}"))
        embeddings.append(_embed(model, features, raw, pixels))
        usable = pixels.usable
        numbers.append(usable + start)
        checksums += [hashlib.blake2b(pixels.array[i].tobytes(), digest_size=16).digest() for i in usable.tolist()]
        sketches.append(make_sketches(pixels.array)[usable])
        start += len(pixels.images)
    near = _measure_near(model, raw, parts[0], embeddings[0])
    return AuditInput(images, torch.cat(numbers), Embeddings.cat(embeddings), checksums, torch.cat(sketches), near)


def _embed(model: Model, features: Tensor, raw: bool, pixels: Pixels) -> Embeddings:
    embeddings = Embeddings.certain(features) if raw else model.embed_features(features)
    bad = (~embeddings.semantic.isfinite().all(dim=1)).nonzero().flatten()
    if len(bad):
        first = pixels.images.sources[int(pixels.usable[bad[0]])].name
        raise ValueError(f"{pixels.images.name}: {len(bad)} embeddings hold NaN or infinity (first: {first!r})")
    return embeddings


def _measure_near(model: Model, raw: bool, pixels: Pixels, embeddings: Embeddings) -> float:
    """Measure the distance that nine of ten slightly cropped copies have at most from their images."""
    chosen = torch.randperm(len(pixels.usable), generator=random_stream("audit copies"))[:_COPIES].sort().values
    views = _CROPPED.images(pixels, pixels.usable[chosen], model.trunk.image_size)
    copies = _embed(model, compute_features(model, views), raw, pixels)
    distances = torch.linalg.vector_norm(copies.unit - embeddings[chosen].unit, dim=1)
    return float(distances.quantile(0.9))


def _rank(found: Findings, images: AuditImages, decisions: CurrentDecisions) -> list[dict[str, Any]]:
    """Convert the findings for audit.json: kind after kind, those with a decision last."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        listed = [_describe(finding, images, decisions) for finding in found.findings if finding.kind == kind]
        listed.sort(key=lambda row: row["decision"] is not None)
        rows += [{"rank": rank, **row} for rank, row in enumerate(listed, start=1)]
    return rows


def _describe(finding: Finding, images: AuditImages, decisions: CurrentDecisions) -> dict[str, Any]:
    about = _describe_image(images, finding.number)
    digest = image_checksum(images.sources[finding.number])
    decision = decisions.find(finding.kind, about["image"], about["label"], digest)
    return {
        "kind": finding.kind,
        **about,
        "suggested": finding.suggested,
        "score": finding.score,
        "why": finding.why,
        "checksum": digest,
        "decision": None if decision is None else asdict(decision),
        "partners": [
            {**_describe_image(images, number), "distance": distance} for number, distance in finding.partners
        ],
    }


def _describe_image(images: AuditImages, number: int) -> dict[str, Any]:
    source = images.sources[number]
    return {"number": number, "image": source.name, "split": images.splits[number], "label": images.label(number)}


def _write_cleaned(images: AuditImages, decisions: CurrentDecisions, folder: Path, note: Note) -> dict[str, Any] | None:
    """Write cleaned.csv, if there are decisions and the images are files."""
    if not decisions.images():
        return None
    try:
        done = write_cleaned(images, decisions, folder)
    except ValueError as error:
        note(str(error))
        return None
    for line in done.notes:
        note(line)
    return asdict(done)


def _pixel_reader(parts: list[Pixels]) -> Callable[[list[int]], NDArray[np.uint8]]:
    """Return a function that reads the pixels of images by their numbers."""
    starts = np.cumsum([0, *(len(pixels.images) for pixels in parts)])

    def show(numbers: list[int]) -> NDArray[np.uint8]:
        places = [(int(np.searchsorted(starts, number, side="right")) - 1, number) for number in numbers]
        return np.stack([parts[part].array[number - starts[part]] for part, number in places])

    return show


# -------------------- files --------------------


def write_audit(folder: Path, audit: dict[str, Any], scores: Tensor, show: Show) -> None:
    """Write the three files; ``show`` returns the pixels [n, side, side, 3] of images by their numbers."""
    write_atomic(folder / REPORT, _format_page(audit, scores, show))
    write_atomic(folder / CSV, _format_csv(audit["findings"]))
    whole = {"format": FORMAT, "format_version": VERSION, **audit}
    write_atomic(folder / JSON, (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())


def read_audit(folder: Path) -> dict[str, Any]:
    """Read audit.json; a ``ValueError`` or ``FileNotFoundError`` in one line if it is damaged or missing."""
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


def _format_csv(findings: list[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(_COLUMNS)
    for finding in findings:
        cells = {**finding, "suggested label": finding["suggested"], "score": f"{finding['score']:.4f}"}
        cells["partners"] = " | ".join(partner["image"] for partner in finding["partners"])
        cells["decision"] = _format_decision(finding)
        rows.writerow(escape_formula(printable(cells[column])) for column in _COLUMNS)
    return text.getvalue().encode("utf-8", "backslashreplace")


def _format_decision(finding: dict[str, Any]) -> str:
    if finding["decision"] is None:
        return ""
    return " ".join(x for x in (finding["decision"]["decision"], finding["decision"]["new_label"]) if x)


def _format_page(audit: dict[str, Any], scores: Tensor, show: Show) -> bytes:
    title = f"audit of {audit['data']}"
    lists = {kind: [f for f in audit["findings"] if f["kind"] == kind] for kind in KINDS}
    counts = [[_TITLES[kind][0], f"{c['listed']:,}", f"{c['open']:,}"] for kind, c in audit["counts"].items()]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{audit['images']:,} images, {audit['classes']:,} classes; model: {html.escape(audit['model'])}.</p>",
        *(f"<p>{html.escape(line)}</p>" for line in audit["notes"]),
        table(["list", "images", "without decision"], counts),
        f"<p>{CSV} lists all of them with reasons. To review them in a browser: idml audit … --review.</p>",
        _histogram(scores),
    ]
    for kind, findings in lists.items():
        heading, legend = _TITLES[kind]
        parts.append(f"<h2>{heading}</h2>")
        shown = [finding for finding in findings if finding["decision"] is None][:_TOP]
        parts.append(f"<p>{legend}</p>" if shown else "<p>There is none without a decision.</p>")
        parts += [_format_finding(finding, show) for finding in shown]
    return page(title, *parts)


def _format_finding(finding: dict[str, Any], show: Show) -> str:
    partners = finding["partners"][:_BESIDE]
    text = (
        f"{finding['rank']}. {finding['image']}, labelled {finding['label']!r} ({finding['split']}): {finding['why']}"
    )
    images = show([finding["number"], *(partner["number"] for partner in partners)])
    labels = ", ".join(partner["label"] for partner in partners)
    return picture(images, text) + f"<p>{html.escape(text)}. Beside it: {html.escape(labels)}</p>"


def _histogram(scores: Tensor) -> str:
    """Draw a histogram of the scores of all labels; images above 0 fit another class better."""
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

"""`idml audit`: embed all images of a data set, list the suspicious ones, remember what was decided about them."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.audit.decisions import KINDS, Settled, read, write_cleaned
from idml.audit.duplicates import sketch
from idml.audit.findings import AuditImages, Finding, Found, Subject, checksum, find
from idml.audit.report import CSV, JSON, REPORT, write_audit
from idml.data.augment import View
from idml.data.datasets import load_dataset
from idml.data.pixel_cache import Pixels
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings
from idml.evaluation.evaluate import Counted, load_model_pixels
from idml.model import Model, build_model, fingerprint, load_model
from idml.model.feature_cache import features_of, view_features
from idml.model.model import PRETRAINED
from idml.progress import Note, Progress, image_counter, silent

_CROPPED = View("crop", 0.08)  # copies that count as near duplicates
_COPIES = 128  # of as many images


def audit_run(
    run: str | Path,
    data: str,
    out: str | Path,
    *,
    split: str = "official",
    progress: Progress = silent,
    note: Note = silent,
) -> dict[str, Any]:
    """List the images of ``data`` that the model in ``run`` finds likely mislabelled, duplicate or ambiguous.

    Args:
        run: a run directory, or the word ``pretrained``: the default trunk as it is.
        data: a SPEC as in `idml.data.datasets.load_dataset`, and ``split`` likewise; all of its images are audited.
        out: a folder for audit.csv, audit.json and report.html, and for the decisions of a review (decisions.csv).
        split: which images are in which part; duplicates across parts are told.
        progress: called with rows of how many images are done.
        note: called with lines that a person should see.

    Images about which a person has decided, and that have not changed since, come last. If there are decisions,
    cleaned.csv applies them. docs/audit.md says what the lists mean; the result is what --json prints.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; an audit needs a folder")
    settled = Settled(read(folder))  # damage is told before anything is computed
    model, name = _model(run)
    dataset = load_dataset(data, split=split)
    images = AuditImages.of(dataset)
    notes = list(dataset.notes)
    for line in notes:
        note(line)

    def keep(line: str) -> None:
        notes.append(line)
        note(line)

    counted = partial(image_counter, progress)

    if run != PRETRAINED and images.parts[0][0] in ("train", "all"):
        keep("the run may have learned wrong labels of images it was trained on: they rank lower than they should")
    parts = [load_model_pixels(model, part, counted, keep) for _, part in images.parts]
    found = find(_subject(model, str(run) == PRETRAINED, images, parts, counted))
    for line in found.notes:
        keep(line)
    findings = _ranked(found, images, settled)
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
    result["cleaned"] = _cleaned(images, settled, folder, keep)
    write_audit(folder, {**audit, "findings": findings}, found.scores, _shower(parts))
    return result


def _model(run: str | Path) -> tuple[Model, str]:
    """The model and how it is called in the report."""
    if str(run) == PRETRAINED:
        model, name = build_model(), "the pretrained trunk"
    else:
        model = load_model(run)
        path = Path(run)
        name = f"{path.name if path.is_dir() else path.parent.name} ({model.config.trunk}, model {fingerprint(run)})"
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return model, name


def _subject(model: Model, raw: bool, images: AuditImages, parts: list[Pixels], counted: Counted) -> Subject:
    """All readable images as the model sees them; ``raw``: the trunk's own features, without u."""
    numbers, embeddings, checksums, sketches, start = [], [], [], [], 0
    for pixels in parts:
        features = view_features(model, pixels, progress=counted(f"of {pixels.images.name}"))
        embeddings.append(_embeddings(model, features, raw, pixels))
        usable = pixels.usable
        numbers.append(usable + start)
        checksums += [hashlib.blake2b(pixels.array[i].tobytes(), digest_size=16).digest() for i in usable.tolist()]
        sketches.append(sketch(pixels.array)[usable])
        start += len(pixels.images)
    near = _near(model, raw, parts[0], embeddings[0])
    return Subject(images, torch.cat(numbers), Embeddings.cat(embeddings), checksums, torch.cat(sketches), near)


def _embeddings(model: Model, features: Tensor, raw: bool, pixels: Pixels) -> Embeddings:
    embeddings = Embeddings.certain(features) if raw else model.embed_features(features)
    bad = (~embeddings.semantic.isfinite().all(dim=1)).nonzero().flatten()
    if len(bad):
        first = pixels.images.sources[int(pixels.usable[bad[0]])].name
        raise ValueError(f"{pixels.images.name}: {len(bad)} embeddings hold NaN or infinity (first: {first!r})")
    return embeddings


def _near(model: Model, raw: bool, pixels: Pixels, embeddings: Embeddings) -> float:
    """The distance within which nine of ten slightly cropped copies lie from their images."""
    chosen = torch.randperm(len(pixels.usable), generator=random_stream("audit copies"))[:_COPIES].sort().values
    views = _CROPPED.images(pixels, pixels.usable[chosen], model.trunk.image_size)
    device = model.semantic.weight.device
    features = torch.from_numpy(np.concatenate([features_of(model, part.to(device)) for part in views.split(64)]))
    copies = _embeddings(model, features, raw, pixels)
    distances = torch.linalg.vector_norm(copies.unit - embeddings[chosen].unit, dim=1)
    return float(distances.quantile(0.9))


def _ranked(found: Found, images: AuditImages, settled: Settled) -> list[dict[str, Any]]:
    """The findings as audit.json holds them: kind after kind, those already decided last."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        told = [_told(finding, images, settled) for finding in found.findings if finding.kind == kind]
        told.sort(key=lambda row: row["decision"] is not None)
        rows += [{"rank": rank, **row} for rank, row in enumerate(told, start=1)]
    return rows


def _told(finding: Finding, images: AuditImages, settled: Settled) -> dict[str, Any]:
    about = _image(images, finding.number)
    digest = checksum(images.sources[finding.number])
    decision = settled.of(finding.kind, about["image"], about["label"], digest)
    return {
        "kind": finding.kind,
        **about,
        "suggested": finding.suggested,
        "score": finding.score,
        "why": finding.why,
        "checksum": digest,
        "decision": None if decision is None else asdict(decision),
        "partners": [{**_image(images, number), "distance": distance} for number, distance in finding.partners],
    }


def _image(images: AuditImages, number: int) -> dict[str, Any]:
    source = images.sources[number]
    return {"number": number, "image": source.name, "split": images.splits[number], "label": images.label(number)}


def _cleaned(images: AuditImages, settled: Settled, folder: Path, note: Note) -> dict[str, Any] | None:
    """cleaned.csv, if anything was decided and the images are files."""
    if not settled.images():
        return None
    try:
        done = write_cleaned(images, settled, folder)
    except ValueError as error:
        note(str(error))
        return None
    for line in done.notes:
        note(line)
    return asdict(done)


def _shower(parts: list[Pixels]) -> Callable[[list[int]], NDArray[np.uint8]]:
    """Pixels by the number of the image among all parts."""
    starts = np.cumsum([0, *(len(pixels.images) for pixels in parts)])

    def show(numbers: list[int]) -> NDArray[np.uint8]:
        places = [(int(np.searchsorted(starts, number, side="right")) - 1, number) for number in numbers]
        return np.stack([parts[part].array[number - starts[part]] for part, number in places])

    return show

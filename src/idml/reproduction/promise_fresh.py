"""What a calibrated gallery does with images and classes that were kept out of it, and after it has grown.

**fresh**: 20 calibrations of the gallery as it is (on queries drawn as `idml calibrate` draws them), asked with the
images in `known` and `unknown`.

**growth**: a gallery of half of the images (or of the images of half of the classes) is calibrated with 25 % unknown
queries, and grows: by 20 %, then to twice its size; then it is calibrated again.

Each error rate is that of a mixture: known and unknown queries are weighted by the share of unknown ones.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from idml.calibration.calibrate import CalibrationQueries, fit_queries
from idml.calibration.evidence import Profile
from idml.calibration.open_set import OpenSetQueries, QueryPool
from idml.calibration.risk_control import measure_drift
from idml.calibration.stored import Calibration
from idml.data.images import read_image
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings
from idml.progress import Progress, image_counter
from idml.reproduction.promise_collection import Collection
from idml.reproduction.promise_draws import (
    CONFIDENCE,
    RATES,
    REJECTED,
    SHARES,
    Curve,
    Draw,
    Population,
    Sums,
    add_sums,
    mixture,
    take_queries,
)
from idml.search.embedder import BATCH, Embedder
from idml.search.gallery_calibration import GallerySource, most_queries, search_known_and_unknown

CALIBRATIONS, GROWN = 20, 8
STAGES = ("at calibration", "20 % larger", "twice as large", "calibrated again")
KINDS = ("images", "classes")
_ASKED = 1500  # fresh images of each kind that grown galleries are asked with


class FreshImages:
    """The images that were kept out of a collection: embeddings and labels, which are folders' names."""

    def __init__(self, collection: Collection, embedder: Embedder, report: Progress) -> None:
        parts = {name: _list_images(collection.folder / name) for name in ("known", "unknown")}
        self.names = [path.parent.name for paths in parts.values() for path in paths]
        self.files = [path for paths in parts.values() for path in paths]
        place = collection.folder / f"fresh-{collection.model}.npz"
        if not place.exists():
            found = embed_files(embedder, self.files, report)
            np.savez(place, semantic=found.semantic.numpy(), uncertainty=found.uncertainty.numpy())
        with np.load(place) as stored:
            self.embeddings = Embeddings(torch.from_numpy(stored["semantic"]), torch.from_numpy(stored["uncertainty"]))

    def labels(self, names: dict[str, int]) -> Tensor:
        """Numbers of the labels; those that are not among ``names`` come after them."""
        numbers = dict(names)
        for name in self.names:
            numbers.setdefault(name, len(numbers))
        return torch.tensor([numbers[name] for name in self.names])


def _list_images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def embed_files(embedder: Embedder, files: Sequence[Path], report: Progress) -> Embeddings:
    """Embed image files."""
    count, parts = image_counter(report, "embedded"), []
    for start in range(0, len(files), BATCH):
        parts.append(embedder.embed([read_image(path) for path in files[start : start + BATCH]]))
        count(min(start + BATCH, len(files)), len(files))
    return Embeddings.cat(parts)


def count_answers(calibration: Calibration, asked: OpenSetQueries, share: float) -> Sums:
    """What a calibration does with queries, for each ε; the error rate is ``wrong`` / ``answered``."""
    p, absent = calibration.probability(asked.evidence), calibration.absent(asked.evidence, REJECTED)
    known, unknown = mixture(share, asked.known.float(), (~asked.known).float())
    curve, out = Curve.of(p, (~asked.correct).double(), known + unknown), {}
    for rate in RATES:
        promise = calibration.find_guarantee(rate, CONFIDENCE)
        answered, wrong = curve.at(promise.threshold)
        away = absent & (p < (2.0 if promise.threshold is None else promise.threshold))
        out[f"{rate:g}"] = {
            "refused": float(not promise.possible),
            "answered": answered,
            "wrong": wrong,
            "above": float(wrong > rate * answered + 1e-12),
            "recognised": float(away[~asked.known].double().mean()),
            "rejected": float(away[asked.known].double().mean()),
        }
    return out


def measure_fresh(population: Population, source: GallerySource, fresh: FreshImages) -> dict[str, Any]:
    """Calibrate the gallery ``CALIBRATIONS`` times for each share, and ask it with fresh images."""
    pool = QueryPool(fresh.embeddings, fresh.labels(source.names), source.embeddings, source.labels)
    asked = pool.search()
    shares: dict[str, Sums] = {}
    every = torch.ones(len(population))
    for share in SHARES:
        sums: Sums = {}
        for number in range(CALIBRATIONS):
            order = torch.randperm(len(population), generator=random_stream("promises, fresh", number))
            images = order[: most_queries(len(population))].sort().values
            drawn = Draw(images, population.labels[images], every, every > 0, every > 0)
            calibration = fit_queries(take_queries(population, drawn), unknown=share, seed=number, lists=False)
            add_sums(sums, count_answers(calibration, asked, share))
        shares[f"{share:g}"] = sums
    known = int(asked.known.sum())
    return {"calibrations": CALIBRATIONS, "known": known, "unknown": len(asked) - known, "shares": shares}


def measure_growth(source: GallerySource, fresh: FreshImages, share: float, report: Progress) -> dict[str, Any]:
    """Grow galleries ``GROWN`` times by images and by classes; return what happens at each stage."""
    found: dict[str, Any] = {kind: {stage: {"drifted": 0.0, "rates": {}} for stage in STAGES} for kind in KINDS}
    labels = fresh.labels(source.names)
    for number in range(GROWN):
        chosen = _choose_asked(labels < len(source.names), number)
        for kind in KINDS:
            units = torch.arange(len(source.labels)) if kind == "images" else source.labels
            order = torch.randperm(int(units.max()) + 1, generator=random_stream(f"promises, growth, {kind}", number))
            parts = [order[units] < len(order) * part for part in (0.5, 0.6, 1.0)]
            first, profile = _calibrate(source, parts[0], share, number)
            again, new_profile = _calibrate(source, parts[2], share, number)
            stages = [(first, profile, parts[0]), (first, profile, parts[1]), (first, profile, parts[2])]
            for stage, (calibration, then, inside) in zip(
                STAGES, [*stages, (again, new_profile, parts[2])], strict=True
            ):
                gallery, theirs = source.embeddings[inside], source.labels[inside]
                asked = QueryPool(fresh.embeddings[chosen], labels[chosen], gallery, theirs).search()
                found[kind][stage]["drifted"] += float(measure_drift(then, Profile.of(gallery)).changed)
                add_sums(found[kind][stage]["rates"], count_answers(calibration, asked, share))
        report({"what": "galleries grown", "done": number + 1, "images": GROWN})
    return {"galleries": GROWN, "share": share, **found}


def _choose_asked(known: Tensor, number: int) -> Tensor:
    generator = random_stream("promises, asked", number)
    parts = [rows[torch.randperm(len(rows), generator=generator)[:_ASKED]] for rows in (
        known.nonzero().flatten(), (~known).nonzero().flatten()
    )]  # fmt: skip
    return torch.cat(parts)


def _calibrate(source: GallerySource, inside: Tensor, share: float, seed: int) -> tuple[Calibration, Profile]:
    """Calibrate a gallery of some of the items, as `idml calibrate` does."""
    gallery, labels = source.embeddings[inside], source.labels[inside]
    rows = (
        torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[: most_queries(len(labels))]
        .sort()
        .values
    )
    queries = search_known_and_unknown(QueryPool(gallery[rows], labels[rows], gallery, labels, rows=rows))
    found = CalibrationQueries(queries, True, "")
    return fit_queries(found, unknown=share, seed=seed, lists=False), Profile.of(gallery)

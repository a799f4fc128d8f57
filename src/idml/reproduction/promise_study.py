"""`idml reproduce promises`: are the promises of `idml calibrate` kept, and how much is answered?

For a data set and a model; `idml.reproduction.promise_collection` makes the gallery as a user would. A finished cell
is stored in results/promises.json at once:

    draws      200 calibrations on samples of the gallery's queries, by image and by class, with 0, 25 and 50 % unknown
               queries, against the known error rates of the population (`idml.reproduction.promise_draws`)
    fresh      200 galleries of a part of the images, asked with the images and classes that were kept out of them
    growth     galleries that grow after their calibration
    unlabelled the same gallery without labels: draws of copies, changes that no calibration used, real near duplicates

Several data sets joined by "+" are one collection (only draws by class). Without --data the tables are written from
what is stored. They go into docs/calibration.md between two marks.

Expected cost on two free cores: CUB at 224 pixels 2 minutes to index, 4 to train, then 3 minutes of draws.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from idml.calibration.calibrate import UNKNOWN
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings
from idml.files import lock_file, write_atomic
from idml.model.model import PRETRAINED
from idml.progress import Note, Progress
from idml.reproduction.front_page import PROMISES, replace_between_marks
from idml.reproduction.promise_collection import GLYPHS, Collection, Parts, make_collection
from idml.reproduction.promise_copies import measure_unlabelled
from idml.reproduction.promise_draws import DRAWS, SAMPLES, SHARES, Population, Sums, add_sums, draw, measure_draw
from idml.reproduction.promise_fresh import GROWN, Everything, measure_fresh, measure_growth
from idml.reproduction.promise_tables import render_promises
from idml.reproduction.stored_results import cells_folder
from idml.search.embedder import MANY
from idml.search.gallery import Gallery
from idml.search.gallery_calibration import GallerySource, collect_queries, most_queries
from idml.training.refit import assign_folds, refit_heads

PAGE, MARK = "calibration.md", "promises"


class Cells:
    """The finished cells of the study, by name; several processes may add to the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """Return all cells."""
        if not self.path.exists():
            return {}
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found

    def add(self, name: str, cell: dict[str, Any]) -> None:
        """Store a cell."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(self.path.with_suffix(".lock")):
            cells = {**self.read(), name: cell}
            lines = [f"{json.dumps(key)}: {json.dumps(cells[key])}" for key in sorted(cells)]
            write_atomic(self.path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def study_promises(
    data: str | None, model: str, out: Path, *, draws: int = DRAWS, report: Progress, note: Note
) -> dict[str, Any]:
    """Make what is missing for a data set and a model; write the tables of everything stored."""
    cells = Cells(out / PROMISES)
    if data is not None:
        specs = data.split("+")
        folder = cells_folder(out) / "promises"
        collections = [make_collection(spec, model, folder, report=report, note=note) for spec in specs]
        name = f"{'+'.join(collection.name for collection in collections)} {model}"
        measure_draws(cells, name, collections, draws, report, note)
        if len(collections) == 1:
            measure_others(cells, collections[0], draws, report, note)
    text = render_promises(cells.read())
    page = out.absolute().parent / "docs" / PAGE
    if page.exists():
        write_atomic(page, replace_between_marks(page.read_text(), MARK, text).encode())
    return {"table": text, "cells": cells.read()}


# -------------------- draws --------------------


def measure_draws(
    cells: Cells, name: str, collections: list[Collection], draws: int, report: Progress, note: Note
) -> None:
    """Count what becomes of the promises in ``draws`` calibrations, for each sample and share of unknown queries."""
    missing = [
        (sample, share, key)
        for sample in (SAMPLES if len(collections) == 1 else SAMPLES[:1])
        for share in SHARES
        if (key := f"draws {name} by {sample} {share:g}") not in cells.read()
    ]
    if not missing:
        return
    population = load_population(collections, report, note)
    for sample, share, key in missing:
        cells.add(key, draw_many(population, sample, share, draws, report))


def draw_many(population: Population, sample: str, share: float, draws: int, report: Progress) -> dict[str, Any]:
    """Draw and calibrate; return the sums over all draws, and what was drawn from."""
    sums: Sums = {}
    clusters = 0
    for number in range(draws):
        drawn = draw(population, sample, most_queries(len(population)), random_stream(f"promises by {sample}", number))
        counts, found = measure_draw(population, drawn, share, number)
        add_sums(sums, counts)
        clusters += found
        report({"what": f"drawn by {sample}", "done": number + 1, "images": draws})
    queries = population.found.queries
    return {
        "draws": draws,
        "images": len(population),
        "classes": population.classes,
        "counted_classes": clusters / draws,
        "right": float(queries.correct[queries.known].double().mean()),
        "rates": sums,
    }


def load_population(collections: list[Collection], report: Progress, note: Note) -> Population:
    """All queries that a gallery gives, of all its images; several collections are put together first."""
    sources = []
    for collection in collections:
        with Gallery.open(collection.gallery, calibrated=False) as gallery:
            sources.append(Parts.read(gallery, note, report).photos)
    source = sources[0] if len(sources) == 1 else join_sources(sources)
    everything = partial(collect_queries, source, most=len(source.items), seed=0)
    return Population.of(everything(refit=refit_heads, assign_folds=assign_folds))


def join_sources(sources: list[GallerySource]) -> GallerySource:
    """One gallery of the items of several, whose labels are different."""
    items = [item for source in sources for item in source.items]
    names = {label: n for n, label in enumerate(sorted({item.label or "" for item in items}))}
    labels = torch.tensor([names[item.label or ""] for item in items])
    embeddings = Embeddings.cat([source.embeddings for source in sources])
    return replace(sources[0], items=items, embeddings=embeddings, labels=labels, names=names)


# -------------------- fresh images, growth, galleries without labels --------------------


def measure_others(cells: Cells, collection: Collection, draws: int, report: Progress, note: Note) -> None:
    """Ask the gallery with what was kept out of it; let it grow, and take its labels away.

    The last only where the model has learned from nothing in the gallery.
    """
    name = f"{collection.name} {collection.model}"
    kinds = ["fresh", "growth"] + ["unlabelled"] * (PRETRAINED in name or GLYPHS in name)
    missing = [kind for kind in kinds if f"{kind} {name}" not in cells.read()]
    if not missing:
        return
    with Gallery.open(collection.gallery, calibrated=False, images=MANY) as gallery:
        parts = Parts.read(gallery, note, report)
        if "fresh" in missing or "growth" in missing:
            searched = Everything.all_of(parts.everything, parts.part == 0, report)
            if "fresh" in missing:
                cells.add(f"fresh {name}", measure_fresh(searched, draws, report))
            if "growth" in missing:
                cells.add(f"growth {name}", measure_growth(searched, GROWN, UNKNOWN, report))
        if "unlabelled" in missing:
            found = measure_unlabelled(gallery, parts.photos, parts.fresh, draws=draws, report=report)
            cells.add(f"unlabelled {name}", found)

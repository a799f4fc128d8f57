"""The promises of a gallery without labels: does a calibration on changed copies hold for other queries?

Copies of 1,500 images, as `idml calibrate` makes them, are the population. 200 calibrations draw 600 pictures each
(`idml.reproduction.promise_draws`). The first 20 are asked with queries that are no such copies:

    other changes      grey, contrast, noise, mirrored, a border, a caption: none is used by the calibration
    near duplicates    photographs that were kept out of the gallery and are in it a second time, found by the pixels
                       alone: the images, 16 × 16 and grey, have a correlation of 0.99 or more

(At 0.95 half of the pairs of Cars196 were different cars, photographed from the same side before a white wall.)

A query is right if the first result is its original (or one of its near duplicates), or one that the gallery holds
twice. The same queries without these are unknown; photographs without a near duplicate are unknown too.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from idml.calibration.calibrate import fit_queries
from idml.calibration.open_set import OpenSetQueries, QueryPool
from idml.data.images import read_image
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings
from idml.progress import Progress
from idml.reproduction.promise_draws import (
    DRAWS,
    SHARES,
    Population,
    Sums,
    add_sums,
    draw,
    measure_draw,
    take_queries,
)
from idml.reproduction.promise_fresh import count_answers
from idml.search.gallery import Gallery
from idml.search.gallery_calibration import (
    ORIGINALS,
    GallerySource,
    collect_queries,
    group_duplicates,
    search_known_and_unknown,
)

POPULATION, CHANGED, CALIBRATIONS = 1500, 250, 20
DUPLICATES, _SAME = "near duplicates", 0.99
_SIDE = 16


def _add_noise(image: Image.Image, chance: random.Random) -> Image.Image:
    rng = np.random.default_rng(chance.randrange(2**32))
    pixels = np.asarray(image) + rng.normal(0, chance.uniform(10, 30), (image.height, image.width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _add_border(image: Image.Image, chance: random.Random) -> Image.Image:
    return ImageOps.expand(image, max(1, round(min(image.size) * chance.uniform(0.05, 0.15))), "white")


def _add_caption(image: Image.Image, chance: random.Random) -> Image.Image:
    copy, height = image.copy(), max(1, round(image.height * chance.uniform(0.08, 0.15)))
    pen = ImageDraw.Draw(copy)
    pen.rectangle((0, image.height - height, image.width, image.height), fill="black")
    pen.text((height // 4, image.height - height), "a picture of mine", fill="white")
    return copy


OTHER_CHANGES: dict[str, Callable[[Image.Image, random.Random], Image.Image]] = {
    "grey": lambda image, chance: image.convert("L").convert("RGB"),
    "contrast": lambda image, chance: ImageEnhance.Contrast(image).enhance(chance.choice((0.5, 2.0))),
    "noise": _add_noise,
    "mirrored": lambda image, chance: ImageOps.mirror(image),
    "a border": _add_border,
    "a caption": _add_caption,
}


def measure_unlabelled(
    gallery: Gallery, source: GallerySource, fresh: GallerySource, *, draws: int = DRAWS, report: Progress
) -> dict[str, Any]:
    """Measure the promises of the gallery as if it had no labels."""
    plain = replace(source, gallery=gallery, names={}, labels=torch.arange(len(source.items)), progress=report)
    population = Population.of(collect_queries(plain, originals=POPULATION))
    groups = group_duplicates(plain.items, plain.embeddings)
    asked = _change_images(plain, groups, report)
    asked[DUPLICATES] = _search_duplicates(plain, groups, fresh, report)
    shares: dict[str, Any] = {}
    for share in SHARES:
        sums: Sums = {}
        others: dict[str, Sums] = {name: {} for name in asked}
        for number in range(draws):
            drawn = draw(population, "class", 10**9, random_stream("promises, copies", number), classes_drawn=ORIGINALS)
            add_sums(sums, measure_draw(population, drawn, share, number)[0])
            if number < CALIBRATIONS:
                found = take_queries(population, drawn)
                calibration = fit_queries(found, unknown=share, seed=number, lists=False)
                for name, queries in asked.items():
                    if bool(queries.known.any()):
                        add_sums(others[name], count_answers(calibration, queries, share))
            report({"what": "drawn without labels", "done": number + 1, "images": draws})
        shares[f"{share:g}"] = {"rates": sums, "others": others}
    return {
        "draws": draws,
        "calibrations": CALIBRATIONS,
        "pictures": population.classes,
        "near_duplicates": int(asked[DUPLICATES].known.sum()),
        "asked": {name: int(queries.known.sum()) for name, queries in asked.items()},
        "shares": shares,
    }


def _change_images(source: GallerySource, groups: Tensor, report: Progress) -> dict[str, OpenSetQueries]:
    """Search copies that were changed in other ways, as they are and without their originals."""
    rows = torch.randperm(len(source.items), generator=random_stream("promises, other changes"))[:CHANGED]
    embedded: dict[str, list[Embeddings]] = {name: [] for name in OTHER_CHANGES}
    for done, (row, file) in enumerate(zip(rows.tolist(), source.files(rows.tolist()), strict=True), 1):
        image, chance = read_image(file), random.Random(row)
        copies = source.gallery.embedder.embed([change(image, chance) for change in OTHER_CHANGES.values()])
        for i, name in enumerate(OTHER_CHANGES):
            embedded[name].append(copies[[i]])
        report({"what": "changed", "done": done, "images": CHANGED})
    return {
        name: search_known_and_unknown(QueryPool(Embeddings.cat(parts), groups[rows], source.embeddings, groups))
        for name, parts in embedded.items()
    }


def _search_duplicates(source: GallerySource, groups: Tensor, fresh: GallerySource, report: Progress) -> OpenSetQueries:
    """Search the photographs that were kept out. Known ones have a near duplicate in the gallery."""
    inside = _shrink(source.files(range(len(source.items))), report)
    outside = _shrink(fresh.files(range(len(fresh.items))), report)
    labels, groups = label_duplicates(outside @ inside.T >= _SAME, groups)
    return QueryPool(fresh.embeddings, labels, source.embeddings, groups).search()


def label_duplicates(same: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return a label for each query [n], and the groups of the gallery [m], put together where one query shows them.

    ``same`` [n, m] says which pictures show the same. A query without any has a label of its own.

    >>> label_duplicates(torch.tensor([[True, True, False], [False, False, False]]), torch.arange(3))
    (tensor([0, 4]), tensor([0, 0, 2]))
    """
    groups = groups.clone()
    for row in same[same.any(dim=1)]:
        shown = groups[row]
        groups[torch.isin(groups, shown)] = shown.min()
    alone = len(groups) + torch.arange(len(same))
    return torch.where(same.any(dim=1), groups[same.int().argmax(dim=1)], alone), groups


def _shrink(files: list[Path], report: Progress) -> Tensor:
    """Images as rows of 16 × 16 grey values with mean 0 and length 1."""
    rows = []
    for done, file in enumerate(files, 1):
        small = read_image(file).convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
        rows.append(torch.from_numpy(np.asarray(small, dtype=np.float32).flatten()))
        report({"what": "compared by pixels", "done": done, "images": len(files)})
    x = torch.stack(rows)
    x = x - x.mean(dim=1, keepdim=True)
    out: Tensor = x / x.norm(dim=1, keepdim=True).clamp_min(1e-6)
    return out

"""From a SPEC such as ``cub:PATH`` to images to train on and images to test on."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from idml.data.layouts import Listed, Listing, cars, counted, cub, folder, inshop, sop, table
from idml.data.sources import Dataset, ImageSet
from idml.errors import unknown_name

LAYOUTS: dict[str, Callable[[Path], Listing]] = {
    "cub": cub,
    "cars": cars,
    "sop": sop,
    "inshop": inshop,
    "folder": folder,
    "csv": table,
}
SPECS = ("glyphs", *(f"{kind}:{'FILE' if kind == 'csv' else 'PATH'}" for kind in LAYOUTS))


def load_dataset(spec: str, *, split: str = "official", strict: bool = False, spare: float = 0.0) -> Dataset:
    """The data set that a SPEC names: ``glyphs``, ``cub:PATH``, ``cars:PATH``, ``sop:PATH``, ``inshop:PATH`` (a folder
    or an uncompressed .tar, the data set's own or its parent), ``folder:PATH`` (one sub-folder a class), ``csv:FILE``.

    ``split`` says which classes train: "official" (the field's own, or the column of a CSV, else the first half of the
    classes), "all" (every image trains and tests), or a share such as "0.8" of the classes, in order. With a share or
    "all", In-Shop's queries and gallery are images like the others. Classes are numbered 0 … within each set.

    Images that are listed but absent are left out. They, and a difference from the official counts, are a line in
    ``notes``, or a ``ValueError`` if ``strict`` and more than a share ``spare`` of the images is concerned. Bad input
    is a ``ValueError`` or ``FileNotFoundError`` of one line.
    """
    _check_split(split)
    kind, _, path = spec.partition(":")
    if spec == "glyphs":
        if split not in ("official", "all"):
            raise ValueError(f"glyphs has the splits official, which keeps twins together, and all; got {split!r}")
        from idml.data.glyphs import load_glyphs

        glyphs = load_glyphs()
        return glyphs if split == "official" else _for_both(glyphs)
    if kind not in LAYOUTS:
        raise ValueError(unknown_name("data set", kind, ["glyphs", *LAYOUTS], choices=f"one of {', '.join(SPECS)}"))
    if not path:
        raise ValueError(f"{kind!r} needs a path: {next(s for s in SPECS if s.startswith(f'{kind}:'))}")
    try:
        listing = LAYOUTS[kind](Path(os.path.expanduser(path)))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot read {str(error.filename or path)!r}: {error.strerror}") from None
    return _dataset(kind, listing, split, spare if strict else None)


def _for_both(dataset: Dataset) -> Dataset:
    """Every image to train and to test on."""
    train, test = dataset.train, dataset.test
    assert train.ambiguous is not None
    assert test.ambiguous is not None
    everything = ImageSet(
        f"{dataset.name} all",
        [*train.sources, *test.sources],
        torch.cat([train.labels, test.labels + len(train.classes)]),
        (*train.classes, *test.classes),
        torch.cat([train.ambiguous, test.ambiguous]),
    )
    return Dataset(dataset.name, everything, everything, notes=dataset.notes)


def _check_split(split: str) -> None:
    try:
        known = split in ("official", "all") or 0 < float(split) < 1
    except ValueError:
        known = False
    if not known:
        raise ValueError(f'the split is "official", "all" or a share of the classes such as "0.8", not {split!r}')


def _dataset(name: str, listing: Listing, split: str, spare: float | None) -> Dataset:
    listed = list(dict.fromkeys(listing.images))
    there = {image: listing.tree.has(image.name) for image in listed}
    images = [image for image in listed if there[image]]
    difference, share = _difference(name, listing, [image for image in listed if not there[image]], images)
    if difference and ((spare is not None and share > spare) or not images):
        raise ValueError(f"{difference} (in {str(listing.tree.path)!r})")
    notes = [*listing.notes, *([difference] if difference else []), *_doubles(name, listing.images)]
    if split == "all":
        everything = _image_set(f"{name} all", listing, images, images)
        return Dataset(name, everything, everything, None, (*notes, *_singles(everything)))
    parts = _parts(name, listing, images, split)
    for part, chosen in parts.items():
        if not chosen:
            raise ValueError(f'{name}: there is no {part} image; the split "all" uses every image for both')
    tested = [*parts["test"], *parts.get("gallery", [])]
    train = _image_set(f"{name} train", listing, parts["train"], parts["train"])
    test = _image_set(f"{name} test", listing, parts["test"], tested)
    gallery = _image_set(f"{name} gallery", listing, parts["gallery"], tested) if "gallery" in parts else None
    both = {image.label for image in parts["train"]} & {image.label for image in tested}
    if both:
        notes.append(f"{name}: {counted(len(both), 'class')} in train and test, {listing.classes[min(both)]!r} first")
    return Dataset(name, train, test, gallery, (*notes, *_singles(train), *_singles(test, gallery)))


def _parts(name: str, listing: Listing, images: list[Listed], split: str) -> dict[str, list[Listed]]:
    if split == "official" and images[0].part is not None:
        parts = dict.fromkeys(("train", "test", *listing.official))
        return {part: [image for image in images if image.part == part] for part in parts}
    classes = sorted({image.label for image in images})
    if len(classes) < 2:
        raise ValueError(f'{name}: one class is not enough to train and test; the split "all" uses it for both')
    share = 0.5 if split == "official" else float(split)
    first = min(max(int(share * len(classes) + 0.5), 1), len(classes) - 1)
    train = {label: place < first for place, label in enumerate(classes)}
    return {
        "train": [image for image in images if train[image.label]],
        "test": [image for image in images if not train[image.label]],
    }


def _image_set(name: str, listing: Listing, images: list[Listed], pool: list[Listed]) -> ImageSet:
    """The images, their classes numbered among those of the pool, in order."""
    numbers = {label: number for number, label in enumerate(sorted({image.label for image in pool}))}
    labels = torch.tensor([numbers[image.label] for image in images], dtype=torch.long)
    sources = [listing.tree.source(image.name) for image in images]
    return ImageSet(name, sources, labels, tuple(listing.classes[label] for label in numbers))


def _difference(name: str, listing: Listing, absent: list[Listed], images: list[Listed]) -> tuple[str | None, float]:
    """One line on what is not as the official counts or the list say, and the share of the images it is about."""
    counts = Counter(image.part for image in images)
    gaps = {part: number - counts[part] for part, number in listing.official.items() if counts[part] != number}
    missing = sum(gap for gap in gaps.values() if gap > 0) if listing.official else len(absent)
    extra = -sum(gap for gap in gaps.values() if gap < 0)
    if not gaps and not absent:
        return None, 0.0
    words = [f"{counted(missing, 'image')} missing"] if missing or not extra else []
    words += [f"{counted(extra, 'image')} too many"] if extra else []
    found = ", ".join(f"{part} {counts[part]:,} of {number:,}" for part, number in listing.official.items())
    where = f"; {len(absent):,} listed but absent, {absent[0].name!r} first" if absent else ""
    share = max(missing + extra, len(absent)) / max(1, sum(listing.official.values()) or len(images) + len(absent))
    return f"{name}: {' and '.join(words)}{f' ({found})' if found else ''}{where}", share


def _doubles(name: str, listed: list[Listed]) -> list[str]:
    """Lines on images that are listed more than once, with one label or with several."""
    notes = []
    repeated = [image for image, number in Counter(listed).items() if number > 1]
    if repeated:
        notes.append(f"{name}: {counted(len(repeated), 'image')} listed more than once, {repeated[0].name!r} first")
    labels = Counter(image for image, _ in {(image.name, image.label): None for image in listed})
    several = [image for image, number in labels.items() if number > 1]
    if several:
        notes.append(f"{name}: {counted(len(several), 'image')} under more than one label, {several[0]!r} first")
    return notes


def _singles(images: ImageSet, gallery: ImageSet | None = None) -> list[str]:
    """A line on classes whose images have no other image to be matched with."""
    if gallery is None:
        lonely = int((images.labels.bincount() == 1).sum())
        return [f"{images.name}: {counted(lonely, 'class')} of one image"] if lonely else []
    lonely = len(set(images.labels.tolist()) - set(gallery.labels.tolist()))
    return [f"{images.name}: {counted(lonely, 'class')} with no image in the gallery"] if lonely else []


# -------------------- holdout --------------------
# Which of its training classes a run does not learn from.


def hold_out(images: ImageSet, share: float) -> tuple[ImageSet, ImageSet | None]:
    """The classes to learn from and, every 1/share-th class, those kept for validation; None if there are too few."""
    count = len(images.classes)
    kept = round(count * share)
    if kept < 2 or count - kept < 2:
        return images, None
    chosen = {round((i + 0.5) * count / kept - 0.5) for i in range(kept)}
    return images.of_classes([c for c in range(count) if c not in chosen]), images.of_classes(sorted(chosen))

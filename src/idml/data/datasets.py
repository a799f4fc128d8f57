"""Data sets: labelled images to train on and to test on, loaded from a SPEC such as ``cub:PATH``."""

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from idml.data.glyphs import Drawings, find_twins, is_train_group, load_drawings
from idml.data.layouts import Listed, Listing, cars, cub, folder, format_count, inshop, sop, table
from idml.data.sources import ArraySource, Source
from idml.embeddings import Index, as_rows
from idml.errors import find_similar, unknown_name

LAYOUTS: dict[str, Callable[[Path], Listing]] = {
    "cub": cub,
    "cars": cars,
    "sop": sop,
    "inshop": inshop,
    "folder": folder,
    "csv": table,
}
SPECS = ("glyphs", *(f"{kind}:{'FILE' if kind == 'csv' else 'PATH'}" for kind in LAYOUTS))


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with one label each, 0 … number of classes − 1.

    ``ambiguous`` marks the images that have an identical twin in another class, if the data set knows them.
    """

    name: str
    sources: Sequence[Source]
    labels: Tensor
    classes: tuple[str, ...]
    ambiguous: Tensor | None = field(default=None)

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.labels):
            raise ValueError(f"{self.name}: {len(self.sources)} images but {len(self.labels)} labels")
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise ValueError(f"{self.name}: labels must lie in 0 … {len(self.classes) - 1}")

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: Index) -> "ImageSet":
        """Select images; the classes stay as they are."""
        numbers = torch.arange(len(self))[as_rows(index, len(self))]
        ambiguous = None if self.ambiguous is None else self.ambiguous[numbers]
        sources = [self.sources[i] for i in numbers.tolist()]
        return ImageSet(self.name, sources, self.labels[numbers], self.classes, ambiguous)

    def of_classes(self, classes: Sequence[int]) -> "ImageSet":
        """Select the images of some classes, which are renumbered in the given order."""
        new = torch.full((len(self.classes),), -1)
        new[torch.tensor(list(classes), dtype=torch.long)] = torch.arange(len(classes))
        chosen = self[new[self.labels] >= 0]
        names = tuple(self.classes[c] for c in classes)
        return ImageSet(self.name, chosen.sources, new[chosen.labels], names, chosen.ambiguous)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of the names and labels: two sets with the same one hold the same images."""
        digest = hashlib.sha256()
        for source, label in zip(self.sources, self.labels.tolist(), strict=True):
            line = f"{len(source.name)}:{source.name}\n{len(self.classes[label])}:{self.classes[label]}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    @property
    def checksums(self) -> set[str]:
        """The first 16 digits of every image's checksum; reads all bytes."""
        return {source.checksum[:16] for source in self.sources} - {""}

    @cached_property
    def version(self) -> str:
        """A short hash of the fingerprint and every image's stamp: the key of all caches made from the pixels."""
        digest = hashlib.sha256(self.fingerprint.encode())
        for source in self.sources:
            digest.update(f"{source.stamp}\n".encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Dataset:
    """The images of a data set: some to train on, and those of other classes to test on.

    If a data set has its own query and gallery images (In-Shop), ``test`` holds the queries, and ``gallery`` the images
    they are searched in, with the same classes. Otherwise ``gallery`` is None, and each test image is a query among the
    others. ``notes`` are lines to show the user: what is missing, what was left out.
    """

    name: str
    train: ImageSet
    test: ImageSet
    gallery: ImageSet | None = None
    notes: tuple[str, ...] = ()


def load_dataset(spec: str, *, split: str = "official", strict: bool = False, spare: float = 0.0) -> Dataset:
    """Load the data set that a SPEC names.

    A SPEC is ``glyphs``, ``cub:PATH``, ``cars:PATH``, ``sop:PATH``, ``inshop:PATH`` (a folder or an uncompressed .tar:
    the data set's own or its parent), ``folder:PATH`` (one sub-folder per class) or ``csv:FILE``.

    ``split`` says which classes train: "official" (the usual split of the field, or the column of a CSV, else the first
    half of the classes), "all" (every image trains and tests), or a share such as "0.8" of the classes, in order. With
    a share or "all", In-Shop's queries and gallery are images like the others. Classes are numbered 0 … in each set.

    Images that are listed but absent are left out. A line in ``notes`` names them, and any difference from the official
    counts. If ``strict``, and more than a share ``spare`` of the images is concerned, that is a ``ValueError``. Bad
    input is a ``ValueError`` or ``FileNotFoundError`` of one line.
    """
    _check_split(split)
    check_spec(spec)
    kind, _, path = spec.partition(":")
    if spec == "glyphs":
        if split not in ("official", "all"):
            raise ValueError(f"glyphs has the splits official, which keeps twins together, and all; got {split!r}")
        glyphs = load_glyphs()
        return glyphs if split == "official" else _train_and_test_on_all(glyphs)
    try:
        listing = LAYOUTS[kind](Path(os.path.expanduser(path)))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot read {str(error.filename or path)!r}: {error.strerror}") from None
    return _build_listed(kind, listing, split, spare if strict else None)


def check_spec(spec: str) -> None:
    """Raise an error of one line unless a SPEC has a known kind and its path exists. No image is looked for.

    For a path without a kind the error names the kind that fits.
    """
    kind, _, name = spec.partition(":")
    if spec == "glyphs":
        return
    if kind not in LAYOUTS:
        bare = os.path.expanduser(spec)
        if os.path.isdir(bare) or (os.path.isfile(bare) and bare.endswith(".tar")):
            raise ValueError(f"{spec!r} is a path without a kind: write folder:{spec} (or cub:, cars:, sop:, inshop:)")
        if os.path.isfile(bare):
            raise ValueError(f"{spec!r} is a path without a kind: write csv:{spec} if it is a list of images")
        raise ValueError(unknown_name("data set", kind, ["glyphs", *LAYOUTS], choices=f"one of {', '.join(SPECS)}"))
    if not name:
        raise ValueError(f"{kind!r} needs a path: {next(s for s in SPECS if s.startswith(f'{kind}:'))}")
    path = Path(os.path.expanduser(name))
    if not os.path.exists(path):
        beside = os.listdir(path.parent) if os.path.isdir(path.parent) else []
        near = find_similar(path.name, beside)
        hint = f"; did you mean {kind}:{path.parent / near[0]}?" if near else ""
        raise FileNotFoundError(f"there is no {str(path)!r}{hint}")


def hold_out(images: ImageSet, share: float) -> tuple[ImageSet, ImageSet | None]:
    """Split training classes into those to learn from and those for validation: every 1/share-th class.

    The second is None if there are too few classes.
    """
    count = len(images.classes)
    kept = round(count * share)
    if kept < 2 or count - kept < 2:
        return images, None
    chosen = {round((i + 0.5) * count / kept - 0.5) for i in range(kept)}
    return images.of_classes([c for c in range(count) if c not in chosen]), images.of_classes(sorted(chosen))


def _check_split(split: str) -> None:
    try:
        known = split in ("official", "all") or 0 < float(split) < 1
    except ValueError:
        known = False
    if not known:
        raise ValueError(f'the split is "official", "all" or a share of the classes such as "0.8", not {split!r}')


# -------------------- glyphs --------------------


def load_glyphs(*, size: int = 32, cache: Path | None = None) -> Dataset:
    """Load characters in many fonts, ``size`` × ``size`` pixels; half of the twin groups train, half test.

    They are drawn in some seconds the first time and kept as one file in the folder ``cache`` (by default
    ``$IDML_CACHE``, else ``idml`` in ``$XDG_CACHE_HOME`` or ``~/.cache``); a folder that cannot be written is no error.
    """
    return _build_glyphs(*load_drawings(size=size, cache=cache))


def _build_glyphs(drawings: Drawings, fonts: Sequence[str]) -> Dataset:
    ambiguous, group = find_twins(drawings)
    places = list(zip(drawings.characters.tolist(), drawings.fonts.tolist(), strict=True))
    halves = {}
    for train in (True, False):
        codes = [code for code in sorted(group) if is_train_group(group[code]) == train]
        label = {code: number for number, code in enumerate(codes)}
        rows = [row for row, (code, _) in enumerate(places) if code in label]
        halves[train] = ImageSet(
            f"glyphs/{'train' if train else 'test'}",
            [ArraySource(f"U+{places[row][0]:04X}/{fonts[places[row][1]]}", drawings.pixels[row]) for row in rows],
            torch.tensor([label[places[row][0]] for row in rows], dtype=torch.long),
            tuple(f"U+{code:04X} {unicodedata.name(chr(code), 'UNNAMED')}" for code in codes),
            torch.from_numpy(ambiguous[rows]),
        )
    members = [count for count in Counter(group.values()).values() if count > 1]
    note = (
        f"glyphs: {len(group):,} classes, {len(places):,} images, {len(fonts)} fonts; {int(ambiguous.sum()):,} images "
        f"have an identical twin in another class ({len(members)} groups of twins, {sum(members)} classes)"
    )
    return Dataset("glyphs", halves[True], halves[False], notes=(note,))


def _train_and_test_on_all(dataset: Dataset) -> Dataset:
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


# -------------------- data sets on disk --------------------


def _build_listed(name: str, listing: Listing, split: str, spare: float | None) -> Dataset:
    """Build the data set of a listing; with ``spare``, more missing images than that share are an error."""
    listed = list(dict.fromkeys(listing.images))
    there = {image: listing.tree.has(image.name) for image in listed}
    images = [image for image in listed if there[image]]
    difference, share = _describe_difference(name, listing, [image for image in listed if not there[image]], images)
    if difference and ((spare is not None and share > spare) or not images):
        raise ValueError(f"{difference} (in {str(listing.tree.path)!r})")
    notes = [*listing.notes, *([difference] if difference else []), *_describe_repeats(name, listing.images)]
    if split == "all":
        everything = _build_image_set(f"{name} all", listing, images, images)
        return Dataset(name, everything, everything, None, (*notes, *_describe_singles(everything)))
    parts = _split_images(name, listing, images, split)
    for part, chosen in parts.items():
        if not chosen:
            raise ValueError(f'{name}: there is no {part} image; the split "all" uses every image for both')
    tested = [*parts["test"], *parts.get("gallery", [])]
    train = _build_image_set(f"{name} train", listing, parts["train"], parts["train"])
    test = _build_image_set(f"{name} test", listing, parts["test"], tested)
    gallery = _build_image_set(f"{name} gallery", listing, parts["gallery"], tested) if "gallery" in parts else None
    both = {image.label for image in parts["train"]} & {image.label for image in tested}
    if both:
        first = listing.classes[min(both)]
        notes.append(f"{name}: {format_count(len(both), 'class')} in train and test, {first!r} first")
    return Dataset(name, train, test, gallery, (*notes, *_describe_singles(train), *_describe_singles(test, gallery)))


def _split_images(name: str, listing: Listing, images: list[Listed], split: str) -> dict[str, list[Listed]]:
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


def _build_image_set(name: str, listing: Listing, images: list[Listed], pool: list[Listed]) -> ImageSet:
    """Build a set of ``images``; classes are numbered, in order, among those of the pool."""
    numbers = {label: number for number, label in enumerate(sorted({image.label for image in pool}))}
    labels = torch.tensor([numbers[image.label] for image in images], dtype=torch.long)
    sources = [listing.tree.source(image.name) for image in images]
    return ImageSet(name, sources, labels, tuple(listing.classes[label] for label in numbers))


def _describe_difference(
    name: str, listing: Listing, absent: list[Listed], images: list[Listed]
) -> tuple[str | None, float]:
    """Return one line on differences from the official counts or the list, and the share of images concerned."""
    counts = Counter(image.part for image in images)
    gaps = {part: number - counts[part] for part, number in listing.official.items() if counts[part] != number}
    missing = sum(gap for gap in gaps.values() if gap > 0) if listing.official else len(absent)
    extra = -sum(gap for gap in gaps.values() if gap < 0)
    if not gaps and not absent:
        return None, 0.0
    words = [f"{format_count(missing, 'image')} missing"] if missing or not extra else []
    words += [f"{format_count(extra, 'image')} too many"] if extra else []
    found = ", ".join(f"{part} {counts[part]:,} of {number:,}" for part, number in listing.official.items())
    where = f"; {len(absent):,} listed but absent, {absent[0].name!r} first" if absent else ""
    share = max(missing + extra, len(absent)) / max(1, sum(listing.official.values()) or len(images) + len(absent))
    return f"{name}: {' and '.join(words)}{f' ({found})' if found else ''}{where}", share


def _describe_repeats(name: str, listed: list[Listed]) -> list[str]:
    """Return lines on images that are listed more than once, with one label or with several."""
    notes = []
    repeated = [image for image, number in Counter(listed).items() if number > 1]
    if repeated:
        first = repeated[0].name
        notes.append(f"{name}: {format_count(len(repeated), 'image')} listed more than once, {first!r} first")
    labels = Counter(image for image, _ in {(image.name, image.label): None for image in listed})
    several = [image for image, number in labels.items() if number > 1]
    if several:
        notes.append(f"{name}: {format_count(len(several), 'image')} under more than one label, {several[0]!r} first")
    return notes


def _describe_singles(images: ImageSet, gallery: ImageSet | None = None) -> list[str]:
    """Return a line on classes whose images have no other image to match."""
    if gallery is None:
        single = int((images.labels.bincount() == 1).sum())
        return [f"{images.name}: {format_count(single, 'class')} of one image"] if single else []
    single = len(set(images.labels.tolist()) - set(gallery.labels.tolist()))
    return [f"{images.name}: {format_count(single, 'class')} with no image in the gallery"] if single else []

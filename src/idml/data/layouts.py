"""The files of each data set: one function per layout reads which images there are, in a folder or a plain tar."""

import csv
import io
import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from idml.data.sources import Folder, Tar, Tree, open_tree

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".heif", ".hif", ".avif")
_NAMED = 5  # files of other types that are named
Part = Literal["train", "test", "gallery"]
_SPLITS: dict[str, Part] = {"train": "train", "test": "test"}
_STATUSES: dict[str, Part] = {"train": "train", "query": "test", "gallery": "gallery"}


class Listed(NamedTuple):
    """An image as a data set lists it: name, number of its class, and its part if the data set says so."""

    name: str
    label: int
    part: Part | None = None


@dataclass(frozen=True)
class Listing:
    """What a data set lists: classes in order, images, and the official number of images in each part."""

    tree: Tree
    classes: tuple[str, ...]
    images: list[Listed]
    official: Mapping[Part, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def cub(path: Path) -> Listing:
    """CUB-200-2011: classes 1 … 100 train."""
    tree = _home(path, "images.txt")
    names = {}
    for line, (number, name) in _rows(tree, "classes.txt", "class_id class_name", key=True):
        if not number.isdecimal():
            raise _malformed(tree, "classes.txt", line, f"class {number!r} is not a number")
        names[number] = name
    class_of = {}
    for line, (image, number) in _rows(tree, "image_class_labels.txt", "image_id class_id", key=True):
        if number not in names:
            raise _malformed(tree, "image_class_labels.txt", line, f"class {number!r} is not in classes.txt")
        class_of[image] = number
    order = sorted(names, key=int)
    labels = {number: label for label, number in enumerate(order)}
    images = []
    for line, (image, name) in _rows(tree, "images.txt", "image_id image_name", key=True):
        if image not in class_of:
            raise _malformed(tree, "images.txt", line, f"image {image!r} is not in image_class_labels.txt")
        number = class_of[image]
        images.append(Listed(f"images/{name}", labels[number], "train" if int(number) <= 100 else "test"))
    return Listing(tree, tuple(names[number] for number in order), images, {"train": 5_864, "test": 5_924})


def cars(path: Path) -> Listing:
    """Cars196: `car_ims` with `cars_annos.mat`, or `cars_train` and `cars_test` with `devkit`; 98 classes train."""
    tree = _home(path, "cars_annos.mat", "devkit/cars_train_annos.mat")
    if tree.has("cars_annos.mat"):
        lists, names = [("cars_annos.mat", "relative_im_path", "")], "cars_annos.mat"
    else:
        tests = "cars_test_annos_withlabels.mat"
        tests = f"devkit/{tests}" if tree.has(f"devkit/{tests}") else tests
        lists = [("devkit/cars_train_annos.mat", "fname", "cars_train/"), (tests, "fname", "cars_test/")]
        names = "devkit/cars_meta.mat"
    classes = tuple(str(name) for name in _mat(tree, names, "class_names"))
    images, numbers = [], range(1, len(classes) + 1)
    for file, column, prefix in lists:
        rows = _mat(tree, file, "annotations")
        if not {column, "class"} <= set(rows.dtype.names or ()):
            raise ValueError(f"{file!r} of {str(tree.path)!r}: the annotations have no {column!r} or no 'class'")
        for row, (name, number) in enumerate(zip(rows[column], rows["class"], strict=True), start=1):
            if not isinstance(name, str) or not isinstance(number, int | float) or number not in numbers:
                message = f"annotation {row:,}: expected a name and a class of 1 … {len(classes)}"
                raise ValueError(f"{file!r} of {str(tree.path)!r}, {message}")
            images.append(Listed(prefix + name, int(number) - 1, "train" if number <= 98 else "test"))
    return Listing(tree, classes, images, {"train": 8_054, "test": 8_131})


def sop(path: Path) -> Listing:
    """Stanford Online Products: a list of images to train on, one of images of other products to test on."""
    tree = _home(path, "Ebay_train.txt")
    found: list[tuple[str, str, Part]] = []
    parts: tuple[tuple[str, Part], ...] = (("Ebay_train.txt", "train"), ("Ebay_test.txt", "test"))
    for file, part in parts:
        for line, (_, number, _, name) in _rows(tree, file, "image_id class_id super_class_id path", header=1):
            if not number.isdecimal():
                raise _malformed(tree, file, line, f"class {number!r} is not a number")
            found.append((name, number, part))
    return _numbered(tree, found, {"train": 59_551, "test": 60_502})


def inshop(path: Path) -> Listing:
    """In-Shop Clothes Retrieval: a list that says train, query or gallery; images in `img` or in `Img/img`."""
    file = "list_eval_partition.txt"
    tree = _home(path, file, f"Eval/{file}")
    file = file if tree.has(file) else f"Eval/{file}"
    found: list[tuple[str, str, Part]] = []
    for line, (name, item, word) in _rows(tree, file, "image_name item_id evaluation_status", header=2):
        if word not in _STATUSES:
            raise _malformed(tree, file, line, f"{word!r} is not train, query or gallery")
        found.append((name, item, _STATUSES[word]))
    if not any(tree.has(name) for name, _, _ in found):
        tree = tree.below("Img/")
    return _numbered(tree, found, {"train": 25_882, "test": 14_218, "gallery": 12_612})


def folder(path: Path) -> Listing:
    """One sub-folder per class, which may have sub-folders of its own.

    A tar often contains the folder itself: a single outer folder around two or more with images does not count. Hidden
    files and folders are skipped; links to folders are not followed (see `Folder`).
    """
    tree = open_tree(path)
    names, links = tree.files()
    images = [name for name in names if name.lower().endswith(EXTENSIONS)]
    others = sorted(name for name in names if not name.lower().endswith(EXTENSIONS))
    outer = {name.split("/")[0] for name in images}
    inner = {name.split("/")[1] for name in images if name.count("/") > 1}
    if isinstance(tree, Tar) and len(outer) == 1 and len(inner) > 1:
        prefix = f"{outer.pop()}/"
        tree, images = tree.below(prefix), [name.removeprefix(prefix) for name in images]
        others = [name.removeprefix(prefix) for name in others]
    inside = sorted((name for name in images if "/" in name), key=natural)
    classes = sorted({name.split("/", 1)[0] for name in inside}, key=natural)
    if not classes:
        skipped = f"; {format_count(links, 'link')} to folders not followed" if links else ""
        raise ValueError(f"there is no image in a sub-folder of {str(path)!r} ({' '.join(EXTENSIONS)}){skipped}")
    labels = {name: label for label, name in enumerate(classes)}
    notes = []
    if others:
        notes.append(f"folder: {describe_others(others)}")
    if len(inside) < len(images):
        notes.append(f"folder: {format_count(len(images) - len(inside), 'image')} in no sub-folder left out")
    if links:
        notes.append(f"folder: {format_count(links, 'link')} to folders not followed")
    listed = [Listed(name, labels[name.split("/", 1)[0]]) for name in inside]
    return Listing(tree, tuple(classes), listed, notes=tuple(notes))


def table(path: Path) -> Listing:
    """A CSV file (UTF-8) with the columns path, label and optionally split; paths start at the file's folder."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no {str(path)!r}")
    if not os.path.isfile(path):
        raise ValueError(f"{str(path)!r} is not a file")
    tree = Folder(path.parent)
    rows = csv.reader(io.StringIO(_text(tree, path.name), newline=""), strict=True)
    found, line = [], 1
    try:
        columns = [name.strip() for name in next(rows, [])]
        if not {"path", "label"} <= set(columns) or len(set(columns)) < len(columns):
            raise ValueError(f"expected the columns path, label and optionally split, got {columns}")
        line = rows.line_num + 1
        for row in rows:
            if row:
                found.append(_table_row(row, columns))
            line = rows.line_num + 1
    except (csv.Error, ValueError) as error:
        raise _malformed(tree, path.name, line, str(error)) from None
    if not found:
        raise ValueError(f"{str(path)!r} lists no image")
    return _numbered(tree, found)


def _table_row(row: list[str], columns: list[str]) -> tuple[str, str, Part | None]:
    if len(row) != len(columns):
        raise ValueError(f"{len(row)} fields instead of {len(columns)}")
    cells = dict(zip(columns, row, strict=True))
    name, label, word = cells["path"], cells["label"].strip(), cells.get("split", "").strip()
    inside = posixpath.normpath(name)
    if not name:
        raise ValueError("the path is empty")
    if not label:
        raise ValueError("the label is empty")
    if inside.startswith("/") or PureWindowsPath(name).is_absolute():
        raise ValueError(f"the path {name!r} is absolute, it must start at the file's folder")
    if inside.split("/")[0] == "..":
        raise ValueError(f"the path {name!r} leaves the file's folder")
    if "split" not in columns:
        return inside, label, None
    if word not in _SPLITS:
        raise ValueError(f"the split {word!r} is neither train nor test")
    return inside, label, _SPLITS[word]


def natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a key that sorts names as people do, 2 before 10."""
    pieces = re.split("([0-9]+)", name)
    key = [(len(p.lstrip("0")), p.lstrip("0")) if i % 2 else (0, p) for i, p in enumerate(pieces)]
    return key, name


def describe_others(names: Sequence[str]) -> str:
    """Say how many files are not of a type that is read, and name the first of them.

    >>> describe_others(["a/film.mov", "notes.txt"])
    "2 files of other types left out ('a/film.mov', 'notes.txt')"
    """
    named = ", ".join(map(repr, names[:_NAMED])) + (", …" if len(names) > _NAMED else "")
    return f"{format_count(len(names), 'file')} of other types left out ({named})"


def format_count(number: int, noun: str) -> str:
    """Format a number and a noun: "1 image", "2 classes"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _home(path: Path, *marks: str) -> Tree:
    """Open the tree that starts where the data set does: at the path, or in a sub-folder of it."""
    tree = open_tree(path)
    homes = tree.homes(marks)
    if not homes:
        raise FileNotFoundError(f"there is no {' or '.join(map(repr, marks))} in {str(path)!r}")
    if homes[0] and len(homes) > 1:
        raise ValueError(f"{str(path)!r} holds several data sets, name one: {', '.join(map(repr, homes))}")
    return tree.below(homes[0])


def _numbered(
    tree: Tree, found: Sequence[tuple[str, str, Part | None]], official: Mapping[Part, int] = MappingProxyType({})
) -> Listing:
    classes = sorted({label for _, label, _ in found}, key=natural)
    labels = {name: number for number, name in enumerate(classes)}
    return Listing(tree, tuple(classes), [Listed(name, labels[label], part) for name, label, part in found], official)


def _malformed(tree: Tree, file: str, line: int, message: str) -> ValueError:
    return ValueError(f"{file!r} of {str(tree.path)!r}, line {line:,}: {message}")


def _text(tree: Tree, file: str) -> str:
    try:
        return tree.read(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file!r} of {str(tree.path)!r} is not UTF-8 at byte {error.start:,}") from None


def _rows(
    tree: Tree, file: str, columns: str, *, header: int = 0, key: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines of a list, split at blanks; line ``header`` is the header; a ``key`` in column 1 is unique."""
    wanted, seen, lines = columns.split(), set(), _text(tree, file).split("\n")
    if header and (len(lines) < header or lines[header - 1].split() != wanted):
        raise _malformed(tree, file, header, f"expected the header {columns!r}")
    for number, line in enumerate(lines[header:], start=header + 1):
        fields = line.strip().split(maxsplit=len(wanted) - 1)
        if not fields:
            continue
        if len(fields) != len(wanted):
            raise _malformed(tree, file, number, f"expected {columns!r}, got {line[:80]!r}")
        if key and fields[0] in seen:
            raise _malformed(tree, file, number, f"{wanted[0]} {fields[0]!r} is there twice")
        seen.add(fields[0])
        yield number, fields


def _mat(tree: Tree, file: str, variable: str) -> Any:
    from scipy.io import loadmat

    data = tree.read(file)
    try:
        return np.atleast_1d(loadmat(io.BytesIO(data), squeeze_me=True, variable_names=[variable])[variable])
    except Exception as error:  # a damaged file can raise any exception
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"cannot read {variable!r} from {file!r} of {str(tree.path)!r}: {reason}") from None

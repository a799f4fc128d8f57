"""From scores to lists a person can go through: each finding names an image, says why in words, and shows the evidence.

Lists are ranked; each is cut where reading on would hardly pay: at a tenth of the images (likely mislabelled) or a
fiftieth (ambiguous). Of a group of duplicates, every image is listed but the one whose label is supported best.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from idml.audit.duplicates import DuplicateGroup, difference, duplicates
from idml.audit.label_errors import Suspicion, ambiguous, mislabelled
from idml.data.datasets import Dataset, ImageSet
from idml.data.layouts import format_count
from idml.data.sources import ArraySource, FileSource, Source, TarSource
from idml.embeddings import Embeddings
from idml.evaluation.knn import Neighbours, nearest

# -------------------- images --------------------
# All images of a data set in one row, whatever part they are in, as an audit numbers them.


@dataclass(frozen=True, eq=False)
class AuditImages:
    """The parts of a data set one after another; an image's number counts through all of them.

    Classes of the same name are one class, in whatever part they are.
    """

    name: str
    parts: tuple[tuple[str, ImageSet], ...]

    @classmethod
    def of(cls, dataset: Dataset) -> "AuditImages":
        """Train, test and, where there is one, gallery; a set that serves as both is there once, as "all"."""
        if dataset.train is dataset.test:
            return cls(dataset.name, (("all", dataset.train),))
        gallery = () if dataset.gallery is None else (("gallery", dataset.gallery),)
        return cls(dataset.name, (("train", dataset.train), ("test", dataset.test), *gallery))

    @cached_property
    def sources(self) -> list[Source]:
        """Where each image is."""
        return [source for _, images in self.parts for source in images.sources]

    @cached_property
    def splits(self) -> list[str]:
        """The part of each image."""
        return [part for part, images in self.parts for _ in range(len(images))]

    @cached_property
    def classes(self) -> list[str]:
        """The names of all classes, in the order of the parts."""
        return list(dict.fromkeys(name for _, images in self.parts for name in images.classes))

    @cached_property
    def labels(self) -> Tensor:
        """The class of each image [n], a place in ``classes``."""
        place = {name: number for number, name in enumerate(self.classes)}
        return torch.cat([torch.tensor([place[c] for c in images.classes])[images.labels] for _, images in self.parts])

    @property
    def version(self) -> str:
        """A short hash of every image's name, label, part and stamp."""
        told = repr([(part, images.version) for part, images in self.parts])
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.sources)

    def label(self, number: int) -> str:
        """The name of an image's class."""
        return self.classes[int(self.labels[number])]


def checksum(source: Source) -> str:
    """16 hexadecimal digits that change when the image's bytes do, and not when it is only copied or touched."""
    digest = hashlib.sha256()
    try:
        if isinstance(source, FileSource):
            with (source.root / source.name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
        elif isinstance(source, TarSource):
            with source.archive.open("rb") as file:
                file.seek(source.offset)
                digest.update(file.read(source.size))
        elif isinstance(source, ArraySource):
            digest.update(repr(source.pixels.shape).encode() + np.ascontiguousarray(source.pixels).tobytes())
        else:
            digest.update(source.stamp.encode())
    except OSError:
        digest.update(b"absent")
    return digest.hexdigest()[:16]


_SHARES = {"mislabelled": 0.1, "ambiguous": 0.02}
_AT_LEAST = 20  # listed, if there are so many
_TIED = 0.25  # where one class has 0.8 and another 0.2 of the surroundings
_SHOWN = 8  # images beside the one in question
_NEAR = 10  # neighbours that the words speak of


@dataclass(frozen=True)
class Finding:
    """One image of a list: its number among all images, and the numbers and distances of those that speak about it."""

    kind: str
    number: int
    score: float
    suggested: str
    why: str
    partners: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class Found:
    """The lists, each in its order; the scores of all labels that could be judged; what a person should know."""

    findings: list[Finding]
    scores: Tensor
    notes: list[str]


@dataclass(frozen=True, eq=False)
class Subject:
    """What is audited: the images, which of them could be read [n], and what the model and the eye make of these.

    ``checksums``, ``sketches`` and ``near`` are what `idml.audit.duplicates` needs.
    """

    images: AuditImages
    numbers: Tensor
    embeddings: Embeddings
    checksums: Sequence[bytes]
    sketches: Tensor
    near: float

    @property
    def labels(self) -> Tensor:
        """The class of each readable image."""
        return self.images.labels[self.numbers]

    def name(self, row: int) -> str:
        """The name of a readable image."""
        return self.images.sources[int(self.numbers[row])].name

    def label(self, row: int) -> str:
        """The name of its class."""
        return self.images.label(int(self.numbers[row]))

    def split(self, row: int) -> str:
        """The part it is in."""
        return self.images.splits[int(self.numbers[row])]

    def partners(self, rows: Sequence[int], distances: Sequence[float]) -> tuple[tuple[int, float], ...]:
        """Rows as numbers, each with its distance."""
        return tuple((int(self.numbers[row]), d) for row, d in zip(rows, distances, strict=True))


def find(subject: Subject) -> Found:
    """All findings about the images, kind after kind, each in its order."""
    notes: list[str] = []
    if len(subject.numbers) < 2:
        raise ValueError(f"{subject.images.name}: one image has nothing to be compared with")
    found = nearest(subject.embeddings, 50)
    suspicion = _suspicion(subject, notes)
    findings = [
        *_mislabelled(subject, suspicion, found, notes),
        *_duplicates(subject, suspicion),
        *_ambiguous(subject, found),
    ]
    return Found(findings, suspicion.score[suspicion.judged], notes)


def _suspicion(subject: Subject, notes: list[str]) -> Suspicion:
    labels = subject.labels
    if len(labels.unique()) < 2:
        notes.append("all images are of one class: no label can be judged")
        nothing = torch.full((len(labels),), -math.inf)
        return Suspicion(nothing, labels, torch.zeros(len(labels), dtype=torch.bool))
    suspicion = mislabelled(subject.embeddings, labels)
    alone = int((~suspicion.judged).sum())
    if alone:
        notes.append(f"{format_count(alone, 'image')} alone in a class: nothing speaks for or against such a label")
    return suspicion


def _mislabelled(subject: Subject, suspicion: Suspicion, found: Neighbours, notes: list[str]) -> list[Finding]:
    doubtful = int((suspicion.score > 0).sum())
    order = _first(suspicion.score, doubtful, "mislabelled")
    if len(order) < doubtful:
        notes.append(f"{doubtful:,} images look more like another class; the {len(order):,} most suspicious are listed")
    labels, findings = subject.labels, []
    for row in order:
        suggested = int(suspicion.suggested[row])
        rows, distances = _near(found, row)
        theirs = labels[rows].tolist()
        both = (suggested, int(labels[row]))
        few = [[i for i, label_there in enumerate(theirs) if label_there == label][: _SHOWN // 2] for label in both]
        chosen = sorted(few[0] + few[1]) or list(range(len(rows)))[:_SHOWN]
        name, own = subject.images.classes[suggested], subject.label(row)
        counts = [sum(label == wanted for label in theirs[:_NEAR]) for wanted in both]
        seen = min(_NEAR, len(rows))
        why = (
            f"the other images support {name!r} rather than {own!r}; "
            f"of the {seen} nearest, {counts[0]} are {name!r} and {counts[1]} {own!r}"
        )
        partners = subject.partners([rows[i] for i in chosen], [distances[i] for i in chosen])
        number, score = int(subject.numbers[row]), float(suspicion.score[row])
        findings.append(Finding("mislabelled", number, score, name, why, partners))
    return findings


def _ambiguous(subject: Subject, found: Neighbours) -> list[Finding]:
    labels = subject.labels
    told = ambiguous(labels, found)
    findings = []
    for row in _first(told.score, int((told.score > _TIED).sum()), "ambiguous"):
        rows, distances = _near(found, row)
        theirs = labels[rows[:_NEAR]]
        most, second = (subject.images.classes[int(x[row])] for x in (told.first, told.second))
        why = (
            f"{most!r} and {second!r} share its surroundings: "
            f"its {len(theirs)} nearest images are of {format_count(len(theirs.unique()), 'class')}"
        )
        number, score = int(subject.numbers[row]), float(told.score[row])
        partners = subject.partners(rows[:_SHOWN], distances[:_SHOWN])
        findings.append(Finding("ambiguous", number, score, "", why, partners))
    return findings


def _duplicates(subject: Subject, suspicion: Suspicion) -> list[Finding]:
    splits = [subject.split(row) for row in range(len(subject.numbers))]
    groups = duplicates(
        subject.embeddings, subject.checksums, subject.sketches, subject.labels.tolist(), splits, near=subject.near
    )
    groups.sort(key=lambda group: (not group.across_classes, not group.across_splits, group.difference, group.rows))
    return [finding for group in groups for finding in _group(subject, group, suspicion)]


def _group(subject: Subject, group: DuplicateGroup, suspicion: Suspicion) -> list[Finding]:
    """A finding for each image of the group but the one whose label is supported best (the first of equals)."""
    score = suspicion.score.where(suspicion.judged, math.inf)
    best = min(group.rows, key=lambda row: (float(score[row]), row))
    findings = []
    for row in group.rows:
        if row == best:
            continue
        what = "the same pixels as" if _same(subject, row, best) else "nearly the same image as"
        words = [f"{what} {subject.name(best)!r}"]
        other = subject.label(best) != subject.label(row)
        if other:
            words.append(f"which is labelled {subject.label(best)!r}")
        if subject.split(best) != subject.split(row):
            words.append(f"which is in {subject.split(best)}")
        if len(group.rows) > 2:
            words.append(f"{len(group.rows)} images in all")
        rows = [best, *(r for r in group.rows if r not in (row, best))][:_SHOWN]
        unit = subject.embeddings[[row, *rows]].unit
        distances = torch.linalg.vector_norm(unit[1:] - unit[:1], dim=1).tolist()
        alike = 1 - float(difference(subject.sketches, torch.tensor([row]), torch.tensor([best])))
        findings.append(
            Finding(
                "duplicate",
                int(subject.numbers[row]),
                1.0 if _same(subject, row, best) else alike,
                subject.label(best) if other else "",
                ", ".join(words),
                subject.partners(rows, distances),
            )
        )
    return findings


def _same(subject: Subject, row: int, other: int) -> bool:
    return subject.checksums[row] == subject.checksums[other]


def _first(score: Tensor, count: int, kind: str) -> list[int]:
    """The rows of the largest scores, at most ``count`` and the list's share; the first of equals first."""
    most = min(count, max(_AT_LEAST, round(_SHARES[kind] * len(score))))
    rows: list[int] = score.argsort(descending=True, stable=True)[:most].tolist()
    return rows


def _near(found: Neighbours, row: int) -> tuple[list[int], list[float]]:
    rows, distances = found.indices[row], found.distances[row]
    return rows[rows >= 0].tolist(), distances[rows >= 0].tolist()

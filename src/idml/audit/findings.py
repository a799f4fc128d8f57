"""Findings: ranked lists of suspicious images, each with a reason in words and the images that support it.

The lists are cut at 10 % of the images (likely mislabelled) or 2 % (ambiguous). Of a group of duplicates, every image
is listed except the one whose label fits best.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from idml.audit.duplicates import DuplicateGroup, find_duplicates, sketch_difference
from idml.audit.label_errors import LabelScores, score_ambiguity, score_labels
from idml.data.datasets import Dataset, ImageSet
from idml.data.layouts import format_count
from idml.data.sources import ArraySource, FileSource, Source, TarSource
from idml.embeddings import Embeddings
from idml.evaluation.knn import Neighbours, nearest

_SHARES = {"mislabelled": 0.1, "ambiguous": 0.02}
_AT_LEAST = 20  # listed, if there are that many
_TIED = 0.25  # smallest score of an ambiguous image; 0.25: one class has 0.8 and another 0.2 of the neighbours
_SHOWN = 8  # images beside the one in question
_NEAR = 10  # neighbours that the reason mentions


# -------------------- images --------------------


@dataclass(frozen=True, eq=False)
class AuditImages:
    """All images of a data set, split after split; the number of an image is its position in this order.

    Classes with the same name in different splits are one class.
    """

    name: str
    parts: tuple[tuple[str, ImageSet], ...]

    @classmethod
    def of(cls, dataset: Dataset) -> "AuditImages":
        """Take train, test and, if there is one, gallery; a set that is both train and test is taken once, as "all"."""
        if dataset.train is dataset.test:
            return cls(dataset.name, (("all", dataset.train),))
        gallery = () if dataset.gallery is None else (("gallery", dataset.gallery),)
        return cls(dataset.name, (("train", dataset.train), ("test", dataset.test), *gallery))

    @cached_property
    def sources(self) -> list[Source]:
        """The source of each image."""
        return [source for _, images in self.parts for source in images.sources]

    @cached_property
    def splits(self) -> list[str]:
        """The split of each image."""
        return [part for part, images in self.parts for _ in range(len(images))]

    @cached_property
    def classes(self) -> list[str]:
        """The names of all classes, in the order of the splits."""
        return list(dict.fromkeys(name for _, images in self.parts for name in images.classes))

    @cached_property
    def labels(self) -> Tensor:
        """The class of each image [n], an index into ``classes``."""
        place = {name: number for number, name in enumerate(self.classes)}
        return torch.cat([torch.tensor([place[c] for c in images.classes])[images.labels] for _, images in self.parts])

    @property
    def version(self) -> str:
        """A short hash of the names, labels, splits and stamps of all images."""
        described = repr([(part, images.version) for part, images in self.parts])
        return hashlib.sha256(described.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.sources)

    def label(self, number: int) -> str:
        """Return the name of an image's class."""
        return self.classes[int(self.labels[number])]


def image_checksum(source: Source) -> str:
    """Hash the bytes of an image to 16 hexadecimal digits, which do not change when the file is copied or touched."""
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


# -------------------- findings --------------------


@dataclass(frozen=True)
class Finding:
    """One listed image: its number, the reason, and the numbers and distances of the images that support it."""

    kind: str
    number: int
    score: float
    suggested: str
    why: str
    partners: tuple[tuple[int, float], ...]


@dataclass(frozen=True, eq=False)
class Findings:
    """The ranked lists, the scores of all labels that could be judged, and notes for the user."""

    findings: list[Finding]
    scores: Tensor
    notes: list[str]


@dataclass(frozen=True, eq=False)
class AuditInput:
    """The images of an audit, the numbers of those that could be read [n], and the data computed from these.

    ``checksums``, ``sketches`` and ``near`` are for `idml.audit.duplicates`.
    """

    images: AuditImages
    numbers: Tensor
    embeddings: Embeddings
    checksums: Sequence[bytes]
    sketches: Tensor
    near: float

    @property
    def labels(self) -> Tensor:
        """The class of each readable image [n]."""
        return self.images.labels[self.numbers]

    def name(self, row: int) -> str:
        """Return the name of a readable image."""
        return self.images.sources[int(self.numbers[row])].name

    def label(self, row: int) -> str:
        """Return the name of its class."""
        return self.images.label(int(self.numbers[row]))

    def split(self, row: int) -> str:
        """Return its split."""
        return self.images.splits[int(self.numbers[row])]

    def nearest_of(self, label: int, row: int, count: int) -> tuple[tuple[int, float], ...]:
        """Return the images of a class that are nearest to an image, without itself, each with its distance."""
        rows = torch.nonzero(self.labels == label).flatten()
        rows = rows[rows != row]
        distances = torch.linalg.vector_norm(self.embeddings[rows].unit - self.embeddings[[row]].unit, dim=1)
        order = distances.argsort(stable=True)[:count]
        return self.partners(rows[order].tolist(), distances[order].tolist())

    def partners(self, rows: Sequence[int], distances: Sequence[float]) -> tuple[tuple[int, float], ...]:
        """Convert rows to image numbers, each with its distance."""
        return tuple((int(self.numbers[row]), d) for row, d in zip(rows, distances, strict=True))


def find_suspicious(subject: AuditInput) -> Findings:
    """Find the suspicious images: all findings, kind after kind, each list ranked."""
    notes: list[str] = []
    if len(subject.numbers) < 2:
        raise ValueError(f"{subject.images.name}: an audit needs at least two readable images")
    found = nearest(subject.embeddings, 50)
    scores = _score_labels(subject, notes)
    findings = [
        *_list_mislabelled(subject, scores, found, notes),
        *_list_duplicates(subject, scores),
        *_list_ambiguous(subject, found),
    ]
    return Findings(findings, scores.score[scores.judged], notes)


def _score_labels(subject: AuditInput, notes: list[str]) -> LabelScores:
    labels = subject.labels
    if len(labels.unique()) < 2:
        notes.append("all images have the same class: no label can be judged")
        nothing = torch.full((len(labels),), -math.inf)
        return LabelScores(nothing, labels, torch.zeros(len(labels), dtype=torch.bool))
    scores = score_labels(subject.embeddings, labels)
    alone = int((~scores.judged).sum())
    if alone:
        notes.append(f"{format_count(alone, 'image')} alone in a class: such a label cannot be judged")
    return scores


def _list_mislabelled(subject: AuditInput, scores: LabelScores, found: Neighbours, notes: list[str]) -> list[Finding]:
    doubtful = int((scores.score > 0).sum())
    order = _top_rows(scores.score, doubtful, "mislabelled")
    if len(order) < doubtful:
        notes.append(f"{doubtful:,} images look more like another class; the {len(order):,} most suspicious are listed")
    findings = []
    for row in order:
        both = (int(scores.suggested[row]), int(subject.labels[row]))
        partners = [subject.nearest_of(label, row, _SHOWN // 2) for label in both]
        number, score = int(subject.numbers[row]), float(scores.score[row])
        why = _explain_label(subject, both, score, _neighbours_of(found, row)[0][:_NEAR])
        supporting = tuple(image for pair in zip_longest(*partners) for image in pair if image is not None)
        findings.append(Finding("mislabelled", number, score, subject.images.classes[both[0]], why, supporting))
    return findings


def _explain_label(subject: AuditInput, both: tuple[int, int], score: float, near: list[int]) -> str:
    """Say what decided (the distances to the classes), and what the nearest images say if they say the same."""
    name, own = (subject.images.classes[label] for label in both)
    ratio = math.exp(score)
    times = f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"
    more, than = ("slightly farther", "than") if ratio < 1.01 else (f"{times} times as far", "as")
    why = f"{more} from the other images of {own!r} {than} from those of {name!r}"
    counts = [int((subject.labels[near] == label).sum()) for label in both]
    if counts[0] <= counts[1]:
        return f"{why}; its nearest images do not decide between the two"
    return f"{why}; of the {len(near)} nearest, {counts[0]} are {name!r} and {counts[1]} {own!r}"


def _list_ambiguous(subject: AuditInput, found: Neighbours) -> list[Finding]:
    labels = subject.labels
    ambiguity = score_ambiguity(labels, found)
    findings = []
    for row in _top_rows(ambiguity.score, int((ambiguity.score > _TIED).sum()), "ambiguous"):
        rows, distances = _neighbours_of(found, row)
        theirs = labels[rows[:_NEAR]]
        most, second = (subject.images.classes[int(x[row])] for x in (ambiguity.first, ambiguity.second))
        why = (
            f"{most!r} and {second!r} share its neighbours: "
            f"its {len(theirs)} nearest images have {format_count(len(theirs.unique()), 'class')}"
        )
        number, score = int(subject.numbers[row]), float(ambiguity.score[row])
        partners = subject.partners(rows[:_SHOWN], distances[:_SHOWN])
        findings.append(Finding("ambiguous", number, score, "", why, partners))
    return findings


def _list_duplicates(subject: AuditInput, scores: LabelScores) -> list[Finding]:
    splits = [subject.split(row) for row in range(len(subject.numbers))]
    groups = find_duplicates(
        subject.embeddings, subject.checksums, subject.sketches, subject.labels.tolist(), splits, near=subject.near
    )
    groups.sort(key=lambda group: (not group.across_classes, not group.across_splits, group.difference, group.rows))
    return [finding for group in groups for finding in _list_group(subject, group, scores)]


def _list_group(subject: AuditInput, group: DuplicateGroup, scores: LabelScores) -> list[Finding]:
    """Make a finding for each image of a group except the one whose label fits best (the first if several do)."""
    score = scores.score.where(scores.judged, math.inf)
    best = min(group.rows, key=lambda row: (float(score[row]), row))
    findings = []
    for row in group.rows:
        if row == best:
            continue
        what = "the same pixels as" if _same_pixels(subject, row, best) else "nearly the same image as"
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
        alike = 1 - float(sketch_difference(subject.sketches, torch.tensor([row]), torch.tensor([best])))
        findings.append(
            Finding(
                "duplicate",
                int(subject.numbers[row]),
                1.0 if _same_pixels(subject, row, best) else alike,
                subject.label(best) if other else "",
                ", ".join(words),
                subject.partners(rows, distances),
            )
        )
    return findings


def _same_pixels(subject: AuditInput, row: int, other: int) -> bool:
    return subject.checksums[row] == subject.checksums[other]


def _top_rows(score: Tensor, count: int, kind: str) -> list[int]:
    """Return the rows with the largest scores, at most ``count`` and at most the share of the list."""
    most = min(count, max(_AT_LEAST, round(_SHARES[kind] * len(score))))
    rows: list[int] = score.argsort(descending=True, stable=True)[:most].tolist()
    return rows


def _neighbours_of(found: Neighbours, row: int) -> tuple[list[int], list[float]]:
    rows, distances = found.indices[row], found.distances[row]
    return rows[rows >= 0].tolist(), distances[rows >= 0].tolist()

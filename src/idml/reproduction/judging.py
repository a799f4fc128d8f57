"""What is kept of a run: its figures, sums for each test class, what ‖u‖ tells, and how it went."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.data.augment import MIXED, View
from idml.data.pixel_cache import Pixels, load_pixels
from idml.data.sources import Dataset, ImageSet
from idml.embeddings import Embeddings
from idml.evaluation.evaluate import auroc_above
from idml.evaluation.knn import Search
from idml.evaluation.retrieval import clusters, normalized_mutual_information
from idml.evaluation.uncertainty import auroc, evaluate_uncertainty
from idml.metric import IntrospectiveMetric
from idml.model import build_model, load_model
from idml.model.feature_cache import CLEAN, embed_view, view_features
from idml.training.build import fold_as_trained
from idml.training.config import TrainConfig
from idml.training.distributed import Processes
from idml.training.noise import noisy_images

_HITS = 1 << 22  # neighbours looked at together
_QUANTILES = 20  # of ‖u‖, for the drawing of its levels
_LAST = 20  # steps whose mean is what training ended with
_FIGURES = ("recall@1", "r_precision", "map@r")


@dataclass(frozen=True, eq=False)
class Sums:
    """Queries of each class [c], and recall@1, R-Precision and MAP@R summed over them [3, c]."""

    queries: Tensor
    sums: Tensor
    rows: Tensor
    """The images that are queries [n]: those with another of their class to find."""
    correct: Tensor
    """Whether the first neighbour of each query is of its class [n]."""

    @property
    def figures(self) -> dict[str, float]:
        """The means over all queries."""
        means = (self.sums.sum(dim=1) / self.queries.sum()).tolist()
        return dict(zip(_FIGURES, means, strict=True))

    def stored(self) -> dict[str, list[float]]:
        """What intervals are resampled from, small enough for a file."""
        hits, _, map_r = self.sums.tolist()
        return {
            "queries": self.queries.tolist(),
            "hits": [int(x) for x in hits],
            "map@r": [round(x, 4) for x in map_r],
        }


def class_sums(
    embeddings: Embeddings,
    labels: Tensor,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Tensor | None = None,
    metric: IntrospectiveMetric | None = None,
) -> Sums:
    """The sums for each class 0 … c − 1, of the same retrieval as `idml.evaluation.evaluate_retrieval`'s."""
    search = Search(embeddings, gallery, metric)
    theirs = labels if gallery_labels is None else gallery_labels
    count = int(torch.maximum(labels.max(), theirs.max())) + 1
    relevant = torch.bincount(theirs, minlength=count)[labels] - (1 if gallery_labels is None else 0)
    k = max(1, int(relevant.max()))
    sums, correct = torch.zeros(3, count, dtype=torch.float64), []
    rows = (relevant > 0).nonzero().squeeze(1)
    for part in rows.split(max(1, _HITS // k)):
        found, own, r = search.ranked(k, part), labels[part], relevant[part].unsqueeze(1)
        place = torch.arange(1, found.shape[1] + 1)
        hits = (theirs[found.clamp_min(0)] == own.unsqueeze(1)) & (found >= 0)
        correct.append(hits[:, 0])
        hits &= place <= r
        precision = hits.cumsum(dim=1).double() / place
        parts = (correct[-1].double(), (hits / r.double()).sum(dim=1), (precision * hits / r).sum(dim=1))
        for i, values in enumerate(parts):
            sums[i].index_add_(0, own, values)
    return Sums(torch.bincount(labels[rows], minlength=count), sums, rows, torch.cat(correct))


def judge(config: TrainConfig, run: Path, dataset: Dataset, clean: Embeddings) -> dict[str, Any]:
    """Everything that a cell keeps of a finished run beside its metrics.json; ``clean`` are its test images."""
    model = fold_as_trained(load_model(run), config).to(Processes().device)

    def embedded(pixels: Pixels, view: View = CLEAN) -> Embeddings:
        return embed_view(model, pixels, view, keep=config.part != "all", last=config.part == "last")

    test = _pixels(dataset.test, model.trunk.image_size)
    labels, known = test.images.labels[test.usable], dict[str, Any]()
    if dataset.gallery is not None:
        gallery = _pixels(dataset.gallery, model.trunk.image_size)
        known = {"gallery": embedded(gallery), "gallery_labels": gallery.images.labels[gallery.usable]}
    mixed = embedded(test, MIXED)
    plain = class_sums(clean, labels, **known)
    found: dict[str, Any] = {
        "nmi": _nmi(clean, labels),
        "classes": plain.stored(),
        **_course_of(config, run),
        "auroc_mixed": auroc_above(mixed.level, clean.level),
        "r_auroc": evaluate_uncertainty(clean.level[plain.rows], plain.correct)["r_auroc"],
        "levels": {"clean": _levels(clean.level), "mixed": _levels(mixed.level)},
    }
    if test.images.ambiguous is not None:
        found["auroc_twins"] = auroc(clean.level, test.images.ambiguous[test.usable])
    if config.label_noise:
        images, wrong = noisy_images(config, dataset)
        pixels = _pixels(images, model.trunk.image_size)
        found["auroc_wrong"] = auroc(embedded(pixels).level, wrong[pixels.usable])
    if config.method in ("idml", "ism") and config.rule == "similar" and config.beta == "sum":
        softened = class_sums(clean, labels, **known, metric=IntrospectiveMetric(config.tau, config.gamma))
        found["introspective"] = {"selected": softened.figures, "classes": softened.stored()}
    return found


def judge_raw(dataset: Dataset, base: Mapping[str, Any]) -> dict[str, Any]:
    """What is reached without learning: by the pretrained trunk's features; where there are none, by the pixels."""
    config = TrainConfig(data="", out="", **base)
    model = build_model(config.trunk, pretrained=config.pretrained, image_size=config.image_size)
    sets = [_pixels(images, model.trunk.image_size) for images in (dataset.test, dataset.gallery) if images is not None]
    if config.starts_from_weights:
        embeddings = [Embeddings.certain(view_features(model, pixels)) for pixels in sets]
    else:
        embeddings = [Embeddings.certain(_flat(pixels, model.trunk.image_size)) for pixels in sets]
    labels = [pixels.images.labels[pixels.usable] for pixels in sets]
    known: dict[str, Any] = {"gallery": embeddings[1], "gallery_labels": labels[1]} if len(sets) > 1 else {}
    sums = class_sums(embeddings[0], labels[0], **known)
    figures = {"selected": sums.figures, "nmi": _nmi(embeddings[0], labels[0]), "classes": sums.stored()}
    return {**figures, "images_seen": 0}


def _pixels(images: ImageSet, size: int) -> Pixels:
    return load_pixels(images, round(size * 256 / 224))


def _flat(pixels: Pixels, size: int) -> Tensor:
    """The pixels of each image as a row, less the mean image."""
    flat = torch.cat([CLEAN.images(pixels, part, size).flatten(1) for part in pixels.usable.split(512)])
    return flat - flat.mean(dim=0)


def _nmi(embeddings: Embeddings, labels: Tensor) -> float:
    return normalized_mutual_information(labels, clusters(embeddings.unit, len(labels.unique())))


def _levels(level: Tensor) -> list[float]:
    quantiles = torch.linspace(0, 1, _QUANTILES + 1, dtype=torch.float64)
    return [round(x, 5) for x in level.double().quantile(quantiles).tolist()]


def _course_of(config: TrainConfig, run: Path) -> dict[str, Any]:
    """How training went: images seen, the time of its steps, u at its end, and means over each epoch."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    images = config.batch_size + config.mixed_images
    found: dict[str, Any] = {
        "images_seen": len(steps) * images,
        "training_seconds": round(sum(images / row["images/s"] for row in steps), 1),
    }
    for key in ("level_clean", "level_mixed", "level_spread", "weight"):
        if key in steps[-1]:
            found[key] = sum(row[key] for row in steps[-_LAST:]) / len(steps[-_LAST:])
    trend: dict[str, list[float]] = {}
    for epoch in sorted({row["epoch"] for row in steps}):
        own = [row for row in steps if row["epoch"] == epoch]
        for key in ("loss", "level_clean", "level_mixed", "weight"):
            if key in own[0]:
                trend.setdefault(key, []).append(round(sum(row[key] for row in own) / len(own), 5))
    held_out = [round(row["held_out_map@r"], 5) for row in rows if "held_out_map@r" in row]
    return {**found, "trend": {**trend, "held_out_map@r": held_out}}

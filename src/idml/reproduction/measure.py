"""What is measured of a run of a table: its figures, sums for each test class, what ‖u‖ indicates, and its course."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.data.augment import CLEAN, MIXED, View
from idml.data.datasets import Dataset, ImageSet
from idml.data.images import resized_side
from idml.data.pixel_cache import Pixels, load_pixels
from idml.embeddings import Embeddings
from idml.evaluation.bootstrap import draw_classes, interval, resampled_auroc
from idml.evaluation.retrieval import ClassSums, class_sums, cluster_rows, normalized_mutual_information
from idml.evaluation.uncertainty import auroc, auroc_between, evaluate_uncertainty
from idml.metric import IntrospectiveMetric
from idml.model import build_model, load_model
from idml.model.feature_cache import embed_view, load_features
from idml.training.build import fold_as_trained
from idml.training.config import TrainConfig
from idml.training.distributed import Processes

_QUANTILES = 20  # of ‖u‖, for the drawing of its levels
_LAST = 20  # steps whose mean is the state at the end of training
_USAGE = ("largest_choice", "largest_node")  # near 1, dcml and drml use one of their parts alone


def measure_run(config: TrainConfig, run: Path, dataset: Dataset, clean: Embeddings, _: object) -> dict[str, Any]:
    """Return what a row keeps of a finished run beside its metrics.json; ``clean`` are its test images."""
    model = fold_as_trained(load_model(run), config).to(Processes().device)

    def embedded(pixels: Pixels, view: View = CLEAN) -> Embeddings:
        return embed_view(model, pixels, view, keep=config.train != "all", last=config.train == "last")

    test = _pixels(dataset.test, model.trunk.image_size)
    labels, known = test.images.labels[test.usable], dict[str, Any]()
    if dataset.gallery is not None:
        gallery = _pixels(dataset.gallery, model.trunk.image_size)
        known = {"gallery": embedded(gallery), "gallery_labels": gallery.images.labels[gallery.usable]}
    mixed = embedded(test, MIXED)
    plain = class_sums(clean, labels, **known)
    level, drawn = clean.level[plain.rows], draw_classes(labels[plain.rows])
    found: dict[str, Any] = {
        "nmi": _nmi(clean, labels),
        "classes": stored_sums(plain),
        **_course(config, run),
        "auroc_mixed": auroc_between(mixed.level, clean.level),
        "r_auroc": evaluate_uncertainty(level, plain.correct)["r_auroc"],
        "r_auroc_interval": interval(resampled_auroc(level, ~plain.correct, drawn)),
        "levels": {"clean": _levels(clean.level), "mixed": _levels(mixed.level)},
    }
    if test.images.ambiguous is not None:
        found["auroc_twins"] = auroc(clean.level, test.images.ambiguous[test.usable])
    options = getattr(config.method_options, "metric", None)
    if options is not None and options.rule == "similar":
        softened = class_sums(clean, labels, **known, metric=IntrospectiveMetric(options.tau, options.gamma))
        found["introspective"] = {"selected": softened.figures, "classes": stored_sums(softened)}
    return found


def measure_raw(config: TrainConfig, dataset: Dataset, _: object) -> dict[str, Any]:
    """Return the figures without learning: of the pretrained trunk's features, or of the pixels if there are none."""
    model = build_model(
        config.trunk, pretrained=config.pretrained, weights=config.weights, image_size=config.image_size
    )
    sets = [_pixels(images, model.trunk.image_size) for images in (dataset.test, dataset.gallery) if images is not None]
    if config.starts_from_weights:
        embeddings = [Embeddings.certain(load_features(model, pixels)) for pixels in sets]
    else:
        embeddings = [Embeddings.certain(_flat(pixels, model.trunk.image_size)) for pixels in sets]
    labels = [pixels.images.labels[pixels.usable] for pixels in sets]
    known: dict[str, Any] = {"gallery": embeddings[1], "gallery_labels": labels[1]} if len(sets) > 1 else {}
    sums = class_sums(embeddings[0], labels[0], **known)
    figures = {"selected": sums.figures, "nmi": _nmi(embeddings[0], labels[0]), "classes": stored_sums(sums)}
    return {**figures, "images_seen": 0}


def stored_sums(found: ClassSums) -> dict[str, list[float]]:
    """Return the sums that intervals are resampled from, small enough for a file."""
    hits, _, map_r = found.sums.tolist()
    return {
        "queries": found.queries.tolist(),
        "hits": [int(x) for x in hits],
        "map@r": [round(x, 4) for x in map_r],
    }


def _pixels(images: ImageSet, size: int) -> Pixels:
    return load_pixels(images, resized_side(size))


def _flat(pixels: Pixels, size: int) -> Tensor:
    """The pixels of each image as a row, less the mean image."""
    flat = torch.cat([CLEAN.images(pixels, part, size).flatten(1) for part in pixels.usable.split(512)])
    return flat - flat.mean(dim=0)


def _nmi(embeddings: Embeddings, labels: Tensor) -> float:
    return normalized_mutual_information(labels, cluster_rows(embeddings.unit, len(labels.unique())))


def _levels(level: Tensor) -> list[float]:
    quantiles = torch.linspace(0, 1, _QUANTILES + 1, dtype=torch.float64)
    return [round(x, 5) for x in level.double().quantile(quantiles).tolist()]


def _course(config: TrainConfig, run: Path) -> dict[str, Any]:
    """The course of training: images seen, the time of its steps, u and the head at its end, means over each epoch."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    images = config.batch_size + config.added_images
    found: dict[str, Any] = {
        "images_seen": len(steps) * images,
        "training_seconds": round(sum(images / row["images/s"] for row in steps), 1),
    }
    for key in ("level_clean", "level_mixed", "level_spread", "weight", "weight_mixed", *_USAGE):
        if key in steps[-1]:
            found[key] = sum(row[key] for row in steps[-_LAST:]) / len(steps[-_LAST:])
    trend: dict[str, list[float]] = {}
    for epoch in sorted({row["epoch"] for row in steps}):
        own = [row for row in steps if row["epoch"] == epoch]
        for key in ("loss", "level_clean", "level_mixed", "weight", *_USAGE):
            if key in own[0]:
                trend.setdefault(key, []).append(round(sum(row[key] for row in own) / len(own), 5))
    held_out = [round(row["held_out_map@r"], 5) for row in rows if "held_out_map@r" in row]
    return {**found, "trend": {**trend, "held_out_map@r": held_out}}

"""The audit table: wrong labels are planted among the test images; which score finds them?

5 % of the labels of the test classes are changed, to any other class ("uniform") or to one of the three classes whose
mean features are nearest ("similar"). Every score ranks all images; n is the number of planted labels. The embeddings
are the trunk's raw features, and those of three runs as in the first table. The data's own mistakes count as false
alarms, so no score can be perfect. Where a data set knows its ambiguous images (glyphs), a second table says which
score of ambiguity finds them.

Expected cost on two cores: CUB at 112 px about 3 minutes of features for each seed, then a minute a run.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from idml.audit.label_errors import SCORES, ambiguous, mislabelled
from idml.data.datasets import load_dataset
from idml.data.images import resized_side
from idml.data.pixel_cache import load_pixels
from idml.data.sampling import random_stream
from idml.embeddings import Embeddings, unit_rows
from idml.evaluation import neighbour_scores
from idml.evaluation.knn import nearest
from idml.evaluation.uncertainty import auroc
from idml.files import write_atomic
from idml.model import build_model, load_model
from idml.model.feature_cache import view_features
from idml.progress import Note, Progress, silent
from idml.reproduction.first import FROZEN, SCRATCH
from idml.reproduction.grid import Cell, interval_text, run_cells, write_table
from idml.training.config import TrainConfig

SHARE = 0.05
SIMILAR = 3  # classes that an image's class is mistaken for
RUNS = (("multi_similarity", "plain"), ("multi_similarity", "idml"), ("proxy_anchor", "idml"))
KINDS = ("uniform", "similar")
BASELINE, RAW = "disagreement", "raw features"
DISCOUNTED = "discriminant ÷ ‖u‖"


def cells(data: str, seeds: int) -> list[Cell]:
    """Every run of the table, seed by seed."""
    settings = SCRATCH if data == "glyphs" else FROZEN
    return [
        Cell(f"{loss}-{method}-{seed}", {**settings, "loss": loss, "method": method, "seed": seed})
        for seed in range(seeds)
        for loss, method in RUNS
    ]


def reproduce_audit(
    data: str,
    seeds: int,
    out: Path,
    *,
    dry_run: bool = False,
    report: Progress = silent,
    note: Note = silent,
) -> dict[str, Any]:
    """Run what is missing and write the tables beside the results."""
    folder, planned = out / f"audit-{data.partition(':')[0]}", cells(data, seeds)
    raw = [] if data == "glyphs" else [f"raw-{seed}" for seed in range(seeds)]  # glyphs have no pretrained trunk
    if dry_run:
        names = [*raw, *(cell.name for cell in planned)]
        missing = [name for name in names if not (folder / f"{name}.json").exists()]
        return {"missing": missing, "table": "\n".join([f"{len(missing)} of {len(names)} cells to do", *missing])}
    results = {name: _raw(data, seed, folder / f"{name}.json", note) for seed, name in enumerate(raw)}
    results |= run_cells(planned, data, folder, judge=judge, report=report, note=note)
    texts = [write_table(folder, "table", *summary(results))]
    if all("ambiguous" in result for result in results.values()):
        texts.append(write_table(folder, "ambiguous", *ambiguity_summary(results)))
    return {"results": results, "table": "\n\n".join(texts)}


def judge(config: TrainConfig, run: Path) -> dict[str, Any]:
    """How well each score finds what was planted among the test images, as this run embeds them."""
    model = load_model(run)
    pixels = load_pixels(load_dataset(config.data, split=config.split).test, resized_side(model.trunk.image_size))
    features = view_features(model, pixels)
    embeddings, labels = model.embed_features(features), pixels.images.labels[pixels.usable]
    result: dict[str, Any] = {"planted": planted_figures(embeddings, features, labels, config.seed)}
    if pixels.images.ambiguous is not None:
        result["ambiguous"] = ambiguity_figures(embeddings, labels, pixels.images.ambiguous[pixels.usable])
    return result


def _raw(data: str, seed: int, path: Path, note: Note) -> dict[str, Any]:
    """The same of the trunk's own features."""
    if path.exists():
        try:
            kept: dict[str, Any] = json.loads(path.read_text())
        except ValueError:
            raise ValueError(f"{path} is not a result; delete it to make it again") from None
        return kept
    model = build_model(image_size=FROZEN["image_size"])
    pixels = load_pixels(load_dataset(data).test, resized_side(model.trunk.image_size))
    features, labels = view_features(model, pixels), pixels.images.labels[pixels.usable]
    figures = planted_figures(Embeddings.certain(features), features, labels, seed)
    result = {"options": {"loss": RAW, "method": "", "seed": seed}, "planted": figures}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, (json.dumps(result, indent=1) + "\n").encode())
    note(f"{path.stem}: done")
    return result


def planted_figures(embeddings: Embeddings, features: Tensor, labels: Tensor, seed: int) -> dict[str, Any]:
    """The figures of every score for both kinds of planted labels."""
    figures: dict[str, Any] = {}
    for kind in KINDS:
        given = plant(labels, seed, features if kind == "similar" else None)
        wrong, rows = given != labels, {}
        for name in SCORES:
            found = mislabelled(embeddings, given, score=name)
            right = (found.suggested == labels)[wrong]
            rows[name] = {**ranking_figures(found.score, wrong), "suggested": float(right.double().mean())}
            if name == "discriminant" and embeddings.uncertainty.shape[1]:
                score = found.score / embeddings.level.double().clamp_min(1e-9)
                rows[DISCOUNTED] = {**ranking_figures(score, wrong), "suggested": rows[name]["suggested"]}
        figures[kind] = {"count": int(wrong.sum()), "scores": rows}
    return figures


def plant(labels: Tensor, seed: int, features: Tensor | None = None) -> Tensor:
    """The labels with 5 % of them wrong: any other class, or with ``features`` one of the three most similar ones."""
    count, classes = round(SHARE * len(labels)), int(labels.max()) + 1
    stream = random_stream("wrong labels", seed, int(features is not None))
    rows = torch.randperm(len(labels), generator=stream)[:count]
    given = labels.clone()
    if features is None:
        given[rows] = (labels[rows] + torch.randint(1, classes, (count,), generator=stream)) % classes
        return given
    unit = unit_rows(features)
    means = unit_rows(torch.zeros(classes, unit.shape[1]).index_add_(0, labels, unit))
    near = nearest(means, min(SIMILAR, classes - 1)).indices
    given[rows] = near[labels[rows], torch.randint(near.shape[1], (count,), generator=stream)]
    return given


def ranking_figures(score: Tensor, wanted: Tensor) -> dict[str, float]:
    """How early a ranking by falling score meets the ``wanted`` images, n of them; equal scores come in any order.

    ``at_n``: share of the n found among the first n, which is precision and recall there; ``at_2n``: recall among the
    first 2n; ``ap``: average precision, equal scores taken together.

    >>> ranking_figures(torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([True, True, False, False]))
    {'at_n': 0.75, 'at_2n': 1.0, 'ap': 0.8333333333333333}
    """
    values, order = score.sort(descending=True, stable=True)
    last = torch.cat([values[:-1] != values[1:], torch.tensor([True])])  # of a group of equal scores
    seen = torch.arange(1, len(order) + 1, dtype=torch.float64)[last]
    hits = wanted[order].double().cumsum(0)[last]
    n = float(wanted.sum())
    size, new = (x.diff(prepend=x.new_zeros(1)) for x in (seen, hits))

    def recall(depth: float) -> float:
        taken = ((depth - (seen - size)) / size).clamp(0, 1)
        return float((taken * new).sum() / n)

    return {"at_n": recall(n), "at_2n": recall(2 * n), "ap": float((new * hits / seen).sum() / n)}


def ambiguity_figures(embeddings: Embeddings, labels: Tensor, known: Tensor) -> dict[str, Any]:
    """How well each score tells the images that are known to be ambiguous."""
    scores = {
        "shared surroundings": ambiguous(labels, nearest(embeddings, 10)).score,
        "entropy": neighbour_scores(embeddings, labels).scores["entropy"],
        "‖u‖": embeddings.level,
    }
    return {name: {"auroc": auroc(x, known), **ranking_figures(x, known)} for name, x in scores.items()}


def _groups(results: dict[str, dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results.values():
        groups.setdefault((result["options"]["loss"], result["options"]["method"]), []).append(result)
    return groups


def summary(results: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A row for each embedding, kind of mistake and score: means over the seeds with 95 % intervals, in per cent."""
    header = ["embeddings", "planted", "score", "found in n", "found in 2n", "AP", "right suggestion"]
    rows = []
    for (loss, method), runs in _groups(results).items():
        for kind in KINDS:
            told = [run["planted"][kind]["scores"] for run in runs]
            for name in told[0]:
                values = [[100 * t[name][figure] for t in told] for figure in ("at_n", "at_2n", "ap", "suggested")]
                gain = [100 * (t[name]["ap"] - t[BASELINE]["ap"]) for t in told]
                cells = [interval_text(x, 1) for x in values]
                more = "" if name == BASELINE else interval_text(gain, 1, sign=True)
                rows.append([" ".join(x for x in (loss, method) if x), kind, name, *cells, more])
    return [*header, f"AP − {BASELINE}"], rows


def ambiguity_summary(results: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """A row for each embedding and score of ambiguity."""
    rows = []
    for (loss, method), runs in _groups(results).items():
        for name in runs[0]["ambiguous"]:
            figures = [[run["ambiguous"][name][figure] for run in runs] for figure in ("auroc", "at_n", "ap")]
            rows.append([f"{loss} {method}", name, *(interval_text(x, 3) for x in figures)])
    return ["embeddings", "score", "AUROC", "found in n", "AP"], rows

"""One gradient step around an ambiguous image, under the plain and under the introspective triplet loss.

A model is trained with the introspective loss. Of a batch of its training images, the one with the largest ‖u‖ among
those that the plain loss moves is the ambiguous one, and its nearest positive is watched. From the same weights the
semantic head then takes one step down the gradient of either loss, of the same length in the learning rate; the paper
says that the plain loss pulls the pair together more. Expected cost: one training run, then seconds.
"""

import copy
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from idml.data.datasets import ImageSet, hold_out
from idml.data.images import resized_side
from idml.data.pixel_cache import load_pixels
from idml.data.sampling import class_batches
from idml.embeddings import Embeddings
from idml.files import write_atomic
from idml.losses import build_loss
from idml.metric import IntrospectiveMetric, alphas
from idml.model import Model, load_model
from idml.model.feature_cache import CLEAN, features_of
from idml.progress import Note, Progress, silent
from idml.report_html import drawing, page, tsne_positions
from idml.reproduction.arms import Arms
from idml.reproduction.drawing import new_figure
from idml.reproduction.protocol import official_dataset
from idml.reproduction.regimes import regime_for
from idml.reproduction.store import VERSION
from idml.training.config import TrainConfig, from_dict
from idml.training.loop import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOSS = "triplet_semihard"
_SHARE = 0.05  # of the head's own length: how far the plain step goes


def reproduce_step(
    data: str,
    out: Path,
    *,
    report: Progress = silent,
    note: Note = silent,
) -> dict[str, Any]:
    """Make the figure, or read it; its numbers go to step.json, the drawing to step.html."""
    regime = regime_for(data)
    kind = data.partition(":")[0]
    folder = out / f"step-tsne-{kind}"
    found = stored_step(out, kind)
    if found is None:
        dataset = official_dataset(data, note)
        folder.mkdir(parents=True, exist_ok=True)
        arm, run = Arms(data, regime).arm(_LOSS, "idml"), folder / "model.run"
        options = {**regime.base, **arm.options, "loss": _LOSS, "lr": regime.rates[-1], "data": data, "out": str(run)}
        config = from_dict(options)
        if not (run / "metrics.json").exists():
            train(config, resume=True, report=report, note=note)
        found = {"version": VERSION, **one_step(load_model(run), config, hold_out(dataset.train, config.holdout)[0])}
        write_atomic(folder / "step.json", (json.dumps(found) + "\n").encode())
        shutil.rmtree(run)
    write_atomic(folder / "step.html", page("One step", "<h1>One step</h1>", drawing(step_figure(found), "one step")))
    return {"table": sentence(found), **found}


def stored_step(out: Path, data: str) -> dict[str, Any] | None:
    """What was found for a data set; None where it is absent, damaged, or of another version."""
    try:
        found: dict[str, Any] = json.loads((out / f"step-tsne-{data}" / "step.json").read_text())
    except (OSError, ValueError):
        return None
    return found if found.get("version") == VERSION else None


def one_step(model: Model, config: TrainConfig, images: ImageSet) -> dict[str, Any]:
    """α of the ambiguous image to its positive before and after a step of each loss, and a map of the batch."""
    pixels = load_pixels(images, resized_side(model.trunk.image_size))
    usable = pixels.usable
    batch = class_batches(images.labels[usable], config.batch_size, config.per_class, seed=0, epoch=0)[0]
    numbers = usable[batch]
    features = torch.from_numpy(features_of(model, CLEAN.images(pixels, numbers, model.trunk.image_size)))
    labels = images.labels[numbers]
    before = model.embed_features(features)
    metrics = {"plain": IntrospectiveMetric(rule="off"), "introspective": IntrospectiveMetric(config.tau, config.gamma)}
    slopes = {name: _slope(model, features, labels, metric) for name, metric in metrics.items()}
    plain, moved = slopes["plain"]
    length = _SHARE * float(model.semantic.weight.detach().norm() / plain.norm().clamp_min(1e-12))
    ambiguous = int(torch.where(moved, before.level, -1.0).argmax())
    gaps = alphas(before)[ambiguous].clone()
    gaps[labels != labels[ambiguous]] = torch.inf
    gaps[ambiguous] = torch.inf
    positive = int(gaps.argmin())
    after = {name: _stepped(model, features, length * slope) for name, (slope, _) in slopes.items()}
    distances = {name: float(alphas(e)[ambiguous, positive]) for name, e in {"before": before, **after}.items()}
    weights = metrics["introspective"].weights(before)
    return {
        "distances": {name: round(value, 6) for name, value in distances.items()},
        "weight": float(weights[ambiguous, positive]),
        "level": float(before.level[ambiguous]),
        "mean_level": float(before.level.mean()),
        "ambiguous": ambiguous,
        "positive": positive,
        "labels": labels.tolist(),
        "map": _map([before, *after.values()]),
    }


def _slope(model: Model, features: Tensor, labels: Tensor, metric: IntrospectiveMetric) -> tuple[Tensor, Tensor]:
    """The gradient of the semantic head's weights, and which embeddings the loss moves."""
    head = copy.deepcopy(model).eval()
    embeddings = head.heads(features)
    embeddings.semantic.retain_grad()
    build_loss(_LOSS, metric=metric)(embeddings, labels, seed=0).backward()
    weight, semantic = head.semantic.weight.grad, embeddings.semantic.grad
    if weight is None or semantic is None:
        raise ValueError("the loss moves nothing: every triplet of the batch keeps its margin")
    return weight, semantic.norm(dim=1) > 0


@torch.no_grad()
def _stepped(model: Model, features: Tensor, change: Tensor) -> Embeddings:
    moved = copy.deepcopy(model)
    moved.semantic.weight -= change
    return moved.embed_features(features)


def _map(embeddings: list[Embeddings]) -> list[list[list[float]]]:
    """One t-SNE of the batch before and after both steps [3][n][2]."""
    rows = torch.cat([e.unit for e in embeddings]).double().numpy()
    places = tsne_positions(rows)
    each = len(rows) // len(embeddings)
    return [[[round(float(v), 2) for v in p] for p in places[i : i + each]] for i in range(0, len(rows), each)]


def sentence(found: dict[str, Any]) -> str:
    """What the step did to the pair."""
    d = found["distances"]
    return (
        f"distance of the ambiguous image to its positive: {d['before']:.4f}; after a plain step {d['plain']:.4f}, "
        f"after an introspective one {d['introspective']:.4f} (weight of the pair {found['weight']:.2f}, ‖u‖ "
        f"{found['level']:.2f} against {found['mean_level']:.2f} on average)"
    )


def step_figure(found: dict[str, Any]) -> "Figure":
    """The batch before and after either step, the ambiguous image joined to its positive, and their distance."""
    figure = new_figure(10.5, 3)
    pair = [found["ambiguous"], found["positive"]]
    titles = ("before", "after a plain step", "after an introspective step")
    *maps, bars = figure.subplots(1, 4, width_ratios=(3, 3, 3, 1.5))
    for title, points, axes in zip(titles, found["map"], maps, strict=True):
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, c=found["labels"], cmap="tab20", s=8)
        axes.plot([x[i] for i in pair], [y[i] for i in pair], "k-", linewidth=1)
        axes.plot([x[pair[0]]], [y[pair[0]]], "k*", markersize=9)
        axes.set(title=title, xticks=[], yticks=[])
    names = ("before", "plain", "introspective")
    bars.bar(names, [found["distances"][name] for name in names], color=["tab:gray", "tab:red", "tab:blue"])
    bars.set_xticks(range(3), names, rotation=40, ha="right")
    bars.set(title="α of the pair")
    return figure

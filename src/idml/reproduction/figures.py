"""The figures: plots of tables, two figures of the metric without training, and one gradient step.

Matplotlib figures become small SVG drawings.

**One gradient step** around an ambiguous image, under the plain and the introspective triplet loss. A model is trained
with the introspective loss. Of a batch of its training images, the ambiguous one is that with the largest ‖u‖ among
those that the plain loss moves; its nearest positive is observed. From the same weights the semantic head then takes
one step down the gradient of either loss, with the same learning rate. The paper says that the plain loss pulls the
pair together more. Expected cost: one training run, then seconds.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from idml.data.augment import CLEAN
from idml.data.datasets import Dataset, ImageSet, hold_out
from idml.data.images import resized_side
from idml.data.pixel_cache import load_pixels
from idml.data.sampling import class_batches
from idml.embeddings import Embeddings
from idml.losses import build_loss
from idml.methods.pel import gaussian_kl_distances
from idml.metric import IntrospectiveMetric, alphas
from idml.model import Model, load_model
from idml.model.feature_cache import compute_features
from idml.report_html import tsne_positions
from idml.reproduction.claims import Estimate, TableRuns, estimate, gain, paper_gain
from idml.reproduction.paper_tables import Table
from idml.reproduction.regimes import Arms, named_regime
from idml.reproduction.runner import ArmProgress, Cell, Store
from idml.training.config import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEVELS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # x = r/τ
_ALPHA = 1.0  # the semantic distance at which metrics are compared
_SIGMAS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_STEP_LOSS = "triplet_semihard"
_STEP = 0.05  # of the head's own length: how far the plain step goes
STEP = "step-tsne"
GRADIENTS = ["x", "D, formula", "D, autograd", "C', formula", "C', autograd"]
METRICS = ["σ", "Euclidean", "KL, one uncertain", "KL, both uncertain", "introspective"]


# -------------------- plots of tables --------------------


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure whose SVG keeps its text as text."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "idml", "font.size": 9})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plot_table(what: str, table: Table, found: TableRuns) -> "Figure | None":
    """Plot a table: a trend, levels, a sweep, or the gains; return None if there is nothing to draw."""
    if what == "trend":
        return _plot_trend(table, found)
    if what == "levels":
        return _plot_levels(table, found)
    if table.sweep is not None:
        return _plot_sweep(table, found)
    return _plot_gains(table, found)


def _known(table: Table, found: TableRuns) -> list[ArmProgress]:
    return [found.progress[arm.key] for arm in table.arms if found.progress[arm.key].runs]


def _plot_gains(table: Table, found: TableRuns) -> "Figure | None":
    """Plot the gain in R@1 of each arm over the better of raw features and plain, and the paper's gain."""
    shown: list[tuple[str, Estimate, float | None]] = []
    for at in _known(table, found):
        rival = found.rival(at.arm.key) if at.arm.name != at.arm.against else None
        if rival is not None:
            theirs = paper_gain(found.data, at.arm.key, (at.arm.loss, at.arm.against))
            shown.append((str(at.arm), gain(at.runs, rival[1], tested=at.arm.tested), theirs))
    if not shown:
        return None
    figure = new_figure(8, 1.1 + 0.24 * len(shown))
    axes = figure.subplots()
    for place, (_, value, theirs) in enumerate(reversed(shown)):
        colour = "tab:green" if value.low > 0 else "tab:red" if value.high < 0 else "tab:gray"
        axes.plot([value.low, value.high], [place, place], color=colour)
        axes.plot([value.mean], [place], "o", color=colour, markersize=4)
        if theirs is not None:
            axes.plot([theirs], [place], "D", color="black", markerfacecolor="none", markersize=4)
    axes.axvline(0, color="black", linewidth=0.7)
    axes.set_yticks(range(len(shown)), [name for name, *_ in reversed(shown)])
    paper = "; ◇ the paper's" if any(theirs is not None for *_, theirs in shown) else ""
    axes.set(
        xlabel=f"gain in R@1 over the better of raw and plain, 95 % intervals{paper}", ylim=(-0.6, len(shown) - 0.4)
    )
    return figure


def _plot_sweep(table: Table, found: TableRuns) -> "Figure | None":
    """Plot R@1 against what is varied, with the interval of its difference to plain; also plain and raw features."""
    assert table.sweep is not None
    symbol, values = table.sweep
    known = [(value, found.progress[arm.key]) for value, arm in zip(values, table.arms[-len(values) :], strict=True)]
    points = [(value, estimate(at.runs).mean, at) for value, at in known if at.runs]
    if not points:
        return None
    figure = new_figure(7.5, 3.2)
    axes = figure.subplots()
    axes.plot([value for value, *_ in points], [mean for _, mean, _ in points], marker="o", label="idml")
    plain = [(value, mean, at.runs, found.runs((at.arm.loss, at.arm.against))) for value, mean, at in points]
    if all(own for *_, own in plain):
        x, gains = [value for value, *_ in plain], [gain(runs, own) for *_, runs, own in plain]
        low = [mean - (g.mean - g.low) for (_, mean, *_), g in zip(plain, gains, strict=True)]
        high = [mean + (g.high - g.mean) for (_, mean, *_), g in zip(plain, gains, strict=True)]
        axes.fill_between(x, low, high, alpha=0.2, label="95 % of the difference to plain")
        axes.plot(x, [estimate(own).mean for *_, own in plain], "--", color="black", linewidth=0.8, label="plain")
    if found.raw is not None:
        axes.axhline(estimate({0: found.raw}).mean, color="gray", linestyle=":", linewidth=0.8, label="raw features")
    axes.set(xlabel=symbol, ylabel="R@1, %")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _plot_trend(table: Table, found: TableRuns) -> "Figure | None":
    """Plot ‖u‖ of clean and mixed images by epoch, a line for each seed."""
    runs = [run for at in _known(table, found) for run in at.runs.values() if "level_mixed" in run.get("trend", {})]
    if not runs:
        return None
    figure = new_figure(5.5, 3.2)
    axes = figure.subplots()
    for number, run in enumerate(runs):
        for kind, colour in (("clean", "tab:blue"), ("mixed", "tab:orange")):
            axes.plot(run["trend"][f"level_{kind}"], color=colour, linewidth=1, label=None if number else kind)
    axes.set(xlabel="epoch", ylabel="‖u‖, mean of the epoch")
    axes.legend(frameon=False)
    return figure


def _plot_levels(table: Table, found: TableRuns) -> "Figure | None":
    """Plot the distribution of ‖u‖ of clean and mixed test images: one panel for each arm that learned it, seed 0."""
    shown = [at for at in _known(table, found) if 0 in at.runs and at.arm.name != "plain"]
    if not shown:
        return None
    figure = new_figure(3 * len(shown), 2.8)
    for at, axes in zip(shown, figure.subplots(1, len(shown), squeeze=False)[0], strict=True):
        for kind, quantiles in at.runs[0]["levels"].items():
            axes.plot(quantiles, [100 * i / (len(quantiles) - 1) for i in range(len(quantiles))], label=kind)
        axes.set(title=str(at.arm), xlabel="‖u‖", ylabel="images below, %")
        axes.legend(frameon=False)
    return figure


# -------------------- the metric without training --------------------


def gradient_rows() -> list[list[float]]:
    """Return x = r/τ, and the share of the plain gradient that D and C' leave, by the formulas and by autograd.

    ∂D/∂s = ∂α/∂s · e^(−x)(1 + x) and ∂C'/∂s = ∂C/∂s · e^(−x)(1 + x/2).
    """
    rows = []
    for x in _LEVELS:
        level = torch.tensor(x, dtype=torch.float64)
        formulas = [float(torch.exp(-level) * (1 + level / part)) for part in (1, 2)]
        rows.append([x, formulas[0], _autograd(x, "distance"), formulas[1], _autograd(x, "cosine")])
    return rows


def _autograd(x: float, form: str) -> float:
    """The length of the gradient on the sphere, in units of the plain metric's."""
    angle = 2 * torch.tensor(_ALPHA / 2, dtype=torch.float64).asin()
    lengths = []
    for rule in ("similar", "off"):
        metric = IntrospectiveMetric(5.0, 0.0, rule)
        s = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
        other = torch.stack([angle.cos(), angle.sin()]).unsqueeze(0)
        beta = torch.tensor([[5.0 * x * _ALPHA, 0.0]], dtype=torch.float64)
        pair = Embeddings(s, beta), Embeddings(other, torch.zeros(1, 2, dtype=torch.float64))
        value = metric.distances(*pair) if form == "distance" else metric.cosines(*pair)
        lengths.append(float(torch.autograd.grad(value.sum(), s)[0].norm()))
    return lengths[0] / lengths[1]


def gradient_figure() -> "Figure":
    """Plot the two shares against x."""
    figure = new_figure(6, 3.2)
    axes = figure.subplots()
    x = torch.linspace(0, 8, 100)
    axes.plot(x, torch.exp(-x) * (1 + x), label="D: e^(−x)(1 + x)")
    axes.plot(x, torch.exp(-x) * (1 + x / 2), label="C': e^(−x)(1 + x/2)")
    rows = torch.tensor(gradient_rows())
    axes.plot(rows[:, 0], rows[:, 2], "ko", markersize=4, label="autograd")
    axes.plot(rows[:, 0], rows[:, 4], "ko", markersize=4)
    axes.set(xlabel="x = (β + γ) / (τα)", ylabel="share of the gradient left")
    axes.legend(frameon=False)
    return figure


def metric_rows() -> list[list[float]]:
    """Return an uncertainty, and distances of two images at α = 1: Euclidean, KL with one and with both uncertain, D.

    The uncertainty is σ in each of 8 dimensions, ‖u‖ = σ·√8; the certain image has the smallest σ.
    """
    d, rows = 8, []
    means = torch.zeros(2, d, dtype=torch.float64)
    angle = 2 * torch.tensor(_ALPHA / 2, dtype=torch.float64).asin()
    means[0, 0], means[1, 0], means[1, 1] = 1.0, angle.cos(), angle.sin()
    for sigma in _SIGMAS:
        certain, uncertain = torch.full((1, d), _SIGMAS[0]), torch.full((1, d), sigma)
        first = Embeddings(means[:1], uncertain.double())
        alone = gaussian_kl_distances(first, Embeddings(means[1:], certain.double()))
        both = gaussian_kl_distances(first, Embeddings(means[1:], uncertain.double()))
        softened = IntrospectiveMetric(1.0).distances(first, Embeddings(means[1:], uncertain.double()))
        rows.append([sigma, _ALPHA, float(alone), float(both), float(softened)])
    return rows


def metric_figure() -> "Figure":
    """Plot the three metrics against the uncertainty, on a logarithmic scale."""
    figure = new_figure(6, 3.2)
    axes = figure.subplots()
    rows = torch.tensor(metric_rows())
    names = ("Euclidean", "Gaussian KL, one image uncertain", "Gaussian KL, both uncertain", "introspective, τ = 1")
    for i, name in enumerate(names, start=1):
        axes.plot(rows[:, 0], rows[:, i], marker="o", markersize=4, label=name)
    axes.set(xlabel="uncertainty σ", ylabel="distance at α = 1", xscale="log", yscale="log")
    axes.legend(frameon=False)
    return figure


def number_texts(values: list[list[float]]) -> list[list[str]]:
    """Format numbers for a table."""
    return [[f"{value:.4g}" for value in row] for row in values]


# -------------------- one gradient step --------------------


def step_cell(store: Store) -> Cell:
    """Return the cell of the figure."""
    regime = store.regime
    arm = Arms(store.data, regime).arm(_STEP_LOSS, "idml")
    return store.cell(_STEP_LOSS, arm.options, regime.rates[-1], 0, study=STEP)


def measure_step(config: TrainConfig, run: Path, dataset: Dataset, _: object, __: object) -> dict[str, Any]:
    """Return what a row keeps of the figure."""
    return take_one_step(load_model(run), config, hold_out(dataset.train, config.holdout)[0])


def take_one_step(model: Model, config: TrainConfig, images: ImageSet) -> dict[str, Any]:
    """Return α of the ambiguous image to its positive before and after a step of each loss, and a map of the batch."""
    pixels = load_pixels(images, resized_side(model.trunk.image_size))
    usable = pixels.usable
    batch = class_batches(images.labels[usable], config.batch_size, config.per_class, seed=0, epoch=0)[0]
    numbers = usable[batch]
    features = compute_features(model, CLEAN.images(pixels, numbers, model.trunk.image_size))
    labels = images.labels[numbers]
    before = model.embed_features(features)
    options = config.method_options.metric
    introspective = IntrospectiveMetric(options.tau, options.gamma)
    metrics = {"plain": IntrospectiveMetric(rule="off"), "introspective": introspective}
    gradients = {name: _gradient(model, features, labels, metric) for name, metric in metrics.items()}
    plain, moved = gradients["plain"]
    length = _STEP * float(model.semantic.weight.detach().norm() / plain.norm().clamp_min(1e-12))
    ambiguous = int(torch.where(moved, before.level, -1.0).argmax())
    gaps = alphas(before)[ambiguous].clone()
    gaps[labels != labels[ambiguous]] = torch.inf
    gaps[ambiguous] = torch.inf
    positive = int(gaps.argmin())
    after = {name: _take_step(model, features, length * gradient) for name, (gradient, _) in gradients.items()}
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


def _gradient(model: Model, features: Tensor, labels: Tensor, metric: IntrospectiveMetric) -> tuple[Tensor, Tensor]:
    """The gradient of the semantic head's weights, and which embeddings the loss moves."""
    head = copy.deepcopy(model).eval()
    embeddings = head.heads(features)
    embeddings.semantic.retain_grad()
    build_loss(_STEP_LOSS, metric=metric)(embeddings, labels, seed=0).backward()
    weight, semantic = head.semantic.weight.grad, embeddings.semantic.grad
    if weight is None or semantic is None:
        raise ValueError("the loss moves nothing: every triplet of the batch keeps its margin")
    return weight, semantic.norm(dim=1) > 0


@torch.no_grad()
def _take_step(model: Model, features: Tensor, change: Tensor) -> Embeddings:
    moved = copy.deepcopy(model)
    moved.semantic.weight -= change
    return moved.embed_features(features)


def _map(embeddings: list[Embeddings]) -> list[list[list[float]]]:
    """One t-SNE of the batch before and after both steps [3][n][2]."""
    rows = torch.cat([e.unit for e in embeddings]).double().numpy()
    places = tsne_positions(rows)
    each = len(rows) // len(embeddings)
    return [[[round(float(v), 2) for v in p] for p in places[i : i + each]] for i in range(0, len(rows), each)]


def step_sentence(found: dict[str, Any]) -> str:
    """Say what the step did to the pair."""
    d = found["distances"]
    return (
        f"distance of the ambiguous image to its positive: {d['before']:.4f}; after a plain step {d['plain']:.4f}, "
        f"after an introspective one {d['introspective']:.4f} (weight of the pair {found['weight']:.2f}, ‖u‖ "
        f"{found['level']:.2f} against {found['mean_level']:.2f} on average)"
    )


def step_figure(found: dict[str, Any]) -> "Figure":
    """Plot the batch before and after either step, a line from the ambiguous image to its positive, and α."""
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


# -------------------- all figures that need no table --------------------


@dataclass(frozen=True)
class DrawnFigure:
    """A figure with its numbers: a title, header and rows, the function that draws it, and a sentence."""

    title: str
    header: list[str]
    rows: list[list[str]]
    figure: "Callable[[], Figure]"
    text: str


def metric_figures() -> dict[str, DrawnFigure]:
    """Return the two figures that need no training, by the name of their command."""
    agree = all(abs(row[1] - row[2]) + abs(row[3] - row[4]) < 1e-6 for row in gradient_rows())
    same = "The formulas and autograd agree." if agree else "The formulas and autograd DISAGREE."
    kl = "The Gaussian KL grows when one image is uncertain; the introspective distance falls."
    left, grows = "Gradient left by uncertainty", "Three metrics as uncertainty grows"
    return {
        "gradients": DrawnFigure(left, GRADIENTS, number_texts(gradient_rows()), gradient_figure, same),
        "metrics": DrawnFigure(grows, METRICS, number_texts(metric_rows()), metric_figure, kl),
    }


def figures_without_runs(out: Path) -> list[DrawnFigure]:
    """Return the figures beside the tables: the two of the metric, and the gradient steps that are stored."""
    shapes = list(metric_figures().values())
    for path in sorted(out.glob("*-*.jsonl")):
        data, name = path.stem.rsplit("-", 1)
        store = Store(out, data, named_regime(name, data))
        if found := store.read(step_cell(store)):
            title = f"One gradient step around an ambiguous image ({data})"
            shapes.append(DrawnFigure(title, [], [], partial(step_figure, found), step_sentence(found)))
    return shapes

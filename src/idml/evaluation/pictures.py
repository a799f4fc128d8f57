"""The figures of an evaluation's report: risk–coverage curves, histograms of uncertainty, t-SNE."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from idml.data.sampling import random_stream
from idml.evaluation.measuring import Seen
from idml.evaluation.scores import QUERY_ONLY
from idml.evaluation.uncertainty import evaluate_uncertainty, risk_coverage
from idml.html import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 300  # of a curve: more than a screen shows
_IMAGES = 3000  # of a t-SNE


def risk_coverage_curves(seen: Seen) -> str:
    """Errors among the answered queries against the share that is answered, a line for each score."""
    figure = _figure(10, 5)
    axes = figure.subplots()
    for number, (name, score) in enumerate(seen.scores.items()):
        coverage, risk = (x.numpy() for x in risk_coverage(score, seen.correct))
        thinned = np.unique(np.linspace(0, len(coverage) - 1, _POINTS).round().astype(int))
        area = evaluate_uncertainty(score, seen.correct)["aurc"]
        axes.plot(
            100 * coverage[thinned],
            100 * risk[thinned],
            label=f"{name} (AURC {area:.3f})",
            color=f"C{number % 10}",
            linestyle="solid" if name in QUERY_ONLY else "dashed",
            linewidth=2.5 if name in ("level", "sigma") else 1.5,  # the model's own
        )
    error = 100 * float((~seen.correct).double().mean())
    axes.axhline(error, color="0.6", linestyle="dotted", label="no order")
    axes.set(xlabel="queries answered, %", ylabel="wrong among the answered, %", xlim=(0, 100))
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside right center", frameon=False, fontsize="medium")
    return drawing(
        figure,
        "risk-coverage curves of all scores on clean queries: from the query alone solid, with the gallery dashed",
    )


def histogram(scores: dict[str, Tensor], label: str) -> str:
    """How often each uncertainty occurs, in each view."""
    figure = _figure(9, 3.6)
    axes = figure.subplots()
    values = torch.cat(list(scores.values())).double()
    low, high = values.quantile(torch.tensor([0.001, 0.999], dtype=torch.float64)).tolist() if len(values) else (0, 1)
    bins = np.linspace(low, high if high > low else low + 1e-6, 60).tolist()
    for number, (view, score) in enumerate(scores.items()):
        filled: dict[str, Any] = {"alpha": 0.35} if view == "clean" else {"histtype": "step", "linewidth": 1.5}
        axes.hist(score.numpy().clip(low, high), bins, density=True, label=view, color=f"C{number % 10}", **filled)
    axes.set(xlabel=label, ylabel="density")
    figure.legend(loc="outside right center", frameon=False)
    return drawing(figure, f"histogram of {label} for clean, mixed and degraded test images")


def tsne(points: Tensor, labels: Tensor, score: Tensor, label: str, note: Callable[[str], None]) -> str:
    """The embeddings in the plane, at most 3,000 of them, coloured by class and by uncertainty."""
    chosen = torch.randperm(len(points), generator=random_stream("t-SNE"))[:_IMAGES].sort().values
    points, labels, score = points[chosen], labels[chosen], score[chosen]
    if len(points) < 4 or bool((points == points[0]).all()):
        return "<p>There are too few different embeddings for a t-SNE.</p>"
    note(f"t-SNE of {len(points):,} images")
    from openTSNE import TSNE

    place = TSNE(
        perplexity=min(30, (len(points) - 1) / 3),
        random_state=0,
        n_jobs=torch.get_num_threads(),
        negative_gradient_method="bh",
    ).fit(points.numpy())
    x, y = np.asarray(place).T
    figure = _figure(12, 5.6)
    left, right = figure.subplots(1, 2)
    size = max(3.0, min(30.0, 9000 / len(points)))
    hue = (labels.double() * 0.618033988749895) % 1  # neighbouring classes get colours far apart
    left.scatter(x, y, s=size, c=hue.numpy(), cmap="hsv", linewidths=0)
    left.set_title(f"by class ({len(labels.unique()):,})")
    low, high = score.double().quantile(torch.tensor([0.02, 0.98], dtype=torch.float64)).tolist()
    coloured = right.scatter(x, y, s=size, c=score.numpy(), cmap="viridis", vmin=low, vmax=high, linewidths=0)
    right.set_title(f"by {label}")
    figure.colorbar(coloured, ax=right)
    for axes in (left, right):
        axes.set(xticks=[], yticks=[])
    text = f"t-SNE of the semantic embeddings of {len(points):,} test images, coloured by class and by {label}"
    return drawing(figure, text, pixels=True)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")

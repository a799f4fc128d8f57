"""Two figures that need no training: what uncertainty leaves of the gradient, and of three ways to compare images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from idml.embeddings import Embeddings
from idml.files import write_atomic
from idml.metric import IntrospectiveMetric
from idml.probabilistic import gaussian_kl_distances
from idml.report_html import drawing, page, table
from idml.reproduction.drawing import new_figure
from idml.reproduction.grid import write_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEVELS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # x = r/τ
_ALPHA = 1.0  # the semantic distance at which metrics are compared
_SIGMAS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def gradient_rows() -> list[list[float]]:
    """x = r/τ, the share of the plain gradient that D and C' leave by the formulas, and by autograd.

    ∂D/∂s = ∂α/∂s · e^(−x)(1 + x) and ∂C'/∂s = ∂C/∂s · e^(−x)(1 + x/2).
    """
    rows = []
    for x in _LEVELS:
        level = torch.tensor(x, dtype=torch.float64)
        formulas = [float(torch.exp(-level) * (1 + level / part)) for part in (1, 2)]
        rows.append([x, formulas[0], _autograd(x, "distance"), formulas[1], _autograd(x, "cosine")])
    return rows


def _autograd(x: float, form: str) -> float:
    """How long the gradient is on the sphere, in units of the plain metric's."""
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
    """The two shares against x."""
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
    """An uncertainty, and what two images at α = 1 then measure: Euclidean, KL with one and with both uncertain, D.

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
    """The three metrics against the uncertainty, on a logarithmic scale."""
    figure = new_figure(6, 3.2)
    axes = figure.subplots()
    rows = torch.tensor(metric_rows())
    names = ("Euclidean", "Gaussian KL, one image uncertain", "Gaussian KL, both uncertain", "introspective, τ = 1")
    for i, name in enumerate(names, start=1):
        axes.plot(rows[:, 0], rows[:, i], marker="o", markersize=4, label=name)
    axes.set(xlabel="uncertainty σ", ylabel="distance at α = 1", xscale="log", yscale="log")
    axes.legend(frameon=False)
    return figure


GRADIENTS = ["x", "D, formula", "D, autograd", "C', formula", "C', autograd"]
METRICS = ["σ", "Euclidean", "KL, one uncertain", "KL, both uncertain", "introspective"]


def draw_gradients(out: Path) -> dict[str, Any]:
    """Write the gradient figure and its numbers."""
    return _written(out / "gradients", GRADIENTS, gradient_rows(), gradient_figure())


def draw_metrics(out: Path) -> dict[str, Any]:
    """Write the comparison of metrics and its numbers."""
    return _written(out / "metrics", METRICS, metric_rows(), metric_figure())


def _written(folder: Path, header: list[str], values: list[list[float]], figure: "Figure") -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = texts(values)
    markdown = write_table(folder, "table", header, rows)
    whole = page(folder.name, f"<h1>{folder.name}</h1>", drawing(figure, folder.name), table(header, rows))
    write_atomic(folder / "table.html", whole)
    return {"table": markdown, "header": header, "rows": rows}


def texts(values: list[list[float]]) -> list[list[str]]:
    """Numbers for a table."""
    return [[f"{value:.4g}" for value in row] for row in values]

"""Draws docs/metric.svg: the introspective distance and how much gradient it leaves.

python docs/metric_figure.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

from idml import Embeddings, IntrospectiveMetric

TAU, LEVELS = 5.0, (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)


def curve(beta: float, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """α, D and |∂D/∂s|/|∂α/∂s| of an image against others at growing angles, with β the same for all."""
    image = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    others = Embeddings.certain(torch.stack([angles.cos(), angles.sin()], dim=1))
    own = Embeddings(image, torch.tensor([[beta, 0.0]], dtype=torch.float64))
    alpha = IntrospectiveMetric(rule="off").distances(own, others)[0]
    softened = IntrospectiveMetric(tau=TAU).distances(own, others)[0]
    slopes = [
        torch.stack([torch.autograd.grad(d, image, retain_graph=True)[0].norm() for d in values])
        for values in (softened, alpha)
    ]
    return alpha.detach(), softened.detach(), slopes[0] / slopes[1]


def main() -> None:
    """Write the figure beside this file."""
    plt.rcParams.update({"font.size": 10, "svg.hashsalt": "idml", "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    angles = torch.linspace(0.02, torch.pi - 0.02, 120, dtype=torch.float64)
    for beta, shade in zip(LEVELS, torch.linspace(0.0, 0.85, len(LEVELS)).tolist(), strict=True):
        alpha, distance, share = curve(beta, angles)
        colour = plt.get_cmap("viridis")(shade)
        left.plot(alpha, distance, color=colour, label=f"β = {beta:g}")
        right.plot(alpha, share, color=colour)
    left.set(xlabel="semantic distance α", ylabel="introspective distance D", xlim=(0, 2), ylim=(0, 2))
    right.set(xlabel="semantic distance α", ylabel="share of the gradient left", xlim=(0, 2), ylim=(0, 1.05))
    left.legend(frameon=False, loc="upper left", fontsize=9)
    figure.savefig(Path(__file__).with_name("metric.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()

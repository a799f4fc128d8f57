"""What IDML costs: a training step of n images and their n mixtures against a plain step of 2n images, per image.

    python benchmarks/step.py [--steps 5] [--losses NAME…] [--json]

The pretrained trunk at 112 pixels, n = 60. Both kinds of step are prepared and taken as in training, from the pixels
on, and alternate, so that both see the same machine. Goal: at most 1.03. A third arm is the plain step without
`idml.model.bn_folding`, as timm computes the trunk.
"""

import argparse
import json
import statistics
import time

import torch

from idml.compat import keep_memory
from idml.model import build_model
from idml.training.build import build, build_optimiser, set_modes
from idml.training.config import from_dict
from idml.training.distributed import Processes
from idml.training.step import compute_gradients

SIZE, HALF, CLASSES = 112, 60, 100


def arm(loss_name: str, method: str, fold: bool = True):
    """A function that takes one step and returns its seconds."""
    linear = {"teach_u": "none"} if method == "plain" else {}
    config = from_dict({"data": "-", "out": "-", "loss": loss_name, "method": method, "image_size": SIZE, **linear})
    count = HALF if config.added_images else 2 * HALF
    labels = torch.arange(count) // 4
    model, trained = build(config, labels, CLASSES)
    if not fold:
        model = build_model(image_size=SIZE, **type(trained).model_options(config.method_options))
    optimizer, processes = build_optimiser(model, trained, config), Processes()
    set_modes(model, config, 0)
    images = torch.rand(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))

    def step(number: int) -> float:
        started = time.perf_counter()
        batch = trained.add_images(images, labels, seed=0, epoch=0, step=number)
        assert len(batch.images) == 2 * HALF
        optimizer.zero_grad(set_to_none=True)
        compute_gradients(batch, torch.arange(count), model, trained, config, processes, number)
        optimizer.step()
        return time.perf_counter() - started

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--losses", nargs="*", default=["multi_similarity", "proxy_anchor"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    keep_memory()  # as the command idml does
    figures = {}
    for name in options.losses:
        arms = {"plain": arm(name, "plain"), "idml": arm(name, "idml"), "unfolded": arm(name, "plain", fold=False)}
        seconds: dict[str, list[float]] = {method: [] for method in arms}
        for number in range(options.steps + 1):
            for method, step in arms.items():
                taken = step(number)
                if number:  # the first of each warms up
                    seconds[method].append(taken)
        ratios = {
            other: statistics.median([b / a for a, b in zip(seconds["plain"], seconds[other], strict=True)])
            for other in ("idml", "unfolded")
        }
        figures[name] = {
            "plain, ms an image": 1000 * statistics.median(seconds["plain"]) / (2 * HALF),
            "idml, ms an image": 1000 * statistics.median(seconds["idml"]) / (2 * HALF),
            "idml / plain": ratios["idml"],
            "plain, unfolded / plain": ratios["unfolded"],
        }
    if options.json:
        print(json.dumps(figures))
        return
    for name, row in figures.items():
        print(f"{name:18}" + "   ".join(f"{key} {value:.3f}" for key, value in row.items()))


if __name__ == "__main__":
    main()

"""Does the uncertainty learn? A short training of every loss with the metric and Mixup on made pictures.

    python benchmarks/made_data.py [--steps 150] [--losses NAME…] [--json]

Every class is a smooth pattern of 16×16 pixels; an image is its pattern, moved by a pixel, with noise. The small
convolutional trunk trains on clean images and their mixtures; then ‖u‖ of new clean images is compared with ‖u‖ of
new mixtures of two classes. AUROC 0.5 means that ‖u‖ cannot tell them apart. ``weight`` is the mean of e^(−x) over
clean pairs: near 1 the metric is the plain one, near 0 the uncertainty has swallowed it.
"""

import argparse
import json

import torch
from torch import Tensor

from idml import IntrospectiveMetric, LabelSets
from idml.losses import LOSSES, build_loss
from idml.model import Model, build_model

CLASSES, SIZE, DIM = 16, 16, 16


def pictures(images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images [n, 1, 16, 16] and their labels; the patterns are always the same."""
    g = torch.Generator().manual_seed(99)
    patterns = torch.nn.functional.interpolate(torch.rand(CLASSES, 1, 4, 4, generator=g), size=SIZE, mode="bilinear")
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (images,), generator=g)
    shifts = torch.randint(-1, 2, (images, 2), generator=g).tolist()
    moved = [torch.roll(patterns[k], tuple(s), dims=(1, 2)) for k, s in zip(labels.tolist(), shifts, strict=True)]
    return (torch.stack(moved) + 0.25 * torch.randn(images, 1, SIZE, SIZE, generator=g)).clamp(0, 1), labels


def mix(x: Tensor, y: Tensor, seed: int) -> tuple[Tensor, LabelSets]:
    """Mixup with one λ ~ Beta(1, 1) for the batch and the labels as sets."""
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=g)
    share = float(torch.rand((), generator=g))
    return share * x + (1 - share) * x[order], LabelSets.mixed(y, y[order])


def train(name: str, steps: int, seed: int = 0) -> Model:
    """A model trained by this loss with the metric, each batch 48 clean images and their 48 mixtures."""
    torch.manual_seed(seed)
    model = build_model("conv4", in_chans=1, embedding_dim=DIM, image_size=SIZE).train()
    loss = build_loss(name, num_classes=CLASSES, embedding_dim=DIM)
    groups = [{"params": model.parameters(), "lr": 1e-3}, {"params": loss.parameters(), "lr": 1e-1}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    for step in range(steps):
        x, y = pictures(48, seed=1_000_000 * seed + step)
        mixed, sets = mix(x, y, seed=step)
        value = loss(model(torch.cat([x, mixed])), LabelSets.cat([LabelSets(y), sets]), seed=step)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return model


def judge(model: Model) -> dict[str, float]:
    """‖u‖ of new clean images and of mixtures (λ = ½) of two classes, and how well it tells them apart."""
    x, y = pictures(300, seed=123_456_789)
    partner = torch.roll(torch.arange(len(x)), 1)
    clean = model.embed(x)
    mixed = model.embed(((x + x[partner]) / 2)[y != y[partner]])
    distances = IntrospectiveMetric(rule="off").distances(clean.unit).fill_diagonal_(torch.inf)
    return {
        "clean": float(clean.level.mean()),
        "mixed": float(mixed.level.mean()),
        "auroc": float((mixed.level.unsqueeze(1) > clean.level).float().mean()),
        "weight": float(IntrospectiveMetric().weights(clean)[~torch.eye(len(x), dtype=torch.bool)].mean()),
        "recall@1": float((y[distances.argmin(dim=1)] == y).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--losses", nargs="*", default=list(LOSSES), choices=list(LOSSES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    columns, rows = ("clean", "mixed", "auroc", "weight", "recall@1"), {}
    if not options.json:
        print(f"{'loss':<18}" + "".join(f"{c:>18}" for c in columns) + f"   ({options.seeds} seeds: mean, lowest)")
    for name in options.losses:
        results = [judge(train(name, options.steps, seed)) for seed in range(options.seeds)]
        rows[name] = results
        if not options.json:
            cells = [[r[c] for r in results] for c in columns]
            print(f"{name:<18}" + "".join(f"{sum(v) / len(v):>10.3f}{min(v):>8.3f}" for v in cells), flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()

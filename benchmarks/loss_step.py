"""Forward + backward of every loss, ours against pytorch-metric-learning, in one run.

    python benchmarks/loss_step.py [--repeats 15] [--json]

240 images, 512-d, four images a class, 100 and 11,318 classes. ``off`` is our plain loss, ``metric`` the
introspective one; they are timed in turn, and the best of all rounds
counts. ``largest`` is the largest
tensor any step makes, in units of the pair matrix; ``peak`` the most memory that was held at once above the inputs.
The last lines compare with a whole training step of the lite0 trunk on the same 240 images.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from idml import Embeddings, IntrospectiveMetric
from idml.losses import LOSSES, ProxyLoss, build_loss
from idml.model import build_model

IMAGES, DIM = 240, 512
Step = Callable[[], None]


def peer(name: str, classes: int) -> tuple[torch.nn.Module, torch.nn.Module | None]:
    return {
        "triplet_semihard": lambda: (pml.TripletMarginLoss(margin=0.1), miners.TripletMarginMiner(0.1, "semihard")),
        "proxy_nca": lambda: (pml.ProxyNCALoss(classes, DIM, softmax_scale=32), None),
        "fast_ap": lambda: (pml.FastAPLoss(10), None),
        "contrastive": lambda: (pml.ContrastiveLoss(0.0, 0.5), None),
        "margin_dw": lambda: (pml.MarginLoss(0.2, beta=1.2), miners.DistanceWeightedMiner(0.5, 1.4)),
        "multi_similarity": lambda: (pml.MultiSimilarityLoss(2, 50, 0.5), miners.MultiSimilarityMiner(0.1)),
        "proxy_anchor": lambda: (pml.ProxyAnchorLoss(classes, DIM, 0.1, 32), None),
        "softmax": lambda: (pml.NormalizedSoftmaxLoss(classes, DIM, 0.05), None),
        "soft_triple": lambda: (pml.SoftTripleLoss(classes, DIM, 10, 20, 0.1, 0.01), None),
        "circle": lambda: (pml.CircleLoss(0.4, 80), None),
        "proxy_nca_pp": lambda: (pml.ProxyNCALoss(classes, DIM, softmax_scale=9), None),
        "ranked_list": lambda: (pml.RankedListLoss(0.4, 5, alpha=1.2), None),
    }[name]()


def steps(name: str, classes: int) -> dict[str, Step]:
    g = torch.Generator().manual_seed(0)
    labels = torch.randperm(classes, generator=g)[: IMAGES // 4].repeat_interleave(4)
    # classes that overlap, in few directions, as in the middle of a training: every miner finds work
    centres, noise = torch.randn(IMAGES // 4, 16, generator=g), torch.randn(IMAGES, 16, generator=g)
    latent = centres.repeat_interleave(4, dim=0) + noise
    semantic = (latent @ torch.randn(16, DIM, generator=g)).requires_grad_()
    uncertainty = (0.02 * torch.randn(IMAGES, DIM, generator=g)).requires_grad_()
    theirs, miner = peer(name, classes)

    def ours(rule: str) -> Step:
        sizes = {"num_classes": classes, "embedding_dim": DIM} if issubclass(LOSSES[name], ProxyLoss) else {}
        loss = build_loss(name, metric=IntrospectiveMetric(rule=rule), **sizes)

        def step() -> None:
            clear(loss)
            loss(Embeddings(semantic, uncertainty), labels, seed=0).backward()

        return step

    def clear(module: torch.nn.Module) -> None:
        semantic.grad = uncertainty.grad = None
        module.zero_grad(set_to_none=True)

    def their_step() -> None:
        clear(theirs)
        x = torch.nn.functional.normalize(semantic) if name == "softmax" else semantic  # it does not do this itself
        theirs(x, labels, miner(x, labels) if miner else None).backward()

    return {"off": ours("off"), "metric": ours("similar"), "pml": their_step}


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage().size() > 0:
                self.elements = max(self.elements, x.untyped_storage().size() // 4)
        return out


def peak_megabytes(step: Step) -> float:
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    held = peak = 0
    memory = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(memory, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak / 2**20


def measure(name: str, classes: int, repeats: int) -> dict[str, float | str | int]:
    run = steps(name, classes)
    columns = classes * (10 if name == "soft_triple" else 1) if issubclass(LOSSES[name], ProxyLoss) else IMAGES
    times: dict[str, list[float]] = {which: [] for which in run}
    for which in run:
        run[which]()
    for _ in range(repeats):  # in turn, so that a slow moment of the machine hits all three
        for which, step in run.items():
            start = time.perf_counter()
            step()
            times[which].append(time.perf_counter() - start)
    row: dict[str, float | str | int] = {"loss": name, "classes": classes}
    for which in run:
        row[f"{which}_ms"] = min(times[which]) * 1e3
    for top, bottom in (("off", "pml"), ("metric", "off"), ("metric", "pml")):
        row[f"{top}/{bottom}"] = min(times[top]) / min(times[bottom])
    for which in ("metric", "pml"):
        with Largest() as largest:
            run[which]()
        row[f"{which}_largest"] = largest.elements / (IMAGES * columns)
        row[f"{which}_peak_mb"] = peak_megabytes(run[which])
    return row


def trunk_step_ms(size: int = 112) -> float:
    """One training step of the default trunk and heads, without the loss; the better of two."""
    model = build_model(pretrained=False).train().to(memory_format=torch.channels_last)
    images = torch.rand(IMAGES, 3, size, size).contiguous(memory_format=torch.channels_last)
    model(images[:2])
    times = []
    for _ in range(2):
        start = time.perf_counter()
        out = model(images)
        (out.semantic.sum() + out.uncertainty.sum()).backward()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    known = [name for name in LOSSES if name != "rankmi"]  # it has no peer
    parser.add_argument("--losses", nargs="*", default=known, choices=known)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    columns = ("off_ms", "metric_ms", "pml_ms", "off/pml", "metric/off", "metric/pml")
    columns += ("metric_largest", "pml_largest", "metric_peak_mb", "pml_peak_mb")
    if not options.json:
        print(f"{'loss':<17}{'classes':>8}" + "".join(f"{c:>15}" for c in columns))
    for classes in (100, 11318):
        for name in options.losses:
            row = measure(name, classes, options.repeats)
            rows.append(row)
            if not options.json:
                print(f"{name:<17}{classes:>8}" + "".join(f"{row[c]:>15.2f}" for c in columns), flush=True)
    step = trunk_step_ms()
    worst = max(rows, key=lambda r: r["metric_ms"])
    summary = {
        "rows": rows,
        "trunk_step_ms": step,
        "worst_share_of_trunk_step": worst["metric_ms"] / step,
        "slower_than_pml": [f"{r['loss']}/{r['classes']}" for r in rows if r["off/pml"] > 1 or r["metric/pml"] > 1],
        "metric_over_twice_off": [f"{r['loss']}/{r['classes']}" for r in rows if r["metric/off"] > 2],
        "over_3_percent_of_step": [f"{r['loss']}/{r['classes']}" for r in rows if r["metric_ms"] > 0.03 * step],
    }
    if options.json:
        print(json.dumps(summary))
        return
    print(f"\na lite0 training step of {IMAGES} images at 112 px takes {step:.0f} ms; the dearest loss with the metric")
    print(f"({worst['loss']}, {worst['classes']} classes) adds {100 * worst['metric_ms'] / step:.1f} %")
    for key in ("slower_than_pml", "metric_over_twice_off", "over_3_percent_of_step"):
        print(f"{key.replace('_', ' ')}: {', '.join(summary[key]) or 'none'}")


if __name__ == "__main__":
    main()

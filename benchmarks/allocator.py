"""What `idml.compat.keep_memory` saves: a training step with and without it, each in a process of its own.

    python benchmarks/allocator.py [--steps 5] [--json]

The pretrained trunk at 112 pixels, 120 images, forward and backward. The two take turns, so that both see the same
machine; the median of all but the first step counts.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

SIZE, BATCH = 112, 120


def steps(count: int, keep: bool) -> list[tuple[float, int]]:
    """Seconds and page faults of each step."""
    import torch

    from idml.compat import keep_memory
    from idml.model import build_model
    from idml.training.build import set_modes
    from idml.training.config import TrainConfig

    if keep and not keep_memory():
        raise SystemExit("this C library has no mallopt: nothing to compare")
    model = build_model(image_size=SIZE)
    set_modes(model, TrainConfig(data="-", out="-"), 0)
    images, taken = torch.rand(BATCH, 3, SIZE, SIZE), []
    for _ in range(count + 1):
        started, faults = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model.zero_grad(set_to_none=True)
        embeddings = model(images)
        (embeddings.unit.sum() + embeddings.level.sum()).backward()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        taken.append((time.perf_counter() - started, faults))
    return taken[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["kept", "returned"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(steps(options.steps, options.only == "kept")))
        return
    found: dict[str, list[tuple[float, int]]] = {"returned": [], "kept": []}
    for _ in range(options.rounds):
        for name, taken in found.items():
            command = [sys.executable, __file__, "--only", name, "--steps", str(options.steps)]
            taken += json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    figures = {
        name: {"s a step": statistics.median(s for s, _ in taken), "faults": statistics.median(f for _, f in taken)}
        for name, taken in found.items()
    }
    ratio = figures["kept"]["s a step"] / figures["returned"]["s a step"]
    if options.json:
        print(json.dumps({**figures, "kept / returned": ratio}))
        return
    for name, row in figures.items():
        print(f"{name:10} {row['s a step']:.2f} s a step, {row['faults']:,.0f} page faults")
    print(f"kept / returned {ratio:.2f}")


if __name__ == "__main__":
    main()

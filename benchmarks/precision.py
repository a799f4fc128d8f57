"""What `--precision bfloat16` gains: training steps in float32 and in bfloat16, in turns, and how far gradients differ.

    python benchmarks/precision.py [--trunk resnet50] [--size 224] [--images 60] [--steps 3] [--json]

Forward and backward through the trunk with frozen normalisation, as in training. The weights are random: a step takes
the same time with any. The median of all but the first step of each counts.
"""

import argparse
import json
import statistics
import time

import torch

from idml.compat import cpu_computes_bfloat16, keep_memory
from idml.model.backbones import build_trunk
from idml.model.bn_folding import fold_frozen_normalisation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trunk", default="resnet50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not cpu_computes_bfloat16():
        raise SystemExit("this CPU cannot compute in bfloat16: nothing to compare")
    keep_memory()
    torch.manual_seed(0)
    trunk = build_trunk(options.trunk, pretrained=False, image_size=options.size).eval()
    fold_frozen_normalisation(trunk)
    images = torch.rand(options.images, 3, options.size, options.size)
    taken: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    gradients: dict[str, torch.Tensor] = {}
    for step in range(options.steps + 1):
        for precision, times in taken.items():
            trunk.zero_grad(set_to_none=True)
            started = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                features = trunk(images)
            features.float().square().mean().backward()
            if step:
                times.append(time.perf_counter() - started)
            gradients[precision] = torch.cat([p.grad.flatten() for p in trunk.parameters() if p.grad is not None])
    speed = {precision: options.images / statistics.median(times) for precision, times in taken.items()}
    ratio = speed["bfloat16"] / speed["float32"]
    cosine = float(torch.cosine_similarity(*(g.double() for g in gradients.values()), dim=0))
    if options.json:
        print(json.dumps({"images/s": speed, "bfloat16 / float32": ratio, "cosine of the gradients": cosine}))
        return
    for precision, images_a_second in speed.items():
        print(f"{precision:9} {images_a_second:.1f} images/s")
    print(f"bfloat16 / float32 {ratio:.2f}; cosine of the gradients {cosine:.4f}")


if __name__ == "__main__":
    main()

"""What the loader costs: a training step fed by it against one on a batch in memory; decoding with and without cache.

    python benchmarks/loader.py [--data SPEC] [--steps 6] [--workers 0] [--json]

The pretrained trunk at 112 pixels, batches of 120 images prepared as in training. The two kinds of step alternate, so
that both see the same machine. Without --data, photos of 500 × 375 pixels are made for the occasion.
Goal: at most 1.05 times the step in memory.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from idml.data.datasets import load_dataset
from idml.data.images import resized_side
from idml.data.pixel_cache import load_pixels
from idml.training.batches import Stream
from idml.training.build import build, build_optimiser, set_modes
from idml.training.config import TrainConfig
from idml.training.distributed import Processes
from idml.training.step import compute_gradients

SIZE, BATCH = 112, 120


def photos(folder: Path, classes: int = 60, each: int = 8) -> str:
    """Smooth random pictures as JPEG files, one sub-folder a class."""
    noise = np.random.default_rng(0)
    for c in range(classes):
        (folder / f"{c:03d}").mkdir()
        for i in range(each):
            small = Image.fromarray(noise.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            small.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{c:03d}" / f"{i}.jpg", quality=90)
    return f"folder:{folder}"


def measure(data: str, steps: int, workers: int) -> dict[str, float]:
    config = TrainConfig(data=data, out="-", method="plain", image_size=SIZE, batch_size=BATCH, workers=workers)
    images = load_dataset(data, split="all").train
    model, method = build(config, images.labels, len(images.classes))
    optimizer, processes = build_optimiser(model, method, config), Processes()
    side = resized_side(SIZE)
    pixels = load_pixels(images, side)
    stream = Stream(pixels, config, method, SIZE, processes.device)
    set_modes(model, config, 0)

    def step(batch):
        optimizer.zero_grad(set_to_none=True)
        compute_gradients(batch, torch.arange(config.batch_size), model, method, config, processes, 0)
        optimizer.step()

    feed = itertools.chain.from_iterable(stream.batches(epoch, 0) for epoch in itertools.count())
    _, kept = next(feed)
    step(kept)
    memory, fed, waits = [], [], []
    for _ in range(steps):
        started = time.perf_counter()
        step(kept)
        memory.append(time.perf_counter() - started)
        started = time.perf_counter()
        _, batch = next(feed)
        waits.append(time.perf_counter() - started)
        step(batch)
        fed.append(time.perf_counter() - started)
    numbers = torch.arange(min(BATCH, len(images)))
    started = time.perf_counter()
    for i in numbers.tolist():
        np.asarray(images.sources[i].decode(min_side=side).resize((side, side), Image.Resampling.BILINEAR))
    decoding = (time.perf_counter() - started) / len(numbers)
    started = time.perf_counter()
    for _ in range(10):
        pixels.batch(numbers)
    cached = (time.perf_counter() - started) / (10 * len(numbers))
    return {
        "step in memory, s": statistics.median(memory),
        "step fed by the loader, s": statistics.median(fed),
        "waiting for the batch, s": statistics.median(waits),
        "fed / memory": statistics.median(f / m for f, m in zip(fed, memory, strict=True)),
        "memory + waiting / memory": 1 + statistics.median(waits) / statistics.median(memory),
        "decode, images/s": 1 / decoding,
        "cache, images/s": 1 / cached,
        "decode / cache": decoding / cached,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", metavar="SPEC")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options.data or photos(Path(folder)), options.steps, options.workers)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:10.3f}")


if __name__ == "__main__":
    main()

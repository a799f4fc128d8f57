"""What ONNX Runtime gains: images a second against torch, on the CPU.

    python benchmarks/onnx_runtime.py [--rounds 15] [--json]

- The features of a frozen trunk, as training and evaluation compute them by default (`FeatureCache` with many images
  ahead): the default trunk at 112 and 224 pixels, 64 images in memory, float pixels to features.
- The whole model, as search and the service run it: the default trunk at both sizes and conv4 at 28 pixels, all with
  512-d heads, one image and 16 at once, uint8 pixels to s and u.

Both use as many threads as torch does by itself and take turns, so that both see the same machine; medians count. The
time of the export is not part of a rate; it is printed.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from idml.model import build_model, load_model, save_model
from idml.model.feature_cache import FeatureCache
from idml.model.onnx import export_onnx, open_session, read_onnx, run_session

MODELS = {
    "lite0, 112 px": {"image_size": 112},
    "lite0, 224 px": {"image_size": 224},
    "conv4, 28 px": {"trunk": "conv4", "image_size": 28},
}
SIZES = (112, 224)
MANY = 100_000  # images ahead: an export pays
BATCHES = (1, 16)
SHORTEST = 0.2  # seconds that one turn lasts at least


def arms(folder: Path, config: dict) -> dict:
    """Both ways from images to tensors."""
    model = build_model(**config)
    size = model.trunk.image_size
    model(torch.rand(8, 3, size, size))  # starts the uncertainty head
    save_model(model, folder)
    export_onnx(folder, folder / "model.onnx")
    model, session = load_model(folder), open_session(read_onnx(folder / "model.onnx").data)
    return {"torch": torch.no_grad()(model), "onnx": lambda images: run_session(session, images)}


def rate(run, images: torch.Tensor, turns: int) -> float:
    """Images a second."""
    started = time.perf_counter()
    for _ in range(turns):
        run(images)
    return turns * len(images) / (time.perf_counter() - started)


def compare(both: dict, images: torch.Tensor, rounds: int) -> dict:
    """The rates of both arms in turn, and the median of their ratios."""
    turns = {}
    for name, run in both.items():
        rate(run, images, 2)  # warms up
        turns[name] = max(1, round(SHORTEST * rate(run, images, 2) / len(images)))
    rates = {name: [] for name in both}
    for _ in range(rounds):
        for name, run in both.items():
            rates[name].append(rate(run, images, turns[name]))
    ratios = [b / a for a, b in zip(rates["torch"], rates["onnx"], strict=True)]
    return {
        "torch, images/s": statistics.median(rates["torch"]),
        "ONNX Runtime, images/s": statistics.median(rates["onnx"]),
        "ratio": statistics.median(ratios),
    }


def measure_features(size: int, rounds: int) -> dict:
    """The features of the frozen default trunk: torch against the default path, and how far they are apart."""
    model = build_model(image_size=size)
    caches = {"torch": FeatureCache(model, images=1), "onnx": FeatureCache(model, images=MANY, keep=False)}
    images = torch.randint(0, 256, (64, 3, size, size), dtype=torch.uint8) / 255
    started = time.perf_counter()
    found = caches["onnx"].compute(images)
    export = time.perf_counter() - started
    assert caches["onnx"].session is not None, "the default path did not choose ONNX Runtime"
    difference = float(abs(found - caches["torch"].compute(images)).max())
    figures = compare({name: cache.compute for name, cache in caches.items()}, images, rounds)
    return {**figures, "export, s": export, "largest difference": difference}


def measure_model(config: dict, rounds: int) -> dict:
    """The whole model, one image and 16 at once."""
    size = config["image_size"]
    with tempfile.TemporaryDirectory() as folder:
        both = arms(Path(folder), config)
        images = {batch: torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8) for batch in BATCHES}
        return {batch: compare(both, images[batch], rounds) for batch in BATCHES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    features = {size: measure_features(size, options.rounds) for size in SIZES}
    models = {name: measure_model(config, options.rounds) for name, config in MODELS.items()}
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "features": features, "models": models}))
        return
    print(f"{torch.get_num_threads()} threads")
    rows = {f"frozen features, {size} px": row for size, row in features.items()}
    rows |= {f"{name}, batch {batch}": row for name, batches in models.items() for batch, row in batches.items()}
    for name, row in rows.items():
        print(f"{name:24}   " + "   ".join(f"{key} {value:.3g}" for key, value in row.items()))


if __name__ == "__main__":
    main()

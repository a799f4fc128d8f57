"""What ONNX Runtime gains: images a second of the exported model against torch, on the CPU.

    python benchmarks/onnx_runtime.py [--rounds 15] [--json]

The default trunk at 112 and 224 pixels and conv4 at 28, both with 512-d heads, one image and 16 at once, from uint8
pixels to s and u. Both use as many threads as torch does by itself and take turns, so that both see the same machine;
medians count.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from idml.model import build_model, load_model, save_model
from idml.model.onnx import export_onnx, open_session, read_onnx, run_session

MODELS = {
    "lite0, 112 px": {"image_size": 112},
    "lite0, 224 px": {"image_size": 224},
    "conv4, 28 px": {"trunk": "conv4", "image_size": 28},
}
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


def measure(config: dict, rounds: int) -> dict:
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        both = arms(Path(folder), config)
        for batch in BATCHES:
            size = config["image_size"]
            images = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8)
            turns = {}
            for name, run in both.items():
                rate(run, images, 2)  # warms up
                turns[name] = max(1, round(SHORTEST * rate(run, images, 2) / batch))
            rates = {name: [] for name in both}
            for _ in range(rounds):
                for name, run in both.items():
                    rates[name].append(rate(run, images, turns[name]))
            ratios = [b / a for a, b in zip(rates["torch"], rates["onnx"], strict=True)]
            figures[batch] = {
                "torch, images/s": statistics.median(rates["torch"]),
                "ONNX Runtime, images/s": statistics.median(rates["onnx"]),
                "ratio": statistics.median(ratios),
            }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = {name: measure(config, options.rounds) for name, config in MODELS.items()}
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), **figures}))
        return
    print(f"{torch.get_num_threads()} threads")
    for name, batches in figures.items():
        for batch, row in batches.items():
            print(f"{name:14} batch {batch:2}   " + "   ".join(f"{key} {value:.2f}" for key, value in row.items()))


if __name__ == "__main__":
    main()

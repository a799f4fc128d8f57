"""What commands cost beyond what they cannot do without: forward passes, decoding, and the import of torch.

    python benchmarks/commands.py [--data FOLDER] [--goals index train evaluate search] [--rounds 5] [--json]

Photos of 500 × 375 pixels are made for the occasion, or FOLDER has sub-folders with images, one for each class. The
model is the default trunk at 224 pixels.

    index     `index_folder` into a new gallery against the bare ONNX Runtime on the same images, decoded and in memory.
              Goal: 0.9 × its images a second. Where all cores compute, decoding takes its share of them: the second
              ratio is to the bare runtime and decoding, one after the other, each on all cores
    train     `idml train --freeze-trunk`, nothing cached, against the forward passes that it makes. Goal: 1.2 × + 30 s
    evaluate  `idml evaluate` of that run against the forward passes that it makes. Goal: 1.3 ×
    search    `idml search` of one image, the whole process, against `python -c "import torch"`. Goal: 1 s more

Ours and the bare runtime take turns in one run, so that both see the same machine, and medians count. Each ratio is
given in wall time and in processor time: on a busy machine the second one says more. *Forward passes* are as many
images as the command shows to the trunk, in the bare runtime: batches of 8, and threads that wait as ONNX Runtime does
by default or sleep, whichever is faster. A run and an evaluation begin with imports done.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from idml.compat import keep_memory
from idml.data.images import crop_for_test, read_image
from idml.evaluation.evaluate import evaluate_run
from idml.model import build_model
from idml.model.feature_cache import FeatureCache
from idml.model.inference import TrunkSession
from idml.model.onnx import BATCH, export_model
from idml.parallel import run_in_threads
from idml.search.gallery import Gallery
from idml.search.indexing import index_folder
from idml.training.config import from_dict
from idml.training.loop import train
from loader import photos

SIZE = 224
GOALS = ("index", "train", "evaluate", "search")
INDEX, TRAIN, TRAIN_SECONDS, EVALUATE, SEARCH = 0.9, 1.2, 30.0, 1.3, 1.0
Seconds = dict[str, float]


# -------------------- clocks --------------------


def timed(call: Callable[[], object]) -> Seconds:
    """Wall and processor time of a call in this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def timed_process(command: list[str], environment: dict[str, str]) -> Seconds:
    """The same of a process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"wall": wall, "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


# -------------------- the bare runtime --------------------


class Bare:
    """ONNX Runtime alone, on images in memory."""

    def __init__(self, data: bytes) -> None:
        self.sessions = []
        for spin in "10":
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = torch.get_num_threads()
            options.add_session_config_entry("session.intra_op.allow_spinning", spin)
            self.sessions.append(onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]))

    def run(self, images: np.ndarray) -> Seconds:
        """Seconds for all images, by the faster session in each of the two times."""
        found = []
        for session in self.sessions:
            session.run(None, {"images": images[:BATCH]})
            parts = [images[i : i + BATCH] for i in range(0, len(images), BATCH)]
            found.append(timed(lambda s=session, p=parts: [s.run(None, {"images": part}) for part in p]))
        return {name: min(one[name] for one in found) for name in ("wall", "cpu")}


# -------------------- index --------------------


def measure_index(folder: Path, model: str, size: int, rounds: int, gallery: Path) -> dict[str, Any]:
    """Rates of `index_folder`, of the bare runtime and of decoding, and their ratios; leaves the last gallery."""
    bare = Bare(export_model(model))
    files = sorted(path for path in folder.rglob("*") if path.is_file())

    def decode(file: Path) -> np.ndarray:
        return crop_for_test(read_image(file), size).numpy()

    def decode_all() -> list[np.ndarray]:
        with closing(run_in_threads((partial(decode, file) for file in files), torch.get_num_threads())) as decoded:
            return list(decoded)

    images, results, rates = np.stack(decode_all()), [], []
    for number in range(rounds):
        place = gallery if number == rounds - 1 else gallery.with_name(f"{gallery.name}-{number}")
        alone, decoding = bare.run(images), timed(decode_all)
        with Gallery.create(place, model, runtime="onnx") as made:
            ours = timed(lambda made=made: index_folder(made, folder))
        both = {clock: alone[clock] + decoding[clock] for clock in alone}
        results.append(
            {f"index / bare, {clock}": alone[clock] / ours[clock] for clock in ours}
            | {f"index / bare and decoding, {clock}": both[clock] / ours[clock] for clock in ours}
        )
        rates.append(
            {"bare, images/s": len(files) / alone["wall"], "decoding, images/s": len(files) / decoding["wall"]}
            | {"index, images/s": len(files) / ours["wall"]}
        )
    return {"images": len(files), **medians(rates), **medians(results)}


# -------------------- train and evaluate --------------------


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the images that pass a trunk, whatever runs it."""
    seen, lock, compute = [0], threading.Lock(), FeatureCache.compute

    def counting(cache: FeatureCache, images: torch.Tensor) -> Any:
        with lock:
            seen[0] += len(images)
        return compute(cache, images)

    FeatureCache.compute = counting  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        FeatureCache.compute = compute  # type: ignore[method-assign]


def forward_passes(bare: Bare, size: int, turns: int = 8) -> Seconds:
    """Seconds for one image."""
    images = np.random.default_rng(0).random((BATCH * turns, 3, size, size), np.float32)
    return {clock: seconds / len(images) for clock, seconds in bare.run(images).items()}


def measure_run(command: Callable[[], object], bare: Bare, size: int) -> dict[str, float]:
    """A command's time, and that of its forward passes before and after it."""
    before = forward_passes(bare, size)
    with counted() as seen:
        took = timed(command)
    after = forward_passes(bare, size)
    out: dict[str, float] = {"forward passes": seen[0]}
    for clock, seconds in took.items():
        forward = seen[0] * (before[clock] + after[clock]) / 2
        out |= {f"command, {clock} s": seconds, f"forward, {clock} s": forward, f"ratio, {clock}": seconds / forward}
    return out


def trunk_session(size: int) -> Bare:
    """The default trunk in the bare runtime. The command exports it again: its cache is another one."""
    model, opened = build_model(image_size=size), []
    module = sys.modules[TrunkSession.__module__]
    original, module.open_session = module.open_session, lambda data, threads=None: opened.append(data)
    try:
        TrunkSession(model, keep=False)
    finally:
        module.open_session = original
        module._sessions.clear()
    return Bare(opened[0])


# -------------------- search --------------------


def measure_search(gallery: Path, image: Path, rounds: int, cache: Path) -> dict[str, float]:
    """Seconds of a search as a process of its own, and of the import of torch."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users have the compiled files
    search = [sys.executable, "-m", "idml.cli", "search", str(gallery), str(image)]
    bare = [sys.executable, "-c", "import torch"]
    for command in (search, bare):
        timed_process(command, environment)
    found = []
    for _ in range(rounds):
        ours, alone = timed_process(search, environment), timed_process(bare, environment)
        found.append(
            {f"search, {clock} s": ours[clock] for clock in ours}
            | {f"import torch, {clock} s": alone[clock] for clock in ours}
            | {f"beyond torch, {clock} s": ours[clock] - alone[clock] for clock in ours}
        )
    return medians(found)


# -------------------- goals --------------------


def verdict(results: dict[str, dict[str, float]]) -> list[str]:
    """Which goals are met, in wall time and in processor time."""
    out = []
    for clock, words in (("wall", "wall time"), ("cpu", "processor time")):
        if found := results.get("index"):
            for name in ("bare", "bare and decoding"):
                ratio = found[f"index / {name}, {clock}"]
                out.append(f"index / {name}, {words}: {ratio:.2f}; goal at least {INDEX}: {met(ratio >= INDEX)}")
        if found := results.get("train"):
            allowed = TRAIN * found[f"forward, {clock} s"] + TRAIN_SECONDS
            took = found[f"command, {clock} s"]
            said = f"train: {took:.0f} s {words}, forward passes {found[f'forward, {clock} s']:.0f} s"
            out.append(f"{said}; goal at most {allowed:.0f} s: {met(took <= allowed)}")
        if found := results.get("evaluate"):
            ratio = found[f"ratio, {clock}"]
            out.append(f"evaluate / forward, {words}: {ratio:.2f}; goal at most {EVALUATE}: {met(ratio <= EVALUATE)}")
        if found := results.get("search"):
            beyond = found[f"beyond torch, {clock} s"]
            out.append(
                f"search beyond torch, {words}: {beyond:.2f} s; goal at most {SEARCH} s: {met(beyond <= SEARCH)}"
            )
    return out


def met(reached: bool) -> str:
    return "met" if reached else "missed"


def measure(folder: Path, goals: list[str], rounds: int, work: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """The figures of each goal. The gallery that is searched and the run that is evaluated are made before."""
    os.environ["IDML_CACHE"] = str(work / "cache")
    if {"index", "search"} & {*goals}:
        found = measure_index(folder, "pretrained", SIZE, rounds if "index" in goals else 1, work / "gallery")
        if "index" in goals:
            yield "index", found
    if "search" in goals:
        image = next(path for path in sorted(folder.rglob("*")) if path.is_file())
        yield "search", measure_search(work / "gallery", image, rounds, work)
    if {"train", "evaluate"} & {*goals}:
        bare, data, run = trunk_session(SIZE), f"folder:{folder}", str(work / "run")
        config = from_dict({"data": data, "out": run, "train": "heads", "image_size": SIZE})
        found = measure_run(lambda: train(config), bare, SIZE)
        if "train" in goals:
            yield "train", found
        if "evaluate" in goals:
            yield "evaluate", measure_run(lambda: evaluate_run(run, data), bare, SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER")
    parser.add_argument("--goals", nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    keep_memory()  # as the command idml does
    results = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(options.data or f"{work}/photos")
        if not options.data:
            folder.mkdir()
            photos(folder)
        for name, figures in measure(folder, options.goals, options.rounds, Path(work)):
            results[name] = figures
            if not options.json:
                print(f"{name}: " + "   ".join(f"{key} {value:,.2f}" for key, value in figures.items()), flush=True)
    print(json.dumps(results) if options.json else "\n".join(verdict(results)))


if __name__ == "__main__":
    main()

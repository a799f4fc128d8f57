"""The embedded gallery against plain torch and faiss: adding, opening, and exact search, one query and batches.

    python benchmarks/gallery.py [--rows 60502] [--dimensions 512] [--batch 1000] [--uncertainty] [--json]

Random unit vectors, top 10. torch is a matrix product and topk on a tensor in memory; faiss is IndexFlatIP. The
engines take turns, so that all see the same machine; queries/s are of the median time, ratios of the shortest ones,
which a busy machine disturbs least. Goal: at most 1.3 times faiss at 60,502 rows. OMP_NUM_THREADS sets the threads of
all of them.
"""

import argparse
import hashlib
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import torch
from torch import Tensor

from idml.embeddings import Embeddings
from idml.metric import IntrospectiveMetric
from idml.search.engines import Item, Properties
from idml.search.engines.sqlite import SqliteEngine

K, MANY = 10, 256


def unit(rows: int, dimensions: int, seed: int) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(rows, dimensions, generator=noise))


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def turns(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The times of each call, made in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    return times


def fill(engine: SqliteEngine, vectors: Tensor, u: Tensor, batch: int) -> list[float]:
    """Add all rows; how long each batch took."""
    times = []
    for first in range(0, len(vectors), batch):
        numbers = range(first, min(first + batch, len(vectors)))
        items = [
            Item(path=f"{n // 12}/{n}.jpg", checksum=hashlib.sha256(b"%d" % n).hexdigest(), label=f"class {n // 12}")
            for n in numbers
        ]
        part = slice(first, first + batch)
        embeddings, images = Embeddings(vectors[part], u[part]), [bytes(2000) for _ in numbers]
        times.append(timed(lambda items=items, e=embeddings, images=images: engine.add(items, e, images)))
    return times


def measure(folder: Path, rows: int, dimensions: int, batch: int, uncertainty: bool) -> dict[str, float]:
    vectors, queries = unit(rows, dimensions, 0), unit(MANY, dimensions, 1)
    u, v = (0.05 * unit(n, dimensions if uncertainty else 1, 2) for n in (rows, MANY))
    properties = Properties("benchmark", dimensions, dimensions if uncertainty else 0)
    with SqliteEngine.create(folder / "g", properties) as engine:
        times = fill(engine, vectors, u, batch)
        again = sum(fill(engine, vectors[:batch], u[:batch], batch))
        one = fill(engine, unit(5, dimensions, 3), u[:5], 1)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    opening = statistics.median(timed(lambda: SqliteEngine.open(folder / "g").close()) for _ in range(3))
    engine = SqliteEngine.open(folder / "g")
    first = timed(lambda: engine.search(Embeddings.certain(queries[:1]), K))
    index = faiss.IndexFlatIP(dimensions)
    index.add(vectors.numpy())
    figures = {
        "rows": rows,
        "added, items/s": rows / sum(times),
        "added again unchanged, items/s": min(batch, rows) / again,
        "one item added, ms": 1000 * statistics.median(one),
        "bytes an item (2000 of them thumbnail)": size / rows,
        "open, s": opening,
        "first search (checks all vectors), s": first,
    }
    for count, rounds in ((1, 30), (2, 15), (8, 10), (MANY, 5)):
        some = queries[:count]
        calls: dict[str, Callable[[], object]] = {
            "gallery": lambda some=some: engine.search(Embeddings.certain(some), K),
            "torch": lambda some=some: (some @ vectors.T).topk(K, dim=1),
            "faiss": lambda some=some: index.search(some.numpy(), K),
        }
        if uncertainty:
            embeddings = Embeddings(some, v[:count])
            calls["metric"] = lambda e=embeddings: engine.search(e, K, IntrospectiveMetric())
        times = turns(calls, rounds)
        for name, own in times.items():
            figures[f"{count} at a time, {name}, queries/s"] = count / statistics.median(own)
        for name in ("torch", "faiss"):
            figures[f"{count} at a time, gallery / {name}"] = min(times["gallery"]) / min(times[name])
    figures["peak memory, MB (with the vectors of torch and faiss)"] = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    )
    engine.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=60502)
    parser.add_argument("--dimensions", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1000, help="items added at a time")
    parser.add_argument("--uncertainty", action="store_true", help="keep u, and search with the metric too")
    parser.add_argument("--folder", help="where the gallery is written (a temporary folder)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure(Path(folder), options.rows, options.dimensions, options.batch, options.uncertainty)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:55} {value:12.3f}")


if __name__ == "__main__":
    main()

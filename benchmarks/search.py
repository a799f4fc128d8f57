"""Keeping and searching vectors: the embedded engine against faiss, bare, and a Milvus server.

    python benchmarks/search.py [--size 60k|1m|small] [--engines NAME…] [--limit 1800] [--json]

Made unit vectors in overlapping classes, 512-d; the ten nearest of 256 queries that are not among them. The contenders
come one after another, and each fills and searches in two processes of its own:

    embedded            our engine in a folder, exact; every batch is on the disk before the next one is added
    faiss-l2, faiss-ip  IndexFlatL2 and IndexFlatIP, exact, in memory; written to a file at the end
    faiss-ivf           IndexIVFFlat, 1,024 lists of which 64 are searched (fewer of both at the small size)
    milvus              our Milvus engine on a server of its own (the one of the tests, and its settings), HNSW or
                        IVF_FLAT; the server gets as many cores as the others get threads, and its client runs beside it

added/s     vectors a second, in batches (faiss-ivf: training too)
ready s     how long Milvus then takes until everything is indexed
open s      from opening in a new process to the first answer; files are in the system's cache
p50, p99    of single queries; batch/s: queries a second in batches of 64; recall: share of the true ten
adding MB   the most memory above that of the imports, while adding
held MB     the same while searching; mapped MB: pages of files, which the system can take back
server MB   what the Milvus server holds at the end, and held at most

Goal: exact search of the embedded engine at most 1.3 × faiss Flat. For that both take turns in one process, single
queries and batches, and the shortest times count, which a busy machine disturbs least; the worse of L2 and IP is shown.
A contender that takes longer than the limit or more than 12 GB has no (further) result. OMP_NUM_THREADS sets threads.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from search_contenders import CONTENDERS, QUERIES, SIZES, Contender, Faiss, Figures, Size, make

MEMORY = 12 << 30
BATCH = 64
GOAL = 1.3
COLUMNS = {
    "added/s": 0, "ready s": 1, "open s": 2, "p50 ms": 2, "p99 ms": 2, "batch/s": 0, "recall": 3, "adding MB": 0,
    "held MB": 0, "mapped MB": 0, "server MB": 0, "peak MB": 0, "disk MB": 0,
}  # fmt: skip


def memory(which: str, process: int | str = "self") -> float:
    """VmHWM (at most), VmRSS, RssAnon or RssFile (now) of a process, in MB."""
    return int(Path(f"/proc/{process}/status").read_text().split(f"{which}:")[1].split()[0]) / 1024


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def repeated(call: Callable[[int], object], least: int, most: int, seconds: float) -> list[float]:
    """Times of call(0), call(1)…: at least and at most so many, and none begun after so many seconds."""
    times: list[float] = []
    while len(times) < least or (len(times) < most and sum(times) < seconds):
        times.append(timed(lambda: call(len(times))))
    return times


def fill(contender: Contender) -> Iterator[Figures]:
    held = memory("VmRSS")
    yield from contender.fill()
    yield {"adding MB": memory("VmHWM") - held}


def search(contender: Contender) -> Iterator[Figures]:
    queries, nearest = (np.load(contender.folder / f"{part}.npy") for part in ("queries", "nearest"))
    batches = np.split(queries, range(BATCH, len(queries), BATCH))
    anonymous, mapped = memory("RssAnon"), memory("RssFile")
    yield {"open s": timed(contender.open) + timed(lambda: contender.search(queries[:1]))}
    found = np.concatenate([contender.search(part) for part in batches])
    pairs = zip(found.tolist(), nearest.tolist(), strict=True)
    yield {"recall": sum(len(set(own) & set(true)) for own, true in pairs) / nearest.size}
    times = repeated(lambda i: contender.search(queries[i % QUERIES, None]), 100, 2000, 20)
    yield {"p50 ms": 1000 * statistics.median(times), "p99 ms": 1000 * float(np.quantile(times, 0.99))}
    yield {"batch/s": BATCH / statistics.median(repeated(lambda i: contender.search(batches[i % len(batches)]), 6, 100, 20))}
    yield {"held MB": memory("RssAnon") - anonymous, "mapped MB": memory("RssFile") - mapped}
    if contender.place == "":
        return

"""The embedded engine against faiss Flat in `search.py`: processes of their own that search in turns.

In one process the two would hinder each other: threads of a BLAS or of OpenMP wait busily for a while after the work.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from search_contenders import Contender, Figures

PAUSE = 0.05  # seconds, after which nobody waits busily any more
ROUNDS, SECONDS = (8, 60), 10.0  # at least and at most so many turns, as many as fit


def answer(contender: Contender) -> Iterator[Figures]:
    """Search for as many queries as each line of the input says; how long it took."""
    queries = np.load(contender.folder / "queries.npy")
    contender.open()
    for line in sys.stdin:
        started = time.perf_counter()
        contender.search(queries[: int(line)])
        yield {"seconds": time.perf_counter() - started}


def turns(
    ours: Sequence[str], theirs: Sequence[str], threads: int, counts: Sequence[int], base: dict[str, str] | None = None
) -> list[float]:
    """Our shortest time over theirs, for so many queries at a time; they get so many threads, and this environment."""
    env, ratios = {**(base or os.environ), "OMP_NUM_THREADS": str(threads)}, []
    with _started(ours, None) as mine, _started(theirs, env) as other:
        for count in counts:
            times: list[list[float]] = []
            begun = time.monotonic()
            while len(times) < ROUNDS[0] or (len(times) < ROUNDS[1] and time.monotonic() - begun < SECONDS):
                times.append([_ask(process, count) for process in (mine, other)])
            shortest = [min(own) for own in zip(*times, strict=True)]
            ratios.append(shortest[0] / shortest[1])
    return ratios


def _started(command: Sequence[str], env: dict[str, str] | None) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def _ask(process: "subprocess.Popen[str]", count: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    time.sleep(PAUSE)
    print(count, file=process.stdin, flush=True)
    reply = process.stdout.readline()
    if not reply:
        raise OSError("a process that was to take turns has ended")
    return float(json.loads(reply)["seconds"])

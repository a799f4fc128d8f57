"""Storing and searching vectors: the SQLite engine against bare faiss, the engine before it, and a Milvus server.

    python benchmarks/search.py [--size 60k|1m|small] [--engines NAME…] [--old SRC] [--limit 1800] [--json]

Made unit vectors in overlapping classes, and the ten nearest of 256 queries that are not among them. The contenders
come one after another, and each adds and searches in two processes of its own:

    embedded            our engine in a folder, exact; every 64 vectors are on the disk before the next ones are added
    old                 the same before SQLite, from the source tree SRC (only with --old)
    faiss-l2, faiss-ip  IndexFlatL2 and IndexFlatIP, exact, in memory; written to a file at the end
    faiss-ivf           IndexIVFFlat with 1,024 lists, of which 64 are searched (fewer of both at the small size)
    milvus              our Milvus engine on a server of its own with Milvus's usual settings, HNSW or IVF_FLAT; it
                        gets as many cores as the others get threads, and its client runs beside it

    added/s     vectors a second (faiss-ivf: training counts)
    ready s     until Milvus has indexed what was added; it may go on merging segments and index them again
    open s      from opening, in a new process, to the first answer; files are in the system's cache
    follow s    the first search after another process has added 64 vectors
    p50, p99    of single queries; batch/s: queries a second in batches of 64; recall: found of the true ten
    adding MB   the most memory while adding, above that of the imports; held MB: the same while searching
    mapped MB   pages of files while searching, without libraries; the system can take them back
    server MB   what the Milvus server holds at the end; peak MB: and held at most

Goals for the embedded engine: a single query in at most 1.1 × the time of faiss Flat and of the engine before it,
opening in at most 10 s, follow in at most 1 s, 2,000 vectors a second added, memory of at most 1.3 × the vectors. For
faiss the ratio is that of the medians, each as it is set up by default. A second ratio is stricter: the two take turns,
each in its process, the shortest times count, and faiss counts as fast as it is with one thread or with all, which is
not always faster. With few vectors that ratio shows what a query costs beside the product, about 1 ms. A contender that
takes longer than the limit or more than 12 GB has no (further) result. OMP_NUM_THREADS sets the threads of all.
"""

import argparse
import importlib
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
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from search_contenders import CONTENDERS, QUERIES, SIZES, Contender, Embedded, Figures, make
from search_server import milvus
from search_turns import answer, turns

MEMORY = 12 << 30
BATCH = 64
FLAT = ("faiss-l2", "faiss-ip")
LARGE = 60_000  # with fewer vectors most of the time goes elsewhere
RATIO, OPEN, FOLLOW, ADDED, MEMORY_SHARE = 1.1, 10.0, 1.0, 2_000, 1.3  # the goals
SOON = 100  # milliseconds that a person does not notice
COLUMNS = {
    "added/s": 0, "ready s": 1, "open s": 2, "follow s": 3, "p50 ms": 2, "p99 ms": 2, "batch/s": 0, "recall": 4,
    "adding MB": 0, "held MB": 0, "mapped MB": 0, "server MB": 0, "peak MB": 0, "disk MB": 0,
}  # fmt: skip


def memory(which: str, process: int | str = "self") -> float:
    """VmHWM (at most), VmRSS or RssAnon (now) of a process, in MB."""
    return int(Path(f"/proc/{process}/status").read_text().split(f"{which}:")[1].split()[0]) / 1024


def mapped_files() -> float:
    """Pages of mapped files in memory, in MB, without those of programs and libraries."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (words := line.split())[0]:
            counts = len(words) > 5 and words[5].startswith("/") and ".so" not in words[5]
        elif counts and words[0] == "Rss:":
            total += int(words[1])
    return total / 1024


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def repeated(call: Callable[[int], object], least: int, most: int, seconds: float) -> list[float]:
    """Times of call(0), call(1)…, ``least`` to ``most`` of them, as many as fit into the seconds."""
    times: list[float] = []
    while len(times) < least or (len(times) < most and sum(times) < seconds):
        times.append(timed(lambda: call(len(times))))
    return times


def fill(contender: Contender) -> Iterator[Figures]:
    Path("/proc/self/clear_refs").write_text("5")  # from here on, VmHWM counts anew
    held = memory("VmRSS")
    yield from contender.fill()
    yield {"adding MB": memory("VmHWM") - held}


def search(contender: Contender) -> Iterator[Figures]:
    queries, nearest = (np.load(contender.folder / f"{part}.npy") for part in ("queries", "nearest"))
    batches = np.split(queries, range(BATCH, len(queries), BATCH))
    anonymous, mapped = memory("RssAnon"), mapped_files()
    yield {"open s": timed(contender.open) + timed(lambda: contender.search(queries[:1]))}
    found = np.concatenate([contender.search(part) for part in batches])
    pairs = zip(found.tolist(), nearest.tolist(), strict=True)
    yield {"recall": sum(len({*own} & {*true}) for own, true in pairs) / nearest.size}
    times = repeated(lambda i: contender.search(queries[i % QUERIES, None]), 100, 2000, 20)
    yield {"p50 ms": 1000 * statistics.median(times), "p99 ms": 1000 * float(np.quantile(times, 0.99))}
    times = repeated(lambda i: contender.search(batches[i % len(batches)]), 6, 200, 20)
    yield {"batch/s": BATCH / statistics.median(times)}
    yield {"held MB": memory("RssAnon") - anonymous, "mapped MB": mapped_files() - mapped}


def follow(contender: Embedded, again: list[str]) -> Iterator[Figures]:
    """Let another process add vectors; how long the next search takes."""
    queries = np.load(contender.folder / "queries.npy")
    subprocess.run(again, check=True, stdout=subprocess.DEVNULL)
    yield {"follow s": timed(lambda: contender.search(queries[:1]))}


def contend(name: str, stage: str, size: str, folder: str, place: str, *, limit: int) -> None:
    """Let a contender add or search in this process; print figures as they come."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    signal.alarm(limit)  # ends the process, also inside a library's loops
    contender = CONTENDERS[name](Path(folder), SIZES[size], place)
    for module in contender.needs:
        importlib.import_module(module)
    if stage == "more":
        assert isinstance(contender, Embedded)
        contender.add_more()
        return
    for figures in {"fill": fill, "search": search, "turns": answer}[stage](contender):
        print(json.dumps(figures), flush=True)
    if name == "embedded" and stage == "search":
        assert isinstance(contender, Embedded)
        for figures in follow(contender, command(name, "more", size, folder, place, limit)):
            print(json.dumps(figures), flush=True)


def command(name: str, stage: str, size: str, data: str, place: str, limit: float) -> list[str]:
    seconds = str(max(1, int(limit)))
    return [sys.executable, __file__, "--limit", seconds, "--contend", name, stage, size, data, place]


def environment(name: str, old: str | None) -> dict[str, str]:
    """The environment of a contender's processes: the engine before SQLite comes from another source tree."""
    return {**os.environ, "PYTHONPATH": old} if name == "old" and old else {**os.environ}


def measure(name: str, size: str, data: str, limit: int, old: str | None = None) -> dict[str, Any]:
    """The figures of a contender; ``nothing`` says why there are none, or no more."""
    figures: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as own,
        tempfile.TemporaryFile("w+") as errors,
        milvus(own, MEMORY) if name == "milvus" else nullcontext((f"{own}/kept", None)) as (place, server),
    ):
        end = time.monotonic() + limit
        for stage in ("fill", "search"):
            call = command(name, stage, size, data, place, end - time.monotonic())
            env = environment(name, old)
            with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=errors, text=True, env=env) as process:
                try:
                    for line in process.stdout or ():
                        figures |= json.loads(line)
                except BaseException:
                    process.kill()
                    raise
            if process.returncode:
                errors.seek(0)
                why = [str(process.returncode), *errors.read().splitlines()][-1]
                slow = process.returncode == -signal.SIGALRM
                figures["nothing"] = f"no result in {limit:,} s" if slow else f"no result: {why}"
                break
        if server is not None and server.poll() is None:
            figures |= {"server MB": memory("VmRSS", server.pid), "peak MB": memory("VmHWM", server.pid)}
        elif server is not None:
            figures["nothing"] = "no result: the server ended by itself"
        figures["disk MB"] = stored(Path(own)) / 2**20
        if name == "embedded" and "nothing" not in figures:
            figures |= against_faiss(size, data, place, limit)
            if old:
                figures |= against_old(size, data, place, limit, old)
    return figures


def stored(folder: Path) -> int:
    """Bytes of the files in a folder, some of which a server may delete just now."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def against_faiss(size: str, data: str, place: str, limit: int) -> Figures:
    """Our shortest time over the best of faiss Flat: L2 and IP, with one thread and with all."""
    ratios = []
    for name in FLAT:
        with tempfile.TemporaryDirectory() as own:
            kept = f"{own}/kept"
            subprocess.run(command(name, "fill", size, data, kept, limit), check=True, stdout=subprocess.DEVNULL)
            ours = command("embedded", "turns", size, data, place, limit)
            theirs = command(name, "turns", size, data, kept, limit)
            for threads in sorted({1, torch.get_num_threads()}):
                ratios.append(turns(ours, theirs, threads, (1, BATCH)))
    single, batch = (max(own) for own in zip(*ratios, strict=True))
    return {"single / faiss": single, "batch / faiss": batch}


def against_old(size: str, data: str, place: str, limit: int, old: str) -> Figures:
    """Our shortest time over that of the engine before SQLite."""
    with tempfile.TemporaryDirectory() as own:
        kept, env = f"{own}/kept", environment("old", old)
        subprocess.run(command("old", "fill", size, data, kept, limit), check=True, stdout=subprocess.DEVNULL, env=env)
        ours = command("embedded", "turns", size, data, place, limit)
        theirs = command("old", "turns", size, data, kept, limit)
        single, batch = turns(ours, theirs, torch.get_num_threads(), (1, BATCH), env)
    return {"single / old": single, "batch / old": batch}


def line(name: str, figures: dict[str, Any]) -> str:
    cells = (f"{figures[c]:,.{digits}f}" if c in figures else "-" for c, digits in COLUMNS.items())
    shown = "".join(f"{cell:>{len(c) + 2}}" for c, cell in zip(COLUMNS, cells, strict=True))
    if "nothing" not in figures:
        return f"{name:<10}{shown}"
    added = f" ({figures['added']:,} were added)" if "added" in figures else ""
    return f"{name:<10}{shown}\n{'':<10}{figures['nothing']}{added}"


def verdict(rows: int, dims: int, index: str, results: dict[str, dict[str, Any]]) -> list[str]:
    """Which goals are met, and where to move to Milvus."""
    ours, server = results.get("embedded", {}), results.get("milvus", {})
    if "batch / faiss" not in ours or rows < LARGE:
        return []
    vectors = rows * dims * 4 / 2**20
    memory = ours["held MB"] + ours["mapped MB"]
    flat = min(results[name]["p50 ms"] for name in FLAT if "p50 ms" in results.get(name, {}))
    single = ours["p50 ms"] / flat
    goals = [
        (f"single query, p50 / that of the faster faiss Flat: {single:.2f}", RATIO, single),
        (f"opening: {ours['open s']:.1f} s", OPEN, ours["open s"]),
        (f"search after another process added 64: {ours['follow s']:.2f} s", FOLLOW, ours["follow s"]),
        (f"memory / vectors: {memory / vectors:.2f}", MEMORY_SHARE, memory / vectors),
    ]
    if "single / old" in ours:
        said = f"single query / the engine before SQLite, in turns: {ours['single / old']:.2f}"
        goals.insert(1, (said, RATIO, ours["single / old"]))
    out = [f"{said}; goal at most {goal:g}: {'met' if value <= goal else 'missed'}" for said, goal, value in goals]
    out += [
        f"added: {ours['added/s']:,.0f} vectors/s in batches of 64; goal at least {ADDED:,}: "
        f"{'met' if ours['added/s'] >= ADDED else 'missed'}",
        f"in turns, shortest times, faiss with the better number of threads: single query {ours['single / faiss']:.2f}"
        f", batches of {BATCH} {ours['batch / faiss']:.2f}",
        f"exact search takes {1e5 * ours['p50 ms'] / rows:.1f} ms for each 100,000 vectors, so a single query "
        f"{SOON} ms at about {round_down(rows * SOON / ours['p50 ms']):,} vectors",
    ]
    if "batch/s" in server:
        as_long = round_down(rows * server["p50 ms"] / ours["p50 ms"])
        batch = round_down(rows * ours["batch/s"] / server["batch/s"])
        out.append(
            f"Milvus with {index} (recall {server['recall']:.3f}) takes as long as exact search of about {as_long:,} "
            f"vectors for a single query, of {batch:,} in batches"
        )
    out.append(
        "move to Milvus where that is too slow, where the vectors no longer fit into memory, or where several machines "
        "add and search; until then a folder is exact and needs no server"
    )
    return out


def round_down(number: float) -> int:
    """Two digits of it."""
    step: int = 10 ** max(0, len(str(int(number))) - 2)
    return int(number) // step * step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="60k")
    parser.add_argument("--engines", nargs="+", choices=list(CONTENDERS), help="all but old if left out")
    parser.add_argument("--old", metavar="SRC", help="the src folder of a version before SQLite, to compare with")
    parser.add_argument("--limit", type=int, default=1800, help="seconds for each contender")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--contend", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contend:
        contend(*options.contend, limit=options.limit)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    size, results = SIZES[options.size], {}
    if not options.json:
        print(f"{size.rows:,} × {size.dims}, {torch.get_num_threads()} threads")
        print(f"{'':<10}" + "".join(f"{c:>{len(c) + 2}}" for c in COLUMNS), flush=True)
    with tempfile.TemporaryDirectory() as data:
        make(Path(data), size)
        for name in options.engines or [name for name in CONTENDERS if name != "old" or options.old]:
            try:
                results[name] = measure(name, options.size, data, options.limit, options.old)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # such as: no server here
                results[name] = {"nothing": f"no result: {error}"}
            if not options.json:
                print(line(name, results[name]), flush=True)
    if options.json:
        print(json.dumps(results))
    else:
        print("\n".join(verdict(size.rows, size.dims, size.milvus, results)))
    assert results.get("embedded", {}).get("recall", 1) == 1, "the embedded engine missed a neighbour"


if __name__ == "__main__":
    main()

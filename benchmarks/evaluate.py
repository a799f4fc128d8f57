"""Exact evaluation of a whole test set: ours against pytorch-metric-learning, faiss and the bare matrix product.

    python benchmarks/evaluate.py [--size sop|cub|small] [--peers NAME…] [--growth [SVG]] [--limit 300] [--json]
                                  [--oml-python PYTHON]

Made embeddings, unit vectors in overlapping classes, as many as in the test sets of Stanford Online Products or
CUB-200. Each contender runs in a process of its own, with the imports and a small run behind it when the clock starts.
``× floor`` is its time over that of the product of all pairs, in chunks of 64 MB and with nothing else done, by torch
or numpy, whichever has the faster BLAS here, taken in the same process on a share of the queries right before and
after. ``extra MB`` is the most memory held above what was held at the start. A contender has no result if it takes
longer than the limit or more than 12 GB.

Goal at the size of Stanford Online Products: ours at most 1.5 × the floor with less than 400 MB, the introspective
metric at most 2.5 × our Euclidean. Recall@1, R-Precision and MAP@R of all must agree to 1e-6.

open-metric-learning needs numpy < 2, so it takes part only if ``--oml-python`` names a Python that has it.
"""

import argparse
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from contenders import CHUNK, OURS, PEERS, SIZES, Size, made, product

MEMORY = 12 << 30
GROWTH = Path(__file__).parent.parent / "docs" / "evaluate_growth.svg"
FIGURES = ("recall@1", "recall@10", "r_precision", "map@r")


def memory(which: str) -> float:
    """VmRSS or VmHWM, the memory held now or at most, in MB."""
    return int(Path("/proc/self/status").read_text().split(f"{which}:")[1].split()[0]) / 1024


def contend(name: str, folder: Path, limit: int) -> None:
    """Run one contender in this process, print what it took."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    run = (OURS | PEERS)[name]
    x, u, labels = (torch.from_numpy(np.load(folder / f"{part}.npy")) for part in ("x", "u", "labels"))
    run(*made(Size(300, x.shape[1], 20, 10, 20)))
    share = max(2 * CHUNK // len(x), len(x) // 16)
    product(x, 256)
    before = product(x, share)
    Path("/proc/self/clear_refs").write_text("5")  # from here on, VmHWM counts anew
    held = memory("VmRSS")
    signal.alarm(limit)  # ends the process, also inside a library's loops
    started = time.perf_counter()
    figures = run(x, u, labels)
    seconds = time.perf_counter() - started
    signal.alarm(0)
    extra = memory("VmHWM") - held
    floor = (before + product(x, share)) / 2
    figures = figures() if callable(figures) else figures
    seconds = figures.pop("seconds", seconds)  # the product's own, without the making of its room
    print(json.dumps({"seconds": seconds, "floor": seconds / floor, "extra_mb": extra, "figures": figures}))


def measure(size: Size, names: list[str], options: argparse.Namespace) -> dict[str, dict]:
    """What each contender took, or under ``nothing`` why it has no result; each is printed as it comes."""
    if not options.json:
        print(f"\n{size.rows:,} × {size.dims}, {size.classes:,} classes, {torch.get_num_threads()} threads")
        print(f"{'':<15}{'seconds':>9}{'× floor':>9}{'extra MB':>10}", flush=True)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for part, values in zip(("x", "u", "labels"), made(size), strict=True):
            np.save(f"{folder}/{part}.npy", values.numpy())
        for name in names:
            python = options.oml_python if name == "oml" else sys.executable
            command = [python, __file__, "--contend", name, folder, "--limit", str(options.limit)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                results[name] = json.loads(done.stdout.splitlines()[-1])
            elif done.returncode == -signal.SIGALRM:
                results[name] = {"nothing": f"no result in {options.limit} s"}
            else:
                results[name] = {"nothing": f"no result: {[str(done.returncode), *done.stderr.splitlines()][-1]}"}
            if not options.json:
                print(line(name, results[name]), flush=True)
    return results


def line(name: str, result: dict) -> str:
    if "nothing" in result:
        return f"{name:<15}{result['nothing']}"
    shown = ", ".join(f"{key} {result['figures'][key]:.4f}" for key in (*FIGURES, "nmi") if key in result["figures"])
    return f"{name:<15}{result['seconds']:>9.2f}{result['floor']:>9.2f}{result['extra_mb']:>10.0f}  {shown}"


def differences(results: dict[str, dict]) -> list[str]:
    """Where a contender with the Euclidean distance did not find what ours found."""
    given = {name: r["figures"] for name, r in results.items() if "figures" in r and name != "introspective"}
    wanted = given.get("ours", {})
    return [
        f"{key}: ours {wanted[key]:.8f}, {name} {figures[key]:.8f}"
        for name, figures in given.items()
        for key in FIGURES
        if key in figures and key in wanted and abs(figures[key] - wanted[key]) > 1e-6
    ]


def grow(options: argparse.Namespace) -> dict[int, dict[str, dict]]:
    """Ever more images; who had no result is not asked again."""
    names, rows = [name for name in (*OURS, *options.peers) if name != "nmi"], {}
    like = SIZES["small" if options.size == "small" else "sop"]
    for factor in (1, 2, 4, 8):
        n = factor * (500 if options.size == "small" else 10_000)
        size = like._replace(rows=n, classes=n * like.classes // like.rows)
        rows[n] = measure(size, [name for name in names if all("seconds" in r[name] for r in rows.values())], options)
        rows[n] |= {name: {"nothing": "not tried"} for name in names if name not in rows[n]}
    draw(rows, options.growth)
    if not options.json:
        for key in ("seconds", "extra_mb"):
            print(f"\n| {key} | " + " | ".join(f"{n:,}" for n in rows) + " |\n|" + " --- |" * (len(rows) + 1))
            for name in names:
                cells = (f"{r[name][key]:.3g}" if key in r[name] else r[name]["nothing"] for r in rows.values())
                print(f"| {name} | " + " | ".join(cells) + " |")
        print(f"\ndrawn: {options.growth}")
    return rows


def draw(rows: dict[int, dict[str, dict]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "svg.hashsalt": "idml", "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name in next(iter(rows.values())):
        done = [(n, r[name]) for n, r in rows.items() if "seconds" in r[name]]
        for axis, key in zip(axes, ("seconds", "extra_mb"), strict=True):
            axis.plot([n for n, _ in done], [max(r[key], 0.1) for _, r in done], marker="o", markersize=4, label=name)
    for axis, label in zip(axes, ("seconds", "extra memory, MB"), strict=True):
        axis.set(xlabel="images", ylabel=label, xscale="log", yscale="log")
        axis.set_xticks(list(rows), [f"{n:,}" for n in rows], minor=False)
        axis.minorticks_off()
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="sop")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--limit", type=int, default=300, help="seconds for each contender")
    parser.add_argument("--growth", nargs="?", type=Path, const=GROWTH, help="10,000 to 80,000 images, drawn here")
    parser.add_argument("--oml-python", help="a Python that has open-metric-learning")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--contend", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contend:
        contend(options.contend[0], Path(options.contend[1]), options.limit)
        return
    if "oml" in options.peers and options.oml_python is None:
        print("open-metric-learning is left out: it needs a Python of its own, see --oml-python", file=sys.stderr)
        options.peers.remove("oml")
    if options.growth:
        report = grow(options)
    else:
        size = SIZES[options.size]
        report = {size.rows: measure(size, [*OURS, *options.peers], options)}
    apart = [f"{n:,} images, {what}" for n, results in report.items() for what in differences(results)]
    if options.json:
        print(json.dumps({"results": report, "differences": apart}))
    else:
        print()
        for n, results in report.items():
            if all("floor" in results[name] for name in ("ours", "introspective")):
                ratio = results["introspective"]["floor"] / results["ours"]["floor"]
                print(f"{n:,} images: introspective / ours {ratio:.2f}")
        print("\n".join(apart) or "Recall@1, Recall@10, R-Precision and MAP@R of all contenders equal ours to 1e-6")
    assert not apart, "contenders disagree"


if __name__ == "__main__":
    main()

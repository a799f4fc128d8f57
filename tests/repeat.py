"""`make repeat`: run the tests many times in a row while other processes keep both cores busy. Tests never flake.

    python tests/repeat.py [--runs 10] [--burners 2] [--log results/repeat.jsonl] [PYTEST ARGUMENTS]

Burners are processes that only compute. `--burners 0` is for a machine that other work keeps busy, such as runs of
`idml reproduce`. How much of the cores the tests did not get is measured in either case.

Each run is one line in the log: its number, outcome, seconds, and the tests that failed. Started again, on this machine
or another one, the script goes on after the last run of the same code; a failed run counts too. Documents and results
may change in between. Each run changes the line of docs/reliability.md about these runs. Exit status 1 if a run has
failed.
"""

import argparse
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG, PAGE = ROOT / "results" / "repeat.jsonl", ROOT / "docs" / "reliability.md"
LINE = "| the tests in a row on a busy machine |"
CODE = ("src", "tests", "examples", "benchmarks", "pyproject.toml", "constraints.txt")
BURN = "while True: pass"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def hash_of_code() -> str:
    """A short hash of the sources, the tests and what they need, as they are in the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z", *CODE], cwd=ROOT, capture_output=True, check=True).stdout
    names = [name for name in sorted(listed.split(b"\0")) if name and (ROOT / os.fsdecode(name)).is_file()]
    content = (name + b"\0" + (ROOT / os.fsdecode(name)).read_bytes() for name in names)
    return hashlib.sha256(b"\0".join(content)).hexdigest()[:12]


def read_log(path: Path, of: str) -> list[dict]:
    """The finished runs of a version of the code."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [run for run in map(json.loads, lines) if run["code"] == of]


def with_figure(text: str, runs: list[dict]) -> str:
    """The page of all figures with the current line about these runs."""
    passed, minutes = sum(run["passed"] for run in runs), [run["seconds"] / 60 for run in runs]
    figure = (
        f"{passed} of {len(runs)} runs of the same code passed, {min(minutes):.0f} to {max(minutes):.0f} minutes each"
    )
    others = [run["others"] for run in runs]
    beside = f"beside other work that took {min(others):.0%} to {max(others):.0%} of all cores".replace("%", " %")
    line = f"{LINE} {figure}, {beside} ({runs[-1]['date']}) | `make repeat` |"
    return "\n".join(line if old.startswith(LINE) else old for old in text.split("\n"))


def busy_seconds() -> float:
    """Processor seconds that all processes of the machine have used, the share of other virtual machines included."""
    first = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _idle, _waiting, irq, softirq, steal, *_ = map(int, first.split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor seconds of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_tests(arguments: list[str], burners: int) -> dict:
    """One run of the tests beside busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(burners)]
    started, before = time.monotonic(), busy_seconds() - own_seconds()
    try:
        done = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True)
        others = busy_seconds() - own_seconds() - before
    finally:
        for process in busy:
            process.kill()
            process.wait()
    summary = (done.stdout.strip().splitlines() or [""])[-1]
    seconds = time.monotonic() - started
    return {
        "passed": done.returncode == 0,
        "seconds": round(seconds),
        "others": round(others / seconds / (os.cpu_count() or 1), 2),
        "date": time.strftime("%Y-%m-%d"),
        "failed": sorted(set(FAILED.findall(done.stdout))),
        "summary": summary[:300],
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--burners", type=int, default=2)
    parser.add_argument("--log", type=Path, default=LOG)
    options, rest = parser.parse_known_args(arguments)
    of = hash_of_code()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    while (number := len(read_log(options.log, of)) + 1) <= options.runs:
        print(f"run {number} of {options.runs} …", file=sys.stderr, flush=True)
        found = {"code": of, "run": number, **run_tests(rest or ["-n", "2", "--dist", "worksteal"], options.burners)}
        with options.log.open("a") as file:
            file.write(json.dumps(found) + "\n")
        if options.log == LOG:
            PAGE.write_text(with_figure(PAGE.read_text(), read_log(LOG, of)))
        print(f"  {'passed' if found['passed'] else 'FAILED'} in {found['seconds']} s {' '.join(found['failed'])}")
    runs = read_log(options.log, of)
    passed = sum(run["passed"] for run in runs)
    print(f"{passed} of {len(runs)} runs passed ({of})")
    return 0 if passed == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())

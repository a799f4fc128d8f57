"""`make repeat`: run the tests many times in a row while other processes keep both cores busy. Tests never flake.

    python tests/repeat.py [--runs 10] [--burners 2] [--log build/repeat.jsonl] [PYTEST ARGUMENTS]

Each run is one line in the log: its number, outcome, seconds, and the tests that failed. Started again, the script goes
on after the last run of the same commit; a failed run counts too. Exit status 1 if a run has failed.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BURN = "while True: pass"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def commit() -> str:
    """The commit of the checkout, with a mark if files differ from it."""
    return subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()


def read_log(path: Path, of: str) -> list[dict]:
    """The finished runs of a commit."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [run for run in map(json.loads, lines) if run["commit"] == of]


def run_tests(arguments: list[str], burners: int) -> dict:
    """One run of the tests beside busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(burners)]
    started = time.monotonic()
    try:
        done = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    summary = (done.stdout.strip().splitlines() or [""])[-1]
    return {
        "passed": done.returncode == 0,
        "seconds": round(time.monotonic() - started),
        "failed": sorted(set(FAILED.findall(done.stdout))),
        "summary": summary[:300],
    }


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--burners", type=int, default=2)
    parser.add_argument("--log", type=Path, default=ROOT / "build" / "repeat.jsonl")
    options, rest = parser.parse_known_args(arguments)
    of = commit()
    options.log.parent.mkdir(parents=True, exist_ok=True)
    while (number := len(read_log(options.log, of)) + 1) <= options.runs:
        print(f"run {number} of {options.runs} …", file=sys.stderr, flush=True)
        found = {"commit": of, "run": number, **run_tests(rest or ["-n", "2", "--dist", "worksteal"], options.burners)}
        with options.log.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"  {'passed' if found['passed'] else 'FAILED'} in {found['seconds']} s {' '.join(found['failed'])}")
    runs = read_log(options.log, of)
    passed = sum(run["passed"] for run in runs)
    print(f"{passed} of {len(runs)} runs passed ({of})")
    return 0 if passed == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Times the path of a newcomer, from nothing to an answer, in an empty folder; docs/your_photos.md has the figures.

    python benchmarks/first_success.py /tmp/newcomer --photos FOLDER --query FILE

The steps are the commands of README.md: clone, make setup, make demo; then index, calibrate, search and the page with
your own photos (by default pictures that are drawn); then an installation into an environment of its own and the lines
of Python of the README. A step whose result is there already is not repeated, so that a stopped run can continue. The
processor time is printed too: it changes little if other programs run.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(folder, *words, **options):
    subprocess.run([str(word) for word in words], cwd=folder, check=True, **options)


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(name, step, done):
    """Run a step unless its result exists; print a line of a table."""
    if done.exists():
        print(f"| {name} | done before | |", flush=True)
        return
    began, used = time.perf_counter(), cpu_seconds()
    step()
    print(f"| {name} | {time.perf_counter() - began:.0f} s | {cpu_seconds() - used:.0f} s |", flush=True)


def draw_photos(folder):
    sys.path.insert(0, str(ROOT / "examples"))
    from pictures import draw_pictures

    draw_pictures(folder / "photos", classes=60, each=25, size=256)
    shutil.copy(folder / "photos" / "scene 00" / "0.png", folder / "query.jpg")


def open_page(idml, folder):
    """Start the service, read the page, stop the service."""
    command = [idml, "serve", "gallery", "--port", "0"]
    service = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        address = next(line.split(" served at ")[1].split()[0] for line in service.stderr if " served at " in line)
        with urllib.request.urlopen(address) as page:
            assert b"<html" in page.read()
    finally:
        service.terminate()
        service.wait()


def readme_lines():
    """The first Python of the README."""
    return re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an empty folder, or the one of a stopped run")
    parser.add_argument("--photos", type=Path, help="a folder of photos (default: pictures that are drawn)")
    parser.add_argument("--query", type=Path, help="an image to ask with")
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.pop("PYTHONPATH", None)
    os.environ["IDML_CACHE"] = str(folder / "cache")
    checkout, idml, python = folder / "idml", folder / "idml/.venv/bin/idml", folder / "own/bin/python"
    if asked.photos is None:
        draw_photos(folder)
    else:
        shutil.copytree(asked.photos, folder / "photos", dirs_exist_ok=True)
        shutil.copy(asked.query or next(asked.photos.rglob("*.jpg")), folder / "query.jpg")

    print("| step | time | processor time |\n| --- | --- | --- |")
    timed("`git clone`", lambda: run(folder, "git", "clone", "-q", ROOT, checkout), checkout)
    timed("`make setup`", lambda: run(checkout, "make", "setup"), checkout / ".venv/.ready")
    timed("`make demo`", lambda: run(checkout, "make", "demo"), checkout / "runs/demo/report.html")
    gallery, never = folder / "gallery", folder / "never"
    timed("`idml index photos --to gallery`", lambda: run(folder, idml, "index", "photos", "--to", gallery), gallery)
    timed("`idml calibrate gallery`", lambda: run(folder, idml, "calibrate", gallery), gallery / "calibration.json")
    timed("`idml search gallery query.jpg`", lambda: run(folder, idml, "search", gallery, "query.jpg"), never)
    timed("`idml serve gallery`, until the page is there", lambda: open_page(idml, folder), never)

    def install():
        run(folder, sys.executable, "-m", "venv", "own")
        run(folder, python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", ROOT)

    timed("`pip install` into an environment of its own", install, python)
    lines = folder / "lines"
    lines.mkdir(exist_ok=True)
    for name in ("photos", "query.jpg"):
        (lines / name).unlink(missing_ok=True)
        (lines / name).symlink_to(folder / name)
    timed("the lines of Python of the README", lambda: run(lines, python, "-c", readme_lines()), lines / "gallery")


if __name__ == "__main__":
    main()

"""`make package`: build the wheel and the sdist into dist/, and use the wheel as a stranger does.

The wheel is installed into an empty environment: no system packages, dependencies from its own metadata, their versions
from constraints.txt. There, in another folder, `idml demo --quick` runs, every public name is imported, a five-line
program embeds and searches, and the page is asked for. This takes some minutes and, with a CPU build of torch, 2 GB;
5.4 GB where pip finds a build for GPUs only.

    python tests/package_check.py --python python3.12 python3.13 --tests

does it with other Pythons, one after the other, and runs the fast tests there, with what the extra ``dev`` names. After
a step that fails, those that can do without it go on; the last lines say what was done and what could not be.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMES = """
import importlib, pkgutil, sys
import idml
assert idml.__file__.startswith(sys.prefix), idml.__file__
for name in idml.__all__:
    assert getattr(idml, name) is not None, name
optional = {"idml.pml", "idml.search.engines.milvus", "idml.search.engines.milvus_connection"}
optional |= {"idml.search.engines.milvus_schema", "idml.search.engines.milvus_search"}
count = 0
for module in pkgutil.walk_packages(idml.__path__, "idml."):
    if module.name in optional:
        continue
    loaded = importlib.import_module(module.name)
    for name in getattr(loaded, "__all__", ()):
        getattr(loaded, name)
    count += 1
print(f"{count} modules and {len(idml.__all__)} public names imported")
"""
SEARCH = """
import pathlib
import idml
model = idml.load_model("runs/demo-quick/plain")
query = sorted(pathlib.Path("runs/demo-quick/images/known").rglob("*.png"))[0]
print(model.embed(query))
with idml.Gallery.open("runs/demo-quick/gallery") as gallery:
    print(gallery.search([query], k=3)[0])
"""
PAGE = """
import importlib.resources
static = importlib.resources.files("idml.server") / "static"
assert "<html" in (static / "index.html").read_text()
assert (importlib.resources.files("idml") / "py.typed").is_file()
"""
FAST = ["losses", "evaluation", "calibration", "data", "model", "search", "test_cli.py", "test_front_door.py"]
"""The tests that `--tests` runs, except those that need a Milvus server."""

Run = Callable[[Sequence[str], Path, dict[str, str]], None]


class Check:
    """The steps of one Python: each is done, failed with a reason, or not tried because it needs one that failed."""

    def __init__(self, python: str, home: Path, run: Run) -> None:
        self.python, self.home, self.run = python, home, run
        self.work = home / "elsewhere"
        self.outcomes: dict[str, str] = {}
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self.settings = clean | {"IDML_CACHE": str(home / "cache"), "HOME": str(home)}

    def step(self, name: str, *command: str, needs: str = "", place: Path | None = None) -> None:
        """Run a command, unless a step that it needs was not done."""
        if needs and self.outcomes[needs] != "done":
            self.outcomes[name] = f"not tried: it needs {needs!r}"
            return
        try:
            self.run(command, place or self.work, self.settings)
            self.outcomes[name] = "done"
        except (OSError, subprocess.SubprocessError) as error:
            said = str(getattr(error, "stderr", None) or error).strip().splitlines()
            self.outcomes[name] = f"failed: {said[-1] if said else error}"

    def use(self, wheel: Path, *, tests: bool) -> None:
        """Install the wheel and use it."""
        self.work.mkdir(parents=True)
        python, idml = (str(self.home / "venv" / "bin" / name) for name in ("python", "idml"))
        install = (python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"))
        self.step("an empty environment", self.python, "-m", "venv", "--clear", str(self.home / "venv"))
        self.step("pip install", *install, str(wheel), needs="an empty environment")
        self.step("pip check", python, "-m", "pip", "check", needs="pip install")
        self.step("idml --version", idml, "--version", needs="pip install")
        self.step("idml demo --quick", idml, "demo", "--quick", needs="pip install")
        self.step("every public name", python, "-c", NAMES, needs="pip install")
        self.step("embed and search", python, "-c", SEARCH, needs="idml demo --quick")
        self.step("the page and the types", python, "-c", PAGE, needs="pip install")
        if tests:
            fast = [str(Path("tests") / name) for name in FAST]
            pytest = (python, "-m", "pytest", "-p", "no:cacheprovider", *fast, "-k", "not milvus")
            self.step("the tools of the tests", *install, f"{wheel}[dev]", needs="pip install")
            self.step("the fast tests", *pytest, needs="the tools of the tests", place=ROOT)


def run_aloud(command: Sequence[str], place: Path, settings: dict[str, str]) -> None:
    """Run a command, and show it, what it prints and how long it took."""
    started = time.monotonic()
    print(f"$ {' '.join([Path(command[0]).name, *(word for word in command[1:] if chr(10) not in word)])}", flush=True)
    done = subprocess.run(command, cwd=place, env=settings, capture_output=True, text=True)
    print(f"{done.stdout.strip()}\n({time.monotonic() - started:.0f} s)", flush=True)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command[0], stderr=done.stderr or done.stdout)


def build() -> Path:
    """Build the wheel and the sdist into dist/; return the wheel."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(f"built {', '.join(sorted(file.name for file in dist.iterdir()))}", flush=True)
    (wheel,) = dist.glob("*.whl")
    return wheel


def check_pythons(pythons: Sequence[str], wheel: Path, *, tests: bool, keep: str | None, run: Run = run_aloud) -> int:
    """Use the wheel with each Python, and say what was done; return 0 if all was."""
    status, lines = 0, []
    for number, python in enumerate(pythons):
        with tempfile.TemporaryDirectory() as place:
            check = Check(python, (Path(keep or place) / f"python-{number}").absolute(), run)
            check.use(wheel, tests=tests)
        done = [name for name, outcome in check.outcomes.items() if outcome == "done"]
        missed = {name: outcome for name, outcome in check.outcomes.items() if outcome != "done"}
        lines += [f"{python}: done: {', '.join(done) or 'nothing'}"]
        lines += [f"{python}: {name}: {outcome}" for name, outcome in missed.items()]
        status |= bool(missed)
    print("\n".join(lines), flush=True)
    return status


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters to make environments with")
    options.add_argument("--tests", action="store_true", help="also run the fast tests in each environment")
    options.add_argument("--keep", metavar="DIR", help="make the environments here, and keep them")
    given = options.parse_args()
    return check_pythons(given.python, build(), tests=given.tests, keep=given.keep)


if __name__ == "__main__":
    sys.exit(main())

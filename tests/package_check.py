"""`make package`: build the wheel and the sdist into dist/, and use the wheel as a stranger does.

The wheel is installed into an empty environment: no system packages, dependencies from its own metadata, their versions
from constraints.txt. There, in another folder, `idml demo --quick` runs, every public name is imported, a five-line
program embeds and searches, and the page is asked for. This takes some minutes and, with a CPU build of torch, 2 GB.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--python", default=sys.executable, help="the interpreter that the environment is made with")
    options.add_argument("--keep", metavar="DIR", help="make the environment here, and keep it")
    given = options.parse_args()
    started = time.monotonic()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = dist.glob("*.whl")
    print(f"built {', '.join(sorted(file.name for file in dist.iterdir()))}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        home = Path(given.keep or place).absolute()
        work = home / "elsewhere"
        work.mkdir(parents=True)
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        clean |= {"IDML_CACHE": str(home / "cache"), "HOME": str(home)}

        def run(*command: str) -> str:
            words = [Path(command[0]).name, *(word for word in command[1:] if "\n" not in word)]
            print(f"$ {' '.join(words)}")
            done = subprocess.run(command, cwd=work, env=clean, stdout=subprocess.PIPE, text=True, check=True)
            print(f"{done.stdout.strip()}\n({time.monotonic() - started:.0f} s)", flush=True)
            return done.stdout

        run(given.python, "-m", "venv", "--clear", str(home / "venv"))
        python, idml = (str(home / "venv" / "bin" / name) for name in ("python", "idml"))
        run(python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel))
        run(python, "-m", "pip", "check")
        run(idml, "--version")
        run(idml, "demo", "--quick")
        run(python, "-c", NAMES)
        run(python, "-c", SEARCH)
        run(python, "-c", PAGE)
    print(f"the package works, after {time.monotonic() - started:.0f} seconds")


if __name__ == "__main__":
    main()

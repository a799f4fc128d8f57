"""The wheel: what is in it, and whether its metadata names everything that the code imports.

`make package` installs it into an empty environment and uses it, which takes minutes.
"""

import ast
import email
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import idml
from package_check import check_pythons, run_aloud

ROOT = Path(__file__).parent.parent
SOURCE = Path(idml.__file__).parent
NO_IMPORT = {"torchvision", "onnx", "onnxscript", "tensorboard"}
"""Declared, and imported by timm and by parts of torch, not by our code."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel):
    tracked = subprocess.run(["git", "ls-files", "src/idml"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("the checkout is not a git repository")
    there = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name for name in there if not name.startswith("idml/")} == set()
    expected = {line.removeprefix("src/") for line in tracked.stdout.splitlines() if (ROOT / line).exists()}
    assert expected <= there
    assert {Path(name).suffix for name in there} == {".py", ".typed", ".html", ".js", ".css", ".csv"}
    for name in ("py.typed", "server/static/index.html", "server/static/app.js", "audit/static/index.html"):
        assert f"idml/{name}" in there
    assert sum(file.file_size for file in wheel.infolist()) < 4_000_000  # no data


def test_the_metadata_is_that_of_a_first_release(wheel, metadata):
    assert (metadata["Name"], metadata["Version"]) == ("idml", idml.__version__) == ("idml", "0.1.0")
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == {"pml", "milvus", "docs", "dev"}
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert b"idml = idml.cli:main" in wheel.read(entry)
    assert f"## {idml.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def declared(metadata):
    """The names of the packages that idml or its extras for users need, without those of the tests."""
    found = set()
    for line in metadata.get_all("Requires-Dist"):
        name, extra = re.match(r"[\w.-]+", line)[0], re.search(r"extra == '(\w+)'", line)
        if extra is None or extra[1] in ("pml", "milvus"):
            found.add(re.sub(r"[-_.]+", "-", name).lower())
    return found


def imported():
    """The top-level names that our code imports, of packages that Python does not have itself."""
    names = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").split(".")[0])
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("import_module", "require"):
                names |= {str(word.value).split(".")[0] for word in node.args if isinstance(word, ast.Constant)}
    return names - sys.stdlib_module_names - {"idml", ""}


def test_every_import_is_declared_and_every_dependency_is_imported(metadata):
    packages = importlib.metadata.packages_distributions()
    needed = {re.sub(r"[-_.]+", "-", packages[name][0]).lower() for name in imported()}
    assert needed - declared(metadata) == set()
    assert declared(metadata) - needed - NO_IMPORT == set()


def test_the_versions_of_all_dependencies_are_pinned(metadata):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    assert declared(metadata) - pinned == set()


@pytest.mark.parametrize("version", ["py311", "py312", "py313"])
def test_the_syntax_is_that_of_every_supported_version(version):
    check = [sys.executable, "-m", "ruff", "check", "--quiet", "--select", "E9,F", "--target-version", version, "src"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# -------------------- make package --------------------


def test_a_failed_step_is_named_and_only_what_needs_it_is_left_out(tmp_path, capsys):
    ran = []

    def run(command, place, settings):
        ran.append((Path(command[0]).name, *command[1:3]))
        if "demo" in command:
            raise subprocess.CalledProcessError(1, "idml", stderr="Traceback …\nImportError: no torch here\n")

    assert check_pythons(["python3.99"], Path("idml.whl"), tests=True, keep=str(tmp_path), run=run) == 1
    assert [words[0] for words in ran].count("idml") == 2
    assert ("python", "-m", "pytest") in ran
    first, *missed = capsys.readouterr().out.splitlines()
    assert first.startswith("python3.99: done: an empty environment, pip install, pip check, idml --version, every")
    assert missed == [
        "python3.99: idml demo --quick: failed: ImportError: no torch here",
        "python3.99: embed and search: not tried: it needs 'idml demo --quick'",
    ]


def test_every_python_is_tried_and_one_that_is_not_there_is_named(tmp_path, capsys):
    def run(command, place, settings):
        assert "PYTHONPATH" not in settings
        if command[0] == "nowhere/python":
            run_aloud(command, place, settings)

    assert check_pythons(["nowhere/python", "other"], Path("idml.whl"), tests=False, keep=str(tmp_path), run=run) == 1
    said = capsys.readouterr().out.splitlines()[1:]
    assert said[0] == "nowhere/python: done: nothing"
    assert "an empty environment: failed: [Errno 2] No such file or directory" in said[1]
    assert said[-1].startswith("other: done: an empty environment, pip install")
    assert check_pythons(["other"], Path("idml.whl"), tests=False, keep=str(tmp_path / "again"), run=run) == 0


def test_the_classifiers_are_the_pythons_of_the_docs(metadata):
    tried = [line.rpartition(" ")[2] for line in metadata.get_all("Classifier") if re.search(r":: 3\.\d+$", line)]
    said = (ROOT / "docs" / "install.md").read_text()
    assert tried == re.findall(r"^\| (3\.\d+) \|", said, re.MULTILINE)

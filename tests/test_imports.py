"""Importing is cheap, folders import only what they may, and few of our files run for a search or a training step."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import idml

SOURCE = Path(idml.__file__).parent
CORE = {"embeddings", "labels", "metric", "pairwise", "mining", "losses"}
TOOLS = {"errors", "parallel", "progress", "files", "compat", "records", "report_html", "version"}
MAY_IMPORT = {
    **{part: CORE | {"errors"} for part in CORE},
    "pml": CORE,
    "errors": set(),
    "version": set(),
    "parallel": set(),
    "cli_parser": {"errors"},
    "records": set(),
    "progress": {"errors"},
    "files": {"errors", "progress"},
    "compat": {"errors"},
    "report_html": {"errors", "files"},
    "data": CORE | TOOLS,
    "model": CORE | TOOLS | {"data"},
    "methods": CORE | {"errors", "model", "data"},
    "evaluation": CORE | TOOLS | {"data", "model"},
    "training": CORE | TOOLS | {"data", "model", "methods", "evaluation"},
    "calibration": CORE | TOOLS | {"data", "model", "evaluation"},
    "audit": CORE | TOOLS | {"data", "model", "evaluation", "server"},
    "search": CORE | TOOLS | {"data", "model", "evaluation", "calibration"},
    "server": CORE | TOOLS | {"data", "calibration", "search"},
}
"""Which parts of the package each part may import; cli, demo and reproduction may import everything."""
UNRESTRICTED = {"cli", "cli_train", "demo", "reproduction", "__init__"}


def modules():
    """All modules of the package by their dotted names."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path, known):
    """What a file imports of ours: at its top, inside functions and for type checking; with the imported names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "idml")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module.split(".")[0] == "idml":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield (full, "") if full in known else (node.module, alias.name)


def part_of(module):
    """The folder or the root file that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_heavy_libraries_wait_until_they_are_used():
    loaded = run("import sys, idml, idml.losses, idml.model; print(' '.join(sorted(sys.modules)))").split()
    for heavy in ("timm", "torchvision", "pytorch_metric_learning", "matplotlib", "PIL"):
        assert heavy not in loaded


def test_import_of_the_package_loads_little_beyond_torch():
    code = "import sys, torch; before = {*sys.modules}; import idml, idml.losses; idml.Embeddings; "
    loaded = run(f"{code}print(' '.join({{*sys.modules}} - before))").split()
    foreign = {name.split(".")[0] for name in loaded} - {"idml", "torch"} - sys.stdlib_module_names
    assert not foreign


def test_help_needs_no_torch():
    code = "import sys; from idml import cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    loaded = run(code).splitlines()[-1].split()
    assert "idml.cli" in loaded
    assert not {"torch", "numpy", "PIL", "timm"} & {*loaded}


def test_names_are_resolved_lazily():
    assert "torch" not in run("import sys, idml; print(' '.join(sys.modules))").split()
    assert set(idml.__all__) <= set(dir(idml))
    for name in idml.__all__:
        assert getattr(idml, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Embedding'"):
        idml.Embedding  # noqa: B018


def test_every_part_is_known():
    assert {part_of(module) for module in modules()} == {*MAY_IMPORT, *UNRESTRICTED}


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_each_part_imports_only_what_it_may(part):
    known = modules()
    for module, path in known.items():
        if part_of(module) == part:
            for imported, _ in imports(path, known):
                target = part_of(imported)
                allowed = target == part or target in MAY_IMPORT[part] or imported == "idml"
                assert allowed, f"{module} imports {imported}"


def test_the_core_knows_torch_and_nothing_else_of_others():
    for module, path in modules().items():
        if part_of(module) in CORE:
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    assert name.split(".")[0] in {"idml", "torch", *sys.stdlib_module_names}, f"{module}: {name}"


def test_there_is_no_import_cycle():
    known = modules()
    graph = {module: {name for name, _ in imports(path, known) if name in known} for module, path in known.items()}
    for module, imported in graph.items():
        imported.discard("idml")  # its names are resolved when they are used
        assert module not in imported
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_no_private_name_is_imported_by_another_file():
    known = modules()
    for module, path in known.items():
        for imported, name in imports(path, known):
            assert not name.startswith("_") or name.startswith("__"), f"{module} imports {imported}.{name}"

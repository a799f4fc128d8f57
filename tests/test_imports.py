"""Importing is cheap, and the rooms of the house import only what they may."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import idml

SOURCE = Path(idml.__file__).parent
LOSSES = [f"losses/{path.name}" for path in (SOURCE / "losses").glob("*.py")]
CORE = ["embeddings.py", "metric.py", "pairwise.py", "labels.py", "mining.py", *LOSSES]
ALLOWED = (
    "torch",
    "idml.errors",
    "idml.embeddings",
    "idml.metric",
    "idml.pairwise",
    "idml.labels",
    "idml.mining",
    "idml.losses",
)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_costs_little_beyond_torch():
    code = (
        "import torch, time; t = time.perf_counter(); import idml; print(time.perf_counter() - t)\n"
        "import idml.losses; idml.Embeddings; idml.IntrospectiveMetric; print(time.perf_counter() - t)"
    )
    assert any(max(map(float, run(code).split())) < 0.5 for _ in range(2))  # the second time with a warm cache


def test_heavy_libraries_wait_until_they_are_used():
    loaded = run("import sys, idml, idml.losses, idml.model; print(' '.join(sorted(sys.modules)))").split()
    for heavy in ("timm", "torchvision", "pytorch_metric_learning", "matplotlib", "PIL"):
        assert heavy not in loaded


def test_names_are_resolved_lazily():
    assert "torch" not in run("import sys, idml; print(' '.join(sys.modules))").split()
    assert set(idml.__all__) <= set(dir(idml))
    for name in idml.__all__:
        assert getattr(idml, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Embedding'"):
        idml.Embedding  # noqa: B018


@pytest.mark.parametrize("file", CORE)
def test_the_core_knows_only_torch_and_itself(file):
    for node in ast.walk(ast.parse((SOURCE / file).read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            known = name.split(".")[0] in sys.stdlib_module_names or name == "idml"
            assert known or any(name == room or name.startswith(room + ".") for room in ALLOWED), name

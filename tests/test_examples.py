"""The scripts in examples/ run as they are, in an empty folder, and print what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
PRINTS = {
    "train_idml.py": "the report is runs/idml/evaluation/report.html",
    "own_loop.py": "right first results: 100%",
    "with_pytorch_metric_learning.py": "step 40: loss",
    "index_calibrate_serve.py": '"state": "match"',
    "audit_folder.py": "'kind': 'mislabelled', 'image': 'scene 00/moved.png'",
    "export_onnx.py": "the vectors of idml are the same: True",
    "own_data.py": "72 images train, 72 test",
    "own_loss.py": "idml: right first results on the test classes",
    "own_method.py": "right first results on the test classes",
}
"""A part of what each script prints."""


def test_every_script_is_run():
    """`milvus_gallery.py` needs a server: tests/search/test_milvus_gallery.py runs it."""
    assert {path.name for path in FOLDER.glob("*.py")} == {*PRINTS, "milvus_gallery.py", "pictures.py"}


@pytest.mark.parametrize("script", PRINTS)
def test_example(script, tmp_path, tmp_path_factory):
    settings = {"IDML_CACHE": str(tmp_path_factory.getbasetemp() / "idml-cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:__main__", FOLDER / script],
        cwd=tmp_path,
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[script] in done.stdout
    assert "Traceback" not in done.stderr


def test_readers_find_each_script():
    listed = (FOLDER / "README.md").read_text()
    assert all(f"]({script})" in listed for script in PRINTS)
    for script in PRINTS:
        text = (FOLDER / script).read_text()
        assert f"python examples/{script}" in text
        assert len(text.splitlines()) <= 80

"""Processes that train one cell together, as `accelerate launch` or `torchrun` starts them on several GPUs."""

import json
import subprocess
import sys

SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from idml.reproduction import regimes
from idml.reproduction import tables
from idml.reproduction.regimes import Regime, Speed
from idml.reproduction.reproduce import reproduce_table
from idml.training.distributed import Processes

base = {
    "trunk": "conv4", "pretrained": False, "image_size": 16, "embedding_dim": 8, "epochs": 1, "batch_size": 8,
    "per_class": 2, "holdout": 0.34,
}
regimes._LAPTOP["frozen"] = Regime("frozen", base, Speed(1000, 1, "a test"), rates=(1e-3, 1e-2), seeds=2)
tables.LOSSES = {}  # the release alone, and the raw features
assert Processes().count == 2
reproduce_table("table1", sys.argv[1], 2, Path(sys.argv[2]))
"""


def test_two_processes_make_every_cell_once_and_together(patterns, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*launch, patterns, str(tmp_path / "out")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = sorted((tmp_path / "out" / "cells-folder-frozen").iterdir())
    assert [cell.suffix for cell in cells] == [".json"] * 4  # two rates, another seed, the raw features
    assert all("classes" in json.loads(cell.read_text()) for cell in cells)
    assert (tmp_path / "out" / "table1-folder-frozen" / "table.md").exists()

"""Workarounds for the libraries below: torchvision that does not fit torch, memory given back too early, bfloat16."""

import ctypes
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: Any = None  # the torch.library.Library with the declarations, which live as long as this object
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # the numbers of mallopt(3)
_BFLOAT16 = """
import torch
layer = torch.nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)
with torch.autocast("cpu", torch.bfloat16):
    out = layer(torch.ones(2, 16, 8, 8))
out.float().sum().backward()
raise SystemExit(out.dtype != torch.bfloat16 or not bool(torch.isfinite(layer.weight.grad).all()))
"""


def ensure_torchvision() -> bool:
    """Make ``import torchvision`` work; call it before importing torchvision or timm.

    timm imports torchvision. If torchvision is a CUDA build and torch is a CPU build (pip easily installs such a
    pair), its operator library cannot be loaded, and ``import torchvision`` fails with *operator torchvision::nms does
    not exist*. Neither timm nor idml calls those operators, so it is enough to declare their names, without an
    implementation. If the library loads, nothing is done.

    Returns True if operators had to be declared, now or earlier.
    """
    global _declared
    if _declared is not None:
        return True
    if "torchvision" in sys.modules or _operators_load():
        return False
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for schema in _OPERATORS:
        library.define(schema)
    _declared = library
    return True


def _operators_load() -> bool:
    """Return whether torchvision's compiled operators fit this torch (True also if there is no torchvision)."""
    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return True
    import torch

    for library in Path(spec.submodule_search_locations[0]).glob("_C.*"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return True
    return False


def keep_memory() -> bool:
    """Ask the C library to keep the memory that this process frees for its next tensors; return whether it agreed.

    By default glibc maps every large block afresh and unmaps it when it is freed, and the system fills each page with
    zeros first. That costs a third of the time of a training step on a CPU (`benchmarks/allocator.py`). The price: the
    process stays as large as it ever was. With another C library than glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


@cache
def cpu_computes_bfloat16() -> bool:
    """Return whether this CPU trains a convolution in bfloat16; tried in another process, which may crash.

    Some virtual machines name instructions that they then refuse, and the process ends with *illegal instruction*.
    """
    return subprocess.run([sys.executable, "-c", _BFLOAT16], capture_output=True, check=False).returncode == 0

"""Lets a torchvision whose compiled operators do not fit the installed torch be imported.

timm imports torchvision. Where torchvision is a CUDA build and torch is a CPU build (pip easily installs such a
pair), its operator library cannot be loaded and ``import torchvision`` stops with *operator torchvision::nms does
not exist*. Nothing here or in timm calls those operators, so it is enough that their names are known: they are
declared, without an implementation, before torchvision is imported. Where the library loads, nothing is done.
"""

import ctypes
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: torch.library.Library | None = None  # the declarations live as long as this object


def ensure_torchvision() -> bool:
    """Make ``import torchvision`` work; call it before importing torchvision or timm.

    Returns True if operators had to be declared, now or earlier.
    """
    global _declared
    if _declared is not None:
        return True
    if "torchvision" in sys.modules or _operators_load():
        return False
    library = torch.library.Library("torchvision", "DEF")
    for schema in _OPERATORS:
        library.define(schema)
    _declared = library
    return True


def _operators_load() -> bool:
    """Whether torchvision's compiled operators fit this torch (True also where there is no torchvision)."""
    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return True
    for library in Path(spec.submodule_search_locations[0]).glob("_C.*"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return True
    return False


# -------------------- memory --------------------
# Keeping freed memory: large tensors come and go at every step, and handing each back to the system costs time.


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # the numbers of mallopt(3)


def keep_memory() -> bool:
    """Ask the C library to keep what this process frees for its next tensors; whether it agreed.

    By default glibc maps every large block anew and unmaps it when it is freed, and the system fills each page with
    zeros first: a third of the time of a training step on a CPU (`benchmarks/allocator.py`). The price is that the
    process stays as large as it ever was. Elsewhere than with glibc nothing happens.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))

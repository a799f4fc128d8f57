"""The workarounds, each in a fresh interpreter."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys

import pytest

from idml import compat

CALL = "import torch; from idml.compat import ensure_torchvision; "
REPORT = "print(result, *(hasattr(torch.ops.torchvision, name) for name in ('nms', 'qnms')))"


def run(code, path=None):
    """What ``code`` prints in a new interpreter that looks for packages in ``path`` first."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def fake(tmp_path):
    """A function that makes a torchvision with a sound or a broken operator library, and returns where it is."""

    def make(*, sound):
        package = tmp_path / "torchvision"
        package.mkdir()
        (package / "__init__.py").write_text("fake = True\n")
        if sound:  # any library that loads will do
            shutil.copy(importlib.util.find_spec("safetensors._safetensors_rust").origin, package / "_C.so")
        else:
            (package / "_C.so").write_bytes(b"not a library" * 100)
        return tmp_path

    return make


def test_installed_torchvision_can_be_imported():
    code = CALL + "first = ensure_torchvision(); second = ensure_torchvision(); import torchvision, timm; "
    code += "print(first == second, ensure_torchvision() == first, timm.is_model('resnet18'), torchvision.__name__)"
    assert run(code) == "True True True torchvision"


def test_sound_operators_are_left_alone(fake):
    assert (
        run(
            CALL + "result = ensure_torchvision(); import torchvision; assert torchvision.fake; " + REPORT,
            fake(sound=True),
        )
        == "False False False"
    )


def test_broken_operators_are_declared(fake):
    code = CALL + "ensure_torchvision(); result = ensure_torchvision(); import torchvision; assert torchvision.fake; "
    assert run(code + REPORT, fake(sound=False)) == "True True True"


def test_an_imported_torchvision_is_left_alone(fake):
    assert run("import torchvision; " + CALL + "result = ensure_torchvision(); " + REPORT, fake(sound=False)) == (
        "False False False"
    )


def test_no_torchvision_at_all():
    hide = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torchvision" else super().find_spec(name, path, target)

sys.meta_path = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""
    assert run(hide + CALL + "result = ensure_torchvision(); " + REPORT) == "False False False"


# -------------------- memory --------------------

CODE = """
import resource, sys, torch
from idml.compat import keep_memory
if sys.argv[1] == "keep":
    assert keep_memory()
for count in (5_000_000, 10_000_000, 20_000_000):  # the heap grows to what is needed
    for _ in range(3):
        torch.ones(count)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(10_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(word):
    done = subprocess.run([sys.executable, "-c", CODE, word], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_kept_memory_is_used_again():
    if platform.libc_ver()[0] != "glibc":
        assert not compat.keep_memory()
        return
    assert 10 * faults("keep") < faults("return")


def test_another_c_library_is_left_alone(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(compat.ctypes, "CDLL", absent)
    assert not compat.keep_memory()


def test_a_processor_that_stops_at_bfloat16_is_noticed(monkeypatch):
    """The process that tries it may be ended by the system: *illegal instruction*."""
    asked = compat.cpu_computes_bfloat16.__wrapped__
    monkeypatch.setattr(compat, "_BFLOAT16", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not asked()
    monkeypatch.setattr(compat, "_BFLOAT16", "raise SystemExit(False)")
    assert asked()

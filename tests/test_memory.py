import platform
import subprocess
import sys

from idml import compat as memory

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
        assert not memory.keep_memory()
        return
    assert 10 * faults("keep") < faults("return")


def test_another_c_library_is_left_alone(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr(memory.ctypes, "CDLL", absent)
    assert not memory.keep_memory()

"""The program in processes that start at once: forked off a server that has its libraries loaded, real to a signal."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

_LIBRARIES = ["torch._dynamo", "idml.cli", "idml.training.loop", "matplotlib.figure", "children"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_LIBRARIES)  # importing them takes longer than a test's training


def start(arguments, *, said=os.devnull, torn=0):
    """A process that runs ``idml`` with these arguments, its output in the file ``said``.

    With ``torn`` it dies between writing that checkpoint's temporary file and renaming it.
    """
    process = _context.Process(target=_main, args=([*map(str, arguments)], str(said), torn, dict(os.environ)))
    process.start()
    return process


def run(arguments, **options):
    """The exit status of a process that ran to its end, -9 if it was killed."""
    process = start(arguments, **options)
    process.join()
    return process.exitcode


def _main(arguments, said, torn, environment):
    os.environ.update(environment)  # the server has that of its start
    multiprocessing.set_start_method("fork", force=True)  # as the command itself has it
    import torch

    from idml.cli import main

    torch.set_num_threads(1)
    with open(said, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    if torn:
        _die_at(torn)
    status = main(arguments)
    sys.stdout.flush()
    os._exit(status)


def _die_at(checkpoint):
    left, rename = [checkpoint], Path.replace

    def replace(self, target):
        left[0] -= self.name == ".last.safetensors.part"
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, target)

    Path.replace = replace

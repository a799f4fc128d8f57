"""The Milvus server of `search.py`: that of the tests, with Milvus's usual settings."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

TESTS = Path(__file__).parent.parent / "tests" / "search"


@contextmanager
def milvus(folder: str, memory: int) -> Iterator[tuple[str, Any]]:
    """A server with its data in a folder and at most so many bytes of memory: a gallery's place, and the process.

    It gets as many cores as torch has threads here.
    """
    sys.path.append(str(TESTS))
    from milvus_server import Server, missing  # type: ignore[import-not-found]

    if reason := missing():
        raise OSError(reason)
    server, cores = Server(folder), os.sched_getaffinity(0)
    usual(Path(folder) / "configs" / "milvus.yaml")
    try:
        os.sched_setaffinity(0, sorted(cores)[: torch.get_num_threads()])  # the server inherits it
        server.start()
        os.sched_setaffinity(0, cores)
        resource.prlimit(server.process.pid, resource.RLIMIT_DATA, (memory, memory))
        os.environ["IDML_MILVUS_TOKEN"] = server.token
        yield server.place("benchmark"), server.process
    finally:
        os.sched_setaffinity(0, cores)
        server.kill()


def usual(file: Path) -> None:
    """Undo what lets the tests' server answer sooner than usual, and give it up."""
    config = yaml.safe_load(file.read_text())
    config["proxy"]["timeTickInterval"] = 200
    config["queryCoord"]["distPullInterval"] = 500
    for name in ("checkChannelInterval", "checkSegmentInterval", "leaderViewUpdateInterval"):
        del config["queryCoord"][name]
    del config["dataCoord"]["compaction"]["check"]
    config["common"]["session"]["ttl"] = 120  # 30 are usual, but on few cores it may be busier than that with an index
    file.write_text(yaml.safe_dump(config))

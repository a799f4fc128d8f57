"""A real Milvus server for the tests: the one the PyPI package `milvus` carries, with ports and a folder of its own.

It starts when the first test asks for it and ends after the last module that does, at the latest with the test
process, however that ends. It listens on every address of the machine (Milvus cannot be told otherwise), so it wants
a password that nobody knows.
"""

import atexit
import ctypes
import functools
import importlib.util
import lzma
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import yaml

from idml.files import cache_folder

VERSION = "2.3.5"
WAIT = 600  # seconds until a server must have started
LAUNCHES = 3


def missing():
    """Why there can be no server here; empty if there can be one."""
    if importlib.util.find_spec("pymilvus") is None:
        return "pymilvus is not installed: pip install 'idml[milvus]'"
    if importlib.util.find_spec("milvus") is None:
        return f"the Milvus server is not installed: pip install milvus=={VERSION} (Linux on x86-64)"
    return "" if sys.platform == "linux" else "the tests start Milvus on Linux only"


def package():
    return Path(importlib.util.find_spec("milvus").origin).parent / "data"


def binaries():
    """The folder of the unpacked programs: unpacking takes longer than starting, so it is done once a machine."""
    folder = cache_folder() / f"milvus-{VERSION}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as own:

            def unpack(packed):
                target = Path(own) / "bin" / packed.stem
                with lzma.open(packed) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                target.chmod(0o755)

            (Path(own) / "bin").mkdir()
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(unpack, sorted((package() / "bin").glob("*.lzma"), key=lambda p: -p.stat().st_size)))
            with suppress(OSError):  # another process was faster
                (Path(own) / "bin").rename(folder)
    return folder


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for own in sockets:
            own.bind(("", 0))
        return [own.getsockname()[1] for own in sockets]


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Server:
    """A server with its data in a folder; it can be killed and started again there."""

    def __init__(self, folder):
        self.folder, self.process, self.token = Path(folder), None, ""
        self.known = {}  # collections that tests have left, by their properties
        self.port, self.health, *self.others = free_ports(11)
        self.alias = f"idml-{self.port}"
        for name in ("configs", "logs", "data"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.configure()

    def configure(self):
        text = (package() / "config.yaml.template").read_text()
        config = yaml.safe_load(re.sub(r"\{\{[^}:]*:? *([^}]*?) *\}\}", r"\1", text))  # each its default, or nothing
        data, (etcd, peer, internal, *ports) = self.folder / "data", self.others
        urls = {"client": f"http://127.0.0.1:{etcd}", "peer": f"http://127.0.0.1:{peer}"}
        etcd_config = {
            "name": "default",
            "initial-cluster": f"default={urls['peer']}",
            **{f"listen-{kind}-urls": url for kind, url in urls.items()},
            "advertise-client-urls": urls["client"],
            "initial-advertise-peer-urls": urls["peer"],
        }
        (self.folder / "configs" / "etcd.yaml").write_text(yaml.safe_dump(etcd_config))
        for key, value in {
            "etcd.endpoints": f"127.0.0.1:{etcd}",
            "etcd.log.path": str(self.folder / "logs" / "etcd.log"),
            "etcd.data.dir": str(data / "etcd.data"),
            "etcd.config.path": str(self.folder / "configs" / "etcd.yaml"),
            "localStorage.path": str(data),
            "rocksmq.path": str(data / "rocksmq"),
            "log.file.rootPath": "",
            "log.level": "warn",
            "proxy.port": self.port,
            "proxy.internalPort": internal,
            "common.security.authorizationEnabled": True,
            # a small server that answers soon: 0.2 to 1 s are usual
            "proxy.timeTickInterval": 20,
            "queryCoord.checkChannelInterval": 50,
            "queryCoord.checkSegmentInterval": 50,
            "queryCoord.distPullInterval": 50,
            "queryCoord.leaderViewUpdateInterval": 1,
            "dataCoord.compaction.check.interval": 1,
            "common.session.ttl": 10,  # seconds that a killed server counts as alive: 30 are usual
            **dict(zip([f"{part}.port" for part in PARTS], ports, strict=True)),
        }.items():
            *path, last = key.split(".")
            functools.reduce(lambda part, name: part.setdefault(name, {}), path, config)[last] = value
        (self.folder / "configs" / "milvus.yaml").write_text(yaml.safe_dump(config))
        shutil.copy(package() / "glog.conf", self.folder / "configs")

    def start(self):
        """Start and wait until it answers; the password is changed the first time."""
        programs, output = binaries(), self.folder / "logs" / "output.txt"
        deadline = time.monotonic() + WAIT
        self._launch(programs, output)
        launches = 1
        while not self.healthy():
            if self.process.poll() is not None and launches < LAUNCHES:  # a fork beside gRPC's threads may fail
                self._launch(programs, output)
                launches += 1
            elif self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"Milvus did not start: {output.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        if not self.token:
            self.choose_password()
        return self

    def _launch(self, programs, output):
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                # without its own alias a second server on this machine would be refused
                [programs / "milvus", "run", "standalone", "-alias", self.alias],
                cwd=self.folder,
                stdout=file,
                stderr=file,
                env={
                    **{k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
                    "LD_LIBRARY_PATH": str(programs),
                    "DEPLOY_MODE": "STANDALONE",
                    "METRICS_PORT": str(self.health),
                },
                preexec_fn=die_with_parent,
            )

    def healthy(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health}/healthz", timeout=5) as answer:
                return b"OK" in answer.read()
        except OSError:
            return False

    def choose_password(self):
        from pymilvus import MilvusClient

        password = secrets.token_hex(16)
        with closing(MilvusClient(uri=f"http://127.0.0.1:{self.port}", token="root:Milvus", timeout=120)) as client:
            client.update_password("root", "Milvus", password)
        self.token = f"root:{password}"

    def kill(self):
        """kill -9, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for folder in ("/run/milvus", "/tmp/milvus"):  # what it leaves there cannot go elsewhere
                for name in (f"standalone-{self.alias}.pid", f"server_id_{self.process.pid}"):
                    Path(folder, name).unlink(missing_ok=True)
            self.process = None

    def place(self, collection):
        return f"milvus://127.0.0.1:{self.port}/{collection}"


PARTS = ["rootCoord", "queryCoord", "queryNode", "indexNode", "dataCoord", "dataNode"]


@functools.cache
def running():
    """The server of this test session."""
    for left in Path(tempfile.gettempdir()).glob("idml-milvus-*-*"):  # by a process that was killed
        if not Path(f"/proc/{left.name.split('-')[2]}").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"idml-milvus-{os.getpid()}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    server = Server(folder)
    atexit.register(server.kill)  # before the folder goes
    return server.start()


def stop():
    """End the running server: idle it takes a third of a core. Who asks for one again gets a new one."""
    if running.cache_info().currsize:
        running().kill()
        running.cache_clear()


@pytest.fixture
def milvus(monkeypatch):
    """The running server, its token where idml looks for it; the test is skipped where there is none."""
    if reason := missing():
        pytest.skip(reason)
    server = running()
    monkeypatch.setenv("IDML_MILVUS_TOKEN", server.token)
    return server

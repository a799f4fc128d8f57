"""Chaos on a live service: clients change and search a gallery while processes are killed and the disk is full.

    python tests/chaos.py [--engine sqlite|milvus] [--seconds 600] [--clients 8] [--seed 0] [--json]

`idml serve` runs in a process of its own. Every client adds, relabels, deletes and searches, and each owns its
pictures, so it knows what the service has acknowledged. Meanwhile a fault comes every few seconds: kill -9 of the
service, kill -9 of the Milvus server, or a full disk (the gallery, or the data of Milvus, lies in a small tmpfs, which
root may mount; elsewhere this fault is left out and the report says so). Checked are

- that nothing acknowledged is lost, and that nothing refused is there (in a folder; in Milvus a change that failed
  while the server died may come later);
- that every search is right: its results are exactly the nearest of the pictures that are there. A picture that
  another client changes during the search may be in it or not, with the old or the new label;
- that reading and searching go on while the disk is full;
- that in the end every item and its picture is there, and `idml gallery verify` finds nothing.

The recovery time of a kill is the time from the start of the new process to the first right search; that of a full
disk, from the space to the first change that is stored. A violation ends the run with exit status 1.
"""

import argparse
import hashlib
import http.client
import io
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

SERVE = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends when its parent does, however that ends
from idml.server.limits import Limits
from idml.server.serve import serve
place, run = sys.argv[1:]
serve(place, port=0, run=run or None, runtime="torch", limits=Limits(rate=1e9, burst=10**9))
"""
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="image"; filename="x.png"\r\n\r\n%b\r\n'
    b'--b\r\nContent-Disposition: form-data; name="label"\r\n\r\n%b\r\n--b--\r\n'
)
SEARCH_FORM = b'--b\r\nContent-Disposition: form-data; name="image"; filename="x.png"\r\n\r\n%b\r\n--b--\r\n'
FORM_TYPE = {"Content-Type": "multipart/form-data; boundary=b"}
APART = 0.03  # distance between two pictures at least: nearer ones would be grouped as duplicates
CLOSE = 1e-4  # tolerance of distances
START_SECONDS = 300  # for a process to start on a busy machine: only a hang is longer
PAUSE_SECONDS = 1.5  # between two faults, on average


class Violation(AssertionError):
    """The service lost something, or gave a wrong answer."""


# -------------------- what must be there --------------------


@dataclass(frozen=True)
class Picture:
    """A picture with its embedding, computed here by the gallery's model."""

    data: bytes
    unit: np.ndarray

    @property
    def id(self) -> str:
        """The id of the item that it becomes."""
        return hashlib.sha256(self.data).hexdigest()[:32]


METHODS = ("search", "POST", "PATCH", "DELETE")
ABSENT = "(absent)"  # a state beside the labels


@dataclass
class Known:
    """What is known about a picture: the states that it may have, and all that it had, with the time of each change.

    A state is a label, or ABSENT. There are several while a change is under way, and after one without an answer.
    """

    picture: Picture
    possible: set[str] = field(default_factory=lambda: {ABSENT})
    history: list[tuple[float, frozenset[str]]] = field(default_factory=list)

    def become(self, *states: str) -> None:
        """From now on the picture has one of these states."""
        self.possible = set(states)
        self.history.append((time.monotonic(), frozenset(states)))

    def between(self, start: float, end: float) -> set[str]:
        """All states that the picture may have had at some moment of an interval."""
        found: set[str] = set()
        for since, states in reversed(self.history):
            if since <= end:
                found |= states
            if since < start:
                break
        return found


class World:
    """All pictures by id, and what the service has acknowledged about them."""

    def __init__(self, pictures: list[Picture], *, refused_is_final: bool) -> None:
        self.known = {picture.id: Known(picture) for picture in pictures}
        for known in self.known.values():
            known.become(ABSENT)
        self.refused_is_final = refused_is_final
        self.lock = threading.Lock()

    def begin(self, id: str, state: str) -> set[str]:
        """A change to this state is sent; return the states before it."""
        with self.lock:
            known = self.known[id]
            before = set(known.possible)
            known.become(*before, state)
            return before

    def end(self, id: str, before: set[str], state: str, outcome: str) -> None:
        """The change was ``done``, ``refused``, or its outcome is ``open``."""
        with self.lock:
            known = self.known[id]
            if outcome == "done":
                known.become(state)
            elif outcome == "refused" and self.refused_is_final:
                known.become(*before)
            # otherwise it stays possible

    def check_search(self, query: Picture, k: int, answer: dict, start: float, end: float) -> None:
        """Compare the answer to a query with all states that the gallery may have had meanwhile."""
        with self.lock:
            states = {id: known.between(start, end) for id, known in self.known.items()}
        distance = {id: float(np.linalg.norm(known.picture.unit - query.unit)) for id, known in self.known.items()}
        listed = answer["results"]
        for found in listed:
            id = found["id"]
            if id not in states or states[id] == {ABSENT}:
                raise Violation(f"a search found {id}, which is not there")
            if found["label"] not in states[id]:
                raise Violation(f"a search shows {id} as {found['label']}, it is one of {sorted(states[id])}")
            if abs(found["distance"] - distance[id]) > CLOSE:
                raise Violation(f"{id} is {distance[id]:.5f} away, the search says {found['distance']:.5f}")
        ids = [found["id"] for found in listed]
        if len(set(ids)) < len(ids) or len(ids) > k:
            raise Violation(f"a search for {k} results listed {len(ids)}, {len(set(ids))} of them different")
        if any(distance[a] > distance[b] + CLOSE for a, b in pairwise(ids)):
            raise Violation("a search is not in the order of distances")
        farthest = distance[ids[-1]] - CLOSE if len(ids) == k else float("inf")
        for id, possible in states.items():
            if ABSENT not in possible and id not in ids and distance[id] < farthest:
                raise Violation(f"a search for {k} results missed {id} at {distance[id]:.5f} (last {farthest:.5f})")

    def check_listing(self, items: dict[str, str | None]) -> None:
        """Compare all items of the gallery with what must be there; nothing changes meanwhile."""
        unknown = set(items) - set(self.known)
        if unknown:
            raise Violation(f"the gallery has items that nobody added: {sorted(unknown)[:3]}")
        for id, known in self.known.items():
            if items.get(id, ABSENT) not in known.possible:
                raise Violation(f"{id} is {items.get(id, ABSENT)!r}, it must be one of {sorted(known.possible)}")


def make_pictures(number: int, run: Path) -> list[Picture]:
    """Make so many pictures that the model tells apart."""
    from idml.search.embedder import open_embedder

    embedder = open_embedder(run, runtime="torch")
    rng = np.random.default_rng(0)
    made: list[Picture] = []
    for _ in range(20 * number):
        pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((28, 28), Image.Resampling.BILINEAR)
        unit = embedder.embed([image]).unit[0].numpy().astype(np.float64)
        if all(np.linalg.norm(unit - other.unit) > APART for other in made):
            out = io.BytesIO()
            image.save(out, "PNG")
            made.append(Picture(out.getvalue(), unit))
            if len(made) == number:
                return made
    raise RuntimeError("the model does not tell enough pictures apart")


# -------------------- processes and disks --------------------


class Service:
    """`idml serve` in a process of its own that is killed and started again."""

    def __init__(self, place: str, run: Path | None, log: Path, environment: dict[str, str]) -> None:
        self._arguments = [place, str(run) if run else ""]
        self._log, self._environment = log, environment
        self.process: subprocess.Popen | None = None
        self.port = 0

    def launch(self) -> None:
        """Start it."""
        with self._log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, *self._arguments],
                stdin=subprocess.DEVNULL,
                stderr=file,
                env=self._environment,
            )

    def start(self) -> None:
        """Start it, and wait until it listens."""
        offset = self._log.stat().st_size if self._log.exists() else 0
        self.launch()
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            said = self._log.read_bytes()[offset:].decode(errors="replace")
            if "for reading only" in said:
                raise OSError(f"the service can only read: {said}")
            if address := re.search(r"http://127\.0\.0\.1:(\d+)/", said):
                self.port = int(address[1])
                return
            if self.process.poll() is not None:
                raise OSError(f"the service ended with {self.process.returncode}: {said[-2000:]}")
            time.sleep(0.02)
        raise Violation(f"the service did not start within {START_SECONDS} seconds: {said[-2000:]}")

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            self.port = 0
            self.process.kill()
            self.process.wait()
            self.process = None


def mount_small_disk(folder: Path, megabytes: int) -> bool:
    """Mount a tmpfs of this size; False if that is not possible here."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False


def fill_disk(folder: Path) -> Path:
    """Write one file until the disk is full."""
    path = folder / "ballast"
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    return path


# -------------------- clients --------------------


class Client(threading.Thread):
    """A client with its own pictures; it sends one request after another until the end."""

    def __init__(self, number: int, chaos: "Chaos", own: list[str]) -> None:
        super().__init__(daemon=True)
        self._chaos, self._own = chaos, own
        self._random = random.Random(f"{chaos.seed} {number}")
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        """Send requests; the first violation ends the whole run."""
        chaos = self._chaos
        try:
            while not chaos.finished.is_set():
                if chaos.pausing.is_set():  # nothing changes while everything is compared
                    with chaos.idle:
                        chaos.waiting += 1
                        chaos.idle.notify_all()
                        chaos.idle.wait_for(lambda: not chaos.pausing.is_set() or chaos.finished.is_set())
                        chaos.waiting -= 1
                    continue
                self._send_one()
        except BaseException as error:
            chaos.fail(error)

    def _send_one(self) -> None:
        chance = self._random.random()
        if chance < 0.4:
            query = self._random.choice(list(self._chaos.world.known.values())).picture
            self._chaos.search(query, self._random.choice((1, 5, 20, 100)), self._request)
            return
        id = self._random.choice(self._own)
        label = f"label {self._random.randrange(10**6)}"
        known = self._chaos.world.known[id]
        if chance < 0.7:
            self._change(id, label, "POST", "/api/items", FORM % (known.picture.data, label.encode()), FORM_TYPE)
        elif chance < 0.85:
            body = json.dumps({"label": label}).encode()
            self._change(id, label, "PATCH", f"/api/items/{id}", body, {"Content-Type": "application/json"})
        else:
            self._change(id, ABSENT, "DELETE", f"/api/items/{id}")

    def _change(
        self, id: str, state: str, method: str, path: str, body: bytes | None = None, headers: dict | None = None
    ) -> None:
        chaos, world = self._chaos, self._chaos.world
        before = world.begin(id, state)
        status, content = self._request(method, path, body, headers)
        chaos.counts[f"{method} {status or 'no answer'}"] += 1
        if status in (201, 204):
            world.end(id, before, state, "done")
            chaos.acknowledged.set()
            if method == "POST":
                new = json.loads(content)["new"]
                if (new and ABSENT not in before) or (not new and before == {ABSENT}):
                    raise Violation(f"adding {id} said new: {new}, but before it was one of {sorted(before)}")
            elif before == {ABSENT}:
                raise Violation(f"{method} of {id} said {status}, but it was not there")
        elif status == 404:
            if ABSENT not in before:
                raise Violation(f"{method} of {id} said 404, but it is one of {sorted(before)}")
            world.end(id, before, ABSENT, "done")
        elif status is None:
            world.end(id, before, state, "open")
        elif status in (503, 507):
            world.end(id, before, state, "refused")
            time.sleep(0.05)
        else:
            raise Violation(f"{method} of {id}: unexpected status {status}, {content[:300]!r}")

    def _request(
        self, method: str, path: str, body: bytes | None = None, headers: dict | None = None
    ) -> tuple[int | None, bytes]:
        """Send a request; the status is None if there was no answer."""
        while not (port := self._chaos.service.port):
            if self._chaos.finished.wait(0.02):
                return None, b""
        if self._connection is None or self._connection.port != port:
            self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        try:
            self._connection.request(method, path, body, headers or {})
            response = self._connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            self._connection = None
            time.sleep(0.05)
            return None, b""


# -------------------- the run --------------------


class Chaos:
    """A gallery, its service, clients and faults."""

    def __init__(self, folder: Path, *, engine: str, clients: int, seed: int, pictures: int, stack: ExitStack) -> None:
        self.folder, self.engine, self.seed = folder, engine, seed
        self._random = random.Random(f"faults {seed}")
        self.run_folder = folder / "run"
        self._make_model()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("IDML_")}
        environment["IDML_CACHE"] = str(folder / "cache")
        self.disk = folder / "disk"
        self.small = mount_small_disk(self.disk, 24 if engine == "sqlite" else 900)
        if self.small:
            stack.callback(subprocess.run, ["umount", "--lazy", str(self.disk)], check=False)
        self.milvus = None
        if engine == "milvus":
            sys.path.insert(0, str(Path(__file__).parent / "search"))
            import milvus_server

            os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # its handlers sometimes break a child that is just starting
            self.milvus = milvus_server.Server(self.disk / "milvus")
            stack.callback(self.milvus.kill)
            self.milvus.start()
            environment["IDML_MILVUS_TOKEN"] = os.environ["IDML_MILVUS_TOKEN"] = self.milvus.token
            self.place = self.milvus.place(f"chaos_{os.getpid()}")
        else:
            self.place = str(self.disk / "gallery")
        from idml.search.gallery import Gallery, Upload

        made = make_pictures(pictures, self.run_folder)
        self.world = World(made, refused_is_final=engine == "sqlite")
        with Gallery.create(self.place, self.run_folder, runtime="torch") as gallery:
            gallery.add([Upload(picture.data, "first") for picture in made[::2]])
        for picture in made[::2]:
            self.world.known[picture.id].become("first")
        self.service = Service(
            self.place, self.run_folder if engine == "milvus" else None, folder / "log.txt", environment
        )
        stack.callback(self.service.kill)
        self.environment = environment
        self.finished, self.pausing = threading.Event(), threading.Event()
        self.idle, self.waiting = threading.Condition(), 0
        self.error: BaseException | None = None
        self.counts: Counter[str] = Counter()
        self.recovery: dict[str, list[float]] = {}
        self.acknowledged = threading.Event()
        ids = list(self.world.known)
        self.clients = [Client(n, self, ids[n::clients]) for n in range(clients)]

    def _make_model(self) -> None:
        import torch

        from idml.model import build_model, save_model

        torch.manual_seed(0)
        model = build_model("conv4", embedding_dim=16, image_size=28)
        model(torch.rand(8, 3, 28, 28))
        save_model(model, self.run_folder)

    def fail(self, error: BaseException) -> None:
        """End the run with an error."""
        self.error = self.error or error
        self.finished.set()
        with self.idle:
            self.idle.notify_all()

    def search(self, query: Picture, k: int, request) -> bool:
        """Search and check the answer; return whether there was one."""
        start = time.monotonic()
        status, content = request("POST", f"/api/search?k={k}", SEARCH_FORM % query.data, FORM_TYPE)
        self.counts[f"search {status or 'no answer'}"] += 1
        if status == 200:
            self.world.check_search(query, k, json.loads(content), start, time.monotonic())
        elif status not in (None, 503):
            raise Violation(f"a search ended with status {status}: {content[:300]!r}")
        return status == 200

    def _ask(self, method: str, path: str, body: bytes | None = None, headers: dict | None = None):
        connection = http.client.HTTPConnection("127.0.0.1", self.service.port, timeout=600)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return None, b""
        finally:
            connection.close()

    # ---- faults ----

    def _wait_for_search(self, since: float, kind: str) -> None:
        """Wait until a search is right again; note how long that took."""
        query = next(iter(self.world.known.values())).picture
        until = time.monotonic() + START_SECONDS
        while not self.search(query, 5, self._ask):
            if self.finished.is_set():
                return
            if time.monotonic() > until:
                raise Violation(f"no search succeeded {START_SECONDS} seconds after: {kind}")
            time.sleep(0.05)
        self.recovery.setdefault(kind, []).append(time.monotonic() - since)

    def kill_service(self) -> None:
        """kill -9 of the service; sometimes again while it starts."""
        self.service.kill()
        if self._random.random() < 0.2:
            self.service.launch()
            self._pause(self._random.uniform(0, 3))
            self.service.kill()
            self.counts["kills during a start"] += 1
        since = time.monotonic()
        self.service.start()
        self._wait_for_search(since, "kill -9 of the service")

    def kill_milvus(self) -> None:
        """kill -9 of the Milvus server; the service stays."""
        assert self.milvus is not None
        self.milvus.kill()
        since = time.monotonic()
        self.milvus.start()
        self._wait_for_search(since, "kill -9 of the Milvus server")

    def fill_the_disk(self) -> None:
        """Fill the disk for a moment; sometimes the service is killed meanwhile."""
        ballast = fill_disk(self.disk)
        kind = "full disk"
        try:
            self._pause(self._random.uniform(0.5, 2))
            if self.engine == "sqlite":
                query = self._random.choice(list(self.world.known.values())).picture
                if not self.search(query, 20, self._ask):
                    raise Violation("no search was possible while the disk was full")
                if self._random.random() < 0.3:
                    kind = "full disk and kill -9"
                    self.service.kill()
        finally:
            ballast.unlink()
        since = time.monotonic()
        if self.milvus is not None and self.milvus.process is not None and self.milvus.process.poll() is not None:
            self.counts["Milvus ended by itself on a full disk"] += 1
            self.milvus.kill()
            self.milvus.start()
        if self.service.process is None:
            self.service.start()
        self.acknowledged.clear()
        if not self.acknowledged.wait(START_SECONDS) and not self.finished.is_set():
            raise Violation(f"nothing could be stored {START_SECONDS} seconds after the disk had space again")
        self.recovery.setdefault(kind, []).append(time.monotonic() - since)

    def _wait_for_changes(self, number: int) -> None:
        """Wait until so many more changes are acknowledged."""
        until, enough = time.monotonic() + START_SECONDS, self._changes() + number
        while self._changes() < enough and not self.finished.is_set():
            if time.monotonic() > until:
                raise Violation(f"fewer than {number} changes were stored within {START_SECONDS} seconds")
            self._pause(0.02)

    def _changes(self) -> int:
        return sum(n for name, n in list(self.counts.items()) if name.rpartition(" ")[2] in ("201", "204"))

    def _pause(self, seconds: float) -> None:
        self.finished.wait(seconds)

    # ---- the whole ----

    def compare(self) -> None:
        """Compare everything in the gallery with what must be there."""
        self.pausing.set()
        try:
            with self.idle:
                self.idle.wait_for(lambda: self.waiting == len(self.clients) or self.finished.is_set())
            if self.finished.is_set():
                return
            items: dict[str, str | None] = {}
            while True:
                status, content = self._ask("GET", f"/api/items?offset={len(items)}&limit=500")
                if status != 200:
                    raise Violation(f"the list of items: status {status}, {content[:300]!r}")
                page = json.loads(content)
                items |= {item["id"]: item["label"] for item in page["items"]}
                if not page["items"] or len(items) >= page["total"]:
                    break
            self.world.check_listing(items)
            if self.engine == "sqlite":
                for id in items:
                    if self._ask("GET", f"/api/items/{id}/image")[0] != 200:
                        raise Violation(f"the picture of {id} is gone")
            self.counts["whole comparisons"] += 1
        finally:
            self.pausing.clear()
            with self.idle:
                self.idle.notify_all()

    def verify(self) -> None:
        """Run `idml gallery verify`."""
        command = [sys.executable, "-m", "idml.cli", "gallery", "verify", self.place]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        if done.returncode != 0:
            raise Violation(f"idml gallery verify: {done.stdout} {done.stderr}")

    def run(self, seconds: float, note) -> dict:
        """Run for so long; return the figures."""
        started = time.monotonic()
        self.service.start()
        for client in self.clients:
            client.start()
        faults = [self.kill_service, *([self.kill_milvus] if self.milvus else [])]
        faults += [self.fill_the_disk] if self.small else []
        try:
            done = 0
            while (time.monotonic() - started < seconds or done < len(faults)) and not self.finished.is_set():
                self._pause(self._random.expovariate(1 / PAUSE_SECONDS))
                self._wait_for_changes(5)
                fault = faults[done] if done < len(faults) else self._random.choice(faults)  # each at least once
                fault()
                done += 1
                if done % 5 == 0 or time.monotonic() - started >= seconds:
                    self.compare()
                    checked = self.counts["search 200"]
                    note(f"{time.monotonic() - started:.0f} s: {done} faults, {checked} searches checked")
            self.compare()
        except BaseException as error:
            self.fail(error)
        self.finished.set()
        with self.idle:
            self.idle.notify_all()
        for client in self.clients:
            client.join(60)
        if self.error is None:
            self.service.kill()
            self.verify()
        else:
            raise self.error
        return self.figures(time.monotonic() - started)

    def figures(self, seconds: float) -> dict:
        """Collect the figures."""
        recovery = {
            kind: {
                "times": len(all_),
                "median_seconds": round(statistics.median(all_), 2),
                "longest_seconds": round(max(all_), 2),
            }
            for kind, all_ in self.recovery.items()
        }
        return {
            "engine": self.engine,
            "seed": self.seed,
            "minutes": round(seconds / 60, 1),
            "clients": len(self.clients),
            "requests": sum(n for name, n in self.counts.items() if name.split()[0] in METHODS),
            "searches_checked": self.counts["search 200"],
            "changes_acknowledged": self._changes(),
            "changes_refused": sum(n for name, n in self.counts.items() if name.rpartition(" ")[2] in ("503", "507")),
            "without_answer": sum(n for name, n in self.counts.items() if name.endswith("no answer")),
            "whole_comparisons": self.counts["whole comparisons"],
            "full_disk_possible": self.small,
            "recovery": recovery,
            "counts": dict(sorted(self.counts.items())),
        }


def run_chaos(
    engine: str, seconds: float, *, clients: int = 8, seed: int = 0, pictures: int = 160, note=lambda line: None
):
    """Run chaos on a new gallery; return the figures, or raise `Violation`."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="idml-chaos-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        chaos = Chaos(folder, engine=engine, clients=clients, seed=seed, pictures=pictures, stack=stack)
        try:
            return chaos.run(seconds, note)
        except Violation:
            log = folder / "log.txt"
            note(log.read_text(errors="replace")[-3000:] if log.exists() else "")
            raise


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sqlite", "milvus"), default="sqlite")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        figures = run_chaos(
            options.engine,
            options.seconds,
            clients=options.clients,
            seed=options.seed,
            note=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except Violation as error:
        print(f"violation: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures) if options.json else json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

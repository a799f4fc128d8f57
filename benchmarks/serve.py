"""The service under load on the loopback interface: requests/s, latencies, errors, and memory.

    python benchmarks/serve.py [--requests 10000] [--clients 8] [--items 2000] [--runtime auto|torch|onnx] [--json]

A gallery of glyphs with a small convolutional model (its weights do not matter for speed), served by `idml serve` in
a process of its own. Every client keeps one connection and sends its next request when the last is answered: of ten,
eight are searches with an uploaded PNG, one is a page of the list and one a thumbnail. The clients run on the same
machine, in one process. Goals: no error, and memory that does not grow after the first 1,000 requests.
"""

import argparse
import http.client
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

CODE = """
import sys
from idml.compat import keep_memory
from idml.server.limits import Limits
from idml.server.serve import serve
keep_memory()
serve(sys.argv[1], port=0, runtime=sys.argv[2], limits=Limits(rate=1e9, burst=10**9))
"""
FORM = b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\n%b\r\n--b--\r\n'


def glyphs(number: int) -> list[bytes]:
    """So many glyphs as PNG, evenly from all classes."""
    from idml.data.datasets import load_glyphs

    images = load_glyphs(size=32).test
    out = []
    for i in range(number):
        file = io.BytesIO()
        images.sources[i * len(images) // number].decode().save(file, "PNG")
        out.append(file.getvalue())
    return out


def fill(place: Path, pictures: Sequence[bytes]) -> None:
    """Make the gallery."""
    from idml.model import build_model, save_model
    from idml.search.gallery import Gallery
    from idml.search.indexing import index_folder

    save_model(build_model("conv4", embedding_dim=64, image_size=32), place / "run")
    (place / "images").mkdir()
    for n, picture in enumerate(pictures):
        (place / "images" / f"{n:06d}.png").write_bytes(picture)
    with Gallery.create(place / "gallery", place / "run") as gallery:
        index_folder(gallery, place / "images")


@contextmanager
def served(gallery: Path, runtime: str) -> Iterator[tuple[int, int]]:
    """The port and the process id of a server; it must end by itself when it is asked to."""
    environment = {name: value for name, value in os.environ.items() if name not in ("IDML_API_KEY", "IDML_READ_KEY")}
    command = [sys.executable, "-c", CODE, str(gallery), runtime]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            said = ""
            while (address := re.search(r"http://[^:]*:(\d+)/", said)) is None:
                line = process.stderr.readline()
                if not line:
                    raise SystemExit(f"the server did not start: {said}")
                said += line
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield int(address.group(1)), process.pid
        finally:
            process.terminate()
            process.wait(60)


class Load:
    """Requests from some clients at once, and how they went."""

    def __init__(self, port: int, queries: Sequence[bytes]) -> None:
        self._port, self._queries = port, queries
        self._lock, self._numbers = threading.Lock(), count()
        ids = json.loads(self._one(http.client.HTTPConnection("127.0.0.1", port), 8)[1])["items"]
        self._ids = [item["id"] for item in ids]
        self.seconds: dict[str, list[float]] = {"search": [], "other": []}
        self.errors: list[str] = []

    def _one(self, connection: http.client.HTTPConnection, number: int) -> tuple[int, bytes]:
        """The request with this number."""
        if number % 10 == 8:
            connection.request("GET", f"/api/items?order=uncertain&offset={number % 1000}&limit=20")
        elif number % 10 == 9:
            connection.request("GET", f"/api/items/{self._ids[number % len(self._ids)]}/thumbnail")
        else:
            body = FORM % self._queries[number % len(self._queries)]
            connection.request("POST", "/api/search", body, {"Content-Type": "multipart/form-data; boundary=b"})
        response = connection.getresponse()
        return response.status, response.read()

    def run(self, requests: int, clients: int) -> float:
        """Send so many requests; how long it took."""
        left = iter(range(requests))

        def client() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            while True:
                with self._lock:
                    if next(left, None) is None:
                        break
                    number = next(self._numbers)
                started = time.perf_counter()
                try:
                    status, content = self._one(connection, number)
                    problem = "" if status == 200 else f"{status} {content[:200]!r}"
                except (OSError, http.client.HTTPException) as error:
                    problem = repr(error)
                    connection.close()
                seconds = time.perf_counter() - started
                with self._lock:
                    self.seconds["search" if number % 10 < 8 else "other"].append(seconds)
                    self.errors += [problem] if problem else []
            connection.close()

        threads = [threading.Thread(target=client) for _ in range(clients)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - started


def memory(process: int) -> float:
    """Resident memory of a process in MB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(found.group(1)) / 1024 if found else float("nan")


def processor_seconds(process: int) -> float:
    """Processor time that a process has used: unlike the other figures it hardly depends on what else runs."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--runtime", choices=["auto", "torch", "onnx"], default="auto")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    pictures = glyphs(options.items + 200)
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), pictures[: options.items])
        with served(Path(folder) / "gallery", options.runtime) as (port, process):
            held = {0: memory(process)}
            queries, done, seconds = pictures[options.items :] + pictures[:200], 0, 0.0
            Load(port, queries).run(20, options.clients)  # the first ones load what is loaded once
            load = Load(port, queries)
            used = processor_seconds(process)
            while done < options.requests:
                step = min(1000 - done % 1000, options.requests - done)
                seconds += load.run(step, options.clients)
                done += step
                held[done] = memory(process)
            used = processor_seconds(process) - used
    settled = held.get(1000, held[0])
    figures = {
        "clients": options.clients,
        "items": options.items,
        "requests": done,
        "errors": len(load.errors),
        "requests/s": done / seconds,
        "processor time of the server, ms a request": 1000 * used / done,
        **{
            f"{kind}, {name}, ms": 1000 * value
            for kind, own in load.seconds.items()
            if own
            for name, value in (("p50", statistics.median(own)), ("p99", percentile(own, 0.99)))
        },
        **{f"memory after {requests:,} requests, MB": size for requests, size in held.items()},
        "growth since 1,000 requests, MB": held[done] - settled if done > 1000 else None,
    }
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name}: {'-' if value is None else f'{value:,.1f}' if isinstance(value, float) else value}")
    for problem in load.errors[:5]:
        print(problem, file=sys.stderr)
    return 1 if load.errors else 0


if __name__ == "__main__":
    sys.exit(main())

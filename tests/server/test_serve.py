"""A real server in a process of its own: slow clients, broken clients, raw addresses, and its end."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from service_client import made_gallery, picture

from idml.search.gallery import Gallery, Upload
from idml.server import serve as running
from idml.server.limits import Limits
from idml.server.serve import serve
from serve import Load, memory, processor_seconds

CODE = """
import json, sys, time
from idml.search.gallery import Gallery
from idml.server.limits import Limits
from idml.server.serve import serve

place, limits, slow, hang = json.loads(sys.argv[1])
if hang:  # every decoder process
    from idml.data import decoder_process
    decoder_process.COMMAND = (sys.executable, "-c", "import time; time.sleep(1000)")
if slow:
    real = Gallery.search
    def search(*args, **options):
        print("searching", file=sys.stderr, flush=True)
        time.sleep(slow)
        return real(*args, **options)
    Gallery.search = search
serve(place, port=0, limits=Limits(**limits))
"""
SHORT = {
    "body": 200_000,
    "head_seconds": 1.0,
    "body_seconds": 1.5,
    "write_seconds": 1.0,
    "connections": 30,
    "rate": 1e6,
    "burst": 10**6,
}


_OPEN = ("01", "03", "08")  # established, being established, left by the client


class Live:
    """A server's process, its port, and what it says."""

    def __init__(self, process):
        self.process, self.said = process, []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", self.wait_for("is served at")).group(1))

    def _read(self):
        for line in self.process.stderr:
            self.said.append(line)

    def wait_for(self, words, seconds=600):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for line in self.said:
                if words in line:
                    return line
            assert self.process.poll() is None, "".join(self.said)
            time.sleep(0.02)
        raise AssertionError("".join(self.said))

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)

    def get(self, path, method="GET", headers=None, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(method, path, body, headers or {})  # the path goes out as it is
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def metric(self, name):
        text = self.get("/metrics")[1].decode()
        return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE).group(1))

    def files(self):
        """Open files, and connections: those that wait to be accepted count too."""
        links = []
        for file in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed in this moment
                links.append(os.readlink(file))
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        own = [row for row in rows if int(row[1].rpartition(":")[2], 16) == self.port]
        return sum(link.startswith("/") for link in links) + sum(row[3] in _OPEN for row in own)

    def settles(self):
        """No more open files and connections than at the beginning, in the end."""
        until = time.monotonic() + 120
        while self.files() > self.few and time.monotonic() < until:
            time.sleep(0.05)
        return self.files() <= self.few


@contextmanager
def live(place, slow=0, hang=False, **limits):
    arguments = json.dumps([str(place), limits, slow, hang])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IDML_")}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, arguments], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield Live(process)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def read_all(connection):
    """Everything until the server closes."""
    data = b""
    while True:
        try:
            part = connection.recv(65536)
        except (ConnectionResetError, BrokenPipeError):
            return data
        if not part:
            return data
        data += part


def keep_sending(connection, piece, pause=0.05, limit=60):
    """Send a piece again and again: whether the server cuts the connection, and what it answers."""
    started, data = time.monotonic(), b""
    while time.monotonic() - started < limit:
        try:
            connection.settimeout(2)
            connection.sendall(piece)
            connection.settimeout(pause)
            data += connection.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            return True, data
    return False, data


def search_request(data, length=None):
    head = b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\n'
    body = head + data + b"\r\n--b--\r\n"
    length = len(body) if length is None else length
    lines = b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    return lines + b"Content-Length: %d\r\n\r\n" % length + body


CHUNKED = (
    b"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_run):
    place = tmp_path_factory.mktemp("live") / "gallery"
    with made_gallery(place, tiny_run) as gallery:
        gallery.add([Upload(picture(500, size=(2600, 2600), format="BMP"))])  # 20 MB
    with live(place, **SHORT) as server:
        content = json.loads(server.get("/api/items?order=uncertain")[1])
        server.get(f"/api/items/{content['items'][0]['id']}/thumbnail")
        with server.connect() as connection:
            connection.sendall(search_request(picture(3)))
            assert read_all(connection).startswith(b"HTTP/1.1 200")
        time.sleep(0.5)  # what is opened once is open now, and nothing else
        server.few = server.files()
        yield server
        assert "Traceback" not in "".join(server.said)  # nothing of all this was unforeseen
        assert "Invalid HTTP request" not in "".join(server.said)  # strangers cannot fill the disk with the log


def test_the_service_answers(server):
    with server.connect() as connection:
        connection.sendall(search_request(picture(3)) + b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n")  # both
        data = read_all(connection)  # closed when nothing more comes
    assert data.count(b"HTTP/1.1 200 OK") == 2
    assert b'"results":[{' in data
    assert b"server:" not in data.lower()


def test_a_silent_client_is_disconnected(server):
    connections = [server.connect() for _ in range(5)]
    for connection in connections:
        assert read_all(connection) == b""  # the server has closed it
        connection.close()
    assert server.settles()


def test_a_client_with_slow_headers_is_disconnected(server):
    with server.connect() as connection:
        connection.sendall(b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n")
        closed, data = keep_sending(connection, b"X: y\r\n")
    assert closed
    assert data == b""
    assert server.settles()


def test_a_client_with_a_slow_body_gets_an_error(server):
    with server.connect() as connection:
        connection.sendall(search_request(b"x" * 1000)[:-900])
        connection.settimeout(0.1)
        started, data = time.monotonic(), b""
        while not data and time.monotonic() - started < 120:
            connection.sendall(b"x")
            try:
                data = connection.recv(65536)
            except TimeoutError:
                continue
        connection.settimeout(120)
        data += read_all(connection)  # the body may come in a packet of its own
        assert data.startswith(b"HTTP/1.1 408")
        assert b'{"error":"the body did not arrive within 1.5 seconds"}' in data
    assert server.settles()


def test_a_client_that_does_not_read_is_disconnected(server):
    id = json.loads(server.get("/api/items?offset=12")[1])["items"][0]["id"]
    assert server.settles()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(b"GET /api/items/%b/image HTTP/1.1\r\nHost: localhost\r\n\r\n" % id.encode())
        assert connection.recv(1) == b"H"  # the response has begun, and more of it than the connection holds waits
        assert server.files() > server.few
        assert server.settles()
    status, content = server.get(f"/api/items/{id}/image")
    assert status == 200
    assert content == picture(500, size=(2600, 2600), format="BMP")


def test_aborted_requests_leave_nothing(server):
    items = server.metric("idml_gallery_items")
    whole = search_request(picture(3))
    for n in range(60):
        with suppress(OSError), server.connect() as connection:  # refused, if too many are open
            connection.sendall(whole[: len(whole) * n // 60])
            if n % 3 == 0:  # not a farewell but a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    for _ in range(20):  # and some that do not wait for their answer
        with suppress(OSError), server.connect() as connection:
            connection.sendall(whole)
    assert server.settles()
    until = time.monotonic() + 120
    while server.metric("idml_queue") and time.monotonic() < until:  # what was complete is still worked on
        time.sleep(0.1)
    assert server.metric("idml_queue") == 0
    assert server.metric("idml_gallery_items") == items
    assert server.get("/api/health")[0] == 200


def test_an_endless_body_is_refused_and_disconnected(server):
    with server.connect() as connection:
        start = b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\n'
        connection.sendall(CHUNKED + b"%x\r\n%b\r\n" % (len(start), start))
        closed, data = keep_sending(connection, b"%x\r\n%b\r\n" % (10_000, b"x" * 10_000))
    assert b"HTTP/1.1 413" in data
    assert b'"error":"the request is larger than 0.2 MB"' in data
    assert closed
    assert server.settles()


def test_a_declared_length_above_the_limit_is_refused_early(server):
    with server.connect() as connection:
        connection.sendall(search_request(b"", length=10**12))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    for length in (b"-1", b"1e3", b"99999999999999999999999999", b"5, 6", b"0x10"):
        with server.connect() as connection:
            request = search_request(b"x").replace(b"Content-Length: ", b"Content-Length: %b\r\nX: " % length)
            connection.sendall(request)
            data = connection.recv(65536)
            assert data[9:12] in (b"400", b"413"), length
            assert b"Traceback" not in data


def test_a_wrong_content_length(server):
    with server.connect() as connection:  # shorter than the body: the rest is no request
        connection.sendall(search_request(picture(3), length=100))
        data = read_all(connection)
    assert data.startswith((b"HTTP/1.1 422", b"HTTP/1.1 400"))
    assert b"Traceback" not in data
    with server.connect() as connection:  # longer: it is waited for, not for ever
        connection.sendall(search_request(picture(3), length=5000))
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
    with server.connect() as connection:  # both kinds of length: a smuggler's request
        smuggler = search_request(b"x").replace(b"\r\nHost", b"\r\nTransfer-Encoding: chunked\r\nHost")
        connection.sendall(smuggler + b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        data = read_all(connection)  # closed: what follows is not read as a request
        assert data[9:12] == b"400"
        assert b"connection: close" in data
        assert data.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: example.org\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
        b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
    ],
)
def test_bytes_that_are_not_a_request(server, request_bytes):
    with server.connect() as connection:
        with suppress(OSError):  # refused before it is through
            connection.sendall(request_bytes)
        data = read_all(connection)
    assert data[9:12] in (b"", b"400", b"403")
    assert b"Traceback" not in data
    assert b".py" not in data


TRAVERSALS = [
    "../gallery.sqlite",
    "..%2fgallery.sqlite",
    "%2e%2e%2fgallery.sqlite",
    "%2e%2e/gallery.sqlite",
    "..%5cgallery.sqlite",
    "..\\gallery.sqlite",
    "....//gallery.sqlite",
    "%252e%252e%252fgallery.sqlite",
    "..%c0%afgallery.sqlite",
    "%2fetc%2fpasswd",
    "/etc/passwd",
    "../" * 12 + "etc/passwd",
    "..;/gallery.sqlite",
    "../app.py",
    "..%2fapp.py",
    "gallery.sqlite%00.png",
    "%00",
    "uploads",
    ".",
    "..",
    "%2e%2e",
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_path_leaves_the_folder(server, path):
    places = [
        ("/static/", ""),
        ("/api/items/", ""),
        ("/api/items/", "/image"),
        ("/api/items/", "/thumbnail"),
        ("/", ""),
    ]
    for before, after in places:
        for method in ("GET", "PATCH", "DELETE"):
            body = b'{"label": "x"}' if method == "PATCH" else None
            headers = {"Content-Type": "application/json"} if body else {}
            status, content = server.get(f"{before}{path}{after}", method, headers, body)
            assert status in (404, 405)
            assert set(json.loads(content)) == {"error"}


def test_too_many_connections(server):
    connections = [server.connect() for _ in range(40)]
    answers = [read_all(connection) for connection in connections]
    for connection in connections:
        connection.close()
    refused = [answer for answer in answers if answer]
    assert len(refused) >= 10
    assert all(answer.startswith(b"HTTP/1.1 503") and b'{"error": ' in answer for answer in refused)
    assert server.settles()
    assert server.get("/api/health")[0] == 200


def test_many_clients(server):
    """32 threads, each on a connection of its own; some more than are let in wait for a place."""
    ids = {}

    def ask(number):
        for _ in range(50):
            with server.connect() as connection:
                connection.sendall(search_request(picture(number % 12)).replace(b"Host", b"Connection: close\r\nHost"))
                data = read_all(connection)
            if data.startswith(b"HTTP/1.1 200"):
                ids[number] = json.loads(data.partition(b"\r\n\r\n")[2])["results"][0]["path"]
                return
            assert data.startswith(b"HTTP/1.1 503") or not data
            time.sleep(0.05)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 32
    assert all(ids[n] == ids[n % 12] for n in ids)
    assert len(set(ids.values())) == 12


def test_the_benchmark_runs(server):
    load = Load(server.port, [picture(n) for n in range(4)])
    assert load.run(40, clients=4) > 0
    assert load.errors == []
    assert {kind: len(times) for kind, times in load.seconds.items()} == {"search": 32, "other": 8}
    assert memory(server.process.pid) > 50
    assert processor_seconds(server.process.pid) > 0.5
    load = Load(server.port, [b"no image"])
    load.run(10, clients=2)
    assert len(load.errors) == 8  # errors are seen


def test_a_signal_during_a_request(tmp_path, tiny_run):
    place = tmp_path / "gallery"
    made_gallery(place, tiny_run).close()
    with live(place, slow=1.5) as server:
        with server.connect() as idle, server.connect() as connection:
            connection.sendall(search_request(picture(3)))
            server.wait_for("searching")
            server.process.send_signal(signal.SIGTERM)
            data = read_all(connection)  # it is answered, and then the connection is closed
            assert data.startswith(b"HTTP/1.1 200 OK")
            assert json.loads(data.partition(b"\r\n\r\n")[2])["results"][0]["distance"] < 1e-3
            assert read_all(idle) == b""
        assert server.process.wait(120) == -signal.SIGTERM
        with pytest.raises(ConnectionRefusedError):
            server.connect()
        assert "Traceback" not in "".join(server.said)
    with Gallery.open(place, write=True) as gallery:  # the lock is free
        assert len(gallery) == 12


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_the_end_for_programs(tmp_path, tiny_run, sent, status):
    """With --json the last line of standard output is one object, whatever signal ends the service."""
    place = tmp_path / "gallery"
    made_gallery(place, tiny_run).close()
    command = [sys.executable, "-m", "idml.cli", "serve", str(place), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        server = Live(process)
        process.send_signal(sent)
        assert process.wait(120) == status
        (line,) = process.stdout.read().splitlines()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    address = f"http://127.0.0.1:{server.port}/"
    assert json.loads(line) == {"gallery": str(place), "address": address, "ended": sent.name}


def test_a_signal_while_decoders_hang(tmp_path, tiny_run):
    """A restart under load: whatever the decoders do, the service ends, and nothing of the gallery is lost."""
    place = tmp_path / "gallery"
    made_gallery(place, tiny_run).close()
    with live(place, hang=True, decode_seconds=1000, stop_seconds=1) as server:
        clients = [server.connect() for _ in range(8)]
        for client in clients:
            client.sendall(search_request(picture(3)))
        deadline = time.monotonic() + 100
        while server.metric("idml_queue") < 8 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.get("/api/items?limit=1")[0] == 200  # reading goes on
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == -signal.SIGTERM
        for client in clients:
            assert not read_all(client).startswith(b"HTTP/1.1 200")
            client.close()
    with Gallery.open(place, write=True) as gallery:
        assert len(gallery) == 12


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
@pytest.mark.parametrize("keys", [{}, {"IDML_READ_KEY": "read"}])
def test_the_network_needs_a_key(tmp_path, monkeypatch, host, keys):
    monkeypatch.delenv("IDML_API_KEY", raising=False)
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="set IDML_API_KEY"):
        serve(tmp_path / "nothing", host=host)


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="cannot listen on 127"):
        serve(tmp_path / "nothing", port=taken.getsockname()[1])


@pytest.mark.parametrize("port", [-1, 65536, 10**9])
def test_invalid_ports(tmp_path, port):
    with pytest.raises(ValueError, match="a port is a number"):
        serve(tmp_path / "nothing", port=port)


def test_a_missing_gallery(tmp_path):
    with pytest.raises(FileNotFoundError, match="no gallery"):
        serve(tmp_path / "nothing", port=0)


def test_a_gallery_is_served_beside_a_writer(tmp_path, tiny_run, monkeypatch):
    notes = []
    place = tmp_path / "g"
    with made_gallery(place, tiny_run), running._open_gallery(place, None, "torch", notes.append) as second:
        assert second.writable
        assert len(second) == 12
    assert notes == []
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for files that are read-only
    with running._open_gallery(place, None, "torch", notes.append) as reader:
        assert not reader.writable
        assert len(reader) == 12
    assert len(notes) == 1
    assert "reading only" in notes[0]
    assert "is read-only" in notes[0]


def test_limits_have_the_documented_defaults():
    limits = Limits()
    assert limits.body == 20_000_000
    assert (limits.batch, limits.batch_seconds) == (16, 0.005)

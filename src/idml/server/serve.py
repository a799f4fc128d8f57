"""`idml serve`: serve a gallery over HTTP until a signal ends it."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from idml.errors import printable
from idml.progress import Note
from idml.search.embedder import MANY, Runtime
from idml.search.gallery import Gallery
from idml.server.app import build_app
from idml.server.limits import Limits
from idml.server.security import LOCAL, Keys, is_loopback


def _print_note(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def serve(
    location: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    run: str | Path | None = None,
    runtime: Runtime = "auto",
    limits: Limits | None = None,
    note: Note = _print_note,
    ended: Callable[[dict[str, str]], object] | None = None,
) -> None:
    """Serve a gallery and the page until SIGTERM or SIGINT; then finish open requests and close the gallery.

    The keys come from the environment, `IDML_API_KEY` and `IDML_READ_KEY` (see `idml.server.security`). If the
    gallery cannot be written, it is served for reading only.

    Args:
        location: the gallery, a folder or milvus://host:port/collection.
        host: the address to listen on; an address other than loopback needs a key.
        port: 0 chooses a free one.
        run: the run of a Milvus gallery.
        runtime: the library that runs the model.
        limits: for clients and requests.
        note: called with the address of the service and other lines for the user.
        ended: called when the gallery is closed, with its place, the address, and the signal that ended the service.
            The signal is then raised again.
    """
    limits = limits or Limits()
    keys = Keys.from_environment(os.environ)
    local = is_loopback(host)
    if not local and not keys.can_write:
        raise ValueError(f"set IDML_API_KEY to listen on {host}: without a key only loopback addresses are allowed")
    with _bind(host, port) as listener, _open_gallery(location, run, runtime, note) as gallery:
        name = f"[{host}]" if ":" in host else host
        app = build_app(gallery, keys=keys, limits=limits, hosts=LOCAL | {name.lower()} if local else None)
        config = uvicorn.Config(
            app,
            http=connection_protocol(limits),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # a client must not choose the address for its rate limit
            server_header=False,
            timeout_graceful_shutdown=limits.stop_seconds,
        )
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
        for logger in ("python_multipart", "uvicorn.error"):  # a line for each malformed request: strangers could fill
            logging.getLogger(logger).setLevel(logging.ERROR)  # the disk with the log, without a key or a rate limit
        address = f"http://{name}:{listener.getsockname()[1]}/"
        words = "everybody on this machine may read and change it" if keys.open else "a key is needed"

        class Server(uvicorn.Server):
            ended_by = ""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started:
                    note(f"{location} is served at {address} ({words}); Ctrl-C ends it")

            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                super().handle_exit(sig, frame)
                self.ended_by = signal.Signals(sig).name

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                await super().shutdown(sockets)
                if ended is not None:
                    ended({"gallery": str(location), "address": address, "ended": self.ended_by})

        Server(config).run([listener])


def _bind(host: str, port: int) -> socket.socket:
    """Bind a socket to the address. Nobody can connect before the service listens."""
    if not 0 <= port <= 65535:
        raise ValueError(f"a port is a number from 0 (any that is free) to 65535, got {port}")
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"cannot listen on {host}, port {port} ({reason}); choose another with --host or --port"
        ) from None
    return listener


def _open_gallery(location: str | Path, run: str | Path | None, runtime: Runtime, note: Note) -> Gallery:
    """Open the gallery for writing, or for reading with a note if that fails."""
    try:
        return Gallery.open(location, run=run, write=True, runtime=runtime, images=MANY)
    except (ValueError, OSError) as reason:
        gallery = Gallery.open(location, run=run, runtime=runtime, images=MANY)  # raises again if reading fails too
        note(f"for reading only: {reason}")
        return gallery


# -------------------- connections with deadlines --------------------


_BODY = json.dumps({"error": "too many connections, try again"}).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


def connection_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with deadlines for headers and for slow readers, and a limit of connections.

    The deadline for a body is in `idml.server.security`. After the response to a request whose body was not read to
    its end, the rest of the body is discarded until the next deadline. Closing the connection at once could destroy the
    response before the client has read it.
    """

    class Connection(H11Protocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._request_timer: asyncio.TimerHandle | None = None  # deadline for the next request
            self._write_timer: asyncio.TimerHandle | None = None  # deadline for the client to read more

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.write(_FULL)
                transport.close()
            self._wait_for_request()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._serving():
                self._cancel()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._serving():  # otherwise the next request has already arrived
                self._wait_for_request()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_timer = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._write_timer is not None:
                self._write_timer.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            if self._write_timer is not None:
                self._write_timer.cancel()
            super().connection_lost(exc)

        def _serving(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait_for_request(self) -> None:
            self._cancel()
            unsent = self.transport.get_write_buffer_size() > 0
            seconds = max(limits.write_seconds, limits.head_seconds) if unsent else limits.head_seconds
            self._request_timer = self.loop.call_later(seconds, self.transport.abort)

        def _cancel(self) -> None:
            if self._request_timer is not None:
                self._request_timer.cancel()

    return Connection

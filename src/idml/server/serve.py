"""Serving a gallery over HTTP until a signal says to stop."""

import asyncio
import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from idml.progress import Note
from idml.search.embedder import Runtime
from idml.server.limits import Limits
from idml.server.security import Keys, is_loopback

if TYPE_CHECKING:
    from idml.search.gallery import Gallery


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def serve(
    place: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    run: str | Path | None = None,
    runtime: Runtime = "torch",
    limits: Limits | None = None,
    note: Note = _say,
) -> None:
    """Serve a gallery and the page until SIGTERM or SIGINT; what is in flight is finished, then the gallery is closed.

    The keys come from the environment, `IDML_API_KEY` and `IDML_READ_KEY` (see `idml.server.security`). Where another
    process writes to the gallery, or nobody may, it is served for reading.

    Args:
        place: the gallery, a folder or milvus://host:port/collection.
        host: the address to listen on; other than loopback only with a key.
        port: 0 takes a free one.
        run: the run of a Milvus gallery.
        runtime: what runs the model.
        limits: how much is taken on.
        note: is told where the service is, and what to know about it.
    """
    import uvicorn

    from idml.server.app import build_app
    from idml.server.security import LOCAL

    limits = limits or Limits()
    keys = Keys.from_environment(os.environ)
    local = is_loopback(host)
    if not local and not keys.can_write:
        raise ValueError(f"set IDML_API_KEY to listen on {host}: without a key only loopback addresses are allowed")
    with _bound(host, port) as listener, _opened(place, run, runtime, note) as gallery:
        name = f"[{host}]" if ":" in host else host
        app = build_app(gallery, keys=keys, limits=limits, hosts=LOCAL | {name.lower()} if local else None)
        config = uvicorn.Config(
            app,
            http=connection(limits),
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # a client must not choose the address that its rate is counted under
            server_header=False,
            timeout_graceful_shutdown=limits.stop_seconds,
        )
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # clients would write our log
        address = f"http://{name}:{listener.getsockname()[1]}/"
        words = "everybody on this machine may read and change it" if keys.open else "a key is needed"

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started:
                    note(f"{place} is served at {address} ({words}); Ctrl-C ends it")

        Server(config).run([listener])


def _bound(host: str, port: int) -> socket.socket:
    """A socket at the address; nobody can connect before the service is ready."""
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


def _opened(place: str | Path, run: str | Path | None, runtime: Runtime, note: Note) -> "Gallery":
    from idml.search.gallery import Gallery

    try:
        return Gallery.open(place, run=run, write=True, runtime=runtime)
    except (ValueError, OSError) as reason:
        gallery = Gallery.open(place, run=run, runtime=runtime)  # if that is not the matter, it says so again
        note(f"for reading only: {reason}")
        return gallery


# -------------------- connection --------------------
# A connection that is not waited for without end: uvicorn's HTTP protocol with deadlines.
#
# The deadline of a body is the door's (`idml.server.security`). After an answer to a request whose body was not read to
# its end, what still comes is thrown away until the next deadline: closing at once would take the answer from the
# client.


_BODY = json.dumps({"error": "too many connections, try again"}).encode()
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


def connection(limits: Limits) -> type[asyncio.Protocol]:
    """The protocol with these limits, for uvicorn."""

    class Connection(H11Protocol):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._next: asyncio.TimerHandle | None = None  # by when the next request must have begun
            self._taken: asyncio.TimerHandle | None = None  # by when the client must have taken some of the answer

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
            if not self._serving():  # else the next request was there already
                self._wait_for_request()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._taken = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._taken is not None:
                self._taken.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            if self._taken is not None:
                self._taken.cancel()
            super().connection_lost(exc)

        def _serving(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _wait_for_request(self) -> None:
            self._cancel()
            unsent = self.transport.get_write_buffer_size() > 0
            seconds = max(limits.write_seconds, limits.head_seconds) if unsent else limits.head_seconds
            self._next = self.loop.call_later(seconds, self.transport.abort)

        def _cancel(self) -> None:
            if self._next is not None:
                self._next.cancel()

    return Connection

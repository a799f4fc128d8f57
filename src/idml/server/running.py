"""Serving a gallery over HTTP until a signal says to stop."""

import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from idml.search.embedder import Runtime
from idml.server.keys import Keys, is_loopback
from idml.server.limits import Limits

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
    note: Callable[[str], None] = _say,
) -> None:
    """Serve a gallery and the page until SIGTERM or SIGINT; what is in flight is finished, then the gallery is closed.

    The keys come from the environment, `IDML_API_KEY` and `IDML_READ_KEY` (see `idml.server.keys`). Where another
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
    from idml.server.connection import connection
    from idml.server.guard import LOCAL

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


def _opened(place: str | Path, run: str | Path | None, runtime: Runtime, note: Callable[[str], None]) -> "Gallery":
    from idml.search.gallery import Gallery

    try:
        return Gallery.open(place, run=run, write=True, runtime=runtime)
    except (ValueError, OSError) as reason:
        gallery = Gallery.open(place, run=run, runtime=runtime)  # if that is not the matter, it says so again
        note(f"for reading only: {reason}")
        return gallery

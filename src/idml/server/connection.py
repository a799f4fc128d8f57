"""A connection that is not waited for without end: uvicorn's HTTP protocol with deadlines.

The deadline of a body is the door's (`idml.server.guard`). After an answer to a request whose body was not read to its
end, what still comes is thrown away until the next deadline: closing at once would take the answer from the client.
"""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from idml.server.limits import Limits

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

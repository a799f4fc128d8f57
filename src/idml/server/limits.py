"""How much the service takes on: of one client, of one request, and of all together."""

import asyncio
import ipaddress
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

_ADDRESSES = 10_000  # remembered at most


@dataclass(frozen=True)
class Limits:
    """The limits of a service; those of an image's pixels are `idml.data.images.MAX_PIXELS`."""

    body: int = 20_000_000
    """Bytes of a request's body."""
    bodies: int = 500_000_000
    """Bytes of all bodies that are held at once."""
    pixels: int = 200_000_000
    """Pixels of all decoded queries that are held at once (3 bytes each); further ones wait in line."""
    rate: float = 50.0
    """Requests a second of one client address, in the long run …"""
    burst: int = 200
    """… and at once."""
    queue: int = 64
    """Uploads that are being worked on or wait for it."""
    batch: int = 16
    """Queries that are embedded and searched together …"""
    batch_seconds: float = 0.005
    """… and how long the first one waits for the others."""
    connections: int = 500
    """Open connections."""
    head_seconds: float = 10.0
    """From a connection, or the answer before, to the end of the request's headers."""
    body_seconds: float = 60.0
    """From the headers to the end of the body."""
    write_seconds: float = 30.0
    """A client that takes no bytes of its answer for so long is given up."""
    stop_seconds: int = 30
    """What is in flight at the end has so long."""


class Rates:
    """A token bucket for each client address (of IPv6, for each /64: one client may have all of it)."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, when; the latest last

    def wait(self, client: str) -> float:
        """Take a token: 0, or how many seconds are missing for one.

        >>> rates = Rates(2.0, 1, clock=lambda: 0.0)
        >>> [rates.wait("127.0.0.1") for _ in range(2)]
        [0.0, 0.5]
        """
        now, address = self._clock(), _address(client)
        tokens, then = self._buckets.pop(address, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - then) * self._rate)
        short = max(0.0, 1 - tokens)
        self._buckets[address] = (tokens if short else tokens - 1, now)
        if len(self._buckets) > _ADDRESSES:
            self._buckets.popitem(last=False)
        return short / self._rate

    def __len__(self) -> int:
        return len(self._buckets)


def _address(client: str) -> str:
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else client


def whole_seconds(seconds: float) -> int:
    """For a Retry-After header: whole, and at least 1."""
    return max(1, math.ceil(seconds))


class Room:
    """A limited amount of something; who finds too little left waits in line, first come, first served."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, amount: int) -> AsyncIterator[None]:
        """Hold an amount; one larger than the whole room waits until it has all of it."""
        amount = min(amount, self.total)
        ticket = asyncio.get_running_loop().create_future()
        self._line.append((amount, ticket))
        self._call()
        try:
            await ticket
            yield
        finally:
            if ticket.done() and not ticket.cancelled():
                self.free += amount
            else:  # given up while waiting
                with suppress(ValueError):
                    self._line.remove((amount, ticket))
            self._call()

    def _call(self) -> None:
        while self._line and self._line[0][0] <= self.free:
            amount, ticket = self._line.popleft()
            if not ticket.cancelled():
                self.free -= amount
                ticket.set_result(None)

"""Limits of the service: per client, per request, and in total."""

import asyncio
import ipaddress
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

_MAX_ADDRESSES = 10_000  # client addresses kept in memory


@dataclass(frozen=True)
class Limits:
    """The limits of a service. The limit of an image's pixels is `idml.data.images.MAX_PIXELS`."""

    body: int = 20_000_000
    """Bytes of a request's body."""
    bodies: int = 500_000_000
    """Bytes of all bodies in memory."""
    pixels: int = 200_000_000
    """Pixels of all decoded images in memory (3 bytes each); further images wait."""
    decode_seconds: float = 10.0
    """Time for decoding an image; then its process is killed."""
    stuck_seconds: float = 30.0
    """`/api/health` reports the service as stuck if one batch or change takes longer than this."""
    map_seconds: float = 0.5
    """How long a request for the map waits until it is computed."""
    rate: float = 50.0
    """Requests per second from one client address, on average …"""
    burst: int = 200
    """… and in one burst."""
    queue: int = 64
    """Uploads and changes that are processed or waiting."""
    batch: int = 16
    """Queries that are embedded and searched together …"""
    batch_seconds: float = 0.005
    """… and how long the first one waits for others."""
    connections: int = 500
    """Open connections."""
    head_seconds: float = 10.0
    """Time for the headers of a request, from the connection or from the previous response."""
    body_seconds: float = 60.0
    """Time for the body of a request, from the end of its headers."""
    write_seconds: float = 30.0
    """Close the connection of a client that takes no bytes of its response for this long."""
    stop_seconds: int = 30
    """Time to finish open requests at shutdown."""


class RateLimiter:
    """A token bucket for each client address. IPv6 addresses share one per /64, which a single client may own."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, last use

    def take(self, client: str) -> float:
        """Take a token and return 0; if there is none, return in how many seconds there will be one.

        >>> limiter = RateLimiter(2.0, 1, clock=lambda: 0.0)
        >>> [limiter.take("127.0.0.1") for _ in range(2)]
        [0.0, 0.5]
        """
        now, address = self._clock(), _address(client)
        tokens, then = self._buckets.pop(address, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - then) * self._rate)
        short = max(0.0, 1 - tokens)
        self._buckets[address] = (tokens if short else tokens - 1, now)
        if len(self._buckets) > _MAX_ADDRESSES:
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
    """Round up for a Retry-After header, to at least 1."""
    return max(1, math.ceil(seconds))


class Budget:
    """A limited amount that tasks reserve parts of. If too little is left, they wait, first come, first served."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, amount: int) -> AsyncIterator[None]:
        """Hold an amount until the end of the block; more than the total counts as the total."""
        amount = min(amount, self.total)
        ticket = asyncio.get_running_loop().create_future()
        self._waiting.append((amount, ticket))
        self._grant()
        try:
            await ticket
            yield
        finally:
            if ticket.done() and not ticket.cancelled():
                self.free += amount
            else:  # cancelled while waiting
                with suppress(ValueError):
                    self._waiting.remove((amount, ticket))
            self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.free:
            amount, ticket = self._waiting.popleft()
            if not ticket.cancelled():
                self.free -= amount
                ticket.set_result(None)

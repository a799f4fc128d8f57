"""The door: what every request passes before a route sees it, and what every answer carries.

In this order: the Host header (against DNS rebinding), the client's rate, its key, the Origin header (against requests
that another site's page sends), the length of the body. An error that nobody foresaw becomes a 500 that says nothing
but that; the trace goes to the log.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Mapping
from enum import IntEnum
from time import perf_counter
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from idml.server.limits import Limits, Rates, whole_seconds
from idml.server.metrics import Metrics
from idml.server.responses import Refusal

# -------------------- keys --------------------
# Who may do what: two keys from the environment, compared in constant time.
#
#     IDML_API_KEY     everything
#     IDML_READ_KEY    reading and searching
#
# With neither the service is open, and listens on the loopback interface only. With the read key alone nobody can
# write.


_PUBLIC = ("/", "/api/health", "/openapi.json")
SAFE = ("GET", "HEAD")


class Role(IntEnum):
    """What a request may do, or needs; each holds the ones before it."""

    NOBODY = 0
    READER = 1
    WRITER = 2


class Keys:
    """The keys of a service; only their hashes are kept.

    >>> keys = Keys("full-key", "read-key")
    >>> keys.role({"x-api-key": "full-key"}).name, keys.role({"authorization": "Bearer read-key"}).name
    ('WRITER', 'READER')
    >>> keys.role({"x-api-key": "a guess"}).name, Keys().role({}).name
    ('NOBODY', 'WRITER')
    """

    def __init__(self, api: str | None = None, read: str | None = None) -> None:
        for name, key in (("IDML_API_KEY", api), ("IDML_READ_KEY", read)):
            if key is not None and not re.fullmatch("[!-~]+", key):
                raise ValueError(f"{name} must be ASCII letters, digits and signs without spaces, or unset")
        if api is not None and api == read:
            raise ValueError("IDML_API_KEY and IDML_READ_KEY are the same: the read key could write; choose another")
        self._api, self._read = (None if key is None else _hash(key) for key in (api, read))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Keys":
        """The keys that the environment sets."""
        return cls(environment.get("IDML_API_KEY"), environment.get("IDML_READ_KEY"))

    @property
    def open(self) -> bool:
        """No key is set: everybody who reaches the service may do everything."""
        return self._api is None and self._read is None

    @property
    def can_write(self) -> bool:
        """There is a key that may write."""
        return self._api is not None

    def role(self, headers: Mapping[str, str]) -> Role:
        """What the sender of these headers may do."""
        if self.open:
            return Role.WRITER
        given = _hash(presented(headers) or "")
        # Both are compared, whatever the first says: the time must tell nothing.
        api, read = (known is not None and hmac.compare_digest(given, known) for known in (self._api, self._read))
        return Role.WRITER if api else Role.READER if read else Role.NOBODY


def presented(headers: Mapping[str, str]) -> str | None:
    """The key that a request carries, if it carries one."""
    if key := headers.get("x-api-key"):
        return key
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


def needed(method: str, path: str) -> Role:
    """What a request has to be allowed: the page and its health are for everybody, searching only reads.

    >>> needed("GET", "/static/app.js").name, needed("POST", "/api/search").name, needed("POST", "/api/items").name
    ('NOBODY', 'READER', 'WRITER')
    """
    if method in SAFE:
        return Role.NOBODY if path in _PUBLIC or path.startswith("/static/") else Role.READER
    return Role.READER if path == "/api/search" else Role.WRITER


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there; a name other than localhost counts as not.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::", "example.org")]
    [True, True, True, False, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


log = logging.getLogger("idml.server")
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PAGE = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
_DATA = "default-src 'none'; frame-ancestors 'none'; sandbox"  # also for an image opened in a tab of its own
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_UNFORESEEN = Refusal(500, "internal error, see the server's log")


class Guard:
    """The door as ASGI middleware.

    Args:
        app: what is behind it.
        keys: who may do what.
        limits: how much is taken on.
        metrics: where requests are counted.
        hosts: the names the service answers to (IPv6 in brackets), without port; all if None.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, limits: Limits, metrics: Metrics, hosts: frozenset[str] | None
    ) -> None:
        self._app, self._keys, self._limits, self._metrics, self._hosts = app, keys, limits, metrics, hosts
        self._rates = Rates(limits.rate, limits.burst)
        self.held = 0  # bytes of all bodies under way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, answer, started = _Body(self, receive, self._limits), _Answer(scope, send), perf_counter()
        try:
            self._admit(scope)
            await self._app(scope, body.receive, answer.send)
        except Refusal as refusal:
            if answer.status:
                raise
            await refusal.response()(scope, receive, answer.send)
        except ClientDisconnect:
            pass  # nobody is left to be told
        except Exception:
            if answer.status:
                raise  # too late for another answer: the connection is cut
            log.exception("%s %s failed", scope["method"], route(scope))
            await _UNFORESEEN.response()(scope, receive, answer.send)
        finally:
            self.held -= body.size
            self._metrics.served(scope["method"], route(scope), answer.status, perf_counter() - started)

    def _admit(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if self._hosts is not None and _without_port(host) not in self._hosts:
            raise Refusal(403, "this service answers to localhost only; give it as the host")
        if missing := self._rates.wait(scope["client"][0] if scope.get("client") else ""):
            raise Refusal(429, "too many requests, slow down", retry_after=whole_seconds(missing))
        role, wanted = self._keys.role(headers), needed(scope["method"], scope["path"])
        if role < wanted and role == Role.NOBODY:
            wrong = "this key is not known" if presented(headers) else "a key is needed"
            raise Refusal(401, f"{wrong}; send it as X-API-Key or Authorization: Bearer")
        if role < wanted:
            raise Refusal(403, "this key may only read and search")
        scope["role"] = role
        if self._keys.open and scope["method"] not in SAFE and not _same_origin(headers.get("origin"), host):
            raise Refusal(403, "this request comes from the page of another site")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._limits.body:
            raise too_large(self._limits)


class _Body:
    """A request's body while it comes in: counted, and not waited for without end."""

    def __init__(self, guard: Guard, receive: Receive, limits: Limits) -> None:
        self._guard, self._receive, self._limits = guard, receive, limits
        self._until: float | None = asyncio.get_running_loop().time() + limits.body_seconds
        self.size = 0

    async def receive(self) -> Message:
        """The next part of it; after the last one, that the client is gone."""
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise Refusal(408, f"the body did not arrive within {self._limits.body_seconds:g} seconds") from None
        size = len(message.get("body", b""))
        self.size += size
        self._guard.held += size
        if self.size > self._limits.body:
            raise too_large(self._limits)
        if self._guard.held > self._limits.bodies:
            raise Refusal(503, "too many uploads at once, try again", retry_after=1)
        if not message.get("more_body", False):
            self._until = None
        return message


class _Answer:
    """The answer as it goes out: its status is remembered, its head gets what every answer carries."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._policy = _PAGE if scope["path"] == "/" or scope["path"].startswith("/static/") else _DATA
        self._send = send
        self.status = 0  # nothing was sent

    async def send(self, message: Message) -> None:
        """Send a part of it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["content-security-policy"] = self._policy
            for name, value in _HEADERS.items():
                headers[name] = value
        await self._send(message)


def too_large(limits: Limits) -> Refusal:
    """The refusal of a body."""
    return Refusal(413, f"the request is larger than {limits.body / 1e6:g} MB")


def route(scope: Scope) -> str:
    """The route's pattern: a request's own path would make the log and the metrics grow without end."""
    path: str = getattr(scope.get("route"), "path", "other")
    return path


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _same_origin(origin: str | None, host: str) -> bool:
    if origin is None:
        return True
    try:
        return urlsplit(origin).netloc.lower() == host != ""
    except ValueError:
        return False

"""ASGI middleware: host, rate, key, origin and size checks.

Every request passes these checks in this order: the Host header (against DNS rebinding), the rate of the client, its
key, the Origin header (against requests from the pages of other sites), and the length of the body. An unexpected error
becomes a 500 without details; the traceback goes to the log. Every response gets the security headers.

Two keys from the environment give access; they are compared in constant time:

    IDML_API_KEY     everything
    IDML_READ_KEY    reading and searching

Without a key the service is open, and listens only on the loopback interface. With only the read key, nobody can write.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from time import perf_counter
from urllib.parse import urlsplit

from h11 import LocalProtocolError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from idml.server.limits import Limits, RateLimiter, whole_seconds
from idml.server.metrics import Metrics
from idml.server.responses import ApiError

log = logging.getLogger("idml.server")
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PAGE = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
_DATA = "default-src 'none'; frame-ancestors 'none'; sandbox"  # also when an image is opened in its own tab
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
_INTERNAL_ERROR = ApiError(500, "internal error, see the server's log")
_CHUNK = 1 << 16  # bytes of a response that are sent at a time
_PAGES = ("/", "/docs")
_PUBLIC = (*_PAGES, "/api/health", "/openapi.json")
SAFE = ("GET", "HEAD")


# -------------------- keys --------------------


class Role(IntEnum):
    """What a request may do; each role includes the previous ones."""

    NOBODY = 0
    READER = 1
    WRITER = 2


class Keys:
    """The keys of a service; only their hashes are stored.

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
        """Read the keys from the environment."""
        return cls(environment.get("IDML_API_KEY"), environment.get("IDML_READ_KEY"))

    @property
    def open(self) -> bool:
        """Whether no key is set: everybody who reaches the service may do everything."""
        return self._api is None and self._read is None

    @property
    def can_write(self) -> bool:
        """Whether there is a key that may write."""
        return self._api is not None

    def role(self, headers: Mapping[str, str]) -> Role:
        """Return what the sender of these headers may do."""
        if self.open:
            return Role.WRITER
        given = _hash(sent_key(headers) or "")
        # Always compare both: the time must reveal nothing.
        api, read = (known is not None and hmac.compare_digest(given, known) for known in (self._api, self._read))
        return Role.WRITER if api else Role.READER if read else Role.NOBODY


def sent_key(headers: Mapping[str, str]) -> str | None:
    """Return the key in the headers of a request, or None."""
    if key := headers.get("x-api-key"):
        return key
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else None


def required_role(method: str, path: str) -> Role:
    """Return the role that a request needs. The page and the health check are public; searching needs a reader.

    >>> [required_role("POST", path).name for path in ("/api/search", "/api/items")]
    ['READER', 'WRITER']
    >>> required_role("GET", "/static/app.js").name
    'NOBODY'
    """
    if method in SAFE:
        return Role.NOBODY if path in _PUBLIC or path.startswith("/static/") else Role.READER
    return Role.READER if path == "/api/search" else Role.WRITER


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host; of all names, only localhost counts.

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


# -------------------- middleware --------------------


class RequestGuard:
    """The middleware.

    Args:
        app: the application to protect.
        keys: the keys that give access.
        limits: the limits for clients and requests.
        metrics: counts the requests.
        hosts: the host names that are accepted, without port (IPv6 in brackets); None accepts all.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, limits: Limits, metrics: Metrics, hosts: frozenset[str] | None
    ) -> None:
        self._app, self._keys, self._limits, self._metrics, self._hosts = app, keys, limits, metrics, hosts
        self._limiter = RateLimiter(limits.rate, limits.burst)
        self.body_bytes = 0  # of all bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, response, started = _Body(self, receive, self._limits), _Response(scope, send), perf_counter()
        try:
            self._check(scope)
            if scope["method"] == "HEAD":  # the routes know GET; `_Response` leaves out the body
                scope = {**scope, "method": "GET"}
            await self._app(scope, body.receive, response.send)
        except ApiError as error:
            if response.status:
                raise
            await error.response()(scope, receive, response.send)
        except ClientDisconnect:
            pass  # no client is left to answer
        except Exception:
            if response.status:
                raise  # too late for another response: close the connection
            log.exception("%s %s failed", scope["method"], _route(scope))
            await _INTERNAL_ERROR.response()(scope, receive, response.send)
        finally:
            self.body_bytes -= body.size
            self._metrics.count_request(response.method, _route(scope), response.status, perf_counter() - started)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may see another end of the body
            raise ApiError(400, "send either Content-Length or Transfer-Encoding", close=True)
        if self._hosts is not None and _without_port(host) not in self._hosts:
            raise ApiError(403, "this service accepts only localhost as the host name")
        if missing := self._limiter.take(scope["client"][0] if scope.get("client") else ""):
            raise ApiError(429, "too many requests, slow down", retry_after=whole_seconds(missing))
        role, wanted = self._keys.role(headers), required_role(scope["method"], scope["path"])
        if role < wanted and role == Role.NOBODY:
            wrong = "this key is not known" if sent_key(headers) else "a key is needed"
            raise ApiError(401, f"{wrong}; send it as X-API-Key or Authorization: Bearer")
        if role < wanted:
            raise ApiError(403, "this key may only read and search")
        scope["role"] = role
        if self._keys.open and scope["method"] not in SAFE and not _same_origin(headers.get("origin"), host):
            raise ApiError(403, "this request comes from the page of another site")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._limits.body:
            raise _too_large(self._limits)


class _Body:
    """Receives the body of a request: counts its bytes and limits the time."""

    def __init__(self, guard: RequestGuard, receive: Receive, limits: Limits) -> None:
        self._guard, self._receive, self._limits = guard, receive, limits
        self._until: float | None = asyncio.get_running_loop().time() + limits.body_seconds
        self.size = 0

    async def receive(self) -> Message:
        """Receive the next message."""
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._limits.body_seconds:g} seconds") from None
        size = len(message.get("body", b""))
        self.size += size
        self._guard.body_bytes += size
        if self.size > self._limits.body:
            raise _too_large(self._limits)
        if self._guard.body_bytes > self._limits.bodies:
            raise ApiError(503, "too many uploads at once, try again", retry_after=1)
        if not message.get("more_body", False):
            self._until = None
        return message


class _Response:
    """Sends the response: remembers its status, adds the security headers, and divides a long body.

    Each part waits until the client has read most of the part before: its deadline is that of a part, not of the whole.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._policy = _PAGE if scope["path"] in _PAGES or scope["path"].startswith("/static/") else _DATA
        self._send, self.method = send, scope["method"]
        self.status = 0  # nothing was sent yet

    async def send(self, message: Message) -> None:
        """Send a message."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["content-security-policy"] = self._policy
            for name, value in _HEADERS.items():
                headers[name] = value
        elif message["type"] == "http.response.body":
            body, place = b"" if self.method == "HEAD" else message.get("body", b""), 0
            while len(body) - place > _CHUNK:
                await self._pass_on({**message, "body": body[place : place + _CHUNK], "more_body": True})
                place += _CHUNK
            message = {**message, "body": body[place:]}
        await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        with suppress(LocalProtocolError):  # uvicorn has answered a malformed body itself and closes the connection
            await self._send(message)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the request is larger than {limits.body / 1e6:g} MB")


def _route(scope: Scope) -> str:
    """Return the pattern of the route; the paths of requests would make the metrics grow without limit."""
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

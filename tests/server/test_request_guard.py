"""The middleware by itself, around an application of a few lines: what it lets in, what it counts, what it answers."""

import asyncio
import json
import logging

import pytest
from h11 import LocalProtocolError
from starlette.requests import ClientDisconnect

from idml.server import security
from idml.server.limits import Limits
from idml.server.responses import ApiError
from idml.server.security import LOCAL, Keys, RequestGuard, sent_key

FULL, READ = "full-key", "read-key"
DATA = "default-src 'none'; frame-ancestors 'none'; sandbox"
PAGE = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
START = {"type": "http.response.start", "status": 200, "headers": []}


class Count:
    """Metrics that remember what was counted."""

    def __init__(self):
        self.requests, self.seconds = [], []

    def count_request(self, method, route, status, seconds):
        self.requests.append((method, route, status))
        self.seconds.append(seconds)


class Route:
    path = "/a/{pattern}"


async def answer(scope, receive, send):
    """An application that reads the body and answers with what it was asked."""
    scope["route"] = Route()
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({**START, "headers": [(b"x-frame-options", b"ALLOW")]})
    body = json.dumps([scope["method"], scope.get("role"), size]).encode()
    await send({"type": "http.response.body", "body": body})


class Asked:
    """One request to a guarded application, and everything that was sent back."""

    def __init__(
        self, app=answer, *, messages=(), silent=False, send=None, guard=None, client=("10.0.0.1", 5), **options
    ):
        settings = {name: options.pop(name) for name in ("keys", "limits", "hosts") if name in options}
        self.metrics = Count()
        given = {"keys": Keys(), "limits": Limits(), "hosts": None, **settings}
        self.guard = guard or RequestGuard(app, metrics=self.metrics, **given)
        if guard:
            self.metrics = guard._metrics
        headers = {"host": "localhost:8000", **options.pop("headers", {})}
        self.scope = {
            "type": "http", "method": "GET", "path": "/api/gallery", "client": client,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()], **options,
        }  # fmt: skip
        self.sent = []
        messages = list(messages) or [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive():
            if not messages:
                assert silent, "nothing more is sent"
                await asyncio.sleep(3600)
            return messages.pop(0)

        async def collect(message):
            self.sent.append(message)

        self.received = messages
        asyncio.run(self.guard(self.scope, receive, send or collect))

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def body(self):
        return json.loads(b"".join(message.get("body", b"") for message in self.sent))

    @property
    def error(self):
        return self.body["error"]

    @property
    def headers(self):
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}


def test_a_request_that_is_let_in():
    asked = Asked(method="POST", messages=[{"type": "http.request", "body": b"12345", "more_body": False}])
    assert (asked.status, asked.body) == (200, ["POST", 2, 5])
    assert asked.metrics.requests == [("POST", "/a/{pattern}", 200)]
    assert asked.guard.body_bytes == 0


def test_the_time_of_a_request(monkeypatch):
    clock = iter([5.0, 7.5])
    monkeypatch.setattr(security, "perf_counter", lambda: next(clock))
    assert Asked().metrics.seconds == [2.5]


def test_other_kinds_of_connection():
    async def app(scope, receive, send):
        await send({"type": f"{scope['type']}.startup.complete", "got": await receive()})

    life = Asked(app, type="lifespan", messages=[{"type": "lifespan.startup"}])
    assert life.sent == [{"type": "lifespan.startup.complete", "got": {"type": "lifespan.startup"}}]
    assert Asked(app, type="websocket").sent == [{"type": "websocket.close", "code": 1008}]
    assert life.metrics.requests == []


def test_head_is_answered_without_a_body():
    asked = Asked(method="HEAD")
    assert (asked.status, asked.sent[1]) == (200, {"type": "http.response.body", "body": b""})
    assert asked.metrics.requests == [("HEAD", "/a/{pattern}", 200)]
    assert asked.scope["method"] == "HEAD"
    refused = Asked(method="HEAD", keys=Keys(FULL))
    assert (refused.status, refused.sent[1]["body"]) == (401, b"")


@pytest.mark.parametrize(
    ("path", "policy"),
    [("/", PAGE), ("/docs", PAGE), ("/static/app.js", PAGE), ("/api/items", DATA), ("/static", DATA), ("/docs/", DATA)],
)
def test_headers_of_every_response(path, policy):
    for keys, status in ((Keys(), 200), (Keys(FULL), 200 if path in ("/", "/docs", "/static/app.js") else 401)):
        asked = Asked(path=path, keys=keys)
        assert asked.status == status
        found = {name: value for name, value in asked.headers.items() if name not in ("content-length", "content-type")}
        expected = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",  # also where the application says something else
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
        }
        assert {name: found[name] for name in expected} == expected
        assert set(found) - set(expected) <= {"cache-control", "www-authenticate"}


def test_keys_and_what_is_said_about_them():
    keys = Keys(FULL, READ)
    for headers, method, status, words in [
        ({}, "GET", 401, "a key is needed; send it as X-API-Key or Authorization: Bearer"),
        ({"x-api-key": "guess"}, "GET", 401, "this key is not known; send it as X-API-Key or Authorization: Bearer"),
        ({"x-api-key": READ}, "DELETE", 403, "this key may only read and search"),
    ]:
        asked = Asked(keys=keys, headers=headers, method=method)
        assert (asked.status, asked.error) == (status, words)
        assert asked.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
        assert asked.metrics.requests == [(method, "other", status)]
        assert "role" not in asked.scope
    assert Asked(keys=keys, headers={"x-api-key": READ}).body == ["GET", 1, 0]
    assert Asked(keys=keys, headers={"x-api-key": FULL}, method="DELETE").body == ["DELETE", 2, 0]
    assert Asked(keys=keys, path="/api/health").body == ["GET", 0, 0]
    assert Asked(keys=keys, headers={"x-api-key": READ}, method="POST", path="/api/search").status == 200
    assert Asked(keys=keys, headers={"x-api-key": FULL, "origin": "http://example.org"}, method="DELETE").status == 200


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, None),
        ({"x-api-key": ""}, None),
        ({"x-api-key": "a", "authorization": "Bearer b"}, "a"),
        ({"x-api-key": "", "authorization": "Bearer b"}, "b"),
        ({"authorization": "BEARER  b c "}, "b c"),
        ({"authorization": "Basic b"}, None),
        ({"authorization": "b"}, None),
        ({"authorization": "Bearer"}, ""),
    ],
)
def test_where_a_key_is_looked_for(headers, key):
    assert sent_key(headers) == key


def test_hosts():
    refused = Asked(hosts=LOCAL, headers={"host": "example.org"})
    assert (refused.status, refused.error) == (403, "this service accepts only localhost as the host name")
    for host in ("LocalHost", "localhost:1", "[::1]:80", "[::1]", "127.0.0.1"):
        assert Asked(hosts=LOCAL, headers={"host": host}).status == 200
    for host in ("", ":80", "localhost:", "localhost:x", "x:localhost:80", "::1"):
        assert Asked(hosts=LOCAL, headers={"host": host}).status == 403
    assert Asked(hosts=frozenset({""}), headers={"host": ""}).status == 200
    nameless = Asked(hosts=LOCAL)
    nameless.scope["headers"] = []
    with pytest.raises(ApiError, match="only localhost"):
        nameless.guard._check(nameless.scope)


def test_origins():
    for origin, status in [
        ("http://localhost:8000", 200),
        ("https://LOCALHOST:8000", 200),
        ("http://localhost", 403),
        ("http://[", 403),
        ("", 403),
        ("null", 403),
    ]:
        asked = Asked(method="POST", path="/api/items", headers={"origin": origin})
        assert asked.status == status
        assert Asked(headers={"origin": origin}).status == 200  # reading is harmless
        assert Asked(headers={"origin": origin}, method="HEAD").status == 200
    assert asked.error == "this request comes from the page of another site"
    assert Asked(method="POST", headers={"host": "", "origin": "/"}).status == 403
    assert Asked(method="POST").status == 200


def test_two_ends_of_a_body_close_the_connection():
    asked = Asked(headers={"content-length": "0", "transfer-encoding": "chunked"})
    assert (asked.status, asked.error) == (400, "send either Content-Length or Transfer-Encoding")
    assert asked.headers["connection"] == "close"
    for one in ({"content-length": "0"}, {"transfer-encoding": "chunked"}):
        assert Asked(headers=one).status == 200


def test_rates_are_those_of_a_client():
    first = Asked(limits=Limits(rate=0.001, burst=2))
    again = [Asked(guard=first.guard) for _ in range(2)]
    assert [asked.status for asked in again] == [200, 429]
    assert again[1].error == "too many requests, slow down"
    assert 100 < int(again[1].headers["retry-after"]) <= 1000
    assert Asked(guard=first.guard, client=("10.0.0.2", 5)).status == 200
    nobody = [Asked(guard=first.guard, client=None).status for _ in range(3)]
    assert nobody == [200, 200, 429]
    assert first.metrics.requests[-1] == ("GET", "other", 429)


@pytest.mark.parametrize(("length", "status"), [("1000", 200), ("1001", 413), ("-1", 413), ("ten", 413), ("", 413)])
def test_declared_lengths(length, status):
    asked = Asked(method="POST", limits=Limits(body=1000), headers={"content-length": length})
    assert asked.status == status
    if status == 413:
        assert asked.error == "the request is larger than 0.001 MB"


def chunks(*sizes):
    return [{"type": "http.request", "body": b"x" * n, "more_body": i + 1 < len(sizes)} for i, n in enumerate(sizes)]


def test_bodies_are_counted_as_they_come():
    limits = Limits(body=1000, bodies=1500)
    exact = Asked(method="POST", limits=limits, messages=chunks(400, 600))
    assert (exact.status, exact.body[2]) == (200, 1000)
    large = Asked(method="POST", limits=limits, messages=chunks(400, 601, 5))
    assert (large.status, large.error) == (413, "the request is larger than 0.001 MB")
    assert len(large.received) == 1  # the rest was not read
    assert exact.guard.body_bytes == large.guard.body_bytes == 0


def test_all_bodies_together_are_limited():
    limits, seen = Limits(body=1000, bodies=1500), []

    async def app(scope, receive, send):
        await receive()
        seen.append(first.guard.body_bytes if seen else None)
        await send({**START})
        await send({"type": "http.response.body", "body": b"[]"})

    first = Asked(app, method="POST", limits=limits, messages=chunks(100))
    first.guard.body_bytes = 700  # of another request
    assert Asked(guard=first.guard, method="POST", messages=chunks(800)).status == 200
    assert seen[-1] == 1500
    crowded = Asked(guard=first.guard, method="POST", messages=chunks(801))
    assert (crowded.status, crowded.error) == (503, "too many uploads at once, try again")
    assert crowded.headers["retry-after"] == "1"
    assert first.guard.body_bytes == 700


def test_a_body_that_does_not_arrive():
    limits = Limits(body_seconds=0.05)
    half = {"type": "http.request", "body": b"x", "more_body": True}
    asked = Asked(method="POST", limits=limits, messages=[half], silent=True)
    assert (asked.status, asked.error) == (408, "the body did not arrive within 0.05 seconds")
    assert asked.guard.body_bytes == 0


def test_after_the_body_there_is_no_hurry():
    """An application that waits for the client to leave is not disturbed."""

    async def app(scope, receive, send):
        assert (await receive())["type"] == "http.request"
        await asyncio.sleep(0.1)
        waiting = asyncio.ensure_future(receive())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        waiting.cancel()
        await answer(scope, lambda: asyncio.sleep(0, {}), send)

    plain = {"type": "http.request"}  # neither a body nor a word about more
    assert Asked(app, limits=Limits(body_seconds=0.05), messages=[plain], silent=True).status == 200


def test_errors_of_the_application(caplog):
    async def fail(scope, receive, send):
        scope["route"] = Route()
        raise RuntimeError("secret")

    with caplog.at_level(logging.ERROR, "idml.server"):
        asked = Asked(fail, method="POST", path="/a/b")
    assert (asked.status, asked.error) == (500, "internal error, see the server's log")
    assert asked.metrics.requests == [("POST", "/a/{pattern}", 500)]
    assert [record.getMessage() for record in caplog.records] == ["POST /a/{pattern} failed"]
    assert "secret" in caplog.text
    assert asked.headers["content-security-policy"] == DATA

    async def refuse(scope, receive, send):
        raise ApiError(418, "no coffee")

    asked = Asked(refuse)
    assert (asked.status, asked.error) == (418, "no coffee")

    async def leave(scope, receive, send):
        raise ClientDisconnect

    asked = Asked(leave)
    assert (asked.sent, asked.metrics.requests) == ([], [("GET", "other", 0)])


@pytest.mark.parametrize("error", [ApiError(503, "late"), RuntimeError("late")])
def test_an_error_after_the_start_of_a_response_closes_the_connection(error):
    """A second response on the same connection would be taken for the body of the first."""

    async def late(scope, receive, send):
        await send({**START})
        raise error

    sent = []

    async def send(message):
        sent.append(message["type"])

    with pytest.raises(type(error), match="late"):
        Asked(late, send=send)
    assert sent == ["http.response.start"]


def test_a_connection_that_the_server_has_closed():
    async def closed(message):
        raise LocalProtocolError("already answered")

    assert Asked(send=closed).metrics.requests == [("GET", "/a/{pattern}", 200)]


@pytest.mark.parametrize("length", [0, 1, 65536, 65537, 200_000])
def test_a_long_body_is_sent_in_parts(length):
    """The deadline for a client that reads nothing begins anew with each part: a slow client that reads is served."""
    body = bytes(range(256)) * (length // 256 + 1)

    async def app(scope, receive, send):
        await send(START)
        await send({"type": "http.response.body", "body": body[:length], "more_body": True})
        await send({"type": "http.response.body", "body": b"end"})

    _, *parts = Asked(app).sent
    assert b"".join(part["body"] for part in parts) == body[:length] + b"end"
    assert max(len(part["body"]) for part in parts) <= 65536
    assert len(parts) == max(1, -(-length // 65536)) + 1
    assert [part.get("more_body", False) for part in parts] == [True] * (len(parts) - 1) + [False]

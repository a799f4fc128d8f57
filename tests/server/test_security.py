"""The door: hosts, keys, origins, rates and sizes; and that no error tells more than it should."""

import logging

import pytest
from service_client import client_of, picture, said, search

from idml.search.gallery import Upload
from idml.server.limits import Limits
from idml.server.security import Keys

FULL, READ = "full-key", "read-key"
ID = "0" * 32
PUBLIC = [("GET", "/"), ("GET", "/docs"), ("GET", "/static/app.js"), ("GET", "/api/health"), ("GET", "/openapi.json")]
READING = [
    ("GET", "/metrics"),
    ("GET", "/api/gallery"),
    ("GET", "/api/items"),
    ("GET", f"/api/items/{ID}"),
    ("GET", f"/api/items/{ID}/thumbnail"),
    ("GET", f"/api/items/{ID}/image"),
    ("GET", f"/api/items/{ID}/similar"),
    ("GET", "/api/labels"),
    ("POST", "/api/search"),
    ("GET", "/nothing"),
]
WRITING = [("POST", "/api/items"), ("PATCH", f"/api/items/{ID}"), ("DELETE", f"/api/items/{ID}"), ("BREW", "/")]


@pytest.mark.parametrize("keys", [(None, None), (FULL, None), (FULL, READ), (None, READ)])
def test_roles_of_all_routes(gallery, keys):
    """Every kind of request with every key at every kind of service: let in (whatever it is told then), 401 or 403."""
    api, read = keys
    with client_of(gallery, keys=Keys(*keys), limits=Limits(rate=1e6, burst=1000)) as client:
        for key in (None, FULL[:-1], FULL, READ):
            role = 2 if keys == (None, None) or (api and key == api) else 1 if read and key == read else 0
            for need, requests in enumerate((PUBLIC, READING, WRITING)):
                for method, path in requests:
                    response = client.request(method, path, headers={} if key is None else {"X-API-Key": key})
                    status = response.status_code
                    if role >= need:
                        assert status not in (401, 403)
                    else:
                        assert status == (401 if role == 0 else 403)
                        assert ("www-authenticate" in response.headers) == (status == 401)
                        assert said(response)
        assert len(gallery) == 12


def test_a_key_in_the_address_is_ignored(gallery):
    with client_of(gallery, keys=Keys(FULL)) as client:
        assert client.get(f"/api/gallery?key={FULL}&x-api-key={FULL}").status_code == 401
        assert client.get("/api/gallery", headers={"authorization": f"Basic {FULL}"}).status_code == 401
        assert client.get("/api/gallery", headers={"cookie": f"x-api-key={FULL}"}).status_code == 401
        assert client.get("/api/gallery", headers={"authorization": f"bearer {FULL}"}).status_code == 200


def test_a_body_without_key_is_not_read(gallery):
    read = []

    def body():
        for _ in range(10):
            read.append(1)
            yield b"x" * 1000

    with client_of(gallery, keys=Keys(FULL)) as client:
        assert client.post("/api/items", content=body()).status_code == 401
        assert len(read) <= 1


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:9", "[::1]:8000", "[::1]", "LOCALHOST:1"])
def test_local_host_names_are_accepted(shared, host):
    assert shared.get("/api/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["example.org", "example.org:8000", "localhost.example.org", "127.0.0.1.nip.io:8000", "", "::1", "[::1", "a:b"],
)
def test_other_host_names_are_refused(shared, host):
    for path in ("/", "/api/health", "/api/items", "/static/app.js"):
        response = shared.get(path, headers={"host": host})
        assert response.status_code == 403
        assert "localhost" in said(response)


def test_with_a_key_every_host_name_is_accepted(gallery):
    with client_of(gallery, keys=Keys(FULL), hosts=None) as client:
        headers = {"host": "example.org", "x-api-key": FULL}
        assert client.get("/api/gallery", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["http://example.org", "null", "http://localhost", "http://localhost:8001", "http://[", "localhost:8000", ""],
)
def test_pages_of_other_sites_cannot_change_anything(shared, origin):
    headers = {"origin": origin}
    for response in (
        shared.post("/api/items", files={"image": picture(99)}, headers=headers),
        shared.post("/api/search", files={"image": picture(99)}, headers=headers),
        shared.patch(f"/api/items/{ID}", json={"label": None}, headers=headers),
        shared.delete(f"/api/items/{ID}", headers=headers),
    ):
        assert response.status_code == 403
        assert "another site" in said(response)
    assert "access-control-allow-origin" not in shared.get("/api/items", headers=headers).headers
    assert shared.get("/api/health").json()["items"] == 12


@pytest.mark.parametrize("origin", ["http://localhost:8000", "https://LOCALHOST:8000"])
def test_its_own_page_may_change_items(shared, origin):
    assert shared.delete(f"/api/items/{ID}", headers={"origin": origin}).status_code == 404


def test_with_a_key_the_origin_does_not_matter(gallery):
    with client_of(gallery, keys=Keys(FULL)) as client:
        headers = {"origin": "http://example.org", "x-api-key": FULL}
        assert client.delete(f"/api/items/{ID}", headers=headers).status_code == 404


def test_rate_limit(gallery):
    with client_of(gallery, limits=Limits(rate=0.2, burst=10)) as client:
        assert [client.get("/api/health").status_code for _ in range(10)] == [200] * 10
        responses = [client.get("/api/health") for _ in range(5)]
        assert responses[-1].status_code == 429
        assert 1 <= int(responses[-1].headers["retry-after"]) <= 5
        assert "too many requests" in said(responses[-1])


def test_guessing_keys_is_rate_limited(gallery):
    with client_of(gallery, keys=Keys(FULL), limits=Limits(rate=0.01, burst=5)) as client:
        statuses = [client.get("/api/gallery", headers={"x-api-key": f"guess-{n}"}).status_code for n in range(20)]
        assert statuses == [401] * 5 + [429] * 15


def test_a_forwarded_address_is_ignored(gallery):
    with client_of(gallery, limits=Limits(rate=0.01, burst=3)) as client:
        statuses = [client.get("/", headers={"x-forwarded-for": f"10.0.0.{n}"}).status_code for n in range(6)]
        assert statuses == [200] * 3 + [429] * 3


def test_a_declared_length_above_the_limit(gallery):
    with client_of(gallery, limits=Limits(body=10_000)) as client:
        response = search(client, b"x" * 20_000)
        assert response.status_code == 413
        assert said(response) == "the request is larger than 0.01 MB"


def test_a_body_without_a_declared_length(gallery):
    def body():
        yield b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\n'
        for _ in range(20):
            yield b"x" * 1000

    with client_of(gallery, limits=Limits(body=10_000)) as client:
        for path in ("/api/search", "/api/items"):
            response = client.post(path, content=body(), headers={"content-type": "multipart/form-data; boundary=b"})
            assert response.status_code == 413
            assert said(response)


def test_a_body_within_the_limit_may_be_streamed(shared):
    def body():
        yield b'--b\r\nContent-Disposition: form-data; name="image"\r\n\r\n'
        data = picture(3)
        for start in range(0, len(data), 100):
            yield data[start : start + 100]
        yield b"\r\n--b-"
        yield b"-\r\n"

    response = shared.post("/api/search", content=body(), headers={"content-type": "multipart/form-data; boundary=b"})
    assert response.status_code == 200
    assert response.json()["results"][0]["distance"] == pytest.approx(0, abs=1e-3)


def test_too_many_uploads_at_once(gallery):
    with client_of(gallery, limits=Limits(bodies=1000)) as client:
        response = search(client, b"x" * 2000)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "uploads" in said(response)
        assert search(client, picture(0, size=(2, 2))).status_code == 200  # the room was given back


@pytest.mark.parametrize("call", ["search", "thumbnail", "image_file", "get", "add", "relabel", "remove", "status"])
def test_unexpected_errors_reveal_nothing(gallery, monkeypatch, caplog, call):
    id = next(iter(gallery.items())).id

    def fail(*args, **options):
        raise RuntimeError("secret place /srv/secret")

    requests = {
        "search": ("POST", "/api/search", {"files": {"image": picture(0)}}),
        "add": ("POST", "/api/items", {"files": {"image": picture(99)}}),
        "thumbnail": ("GET", f"/api/items/{id}/thumbnail", {}),
        "image_file": ("GET", f"/api/items/{id}/image", {}),
        "get": ("GET", f"/api/items/{id}", {}),
        "relabel": ("PATCH", f"/api/items/{id}", {"json": {"label": "x"}}),
        "remove": ("DELETE", f"/api/items/{id}", {}),
        "status": ("GET", "/api/gallery", {}),
    }
    with client_of(gallery) as client:
        with monkeypatch.context() as patch:
            patch.setattr(gallery, call, fail)
            method, path, options = requests[call]
            with caplog.at_level(logging.ERROR, "idml.server"):
                response = client.request(method, path, **options)
        assert response.status_code == 500
        assert said(response) == "internal error, see the server's log"
        assert "secret place" in caplog.text  # there it is
        assert "Traceback" in caplog.text
        assert response.headers["x-content-type-options"] == "nosniff"
        again = client.request(method, path, **options)
        assert again.status_code < 300  # and the service goes on


def test_a_file_that_shrinks_while_it_is_read(gallery, monkeypatch):
    from idml.server import uploads

    large = Upload(picture(1, size=(300, 300), format="BMP"))  # more than is read to look at it
    gallery.add([large])
    id, real = large.id, uploads.read_header

    def cut(file):
        head = real(file)
        gallery.image_file(id).write_bytes(b"")
        return head

    monkeypatch.setattr(uploads, "read_header", cut)
    with client_of(gallery) as client:
        reply = client.get(f"/api/items/{id}/image")
    assert reply.status_code == 404
    assert "changed while it was read" in reply.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/api", 404),
        ("GET", "/api/items/", 404),
        ("POST", "/api/gallery", 405),
        ("GET", "/api/search", 405),
        ("PUT", f"/api/items/{ID}", 405),
        ("OPTIONS", "/api/items", 405),
        ("TRACE", "/", 405),
    ],
)
def test_unknown_addresses_and_methods(shared, method, path, status):
    response = shared.request(method, path)
    assert response.status_code == status
    assert said(response)


def test_every_response_has_the_security_headers(shared):
    id = shared.get("/api/items").json()["items"][0]["id"]
    paths = ["/", "/static/app.js", "/api/items", f"/api/items/{id}/image", f"/api/items/{id}/thumbnail", "/metrics"]
    for path in [*paths, "/nothing", "/api/items?limit=0", "/openapi.json"]:
        headers = shared.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "server" not in headers


def test_websockets_are_refused(shared):
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), shared.websocket_connect("/api/search"):
        pass

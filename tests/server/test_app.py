"""Every route but those of searching and of items, with a real gallery."""

import json
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from service_client import LABELS, client_of, fill, identity, picture, said, search

import idml.search.tsne_map
from idml.search.gallery import Gallery
from idml.search.tsne_map import Point
from idml.server.limits import Limits
from idml.server.responses import ApiError
from idml.server.security import Keys


def test_health(shared):
    assert shared.get("/api/health").json() == {"status": "ok", "items": 12}


def test_gallery_info(client, gallery):
    content = client.get("/api/gallery").json()
    assert content == {
        "name": "gallery",
        "items": 12,
        "labelled": 12,
        "classes": 4,
        "model": gallery.embedder.fingerprint,
        "calibrated": False,
        "unknown_share": None,
        "recognised": None,
        "rejected": None,
        "level_speaks": False,
        "drift": "",
        "growth": "",
        "queries": "",
        "feedback": 0,
        "rerankers": [],
        "writable": True,
        "promises": [],
    }


def test_the_map_is_computed_while_clients_ask_again(gallery, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(idml.search.tsne_map, "gallery_map", lambda gallery, check: go_on.wait() and [])
    with client_of(gallery, limits=Limits(map_seconds=0.01)) as client:
        for _ in range(3):
            response = client.get("/api/map")
            assert (response.status_code, response.json()) == (202, {"status": "computing"})
            assert response.headers["retry-after"] == "1"
        go_on.set()
        while (response := client.get("/api/map")).status_code == 202:
            pass
        assert response.json() == {"points": []}


def test_the_end_of_the_service_ends_the_map(gallery, monkeypatch):
    begun, ended = threading.Event(), threading.Event()

    def draw(gallery, check):
        begun.set()
        try:
            while True:
                check()
                time.sleep(0.01)
        except ApiError:
            ended.set()
            raise

    monkeypatch.setattr(idml.search.tsne_map, "gallery_map", draw)
    with client_of(gallery, limits=Limits(map_seconds=0.01)) as client:
        assert client.get("/api/map").status_code == 202
        assert begun.wait(60)
        assert not ended.is_set()
    assert ended.wait(60)


def test_map(client, monkeypatch):
    made = []

    def draw(gallery, check):
        made.append(time.sleep(0.2))
        return [Point(item.id, n / 12, float("nan"), item.label, 0.5) for n, item in enumerate(gallery.items())]

    monkeypatch.setattr(idml.search.tsne_map, "gallery_map", draw)
    with ThreadPoolExecutor(4) as threads:
        contents = list(threads.map(lambda _: client.get("/api/map").json(), range(4)))
    assert all(content == contents[0] for content in contents)
    points = [
        {"id": identity(picture(n)), "x": n / 12, "y": None, "label": LABELS[n % 4], "level": 0.5} for n in range(12)
    ]
    assert contents[0] == {"points": points}
    assert client.get("/api/map").status_code == 200
    assert len(made) == 1  # all of them got the same one
    client.delete(f"/api/items/{identity(picture(0))}")
    assert len(client.get("/api/map").json()["points"]) == 11
    assert len(made) == 2


def test_a_failed_map_is_computed_again(client, monkeypatch):
    monkeypatch.setattr(idml.search.tsne_map, "gallery_map", lambda gallery, check: 1 / 0)
    assert client.get("/api/map").status_code == 500
    monkeypatch.setattr(idml.search.tsne_map, "gallery_map", lambda gallery, check: [])
    assert client.get("/api/map").json() == {"points": []}


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_pages(shared, path):
    response = shared.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "http" not in policy
    assert "unsafe" not in policy
    for name, kind in [("app.js", "text/javascript"), ("style.css", "text/css")]:
        response = shared.get(f"/static/{name}")
        assert response.status_code == 200
        assert response.headers["content-type"] == f"{kind}; charset=utf-8"
        assert response.headers["x-content-type-options"] == "nosniff"


def test_metrics(client):
    search(client, picture(0))
    client.get("/api/items/nobody")
    text = client.get("/metrics").text
    assert 'idml_requests_total{method="POST",route="/api/search",status="200"} 1.0' in text
    assert 'idml_requests_total{method="GET",route="/api/items/{id}",status="404"} 1.0' in text
    assert "idml_gallery_items 12.0" in text
    assert "idml_batch_queries_count 1.0" in text
    assert 'idml_answers_total{state="' in text
    assert "process_resident_memory_bytes" in text


def test_unknown_methods_and_paths_do_not_grow_the_metrics(client):
    for n in range(20):
        client.request(f"BREW{n}", f"/somewhere/{n}")
        client.get(f"/api/items/{n}")
        client.get(f"/{n}")
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("idml_requests_total")]
    assert len(lines) <= 4


def test_openapi_tells_where_a_key_is_needed(gallery):
    with client_of(gallery, keys=Keys("full", "read")) as client:
        content = client.get("/openapi.json").json()
        schemes = content["components"]["securitySchemes"]
        assert {(scheme["type"], scheme.get("name")) for scheme in schemes.values()} == {
            ("apiKey", "X-API-Key"),
            ("http", None),
        }
        for path, operations in content["paths"].items():
            public = operations.get("get", {}).get("security") == [{}]
            assert public == (path == "/api/health")
            status = client.request(next(iter(operations)), path).status_code
            assert (status == 401) == (not public)


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/health", "/metrics", "/api/items", "/openapi.json"])
def test_head_is_get_without_a_body(shared, path):
    got, head = shared.get(path), shared.head(path)
    assert head.status_code == got.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    if path != "/metrics":
        assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.content))


def test_head_of_an_item(client):
    id = client.get("/api/items?limit=1").json()["items"][0]["id"]
    for path in (f"/api/items/{id}", f"/api/items/{id}/image", f"/api/items/{id}/thumbnail"):
        assert client.head(path).status_code == 200
    assert client.head("/api/items/nothing").status_code == 404
    assert client.head("/api/search").status_code == 405


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/api/items", "GET, HEAD, POST"),
        ("/api/items/x", "DELETE, GET, HEAD, PATCH"),
        ("/api/search", "POST"),
        ("/api/health", "GET, HEAD"),
        ("/", "GET, HEAD"),
    ],
)
def test_a_wrong_method_gets_the_right_ones(shared, path, methods):
    for method in ("PUT", "OPTIONS", "TRACE"):
        response = shared.request(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == methods


def test_openapi(shared):
    content = shared.get("/openapi.json").json()
    assert content["openapi"].startswith("3.")
    assert set(content["paths"]) == {
        "/api/health",
        "/metrics",
        "/api/gallery",
        "/api/search",
        "/api/items",
        "/api/items/{id}",
        "/api/items/{id}/thumbnail",
        "/api/items/{id}/image",
        "/api/items/{id}/similar",
        "/api/labels",
        "/api/feedback",
        "/api/feedback/{id}",
        "/api/map",
    }
    known = {f"#/components/schemas/{name}" for name in content["components"]["schemas"]}
    names = set()
    for path, operations in content["paths"].items():
        for method, operation in operations.items():
            names.add(operation["operationId"])
            assert operation["description"]
            assert all(int(status) in range(200, 600) for status in operation["responses"])
            used = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
            assert used == ({"id"} if "{id}" in path else set())
            assert ("requestBody" in operation) == (method in ("post", "patch"))
            assert operation["security"] == [{}]  # no key is set: none is needed
            for body in operation.get("requestBody", {}).get("content", {}).values():
                assert body["schema"]["additionalProperties"] is False
    assert len(names) == sum(map(len, content["paths"].values()))
    text = json.dumps(content)
    references = {part.split('"')[0] for part in text.split('"$ref": "')[1:]}
    assert references
    assert references <= known
    assert "HTTPValidationError" not in text  # errors have one shape


def test_no_page_loads_from_other_hosts(shared):
    assert shared.get("/redoc").status_code == 404
    assert "http" not in shared.get("/docs").text


def test_names_that_are_not_utf8(client, gallery, monkeypatch):
    real = gallery.get
    monkeypatch.setattr(gallery, "get", lambda id: replace(real(id), path="d/caf\udce9.png", label="\udcff<script>"))
    content = client.get(f"/api/items/{identity(picture(0))}").json()
    assert content["path"] == "d/caf�.png"
    assert content["label"] == "�<script>"


def test_read_only_beside_a_writer(gallery, tmp_path, monkeypatch):
    from idml.server import service

    monkeypatch.setattr(service, "_POLL_SECONDS", 0.05)
    with client_of(Gallery.open(tmp_path / "gallery")) as reader:
        assert reader.get("/api/gallery").json()["writable"] is False
        id = identity(picture(0))
        for response in (
            reader.post("/api/items", files={"image": picture(50)}),
            reader.patch(f"/api/items/{id}", json={"label": "x"}),
            reader.delete(f"/api/items/{id}"),
        ):
            assert response.status_code == 403
            assert "reading only" in said(response)
        assert search(reader, picture(3)).json()["results"][0]["id"] == identity(picture(3))
        fill(gallery, 15)  # the writer goes on, and the reader follows
        gallery.remove([id])
        until = time.monotonic() + 60
        while reader.get("/api/gallery").json()["items"] != 14 and time.monotonic() < until:
            time.sleep(0.02)
        assert reader.get("/api/gallery").json()["items"] == 14
        assert reader.get("/api/items").json()["total"] == 14
        assert reader.get(f"/api/items/{id}").status_code == 404
        assert search(reader, picture(14)).json()["results"][0]["id"] == identity(picture(14))


def test_readers_see_that_they_cannot_write(gallery):
    with client_of(gallery, keys=Keys("full", "read")) as client:
        for key, may in [("full", True), ("read", False)]:
            assert client.get("/api/gallery", headers={"x-api-key": key}).json()["writable"] is may


def test_a_full_queue(gallery, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()
    real = gallery.search

    def slow(*args, **options):
        entered.set()
        go_on.wait(600)
        return real(*args, **options)

    monkeypatch.setattr(gallery, "search", slow)
    with client_of(gallery, limits=Limits(queue=2)) as client, ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(search, client, picture(0)) for _ in range(2)]
        entered.wait(600)
        until = time.monotonic() + 600
        while "idml_queue 2.0" not in client.get("/metrics").text and time.monotonic() < until:
            time.sleep(0.01)
        third = threads.submit(search, client, picture(0))
        while not third.done() and "idml_queue 3.0" not in client.get("/metrics").text:
            time.sleep(0.01)
        if not third.done():
            go_on.set()  # it was let in: end the test instead of waiting for it
        full = third.result()
        assert full.status_code == 503
        assert full.headers["retry-after"] == "1"
        assert "too much" in said(full)
        assert client.delete(f"/api/items/{identity(picture(0))}").status_code == 503
        go_on.set()
        assert [task.result().status_code for task in waiting] == [200, 200]
        assert search(client, picture(0)).status_code == 200


def test_a_full_disk(client, gallery, tmp_path, caplog):
    """Whatever does not fit is refused as a whole; what is there is searched all the same."""
    before = client.get("/api/items").json()
    kept, first = resource.getrlimit(resource.RLIMIT_FSIZE), before["items"][0]["id"]
    for limit in (10, len(picture(100)), 20_000):  # the bytes of the image, the row, the log do not fit
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, kept[1]))  # no file may grow beyond it
        try:
            answers = [
                client.post("/api/items", files={"image": picture(100)}, data={"label": "new"}),
                client.patch(f"/api/items/{first}", json={"label": "x"}),
                client.delete(f"/api/items/{first}"),
            ]
            found = search(client, picture(3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        for response in answers:
            assert response.status_code == 507
            assert "could not be stored" in said(response)
        assert "cannot write to the gallery" in caplog.text or "File too large" in caplog.text
        assert found.json()["results"][0]["id"] == identity(picture(3))
        assert client.get("/api/items").json() == before
        assert gallery.engine.verify() == []
    added = client.post("/api/items", files={"image": picture(100)}, data={"label": "new"})
    assert added.json() == {"id": identity(picture(100)), "new": True}
    assert client.get(f"/api/items/{identity(picture(100))}/image").content == picture(100)


def test_a_closed_service_refuses_requests(gallery):
    client = client_of(gallery)
    with client:
        assert search(client, picture(0)).status_code == 200
    for response in (search(client, picture(0)), client.get("/api/health"), client.get("/api/map")):
        assert response.status_code == 503
        assert "shutting down" in said(response)
    with pytest.raises(ValueError, match="closed"):
        len(gallery)


def test_a_gallery_that_cannot_be_read_now(gallery, monkeypatch):
    """A Milvus server that is down, or a disk that fails: 503 and a reason, not an unexpected error."""
    with client_of(gallery, limits=Limits(rate=1e6)) as client:
        id = client.get("/api/items").json()["items"][0]["id"]

        def fail(*args, **options):
            raise OSError("Milvus at localhost failed: nobody answers")

        for method in ("search", "get", "get_many"):
            monkeypatch.setattr(gallery.engine, method, fail)
        for response in (
            search(client, picture(1)),
            client.get(f"/api/items/{id}"),
            client.get(f"/api/items/{id}/similar"),
            client.get("/api/items"),
        ):
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert said(response) == "the gallery cannot be read now; the server's log says why"
        monkeypatch.undo()
        assert search(client, picture(1)).status_code == 200

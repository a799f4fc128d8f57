"""Every route, with a real gallery."""

import hashlib
import io
import json
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from PIL import Image
from serving import LABELS, client_of, fill, picture, said, search

import idml.search.map
from idml.data.images import decode_image
from idml.evaluation.guarantee import Counts
from idml.search.answers import Wishes
from idml.search.gallery import Gallery
from idml.search.map import Point
from idml.server.keys import Keys
from idml.server.limits import Limits

RESULT = {"id", "path", "label", "distance", "probability", "level", "duplicates"}
ANSWER = {"state", "reason", "probability", "novelty", "calibrated", "level", "set_size", "results", "notes", "took_ms"}
ITEM = {"id", "path", "label", "level"}


def identity(data):
    return hashlib.sha256(data).hexdigest()[:32]


def test_health(shared):
    assert shared.get("/api/health").json() == {"status": "ok", "items": 12}


def test_about(client, gallery):
    content = client.get("/api/gallery").json()
    assert content == {
        "items": 12,
        "labelled": 12,
        "classes": 4,
        "model": gallery.embedder.fingerprint,
        "calibrated": False,
        "unknown_share": None,
        "drift": "",
        "writable": True,
        "promises": [],
    }


def test_search_finds_the_image_itself(shared):
    response = search(shared, picture(5), "?k=3")
    assert response.status_code == 200
    content = response.json()
    assert set(content) == ANSWER
    assert content["state"] in ("match", "unsure", "not in the collection")
    assert content["calibrated"] is False
    assert content["probability"] is None
    assert len(content["results"]) == 3
    assert all(set(result) == RESULT for result in content["results"])
    first = content["results"][0]
    assert first["id"] == identity(picture(5))
    assert first["label"] == LABELS[1]
    assert first["path"].startswith("uploads/")
    assert first["distance"] == pytest.approx(0, abs=1e-3)
    assert content["took_ms"] > 0


@pytest.mark.parametrize(
    "query",
    [
        *("?k=0", "?k=101", "?k=x", "?k=1.5", "?max_error=0", "?max_error=1", "?max_error=nan"),
        *("?max_missed=0", "?max_missed=1", "?max_missed="),
    ],
)
def test_search_refuses_bad_parameters(shared, query):
    response = search(shared, picture(5), query)
    assert response.status_code == 422
    assert said(response).split(":")[0] in ("k", "max_error", "max_missed")


def test_wishes_reach_the_gallery_and_its_answer_the_client(client, gallery, monkeypatch):
    asked, real = [], gallery.search

    def search_sets(images, k, wishes):
        asked.append((k, wishes))
        return [replace(reply, answer=replace(reply.answer, results=2)) for reply in real(images, k, wishes)]

    monkeypatch.setattr(gallery, "search", search_sets)
    assert search(client, picture(5), "?k=7&max_error=0.2&max_missed=0.1").json()["set_size"] == 2
    assert search(client, picture(5)).status_code == 200
    assert asked == [(7, Wishes(max_error=0.2, max_missed=0.1)), (12, Wishes())]


def test_promises_say_what_they_are_for(client, gallery, monkeypatch):
    """The confidence, and how many of the queries may be unknown."""
    counts = Counts((0.9, 0.0), (60, 100), (0, 20), 100, (0,))
    monkeypatch.setattr(gallery, "promises", lambda: [counts.promise(error, 0.9) for error in (0.01, 0.05)])
    status = replace(gallery.status(), calibrated=True, unknown_share=0.25)
    monkeypatch.setattr(gallery, "status", lambda: status)
    content = client.get("/api/gallery").json()
    assert (content["calibrated"], content["unknown_share"]) == (True, 0.25)
    reason = counts.promise(0.01, 0.9).reason
    cannot = {"max_error": 0.01, "possible": False, "threshold": None, "coverage": 0.0, "reason": reason}
    can = {"max_error": 0.05, "possible": True, "threshold": 0.9, "coverage": 0.6, "reason": ""}
    assert content["promises"] == [{**promise, "confidence": 0.9} for promise in (cannot, can)]


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_search_knows_all_formats(shared, format):
    response = search(shared, picture(3, format=format))
    assert response.status_code == 200
    assert response.json()["results"][0]["id"] == identity(picture(3))


def test_search_in_an_empty_gallery(tmp_path, tiny_run):
    with client_of(Gallery.create(tmp_path / "empty", tiny_run)) as client:
        content = search(client, picture(0)).json()
        assert content["state"] == "not in the collection"
        assert content["results"] == []
        assert client.get("/api/items").json() == {"total": 0, "items": []}


def test_many_at_once_get_what_each_gets_alone(client, gallery):
    """32 threads; the reference is the gallery itself, one image at a time."""
    queries = [picture(n) for n in range(32)]
    sizes = []
    batcher = gallery.search

    def counted(images, k, wishes):
        sizes.append(len(images))
        return batcher(images, k, wishes)

    gallery.search = counted
    barrier = threading.Barrier(32)

    def ask(number):
        barrier.wait()
        return search(client, queries[number], f"?k={3 + number % 2}").json()

    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(ask, range(32)))
    assert max(sizes) > 1  # they did go together
    for number, content in enumerate(answers):
        image = decode_image(io.BytesIO(queries[number]), "query")
        [alone] = batcher([image], 3 + number % 2, Wishes(max_error=0.05))
        assert content["state"] == alone.answer.state.value
        assert [x["id"] for x in content["results"]] == [x.id for x in alone.results]
        expected = [x.distance for x in alone.results]
        assert [x["distance"] for x in content["results"]] == pytest.approx(expected, abs=1e-3)
        assert content["level"] == pytest.approx(alone.level, rel=1e-4)


def test_a_broken_query_fails_alone(shared):
    whole = picture(1, size=(60, 60), format="JPEG")
    queries = [picture(0), b"no image", whole[:300], picture(2)] * 4

    def ask(data):
        return search(shared, data).status_code

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(ask, queries)) == [200, 415, 422, 200] * 4


def test_items_in_both_orders(client, gallery):
    added = client.get("/api/items").json()
    assert added["total"] == 12
    assert [item["id"] for item in added["items"]] == [identity(picture(n)) for n in range(12)]
    assert all(set(item) == ITEM for item in added["items"])
    levels = dict(zip([i.id for i in gallery.items()], gallery.engine.levels().tolist(), strict=True))
    assert {item["id"]: item["level"] for item in added["items"]} == levels
    uncertain = client.get("/api/items?order=uncertain").json()["items"]
    assert sorted(levels.values(), reverse=True) == [item["level"] for item in uncertain]
    assert {item["id"] for item in uncertain} == set(levels)


def test_items_by_page_and_label(shared):
    pages = [shared.get(f"/api/items?offset={n}&limit=5").json()["items"] for n in (0, 5, 10, 15)]
    assert [len(page) for page in pages] == [5, 5, 2, 0]
    assert [item["id"] for page in pages for item in page] == [identity(picture(n)) for n in range(12)]
    blue = shared.get("/api/items", params={"label": "blue", "limit": 2}).json()
    assert blue["total"] == 3
    assert [item["id"] for item in blue["items"]] == [identity(picture(n)) for n in (2, 6)]
    assert shared.get("/api/items?label=nobody").json() == {"total": 0, "items": []}
    assert shared.get("/api/items?label=").json()["total"] == 12


@pytest.mark.parametrize("query", ["order=x", "offset=-1", "limit=0", "limit=501", "offset=x", "offset=99999999999"])
def test_items_refuses_bad_parameters(shared, query):
    response = shared.get(f"/api/items?{query}")
    assert response.status_code == 422
    assert said(response).startswith(query.split("=")[0])


def test_one_item(client, gallery):
    id = identity(picture(7))
    content = client.get(f"/api/items/{id}").json()
    level = float(gallery.engine.levels([id])[0])
    assert content == {"id": id, "path": f"uploads/{id}.png", "label": "grey", "level": level}


def test_pictures(client, gallery):
    id = identity(picture(7))
    image = client.get(f"/api/items/{id}/image")
    assert image.content == picture(7)
    assert image.headers["content-type"] == "image/png"
    assert image.headers["content-disposition"] == f'inline; filename="{id}.png"'
    thumbnail = client.get(f"/api/items/{id}/thumbnail")
    assert thumbnail.content == gallery.thumbnail(id)
    assert thumbnail.headers["content-type"] == "image/jpeg"
    assert thumbnail.headers["content-disposition"] == f'inline; filename="{id}.jpg"'
    for response in (image, thumbnail):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "sandbox" in response.headers["content-security-policy"]
        Image.open(io.BytesIO(response.content)).load()


@pytest.mark.parametrize("id", ["0" * 32, "x", "a b", "é", "%00", "'; drop", "a" * 1000, '" or id != "'])
def test_unknown_items(shared, id):
    responses = [shared.get(f"/api/items/{id}{part}") for part in ("", "/thumbnail", "/image")]
    responses += [shared.delete(f"/api/items/{id}"), shared.patch(f"/api/items/{id}", json={"label": "x"})]
    assert [response.status_code for response in responses] == [404] * 5
    assert all(map(said, responses))


def test_an_item_whose_file_is_gone(client, gallery):
    id = identity(picture(7))
    file = gallery.image_file(id)
    file.write_bytes(b"<html>no image any more")
    response = client.get(f"/api/items/{id}/image")
    assert response.status_code == 404
    assert "no image" in said(response)
    file.unlink()
    response = client.get(f"/api/items/{id}/image")
    assert response.status_code == 404
    assert "no file" in said(response)
    assert client.get(f"/api/items/{id}/thumbnail").status_code == 200


def test_add_label_and_remove(client, gallery):
    new = picture(100, format="JPEG")
    response = client.post("/api/items", files={"image": new}, data={"label": "  pink "})
    assert response.status_code == 201
    assert response.json() == {"id": identity(new), "new": True}
    path = f"/api/items/{identity(new)}"
    assert client.get(path).json()["label"] == "pink"
    assert client.get(f"{path}/image").content == new
    assert client.get(f"{path}/image").headers["content-type"] == "image/jpeg"
    assert search(client, new).json()["results"][0]["id"] == identity(new)
    again = client.post("/api/items", files={"image": new})
    assert again.status_code == 201
    assert again.json() == {"id": identity(new), "new": False}
    assert client.get("/api/gallery").json()["items"] == 13
    assert client.get("/api/items?label=pink").json()["total"] == 1

    for label, kept in [("<b>bold</b>", "<b>bold</b>"), (None, None), ("été ✓", "été ✓"), (" ", None)]:
        assert client.patch(path, json={"label": label}).status_code == 204
        assert client.get(path).json()["label"] == kept
        assert gallery.get(identity(new)).label == kept
        assert client.get("/api/gallery").json()["labelled"] == 12 + (kept is not None)

    removed = client.delete(path)
    assert removed.status_code == 204
    assert removed.content == b""
    assert client.get(path).status_code == 404
    assert client.delete(path).status_code == 404
    assert client.get("/api/items").json()["total"] == 12
    assert identity(new) not in [x["id"] for x in search(client, new).json()["results"]]


def test_changes_are_on_the_disk(client, gallery, tmp_path):
    client.post("/api/items", files={"image": picture(100)}, data={"label": "new"})
    client.delete(f"/api/items/{identity(picture(0))}")
    with Gallery.open(tmp_path / "gallery") as reader:
        assert reader.get(identity(picture(100))).label == "new"
        assert reader.get(identity(picture(0))) is None


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[]", 422),
        (b"null", 422),
        (b"{}", 422),
        (b'{"label": 3}', 422),
        (b'{"label": ["x"]}', 422),
        (b'{"label": "x", "id": "y"}', 422),
        (b'{"label": "a\\nb"}', 422),
        (b'{"label": "\\ud800"}', 422),
        (b'{"label": "\\udc80"}', 422),
        (json.dumps({"label": "x" * 201}).encode(), 422),
        (b'{"label": "\xff"}', 422),
        (b"[" * 4000, 422),
        (b'{"label": "' + b"x" * 6000 + b'"}', 413),
    ],
)
def test_bad_labels(shared, body, status):
    id = identity(picture(0))
    response = shared.patch(f"/api/items/{id}", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status
    assert said(response)
    assert shared.get(f"/api/items/{id}").json()["label"] == "red"


def test_a_label_must_be_sent_as_json(shared):
    response = shared.patch(f"/api/items/{identity(picture(0))}", content=b'{"label": "x"}')
    assert response.status_code == 415
    assert "application/json" in said(response)


@pytest.mark.parametrize("label", [b"\xff\xfe", b"a\x00b", b"x" * 300])
def test_bad_labels_of_uploads(shared, label):
    boundary = b"--b\r\nContent-Disposition: form-data; name="
    body = boundary + b'"image"\r\n\r\n' + picture(50) + b"\r\n" + boundary + b'"label"\r\n\r\n' + label + b"\r\n--b--"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    response = shared.post("/api/items", content=body, headers=headers)
    assert response.status_code == 422
    assert "label" in said(response)
    assert shared.get("/api/health").json()["items"] == 12


def test_map(client, monkeypatch):
    made = []

    def draw(gallery):
        made.append(time.sleep(0.2))
        return [Point(item.id, n / 12, float("nan"), item.label, 0.5) for n, item in enumerate(gallery.items())]

    monkeypatch.setattr(idml.search.map, "gallery_map", draw)
    with ThreadPoolExecutor(4) as threads:
        contents = list(threads.map(lambda _: client.get("/api/map").json(), range(4)))
    assert all(content == contents[0] for content in contents)
    points = [
        {"id": identity(picture(n)), "x": n / 12, "y": None, "label": LABELS[n % 4], "level": 0.5} for n in range(12)
    ]
    assert contents[0] == {"points": points}
    client.get("/api/map")
    assert len(made) == 1  # all of them got the same one
    client.delete(f"/api/items/{identity(picture(0))}")
    assert len(client.get("/api/map").json()["points"]) == 11
    assert len(made) == 2


def test_a_map_that_failed_is_tried_again(client, monkeypatch):
    monkeypatch.setattr(idml.search.map, "gallery_map", lambda gallery: 1 / 0)
    assert client.get("/api/map").status_code == 500
    monkeypatch.setattr(idml.search.map, "gallery_map", lambda gallery: [])
    assert client.get("/api/map").json() == {"points": []}


def test_the_page(shared):
    response = shared.get("/")
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


def test_what_clients_invent_does_not_make_the_metrics_grow(client):
    for n in range(20):
        client.request(f"BREW{n}", f"/somewhere/{n}")
        client.get(f"/api/items/{n}")
        client.get(f"/{n}")
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("idml_requests_total")]
    assert len(lines) <= 4


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
            assert ("security" in operation) == (path != "/api/health")
    assert len(names) == sum(map(len, content["paths"].values()))
    text = json.dumps(content)
    references = {part.split('"')[0] for part in text.split('"$ref": "')[1:]}
    assert references
    assert references <= known
    assert "HTTPValidationError" not in text  # errors have one shape


def test_there_is_no_page_that_loads_from_other_hosts(shared):
    for path in ("/docs", "/redoc"):
        assert shared.get(path).status_code == 404


def test_numbers_are_always_finite(client, gallery, monkeypatch):
    real = gallery.search

    def strange(images, k, wishes):
        found = real(images, k, wishes)
        bad = float("nan"), float("inf"), -float("inf")
        results = tuple(replace(r, distance=bad[0], probability=bad[1], level=bad[2]) for r in found[0].results)
        answer = replace(found[0].answer, probability=bad[0], novelty=bad[1])
        return [replace(found[0], answer=answer, results=results, level=bad[0])]

    monkeypatch.setattr(gallery, "search", strange)
    response = search(client, picture(0))
    assert response.status_code == 200

    def refuse(word):
        raise AssertionError(word)

    content = json.loads(response.content, parse_constant=refuse)
    assert content["level"] is content["novelty"] is content["results"][0]["distance"] is None


def test_names_that_are_no_utf8(client, gallery, monkeypatch):
    real = gallery.get
    monkeypatch.setattr(gallery, "get", lambda id: replace(real(id), path="d/caf\udce9.png", label="\udcff<script>"))
    content = client.get(f"/api/items/{identity(picture(0))}").json()
    assert content["path"] == "d/caf�.png"
    assert content["label"] == "�<script>"


def test_read_only_beside_a_writer(gallery, tmp_path, monkeypatch):
    from idml.server import service

    monkeypatch.setattr(service, "_FOLLOW", 0.05)
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
        until = time.monotonic() + 5
        while reader.get("/api/items").json()["total"] != 14 and time.monotonic() < until:
            time.sleep(0.02)
        assert reader.get("/api/gallery").json()["items"] == 14
        assert reader.get(f"/api/items/{id}").status_code == 404
        assert search(reader, picture(14)).json()["results"][0]["id"] == identity(picture(14))


def test_whoever_may_only_read_is_told_so(gallery):
    with client_of(gallery, keys=Keys("full", "read")) as client:
        for key, may in [("full", True), ("read", False)]:
            assert client.get("/api/gallery", headers={"x-api-key": key}).json()["writable"] is may


def test_a_full_queue(gallery, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()
    real = gallery.search

    def slow(*args):
        entered.set()
        go_on.wait(10)
        return real(*args)

    monkeypatch.setattr(gallery, "search", slow)
    with client_of(gallery, limits=Limits(queue=2)) as client, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(search, client, picture(0)) for _ in range(2)]
        entered.wait(10)
        until = time.monotonic() + 5
        while "idml_queue 2.0" not in client.get("/metrics").text and time.monotonic() < until:
            time.sleep(0.01)
        full = search(client, picture(0))
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
    log = next((tmp_path / "gallery").glob("generation-*/items.log"))
    kept, first = resource.getrlimit(resource.RLIMIT_FSIZE), before["items"][0]["id"]
    for limit in (10, len(picture(100)), log.stat().st_size - 1):  # the bytes, the vectors, the record do not fit
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
        assert "File too large" in caplog.text
        assert found.json()["results"][0]["id"] == identity(picture(3))
        assert client.get("/api/items").json() == before
        assert gallery.engine.verify() == []
    added = client.post("/api/items", files={"image": picture(100)}, data={"label": "new"})
    assert added.json() == {"id": identity(picture(100)), "new": True}
    assert client.get(f"/api/items/{identity(picture(100))}/image").content == picture(100)


def test_after_the_end_nothing_is_taken_on(gallery):
    client = client_of(gallery)
    with client:
        assert search(client, picture(0)).status_code == 200
    for response in (search(client, picture(0)), client.get("/api/health"), client.get("/api/map")):
        assert response.status_code == 503
        assert "shutting down" in said(response)
    with pytest.raises(ValueError, match="closed"):
        len(gallery)

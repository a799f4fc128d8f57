"""The review over HTTP: every decision is on disk when it is acknowledged, and nobody else's page can make one."""

import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient
from PIL import Image
from reviewed import FOREIGN, WRONG, audited, copied
from service_client import said

from idml.audit import review as review_module
from idml.audit.decisions import DECISIONS_FILE, read_decisions
from idml.audit.review import review_app, serve_review
from idml.audit.run import audit_run


@pytest.fixture(scope="module")
def original(tmp_path_factory, tiny_run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IDML_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("audit")
        audited(folder, tiny_run)
        yield folder


@pytest.fixture
def place(original, tmp_path):
    """The data and their audit, for one test to change."""
    return copied(original, tmp_path)


def connected(place):
    app = review_app(place / "out", f"folder:{place / 'data'}")
    return TestClient(app, base_url="http://127.0.0.1:8001")


@pytest.fixture
def client(place):
    with connected(place) as client:
        yield client


def following(client, **query):
    return client.get("/api/next", params=query).json()


def decide(client, item, decision, **more):
    return client.post("/api/decisions", json={"item": item, "decision": decision, **more})


# ---- going through the lists


def test_one_image_at_a_time_with_its_evidence(client):
    told = following(client, kind="mislabelled")
    item = told["item"]
    assert (item["kind"], item["rank"], item["decision"]) == ("mislabelled", 1, None)
    assert item["image"] in (f"class 4/{WRONG}", "class 5/caf\udce9.png")
    assert item["label"] in ("class 4", "class 5")
    assert item["suggested"] in ("class 0", "class 1")
    assert {"number", "image", "label", "split", "distance"} <= set(item["partners"][0])
    assert told["progress"]["mislabelled"]["open"] == told["progress"]["mislabelled"]["total"] >= 2
    assert told["progress"]["all"]["total"] == sum(told["progress"][kind]["total"] for kind in told["progress"]) / 2
    assert following(client, kind="mislabelled", after=item["id"])["item"]["id"] == item["id"] + 1
    assert following(client, kind="duplicate")["item"]["kind"] == "duplicate"
    assert client.get("/api/review").json()["about"].startswith("folder: 37 images of 6 classes; model: ")


def test_next_wraps_around_or_ends(client):
    places, after = [], -1
    for _ in range(200):
        item = following(client, kind="duplicate", after=after)["item"]
        if item["id"] in places:
            break
        places.append(item["id"])
        after = item["id"]
    assert places == sorted(places)
    assert item["id"] == places[0]  # round
    for place in places:
        decide(client, place, "keep")
    assert following(client, kind="duplicate")["item"] is None
    assert following(client, kind="duplicate", decided=True)["item"]["decision"]["decision"] == "keep"
    assert following(client, kind="duplicate", decided=True, after=places[-1])["item"] is None
    assert following(client, after=10**9)["item"] is not None


def test_images_are_shown_and_only_those_of_the_audit(client, place):
    item = following(client, kind="mislabelled")["item"]
    for path in (f"/api/images/{item['number']}", f"/api/thumbnails/{item['partners'][0]['number']}"):
        answer = client.get(path)
        assert answer.headers["content-type"] == "image/jpeg"
        assert Image.open(io.BytesIO(answer.content)).size == (48, 48)
    named = {item["number"] for item in json.loads((place / "out" / "audit.json").read_text())["findings"]}
    assert len(named) < 37
    for number in (-1, 37, 10**12):
        assert "lists no image" in said(client.get(f"/api/images/{number}"))
    (place / "data" / item["image"]).unlink()
    answer = client.get(f"/api/images/{item['number']}")
    assert (answer.status_code, "there is no image" in said(answer)) == (404, True)


def test_labels_are_completed(client):
    assert client.get("/api/labels", params={"text": "CLASS 3"}).json() == {"labels": ["class 3"]}
    assert len(client.get("/api/labels").json()["labels"]) == 6
    assert client.get("/api/labels", params={"text": "x"}).json() == {"labels": []}


# ---- deciding


@pytest.mark.parametrize(
    ("decision", "more", "new"),
    [("keep", {}, ""), ("relabel", {"label": " class 3 "}, "class 3"), ("exclude", {"label": "ignored"}, "")],
)
def test_a_decision_is_on_disk_when_it_is_acknowledged(client, place, decision, more, new):
    item = following(client, kind="mislabelled")["item"]
    answer = decide(client, item["id"], decision, **more)
    assert answer.status_code == 200
    (written,) = read_decisions(place / "out")
    assert (written.kind, written.image, written.label) == ("mislabelled", item["image"], item["label"])
    assert (written.decision, written.new_label, written.checksum) == (decision, new, item["checksum"])
    told = answer.json()
    assert told["item"]["decision"]["decision"] == decision
    assert told["progress"]["mislabelled"]["open"] == told["progress"]["mislabelled"]["total"] - 1
    assert following(client, kind="mislabelled")["item"]["id"] != item["id"]


def test_undo_opens_it_again(client):
    item = following(client)["item"]
    decide(client, item["id"], "exclude")
    told = decide(client, item["id"], "undo").json()
    assert told["item"]["decision"] is None
    assert told["progress"]["all"]["open"] == told["progress"]["all"]["total"]
    assert following(client)["item"]["id"] == item["id"]


def test_two_reviews_of_one_folder_see_each_other(place):
    with connected(place) as one, connected(place) as other:
        item = following(one)["item"]
        decide(one, item["id"], "keep")
        second = following(other)["item"]
        assert second["id"] != item["id"]
        decide(other, second["id"], "exclude")
        assert following(one, after=item["id"])["item"]["id"] not in (item["id"], second["id"])
    assert [d.decision for d in read_decisions(place / "out")] == ["keep", "exclude"]


def test_decisions_of_many_tabs_at_once_are_all_kept(client, place):
    total = following(client)["progress"]["all"]["total"]
    with ThreadPoolExecutor(8) as tabs:
        answers = list(tabs.map(lambda i: decide(client, i, "keep").status_code, range(total)))
    assert answers == [200] * total
    assert len(read_decisions(place / "out")) == total
    assert following(client)["item"] is None


def test_decisions_are_remembered_by_the_next_audit(client, place, tiny_run):
    item = following(client, kind="mislabelled")["item"]
    decide(client, item["id"], "relabel", label=item["suggested"])
    result = audit_run(tiny_run, f"folder:{place / 'data'}", place / "out")
    assert result["cleaned"]["relabelled"] == 1
    with connected(place) as again:
        assert following(again, kind="mislabelled")["item"]["image"] != item["image"]
        last = following(again, kind="mislabelled")["progress"]["mislabelled"]
        assert last["open"] == last["total"] - 1


def test_the_cleaned_list_is_written_on_request_and_at_the_end(place):
    with connected(place) as client:
        item = following(client, kind="duplicate")["item"]
        decide(client, item["id"], "exclude")
        assert not (place / "out" / "cleaned.csv").exists()
        told = client.post("/api/cleaned", json={}).json()
        assert (told["images"], told["excluded"], told["relabelled"]) == (35, 1, 0)  # one name cannot be listed
        assert told["path"].endswith("cleaned.csv")
        (place / "out" / "cleaned.csv").unlink()
    assert (place / "out" / "cleaned.csv").exists()


# ---- what is wrong


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"item": 0, "decision": "burn"}, 422, "unknown decision 'burn'; use one of keep"),
        ({"item": 0, "decision": "relabel"}, 422, "relabel needs a new label"),
        ({"item": 0, "decision": "relabel", "label": "a\nb"}, 422, "printable characters"),
        ({"item": 0, "decision": "relabel", "label": "x" * 300}, 422, "printable characters"),
        ({"item": 10**6, "decision": "keep"}, 404, "no item 1000000"),
        ({"item": -1, "decision": "keep"}, 404, "no item -1"),
        ({"item": "0", "decision": "keep"}, 422, "a decision needs an item"),
        ({"item": True, "decision": "keep"}, 422, "a decision needs an item"),
        ({"item": 0, "decision": ["keep"]}, 422, "a decision needs an item"),
        ([], 422, "not a JSON object"),
    ],
)
def test_a_wrong_decision_is_refused_and_nothing_is_written(client, place, body, status, words):
    answer = client.post("/api/decisions", json=body)
    assert answer.status_code == status
    assert words in said(answer)
    assert not (place / "out" / DECISIONS_FILE).exists()


def test_relabelling_to_the_same_label(client):
    item = following(client)["item"]
    answer = decide(client, item["id"], "relabel", label=item["label"])
    assert (answer.status_code, "is its label already" in said(answer)) == (422, True)


def test_bodies_that_are_not_json(client):
    assert client.post("/api/decisions", content=b"{", headers={"content-type": "application/json"}).status_code == 422
    form = client.post("/api/decisions", data={"item": 0, "decision": "keep"})
    assert (form.status_code, said(form)) == (415, "send application/json")
    plain = client.post("/api/decisions", content=b'{"item":0}', headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    large = client.post("/api/decisions", json={"item": 0, "decision": "keep", "label": "x" * 20_000})
    assert (large.status_code, "at most 10,000 bytes" in said(large)) == (413, True)
    deep = client.post("/api/decisions", content=b"[" * 9_000, headers={"content-type": "application/json"})
    assert deep.status_code == 422


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8001"},
        {"host": "127.0.0.1.evil.example"},
        {"host": ""},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_other_sites_can_neither_read_nor_decide(client, place, headers):
    assert client.get("/api/next", headers=headers).status_code == 403
    answer = client.post("/api/decisions", json={"item": 0, "decision": "exclude"}, headers=headers)
    assert answer.status_code == 403
    assert "the review accepts" in said(answer)
    assert not (place / "out" / DECISIONS_FILE).exists()


def test_its_own_page_and_links_are_accepted(client):
    own = {"origin": "http://127.0.0.1:8001", "sec-fetch-site": "same-origin"}
    assert client.post("/api/decisions", json={"item": 0, "decision": "keep"}, headers=own).status_code == 200
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200
    assert client.get("/", headers={"host": "localhost:1"}).status_code == 200


def test_an_image_that_changed_since_the_audit_cannot_be_decided(client, place):
    item = following(client, kind="mislabelled")["item"]
    with (place / "data" / os.fsencode(item["image"]).decode("utf-8", "surrogateescape")).open("ab") as file:
        file.write(b"more")
    answer = decide(client, item["id"], "keep")
    assert (answer.status_code, "has changed since the audit: run it again" in said(answer)) == (422, True)


def test_a_full_disk_is_reported(client, monkeypatch, place):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    answer = decide(client, 0, "keep")
    assert (answer.status_code, said(answer)) == (507, "nothing was stored: No space left on device")
    assert read_decisions(place / "out") == []


def test_decisions_damaged_during_a_review_are_reported(client, place):
    (place / "out" / DECISIONS_FILE).write_text("garbage\n")
    answer = decide(client, 0, "keep")
    assert (answer.status_code, "line 1" in said(answer)) == (422, True)
    assert (place / "out" / DECISIONS_FILE).read_text() == "garbage\n"


def test_what_cannot_be_reviewed(place, tmp_path):
    spec = f"folder:{place / 'data'}"
    with pytest.raises(FileNotFoundError, match="run idml audit first"):
        review_app(tmp_path / "none", spec)
    (place / "data" / "class 3" / "0.png").unlink()
    with pytest.raises(ValueError, match="the audit of other images, or the images have changed: audit folder:"):
        review_app(place / "out", spec)
    (place / "out" / DECISIONS_FILE).write_text("garbage\n")
    shutil.copy(place / "data" / "class 3" / "1.png", place / "data" / "class 3" / "0.png")
    with pytest.raises(ValueError, match="other images"):
        review_app(place / "out", spec)


# ---- the page's files


def test_the_page_is_self_contained(client):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    for path in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert path.startswith("/static/")
        answer = client.get(path)
        assert answer.status_code == 200
        assert "http" not in answer.text.replace("`HTTP ", "")
        assert "innerHTML" not in answer.text
    assert not re.search(r"<script>|<style|\son[a-z]+=", page.text)
    for path in ("/static/review.py", "/static/../review.py", "/static/%2e%2e/review.py", "/static/", "/openapi.json"):
        assert client.get(path).status_code == 404
    assert client.get("/favicon.ico").status_code == 204
    assert said(client.delete("/api/next")) == "Method Not Allowed"


def test_names_are_sent_as_they_are(client):
    images = [following(client, kind="mislabelled", after=i)["item"]["image"] for i in (-1, 0)]
    assert sorted(images) == sorted([f"class 4/{WRONG}", f"class 5/{FOREIGN}"])


# ---- the real server


def started(place):
    """The server in a process of its own, and where it listens."""
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    options = {"port": 0, "note": tell.send}
    server = context.Process(target=serve_review, args=(place / "out", f"folder:{place / 'data'}"), kwargs=options)
    server.start()
    url = re.search(r"http://127\.0\.0\.1:\d+/", told.recv())[0]
    for _ in range(6000):
        try:
            urllib.request.urlopen(url, timeout=60).read()
            break
        except OSError:
            time.sleep(0.1)
    return server, url


def post(url, body):
    request = urllib.request.Request(
        f"{url}api/decisions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    return json.loads(urllib.request.urlopen(request, timeout=600).read())


def test_kill_9_loses_no_acknowledged_decision(place):
    server, url = started(place)
    try:
        for item in range(3):
            post(url, {"item": item, "decision": "keep"})
    finally:
        server.kill()
        server.join()
    assert len(read_decisions(place / "out")) == 3
    assert not (place / "out" / "cleaned.csv").exists()
    server, url = started(place)
    post(url, {"item": 3, "decision": "exclude"})
    os.kill(server.pid, signal.SIGINT)
    server.join(600)
    assert server.exitcode == 0
    assert len(read_decisions(place / "out")) == 4
    assert (place / "out" / "cleaned.csv").exists()  # an orderly end writes it


def test_it_listens_only_on_loopback(place, monkeypatch):
    bound = []

    class Server:
        def __init__(self, config):
            pass

        def run(self, sockets):
            bound.append(sockets[0].getsockname())

    import uvicorn

    monkeypatch.setattr(uvicorn, "Server", Server)
    notes = []
    serve_review(place / "out", f"folder:{place / 'data'}", port=0, note=notes.append)
    assert bound[0][0] == "127.0.0.1"
    assert f"http://127.0.0.1:{bound[0][1]}/" in notes[0]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match=r"cannot listen on port .* choose another with --port"):
            serve_review(place / "out", f"folder:{place / 'data'}", port=taken.getsockname()[1])
    with pytest.raises(ValueError, match="a port is a number from 0 to 65535"):
        serve_review(place / "out", f"folder:{place / 'data'}", port=70000)
    assert review_module.PORT == 8001

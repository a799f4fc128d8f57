"""Searching over HTTP, with a real gallery."""

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from service_client import LABELS, client_of, identity, picture, said, search

from idml import Embeddings
from idml.calibration.open_set import QueryPool
from idml.calibration.risk_control import ThresholdCounts
from idml.calibration.stored import Calibration
from idml.data.images import decode_image
from idml.search.answers import RiskTargets
from idml.search.gallery import Gallery

RESULT = {"id", "path", "label", "distance", "probability", "level", "duplicates"}
ANSWER = {
    "state",
    "reason",
    "probability",
    "novelty",
    "calibrated",
    "promised",
    "level",
    "set_size",
    "results",
    "notes",
    "took_ms",
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


def test_an_item_is_searched_without_itself(shared):
    id = identity(picture(5))
    content = shared.get(f"/api/items/{id}/similar?k=12").json()
    assert set(content) == ANSWER
    found = [result["id"] for result in content["results"]]
    assert sorted(found) == sorted(identity(picture(n)) for n in range(12) if n != 5)
    by_upload = [result["id"] for result in search(shared, picture(5), "?k=12").json()["results"]]
    assert [id, *found] == by_upload
    assert len(shared.get(f"/api/items/{id}/similar?k=2").json()["results"]) == 2
    for path, status in ((f"{'0' * 32}/similar", 404), (f"{id}/similar?k=0", 422), (f"{id}/similar?max_error=1", 422)):
        assert shared.get(f"/api/items/{path}").status_code == status


@pytest.mark.parametrize(
    "query",
    [
        *(
            "?k=0",
            "?k=101",
            "?k=x",
            "?k=1.5",
            "?max_error=0",
            "?max_error=5e-324",
            "?max_missed=5e-324",
            "?max_error=1",
            "?max_error=nan",
        ),
        *("?max_missed=0", "?max_missed=1", "?max_missed="),
    ],
)
def test_search_refuses_bad_parameters(shared, query):
    response = search(shared, picture(5), query)
    assert response.status_code == 422
    assert said(response).split(":")[0] in ("k", "max_error", "max_missed")


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("?max_eror=0.2", "unknown parameter 'max_eror'; did you mean 'max_error'?"),
        ("?K=3", "unknown parameter 'K'; did you mean 'k'?"),
        (f"?{'x' * 500}=1", f"unknown parameter '{'x' * 40}' (one of k, max_error, max_missed, rerank)"),
        ("?k=3&k=4", "k is given more than once"),
    ],
)
def test_a_misspelt_parameter_is_no_silent_default(shared, query, reason):
    response = search(shared, picture(5), query)
    assert response.status_code == 422
    assert said(response).startswith(reason)
    assert shared.get("/api/labels?offst=1").status_code == 422
    assert shared.get("/api/health?now=1").status_code == 422
    assert shared.get("/?from=mail").status_code == 200  # a link to the page may carry something


def test_targets_reach_the_gallery(client, gallery, monkeypatch):
    asked, real = [], gallery.search

    def search_sets(images, k, targets, rerank):
        asked.append((k, targets))
        return [replace(reply, answer=replace(reply.answer, results=2)) for reply in real(images, k, targets)]

    monkeypatch.setattr(gallery, "search", search_sets)
    assert search(client, picture(5), "?k=7&max_error=0.2&max_missed=0.1").json()["set_size"] == 2
    assert search(client, picture(5)).status_code == 200
    assert asked == [(7, RiskTargets(max_error=0.2, max_missed=0.1)), (12, RiskTargets())]


def test_guarantees_name_their_conditions(client, gallery, monkeypatch):
    """The confidence, and how many of the queries may be unknown."""
    counts = ThresholdCounts((0.9, 0.0), (60, 100), (0, 20), 100, (0,))
    monkeypatch.setattr(gallery, "guarantees", lambda: [counts.find_guarantee(error, 0.9) for error in (0.01, 0.05)])
    status = replace(gallery.status(), calibrated=True, unknown_share=0.25)
    monkeypatch.setattr(gallery, "status", lambda: status)
    content = client.get("/api/gallery").json()
    assert (content["calibrated"], content["unknown_share"]) == (True, 0.25)
    reason = counts.find_guarantee(0.01, 0.9).reason
    cannot = {"max_error": 0.01, "possible": False, "threshold": None, "coverage": 0.0, "reason": reason}
    can = {"max_error": 0.05, "possible": True, "threshold": 0.9, "coverage": 0.6, "reason": ""}
    common = {"confidence": 0.9, "approximate": False}
    assert content["promises"] == [{**promise, **common} for promise in (cannot, can)]


def test_one_picture_that_is_asked_for_again_voids_no_promise(client, gallery):
    noise = np.random.default_rng(0)
    labels = torch.arange(40).repeat_interleave(30)
    places = noise.normal(size=(40, 16))[labels] + noise.normal(0, 0.8, size=(1200, 16))
    world = Embeddings(torch.tensor(places).float(), torch.tensor(noise.normal(size=(1200, 16))).float())
    stored = (torch.arange(1200) % 2 == 0) & (labels < 30)  # ten classes are unknown
    found = QueryPool(world[~stored], labels[~stored], world[stored], labels[stored]).search()
    model = gallery.embedder.fingerprint
    gallery.store_calibration(Calibration.fit(found.evidence, found.correct, model=model, known=found.known))
    assert next(promise for promise in gallery.guarantees() if promise.max_error == 0.5).possible

    def ask():
        """What a search, a search for an item and the state of the gallery say."""
        similar = client.get(f"/api/items/{identity(picture(5))}/similar?max_error=0.5").json()
        asked = search(client, picture(77), "?max_error=0.5").json()
        told = client.get("/api/gallery").json()["drift"]
        assert similar["promised"] == asked["promised"] == (told == "")
        assert (told in asked["notes"] and told in similar["notes"]) or told == ""
        return told

    for _ in range(30):
        assert ask() == ""
    for number in range(5):
        form = {"files": {"image": picture(number)}, "data": {"verdict": "right"}}
        assert client.post("/api/feedback", **form).status_code == 201
    assert gallery._latest.counts()[1] == 1  # no judgement is counted
    gallery._latest.count(world[:40], [True] * 40)
    assert ask().startswith("about 100% of the latest 41 queries seem to show nothing of the collection")


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_search_accepts_all_formats(shared, format):
    response = search(shared, picture(3, format=format))
    assert response.status_code == 200
    assert response.json()["results"][0]["id"] == identity(picture(3))


def test_search_in_an_empty_gallery(tmp_path, tiny_run):
    with client_of(Gallery.create(tmp_path / "empty", tiny_run)) as client:
        content = search(client, picture(0)).json()
        assert content["state"] == "not in the collection"
        assert content["results"] == []
        assert client.get("/api/items").json() == {"total": 0, "items": []}


def test_parallel_queries_get_the_same_answers(client, gallery):
    """32 threads; the reference is the gallery itself, one image at a time."""
    queries = [picture(n) for n in range(32)]
    sizes = []
    batcher = gallery.search

    def counted(images, k, targets, rerank):
        sizes.append(len(images))
        return batcher(images, k, targets, rerank=rerank)

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
        [alone] = batcher([image], 3 + number % 2, RiskTargets(max_error=0.05))
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


def test_numbers_are_always_finite(client, gallery, monkeypatch):
    real = gallery.search

    def strange(images, k, targets, rerank):
        found = real(images, k, targets)
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

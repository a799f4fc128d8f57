"""Re-ranking over HTTP: the answers of the command line, and what cannot be re-ranked."""

import json
from typing import get_args

import pytest
from service_client import client_of, identity, made_gallery, picture, said, search

from idml import cli
from idml.evaluation.rerank import RERANKERS
from idml.search.gallery import Gallery
from idml.search.indexing import add_maps
from idml.search.position_maps import PositionMaps
from idml.search.reranking import NOTE
from idml.server.schemas import Reranker


@pytest.fixture
def mapped(gallery, client):
    """The gallery of the client, with position maps."""
    assert add_maps(gallery) == 12
    return gallery


@pytest.mark.parametrize(("number", "reason"), [(50, "two classes tie"), (105, "re-ranking puts another class first")])
def test_the_service_answers_as_the_command_line_does(client, mapped, tmp_path, capsys, number, reason):
    (tmp_path / "query.png").write_bytes(picture(number))
    command = ["search", mapped.location, str(tmp_path / "query.png"), "-k", "5", "--json", "--rerank", "diml"]
    assert cli.main(command) == 0
    (told,) = json.loads(capsys.readouterr().out.splitlines()[-1])["replies"]
    answer = search(client, picture(number), "?k=5&rerank=diml").json()
    for name in ("state", "reason", "probability", "novelty", "calibrated", "promised", "set_size", "notes"):
        assert answer[name] == told[name]
    assert answer["level"] == pytest.approx(told["level"], abs=1e-5)
    assert (answer["promised"], answer["probability"]) == (False, None)
    assert answer["reason"].startswith(reason)
    assert answer["notes"][-1] == NOTE.format("diml")
    for found, theirs in zip(answer["results"], told["results"], strict=True):
        assert found["distance"] == pytest.approx(theirs["distance"], abs=1e-5)
        for name in ("id", "path", "label", "probability", "duplicates"):
            assert found[name] == theirs[name]
    plain = search(client, picture(number), "?k=12").json()["results"]
    assert [r["id"] for r in answer["results"]] != [r["id"] for r in plain][:5]


def test_an_item_is_compared_by_its_stored_map(client, mapped):
    id = identity(picture(5))
    answer = client.get(f"/api/items/{id}/similar?k=12&rerank=diml").json()
    (reply,) = mapped.search_items([id], 12, rerank="diml")
    assert [result["id"] for result in answer["results"]] == [result.id for result in reply.results]
    assert len(answer["results"]) == 11
    assert answer["notes"][-1] == NOTE.format("diml")


def test_the_gallery_says_whether_it_can_be_re_ranked(client, gallery):
    assert client.get("/api/gallery").json()["rerankers"] == []
    add_maps(gallery)  # no item changes
    assert client.get("/api/gallery").json()["rerankers"] == ["diml"]
    PositionMaps(gallery.require_folder()).file.unlink()
    assert client.get("/api/gallery").json()["rerankers"] == []


def test_without_maps_it_is_refused(client):
    reason = "the gallery has no position maps: idml index --maps makes them"
    for response in (
        search(client, picture(5), "?rerank=diml"),
        search(client, b"no image", "?rerank=diml"),  # before the image is read
        client.get(f"/api/items/{identity(picture(5))}/similar?rerank=diml"),
    ):
        assert response.status_code == 409
        assert said(response) == reason
    assert search(client, picture(5)).status_code == 200


def test_bad_parameters_are_refused(client, mapped):
    for query, status, words in (
        ("?rerank=dilm", 422, "rerank: Input should be 'diml'"),
        ("?rerank=", 422, "rerank: Input should be 'diml'"),
        ("?rerank=diml&k=0", 422, "k: "),
        ("?rerank=diml&max_missed=0.1", 409, "a set that misses rarely is one of a search without re-ranking"),
    ):
        response = search(client, picture(5), query)
        assert response.status_code == status
        assert said(response).startswith(words)
    assert client.get(f"/api/items/{'0' * 32}/similar?rerank=diml").status_code == 404


def test_an_image_without_a_map_is_named(client, mapped):
    PositionMaps(mapped.require_folder()).delete([identity(picture(5))])
    for response in (
        search(client, picture(5), "?rerank=diml"),
        client.get(f"/api/items/{identity(picture(5))}/similar?rerank=diml"),
    ):
        assert response.status_code == 409
        assert said(response) == (
            f"the image 'uploads/{identity(picture(5))}.png' has no position map: run idml index --maps again"
        )


def test_an_uploaded_image_gets_a_map(client, mapped):
    added = client.post("/api/items", files={"image": ("new.png", picture(99), "image/png")}, data={"label": "red"})
    assert added.status_code == 201
    answer = search(client, picture(99), "?rerank=diml").json()
    assert answer["results"][0]["id"] == identity(picture(99))


def test_an_empty_gallery_with_maps_answers(tmp_path, tiny_run):
    with made_gallery(tmp_path / "g", tiny_run, items=2) as made:
        add_maps(made)
        made.remove([item.id for item in list(made.items())])
    with client_of(Gallery.open(tmp_path / "g")) as client:
        answer = search(client, picture(0), "?rerank=diml").json()
        assert (answer["state"], answer["results"]) == ("not in the collection", [])


def test_the_api_names_all_re_rankers():
    assert get_args(Reranker) == RERANKERS

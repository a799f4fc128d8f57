"""Judgements about answers over HTTP: kept, listed, deleted; and pictures that give nothing away."""

import io
from dataclasses import replace

import pytest
from PIL import Image
from service_client import client_of, identity, made_gallery, picture, said, search

from idml.search.feedback import delete_feedback, read_feedback


def judge(client, verdict, image=None, **fields):
    return client.post("/api/feedback", files={"image": image or picture(7)}, data={"verdict": verdict, **fields})


def test_judgements_are_kept_listed_and_deleted(client, gallery):
    assert client.get("/api/feedback").json() == {"feedback": []}
    right = judge(client, "right")
    assert right.status_code == 201
    assert right.json() == {
        "id": right.json()["id"],
        "query": "upload",
        "right": True,
        "found": "grey",
        "label": "grey",
    }
    wrong = judge(client, "wrong", picture(11), label="<b>new</b>").json()
    assert (wrong["right"], wrong["found"], wrong["label"]) == (False, "grey", "<b>new</b>")
    assert judge(client, "wrong", picture(3)).json()["label"] is None
    kept = client.get("/api/feedback").json()["feedback"]
    assert [one["label"] for one in kept] == ["grey", "<b>new</b>", None]
    stored = read_feedback(gallery.location, gallery.engine.properties)
    found = gallery.search_embeddings(stored[0].embedding, 1)[0].results[0]
    assert (found.id, found.distance) == (identity(picture(7)), pytest.approx(0, abs=1e-3))
    assert client.delete(f"/api/feedback/{right.json()['id']}").status_code == 204
    assert len(client.get("/api/feedback").json()["feedback"]) == 2
    assert client.delete(f"/api/feedback/{right.json()['id']}").status_code == 404


def test_a_picture_has_one_judgement(client):
    judge(client, "right")
    other = judge(client, "right", picture(3)).json()
    again = judge(client, "wrong", label="new").json()
    assert client.get("/api/feedback").json() == {"feedback": [other, again]}
    assert client.get("/api/gallery").json()["feedback"] == 2


def test_only_the_result_that_was_shown_is_judged(client):
    first = identity(picture(7))
    assert judge(client, "right", result=first).status_code == 201
    assert client.delete(f"/api/items/{first}").status_code == 204
    for result in (first, "", "\u00e9"):
        refused = judge(client, "right", result=result)
        assert (refused.status_code, said(refused)) == (409, "another result is the first one now: search again")
    assert [one["found"] for one in client.get("/api/feedback").json()["feedback"]] == ["grey"]


def test_bad_judgements_are_one_line(client, gallery, tmp_path, tiny_run):
    assert said(judge(client, "perhaps")) == "verdict: must be right or wrong"
    assert said(judge(client, "wrong", label="grey")) == "the answer 'grey' cannot be wrong if it is the right label"
    assert judge(client, "right", image=b"no image").status_code == 415
    assert client.get("/api/feedback").json() == {"feedback": []}
    with made_gallery(tmp_path / "other", tiny_run) as other:
        other.writable = False
        with client_of(other) as reader:
            assert judge(reader, "right").status_code == 403


def test_a_damaged_file_of_judgements_is_named(client, gallery, tmp_path, caplog):
    """Only what needs the judgements is refused."""
    file, words = tmp_path / "gallery" / "feedback.json", "what this needs of the gallery is damaged; the server's log"
    file.write_text('{"judgements": [{"id": 3}]}')
    with pytest.raises(ValueError, match=r"feedback\.json is damaged"):
        read_feedback(gallery.location, gallery.engine.properties)
    assert client.get("/api/gallery").json()["feedback"] is None
    assert "feedback.json is damaged" in caplog.text
    for answer in (client.get("/api/feedback"), client.delete("/api/feedback/00"), judge(client, "right")):
        assert (answer.status_code, said(answer)[: len(words)]) == (503, words)
    assert search(client, picture(7)).status_code == 200
    assert delete_feedback(gallery.location, gallery.engine.properties) == 0
    assert judge(client, "right").status_code == 201
    assert client.get("/api/gallery").json()["feedback"] == 1


def test_damaged_folders_of_images(client, gallery, tmp_path):
    id = identity(picture(7))
    gallery.engine.add([replace(gallery.get(id), path="photos/7.png")], gallery.engine.embeddings([id]))
    (tmp_path / "gallery" / "roots.json").write_text("{")
    answer = client.get(f"/api/items/{id}/image")
    assert answer.status_code == 503
    assert "is damaged" in said(answer)
    assert search(client, picture(7)).json()["results"][0]["id"] == id


def test_served_pictures_are_upright_and_without_metadata(client):
    exif = Image.Exif()
    exif[0x010E], exif[0x0112] = "a secret place", 6
    out = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(out, "JPEG", exif=exif.tobytes())
    id = client.post("/api/items", files={"image": out.getvalue()}, data={"label": "red"}).json()["id"]
    for kind in ("image", "thumbnail"):
        response = client.get(f"/api/items/{id}/{kind}")
        assert response.headers["content-type"] == "image/jpeg"
        assert b"secret" not in response.content
        with Image.open(io.BytesIO(response.content)) as image:
            assert image.size == (30, 40)
            assert len(image.getexif()) == 0

"""The items of a gallery over HTTP: listed, shown, added, labelled, removed."""

import io
import json

import pytest
from PIL import Image
from service_client import identity, picture, said, search

from idml.search.gallery import Gallery

ITEM = {"id", "path", "label", "level"}


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


def test_a_mixed_page_is_a_sample_of_the_whole_gallery(shared):
    items = shared.get("/api/items?order=mixed&limit=8").json()["items"]
    assert [item["id"] for item in items] == sorted(identity(picture(n)) for n in range(12))[:8]
    blue = shared.get("/api/items?order=mixed&label=blue").json()["items"]
    assert [item["id"] for item in blue] == sorted(identity(picture(n)) for n in (2, 6, 10))


def test_labels(client, gallery):
    content = client.get("/api/labels").json()
    assert content == {"total": 4, "labels": [{"label": x, "items": 3} for x in ("blue", "green", "grey", "red")]}
    gallery.relabel({identity(picture(0)): "Grün", identity(picture(1)): None})
    client.delete(f"/api/items/{identity(picture(2))}")  # the service reads the gallery again
    content = client.get("/api/labels?text=GR").json()
    assert content["labels"] == [{"label": x, "items": n} for x, n in (("green", 2), ("grey", 3), ("Grün", 1))]
    assert client.get("/api/labels?offset=1&limit=1").json() == {"total": 5, "labels": content["labels"][:1]}
    assert client.get("/api/labels?text=nobody").json() == {"total": 0, "labels": []}
    assert client.get("/api/labels?limit=501").status_code == 422


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


def test_thumbnails_and_images(client, gallery):
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
    assert "not an image" in said(response)
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


def test_changes_are_durable(client, gallery, tmp_path):
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

"""Images, galleries and clients for the tests of the service."""

import hashlib
import io

import numpy as np
from fastapi.testclient import TestClient
from PIL import Image

from idml.search.gallery import Gallery, Upload
from idml.server.app import build_app
from idml.server.limits import Limits
from idml.server.security import LOCAL, Keys

LABELS = ("red", "green", "blue", "grey")


def picture(number, size=(40, 32), format="PNG", **options):
    """The bytes of an image that follows from its number."""
    noise = np.random.default_rng(number)
    coarse = Image.fromarray(noise.integers(0, 256, (5, 4, 3), dtype=np.uint8))
    out = io.BytesIO()
    coarse.resize(size, Image.Resampling.BILINEAR).save(out, format, **options)
    return out.getvalue()


def fill(gallery, items=12):
    gallery.add([Upload(picture(n), LABELS[n % 4], f"{n}.png") for n in range(items)])


def made_gallery(folder, run, items=12):
    """A gallery with some labelled images, open for writing."""
    gallery = Gallery.create(folder, run)
    fill(gallery, items)
    return gallery


def client_of(gallery, *, keys=None, limits=None, hosts=LOCAL, address="127.0.0.1"):
    """A client of the service, for use in a with statement."""
    app = build_app(gallery, keys=keys or Keys(), limits=limits or Limits(), hosts=hosts)
    return TestClient(app, base_url="http://localhost:8000", client=(address, 50000), follow_redirects=False)


def search(client, data, query="", **options):
    return client.post(f"/api/search{query}", files={"image": ("query.png", data, "image/png")}, **options)


def said(response):
    """The one line of a refusal; anything else than that is an error."""
    assert response.headers["content-type"] == "application/json"
    content = response.json()
    assert list(content) == ["error"]
    assert "\n" not in content["error"]
    assert "Traceback" not in content["error"]
    return content["error"]


def identity(data):
    return hashlib.sha256(data).hexdigest()[:32]

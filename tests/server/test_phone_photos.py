"""HEIF and AVIF in the service: found, kept as they are, served as JPEG; broken and hostile files are refused."""

import asyncio
import io

import pytest
from heif_files import encode, repeated_tile, with_size
from PIL import Image
from service_client import picture, said, search

from idml.server.decoders import Decoders
from idml.server.limits import Limits
from idml.server.responses import ApiError

KINDS = {"HEIF": "heic", "AVIF": "avif"}


def photo(number, kind, **options):
    return encode(Image.open(io.BytesIO(picture(number, size=(64, 64)))).convert("RGB"), kind, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_photo_is_found_kept_and_served(client, gallery, kind):
    exif = Image.Exif()
    exif[0x010E] = "a secret place"
    data = photo(40, kind, exif=exif)
    added = client.post("/api/items", files={"image": data})
    assert added.status_code == 201
    id = added.json()["id"]
    assert gallery.image_file(id).name == f"{id}.{KINDS[kind]}"
    assert gallery.image_file(id).read_bytes() == data
    response = client.get(f"/api/items/{id}/image")
    assert response.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(response.content)).size == (64, 64)
    assert b"secret" not in response.content
    found = search(client, data).json()["results"][0]
    assert found["id"] == id
    assert found["distance"] < 1e-3
    client.delete(f"/api/items/{id}")
    assert not gallery.image_file(id)


@pytest.mark.parametrize("kind", KINDS)
def test_broken_photos(shared, kind):
    whole = photo(1, kind)
    for cut in range(1, len(whole), len(whole) // 8):
        response = search(shared, whole[:cut])
        assert response.status_code in (200, 415, 422)
        assert response.status_code == 200 or said(response)
    large = with_size(encode(Image.new("RGB", (64, 64)), kind), (64, 64), (9000, 9000))
    assert search(shared, large).status_code == 413


def test_a_photo_that_never_ends_is_killed():
    async def work():
        decoders = Decoders(Limits(decode_seconds=1))
        try:
            with pytest.raises(ApiError, match="decoding the image took longer than 1 seconds"):
                async with decoders.decode(repeated_tile((1024, 1024), 30, 30, (64, 64))):
                    pass
            async with decoders.decode(photo(1, "HEIF")) as decoded:
                assert decoded.image.size == (64, 64)
        finally:
            await decoders.close()

    asyncio.run(work())

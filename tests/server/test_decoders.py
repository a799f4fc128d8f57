"""Decoding in processes: hangs, crashes and hunger for memory harm nobody but the image that causes them."""

import asyncio
import io
import sys
import threading
import time

import pytest
from PIL import Image
from service_client import client_of, picture, said, search

from idml.data import decoder_process, images
from idml.data.images import MAX_SIDE, decode_image
from idml.search.gallery import Upload
from idml.server import service
from idml.server.decoders import Decoders
from idml.server.limits import Limits
from idml.server.responses import ApiError

SPECIAL = """
import os, time
from idml.data import decoder_main

real = decoder_main.decode_with_format
def decode(file, name, **options):
    match file.getvalue():
        case data if data.endswith(b"hang"):
            time.sleep(1000)
        case b"crash":
            os.abort()
        case b"environment":
            raise decoder_main.RefusedImage("content", " ".join(sorted(os.environ)))
        case _:
            return real(file, name, **options)
decoder_main.decode_with_format = decode
decoder_main.MAX_MEMORY = 300_000_000
decoder_main.main()
"""


@pytest.fixture
def special(monkeypatch):
    """Decoder processes that obey the words hang, crash and environment."""
    monkeypatch.setattr(decoder_process, "COMMAND", (sys.executable, "-c", SPECIAL))


def run(work, **limits):
    """Run a function of decoders in an event loop."""

    async def main():
        decoders = Decoders(Limits(**limits))
        try:
            return await work(decoders)
        finally:
            await decoders.close()

    return asyncio.run(main())


async def decode(decoders, data):
    async with decoders.decode(data) as decoded:
        return decoded


async def refusal(decoders, data):
    with pytest.raises(ApiError) as refused:
        await decode(decoders, data)
    return refused.value.status, refused.value.reason


@pytest.mark.parametrize("options", [{"format": "PNG"}, {"format": "JPEG", "size": (1800, 1300)}, {"format": "GIF"}])
def test_the_same_pixels_as_in_process(options, monkeypatch):
    monkeypatch.setattr(decoder_process, "_BAND", 100_000)  # several bands
    data = picture(1, **options)
    image, format = run(lambda decoders: decode(decoders, data))
    assert image.tobytes() == decode_image(io.BytesIO(data), "x").tobytes()
    assert format == options["format"]


def test_a_hanging_or_crashing_decoder_is_replaced(special):
    async def work(decoders):
        for data, seconds, reason in (
            (b"hang", 0.3, "decoding the image took longer than 0.3 seconds"),
            (b"crash", 1000.0, "the image cannot be decoded"),
        ):
            decoders._seconds = seconds
            for _ in range(2):  # each process is replaced
                refusals = await asyncio.gather(refusal(decoders, data), refusal(decoders, data))
                assert refusals == [(422, reason)] * 2
        assert (await decode(decoders, picture(1))).image.size == (40, 32)

    run(work)


def test_memory_of_a_decoder_is_bounded(special):
    out = io.BytesIO()
    Image.new("L", (8000, 8000)).save(out, "TIFF", compression="tiff_adobe_deflate")

    async def work(decoders):
        status, reason = await refusal(decoders, out.getvalue())
        assert (status, "cannot read the image" in reason) == (422, True)
        assert (await decode(decoders, picture(1))).image.size == (40, 32)

    run(work)


def test_a_decoder_knows_no_key_and_no_token(special, monkeypatch):
    for name in ("IDML_API_KEY", "IDML_MILVUS_TOKEN", "AWS_SECRET", "HOME_PASSWORD", "LC_ALL"):
        monkeypatch.setenv(name, "C")
    status, names = run(lambda decoders: refusal(decoders, b"environment"))
    assert status == 422
    assert "LC_ALL" in names.split()
    assert not {"IDML_API_KEY", "IDML_MILVUS_TOKEN", "AWS_SECRET", "HOME_PASSWORD"} & {*names.split()}


def test_decoded_images_held_at_once_are_bounded():
    held, most = 0, 0

    async def hold(decoders, number, go_on):
        nonlocal held, most
        async with decoders.decode(picture(number)):
            held += 1
            most = max(most, held)
            if held == 3:
                while not decoders._pixels._waiting and held == 3:  # until a fourth waits, or is let in
                    await asyncio.sleep(0.001)
                go_on.set()
            await go_on.wait()
            held -= 1

    async def work(decoders):
        go_on = asyncio.Event()
        await asyncio.gather(*[hold(decoders, n, go_on) for n in range(9)])

    run(work, pixels=3 * 40 * 32)
    assert most == 3


def test_closing_does_not_wait_for_a_decoder(special):
    async def work(decoders):
        waiting = [asyncio.create_task(refusal(decoders, b"hang")) for _ in range(4)]
        await asyncio.sleep(0.2)
        await decoders.close()
        assert await asyncio.gather(*waiting) == [(503, "the service is shutting down")] * 4

    run(lambda decoders: asyncio.wait_for(work(decoders), 500), decode_seconds=60)


def test_a_cancelled_request_frees_its_decoder(special):
    async def work(decoders):
        for _ in range(3):
            task = asyncio.create_task(decode(decoders, b"hang"))
            await asyncio.sleep(0.2)
            task.cancel()
        assert (await decode(decoders, picture(1))).image.size == (40, 32)

    run(work, decode_seconds=1000)


def test_bombs_of_scans_and_sides(shared):
    out = io.BytesIO()
    Image.new("L", (64, 64)).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    bomb = data[:-2] + data[data.rindex(b"\xff\xda") : -2] * 13_000 + b"\xff\xd9"
    wide = io.BytesIO()
    Image.new("1", (MAX_SIDE + 1, 1)).save(wide, "PNG")
    for path in ("/api/search", "/api/items"):
        response = shared.post(path, files={"image": bomb})
        assert response.status_code == 422
        assert "13006 scans" in said(response)
        assert shared.post(path, files={"image": wide.getvalue()}).status_code == 413


def test_an_image_is_decoded_once_and_never_in_the_service(client, monkeypatch):
    from idml.search import uploads

    monkeypatch.setattr(uploads, "decode_image", None)
    assert client.post("/api/items", files={"image": picture(90)}).status_code == 201
    assert search(client, picture(90)).json()["results"][0]["distance"] < 1e-3


def test_a_picture_that_must_be_decoded_is_decoded_in_a_process(client, gallery, monkeypatch):
    """A picture of the gallery is as untrusted as an upload, whoever asks for it."""
    upload = Upload(picture(70, size=(1800, 1300), format="TIFF"))
    gallery.add([upload])
    monkeypatch.setattr(images, "_decode", None)  # in this process
    monkeypatch.setattr(images, "_decode_elsewhere", None)  # in one of the library
    response = client.get(f"/api/items/{upload.id}/image")
    assert response.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(response.content)).size == (1800, 1300)


def test_a_picture_whose_decoding_hangs(gallery, special):
    upload = Upload(picture(71, format="TIFF") + b"hang")
    gallery.add([upload])
    with client_of(gallery, limits=Limits(decode_seconds=0.5)) as client:
        response = client.get(f"/api/items/{upload.id}/image")
        assert response.status_code == 404
        assert "not an image that can be read" in said(response)


def test_health_tells_of_a_stuck_service(gallery, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    real = gallery.search
    monkeypatch.setattr(gallery, "search", lambda *args, **more: begun.set() or (go_on.wait() and real(*args, **more)))
    with client_of(gallery, limits=Limits(stuck_seconds=1000)) as client:
        assert client.get("/api/health").status_code == 200
        thread = threading.Thread(target=search, args=(client, picture(1)))
        thread.start()
        assert begun.wait(300)
        monkeypatch.setattr(service, "monotonic", lambda: time.monotonic() + 1001)
        response = client.get("/api/health")
        go_on.set()
        thread.join()
        assert response.status_code == 503
        assert "stuck" in said(response)
        assert client.get("/api/health").status_code == 200


def test_health_tells_of_readers_that_hang(gallery, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(service, "_POLL_SECONDS", 1000.0)  # the worker does nothing that could take long
    monkeypatch.setattr(type(gallery.engine), "__len__", lambda engine: go_on.wait() and 12)
    with client_of(gallery, limits=Limits(stuck_seconds=0.05)) as client:
        response = client.get("/api/health")
        go_on.set()
        assert response.status_code == 503
        assert "reading takes longer" in said(response)


def test_health_tells_of_decoders_that_do_not_start(gallery, monkeypatch, caplog):
    monkeypatch.setattr(decoder_process, "COMMAND", ("false",))
    with client_of(gallery) as client:
        assert search(client, picture(1)).status_code == 500
        response = client.get("/api/health")
        assert response.status_code == 503
        assert "does not start: false" in said(response)

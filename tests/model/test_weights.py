"""Weights from a local file: all tensors arrive, nothing else is accepted, and resnet50 gets the form they are for."""

import copy
import hashlib

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from idml.compat import ensure_torchvision
from idml.model import ModelConfig, build_model, load_model, save_model
from idml.model.backbones import Conv4
from idml.model.bn_folding import fold_frozen_normalisation
from idml.model.feature_cache import FeatureCache

ensure_torchvision()
import timm  # noqa: E402

KERAS_MEAN = torch.tensor([123.68, 116.779, 103.939])


def write(path, tensors, **options):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, **options)
    return path


def changed(network):
    """The network's tensors as if it had been trained."""
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.add_(0.1 * torch.rand_like(tensor))
    return state


@pytest.fixture
def conv4(tmp_path):
    """The tensors of a conv4, and a function that writes some of them to a file."""
    tensors = changed(Conv4(3))
    return tensors, lambda **others: write(tmp_path / "w.safetensors", {**tensors, **others})


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "test_vit", "test_convnext"])
@pytest.mark.parametrize("classes", [0, 7, 1000])
def test_a_timm_trunk_gets_every_tensor_and_leaves_the_classifier_out(tmp_path, name, classes):
    source = timm.create_model(name, num_classes=classes)
    tensors = changed(source)
    path = write(tmp_path / "w.safetensors", tensors)
    model = build_model(name, weights=path)
    own = model.trunk.network.state_dict()
    classifier = tensors.keys() - own.keys()
    assert len(classifier) == (2 if classes else 0)
    assert own.keys() == tensors.keys() - classifier
    for key, tensor in own.items():
        assert torch.equal(tensor, tensors[key]), key
    assert model.config.weights_file == "w.safetensors"
    assert model.config.weights_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert model.config.trunk_form == "timm"


def test_conv4_in_half_precision_without_counters_is_accepted(conv4):
    tensors, file = conv4
    half = {k: v.half() if v.is_floating_point() else v for k, v in tensors.items()}
    path = file(**half)
    write(path, {k: v for k, v in half.items() if not k.endswith("num_batches_tracked")})
    model = build_model("conv4", weights=path, image_size=16)
    for key, tensor in model.trunk.network.state_dict().items():
        assert tensor.dtype == tensors[key].dtype
        torch.testing.assert_close(tensor, tensors[key], rtol=1e-3, atol=1e-3)


def refused(words, path, trunk="conv4"):
    with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        build_model(trunk, weights=path, image_size=32)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)


def test_what_does_not_fit_is_refused_in_one_line(conv4, tmp_path):
    tensors, file = conv4
    path, zeros = file(), torch.zeros
    build_model("conv4", weights=path, image_size=32)  # as it is, it fits
    refused(
        r"does not fit test_resnet: \d+ of \d+ tensors are missing \(first: .*; 24 others do not", path, "test_resnet"
    )
    refused(r"1 tensors do not belong to it \(first: fc.weight\)", file(**{"fc.weight": zeros(5, 256)}))
    refused(
        r"layers.0.weight has shape \[32, 1, 3, 3\], conv4 needs \[32, 3, 3, 3\]",
        file(**{"layers.0.weight": zeros(32, 1, 3, 3)}),
    )
    refused("is torch.int64, conv4 needs torch.float32", file(**{"layers.1.bias": zeros(32, dtype=torch.int64)}))
    refused("is torch.complex64", file(**{"layers.1.bias": zeros(32, dtype=torch.complex64)}))
    for bad in (torch.nan, torch.inf):
        refused("layers.1.bias holds NaN or infinity", file(**{"layers.1.bias": torch.full((32,), bad)}))
    too_large = torch.full((32,), 1e300, dtype=torch.float64)
    refused("layers.1.bias holds NaN or infinity", file(**{"layers.1.bias": too_large}))
    refused(
        r"1 of 24 tensors are missing \(first: layers.5.bias\)",
        write(path, {k: v for k, v in tensors.items() if k != "layers.5.bias"}),
    )


def test_what_is_no_safetensors_file_is_refused_in_one_line(tmp_path, conv4):
    tensors, _ = conv4
    refused("there is no file of weights at", tmp_path / "absent.safetensors")
    refused("is a folder; weights are one safetensors file", tmp_path)
    path = tmp_path / "weights.pth"
    torch.save(tensors, path)
    refused("is a pickle .* only safetensors", path)
    for content in (b"", b"text" * 50):
        path.write_bytes(content)
        refused("is not a sound safetensors file", path)


def test_the_file_is_not_needed_to_load_the_model(conv4, tmp_path):
    model = build_model("conv4", weights=conv4[1](), embedding_dim=4, image_size=16)
    images = torch.rand(3, 3, 16, 16)
    expected = model.embed(images)
    save_model(model, tmp_path / "run")
    (tmp_path / "w.safetensors").unlink()
    loaded = load_model(tmp_path / "run")
    assert loaded.config == model.config
    assert torch.equal(loaded.embed(images).semantic, expected.semantic)


# -------------------- resnet50 in two forms --------------------


@pytest.fixture(scope="module")
def resnet50(tmp_path_factory):
    """Random weights for normalised images, the same for images of bytes, and both as files."""
    torch.manual_seed(0)
    normalised = timm.create_model("resnet50", num_classes=2).state_dict()
    of_bytes = {**normalised, "bn1.running_var": normalised["bn1.running_var"] * 60**2}
    folder = tmp_path_factory.mktemp("resnet50")
    return [write(folder / f"{i}.safetensors", tensors) for i, tensors in enumerate((normalised, of_bytes))]


def bottleneck(x, block, strides):
    """One block of a ResNet in evaluation mode, written out."""

    def unit(x, conv, norm, stride):
        x = F.conv2d(x, conv.weight, stride=stride, padding=conv.weight.shape[-1] // 2)
        return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=1e-5)

    y = unit(x, block.conv1, block.bn1, strides[0]).relu()
    y = unit(y, block.conv2, block.bn2, strides[1]).relu()
    y = unit(y, block.conv3, block.bn3, 1)
    return (y + unit(x, block.downsample[0], block.downsample[1], 2)).relu()


@torch.no_grad()
def test_resnet50_gets_the_form_its_weights_are_for(resnet50, tmp_path):
    models = [build_model("resnet50", weights=path, embedding_dim=4, image_size=64).eval() for path in resnet50]
    assert [model.config.trunk_form for model in models] == ["timm", "keras"]
    for model, strides in zip(models, ((1, 2), (2, 1)), strict=True):
        for stage in (model.trunk.network.layer2, model.trunk.network.layer3, model.trunk.network.layer4):
            x = torch.rand(1, stage[0].conv1.in_channels, 6, 6)
            torch.testing.assert_close(stage[0](x), bottleneck(x, stage[0], strides), rtol=1e-4, atol=1e-4)
    timms, keras = (model.trunk for model in models)
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(timms.mean.flatten(), torch.tensor([0.485, 0.456, 0.406]))
    torch.testing.assert_close((images - keras.mean) / keras.deviation, 255 * images - KERAS_MEAN.view(1, 3, 1, 1))
    # pooling, folding, the last stage and a saved model are those of any trunk
    features, map_ = keras(images), keras.positions(images)
    assert map_.shape == (2, 4, 2048)
    torch.testing.assert_close(features, map_.mean(dim=1) + map_.amax(dim=1))
    torch.testing.assert_close(models[1].stages.features(models[1].stages.activations(images)), features)
    save_model(models[1], tmp_path)
    torch.testing.assert_close(load_model(tmp_path).features(images), features)
    folded = copy.deepcopy(keras)
    assert fold_frozen_normalisation(folded) == 53
    torch.testing.assert_close(folded(images), features, rtol=1e-3, atol=1e-3 * float(features.max()))


def test_features_of_both_forms_have_keys_of_their_own():
    class Images:
        images, side = type("Set", (), {"version": "1"}), 32

    model = build_model("conv4", image_size=16)
    keys = []
    for config in (ModelConfig("resnet50"), ModelConfig("resnet50", trunk_form="keras")):
        model.config = config
        keys.append(FeatureCache(model, images=1)._key(Images(), ()))
    assert keys[0] != keys[1]


def test_forms_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="trunk_form 'keras' is for resnet50, not for conv4"):
        ModelConfig("conv4", trunk_form="keras")
    with pytest.raises(ValueError, match="trunk_form must be 'timm' or 'keras', got 'caffe'"):
        ModelConfig("resnet50", trunk_form="caffe")

"""Exported models: equal to torch for every kind of model, and no file that is trusted."""

import json
import sys
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import idml
from idml.model import onnx as export
from idml.model.model import FILE, ModelConfig, build_model, fingerprint, load_model, save_model
from idml.model.onnx import export_onnx, open_session, read_onnx
from idml.search.embedder import open_embedder, prepare_image

VARIANTS = {
    "introspective": {},
    "gaussian": {"uncertainty": "gaussian"},
    "grey": {"in_chans": 1, "detach": True, "image_size": 33},
    "lite0": {"trunk": "tf_efficientnet_lite0", "image_size": 64},
    "slices": {"head": "slices", "slices": ("a", "b"), "training_slices": ("c",)},
    "relations": {"head": "relations", "slices": ("a", "b")},
    "attention": {"head": "shared", "slices": ("a", "b"), "branching": "attention"},
    "stages": {"head": "parts", "slices": ("a", "b", "c"), "branching": "stages", "embedding_dim": 9},
    "transformer": {"trunk": "test_vit", "image_size": 32, "pretrained": False},
}


def save_run(folder, **config):
    """A model whose statistics have moved and whose u is large."""
    model = build_model(**{"trunk": "conv4", "embedding_dim": 8, "image_size": 28, **config}).train()
    size = model.trunk.image_size
    model(torch.rand(4, model.config.in_chans, size, size))
    model.uncertainty.scale *= 600
    save_model(model, folder)
    return folder


def pictures(config, count, seed=0):
    """Noise of any contrast as uint8, and black and white ones in front."""
    generator = np.random.default_rng(seed)
    size = (count, config.in_chans, config.image_size, config.image_size)
    contrast = generator.random((count, 1, 1, 1))
    images = (generator.random(size) * contrast * 255).round().astype(np.uint8)
    images[0] = 0
    images[count // 2] = 255
    return images


@pytest.fixture(scope="module")
def export_of(tmp_path_factory):
    """The run folder of a variant, with a model.onnx, and what the export said; made once."""

    @cache
    def made(name):
        folder = save_run(tmp_path_factory.mktemp(name), **VARIANTS[name])
        return folder, export_onnx(folder, folder / "model.onnx")

    return made


@pytest.fixture(params=VARIANTS)
def exported(request, export_of):
    folder, result = export_of(request.param)
    return folder, result, load_model(folder)


@pytest.fixture
def small(export_of):
    """The file of a small model."""
    return export_of("introspective")[0] / "model.onnx"


def test_equal_to_torch(exported):
    folder, result, model = exported
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 2, 5, 17):
        images = pictures(model.config, count, seed=count)
        semantic, uncertainty = session.run(["semantic", "uncertainty"], {"images": images})
        wanted = model.embed(torch.from_numpy(images))
        assert semantic.dtype == uncertainty.dtype == np.float32
        for ours, theirs in ((semantic, wanted.semantic.numpy()), (uncertainty, wanted.uncertainty.numpy())):
            assert ours.shape == (count, model.config.embedding_dim)
            scale = np.abs(theirs).max(axis=1, keepdims=True).clip(None, 1)  # small values are equal in proportion
            np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=1e-4)
    assert result["difference"] < 1e-4
    assert np.abs(uncertainty).max() > 1e-3  # there was something to be equal to
    if model.config.uncertainty == "gaussian":
        assert uncertainty.min() > 0
        assert uncertainty.max() > 2 * uncertainty.min()


def test_what_the_file_says(exported):
    folder, result, model = exported
    path = folder / "model.onnx"
    proto = onnx.load(path, load_external_data=False)
    onnx.checker.check_model(proto, full_check=True)
    assert [(i.domain, i.version >= 17) for i in proto.opset_import] == [("", True)]
    (given,) = proto.graph.input
    size, channels = model.config.image_size, model.config.in_chans
    assert given.name == "images"
    assert given.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    assert [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim] == ["n", channels, size, size]
    outputs = {o.name: [d.dim_param or d.dim_value for d in o.type.tensor_type.shape.dim] for o in proto.graph.output}
    dims = model.config.embedding_dim
    assert outputs == {"semantic": ["n", dims], "uncertainty": ["n", dims]}
    told = {entry.key: entry.value for entry in proto.metadata_props}
    assert told["idml.version"] == idml.__version__
    assert told["idml.fingerprint"] == result["fingerprint"] == fingerprint(folder / FILE)
    assert ModelConfig(**json.loads(told["idml.config"])) == model.config
    data = path.read_bytes()
    assert result["bytes"] == len(data)
    assert b".py" not in data  # where the code lay on the machine is nobody's business
    assert str(folder).encode() not in data
    assert sorted(p.name for p in folder.iterdir()) == ["model.onnx", FILE]
    file = read_onnx(path)
    assert (file.data, file.fingerprint, file.config) == (data, result["fingerprint"], model.config)


def test_same_model_same_bytes(small, tmp_path):
    export_onnx(small.parent / FILE, tmp_path / "new" / "again.onnx")
    assert (tmp_path / "new" / "again.onnx").read_bytes() == small.read_bytes()


def refused(match, run, out, error=ValueError):
    """The export fails with one line and leaves the folder of ``out`` as it was."""
    before = {p: p.read_bytes() for p in out.parent.rglob("*") if p.is_file()}
    with pytest.raises(error, match=match) as caught:
        export_onnx(run, out)
    assert "\n" not in str(caught.value)
    assert {p: p.read_bytes() for p in out.parent.rglob("*") if p.is_file()} == before


def test_places_that_will_not_do(small, tmp_path):
    refused("is a folder; name a file, such as .*model.onnx", small.parent, tmp_path)
    (tmp_path / "model.onnx").mkdir()
    refused("is a folder", small.parent, tmp_path / "model.onnx")
    refused(r"ends in \.onnx, got 'model.safetensors'", small.parent, small.parent / FILE)
    (tmp_path / "file").touch()
    refused("file", small.parent, tmp_path / "file" / "model.onnx", OSError)


def test_runs_that_will_not_do(tmp_path):
    out = tmp_path / "model.onnx"
    refused("there is no model at .*absent", tmp_path / "absent", out, FileNotFoundError)
    refused("there is no model at", tmp_path, out, FileNotFoundError)
    model = build_model("conv4", embedding_dim=8)
    with torch.no_grad():
        model.uncertainty.linear.weight.zero_()
    save_model(model, tmp_path / "new")
    refused("never trained", tmp_path / "new", out)
    model = load_model(save_run(tmp_path / "run"))
    with torch.no_grad():
        model.semantic.weight.fill_(3e38)
    save_model(model, tmp_path / "run")
    refused("NaN or infinity on ordinary images", tmp_path / "run", out)
    with torch.no_grad():
        model.semantic.weight[0, 0] = float("nan")
    save_model(model, tmp_path / "run")
    refused("semantic.weight holds NaN or infinity", tmp_path / "run", out)


def test_a_file_that_differs_from_torch_is_not_written(small, tmp_path, monkeypatch):
    data, honest = small.read_bytes(), export.run_session

    def wrong(factor):
        def run(session, images):
            found = honest(session, images)
            return {**found, "uncertainty": found["uncertainty"] * factor}

        monkeypatch.setattr(export, "run_session", run)

    monkeypatch.setattr(export, "_convert", lambda *_: data)
    for factor in (1.001, float("nan")):
        wrong(factor)
        refused("ONNX Runtime and torch differ by", small.parent, tmp_path / "model.onnx")
        refused("ONNX Runtime and torch differ by", small.parent, small)
    wrong(1.0)
    export_onnx(small.parent, tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["onnx", "onnxscript", "onnxruntime"])
def test_without_the_libraries(small, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    refused(rf"{name} cannot be used .*pip install {name}", small.parent, tmp_path / "model.onnx")


def test_too_large(small, tmp_path, monkeypatch):
    with (tmp_path / "huge.onnx").open("wb") as file:
        file.truncate(2**31)  # takes no room
    with pytest.raises(ValueError, match=r"huge.onnx is larger than an ONNX file can be \(2 GB\)"):
        read_onnx(tmp_path / "huge.onnx")
    (tmp_path / "huge.onnx").unlink()
    monkeypatch.setattr(export, "LARGEST", 1000)
    refused("at most 2 GB, and the weights alone are", small.parent, tmp_path / "model.onnx")


def unreadable(path, match):
    with pytest.raises(ValueError, match=match) as caught:
        read_onnx(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_damage_is_noticed(small, tmp_path_factory):
    data, path = small.read_bytes(), tmp_path_factory.mktemp("damaged") / "model.onnx"

    @settings(max_examples=30)
    @given(st.integers(0, len(data) - 1), st.integers(1, 255))
    def flipped(place, change):
        path.write_bytes(data[:place] + bytes([data[place] ^ change]) + data[place + 1 :])
        unreadable(path, "is damaged|is not a whole file")

    @settings(max_examples=30)
    @given(st.integers(0, len(data) - 1))
    def cut(place):
        path.write_bytes(data[:place])
        unreadable(path, "is not a complete file of `idml export`")

    flipped()
    cut()
    path.write_bytes(data + b"x")
    unreadable(path, "is not a complete file of `idml export`")


def test_files_of_others(tmp_path, small):
    path = tmp_path / "other.onnx"
    plain = onnx.load(small)
    plain.metadata_props.pop()
    for content in (b"", b"\x80\x04\x95", b"PK\x03\x04", b"x" * 5000, plain.SerializeToString()):
        path.write_bytes(content)
        unreadable(path, "is not a complete file of `idml export`")


def sealed(path, model):
    """A file with a checksum that fits, whatever it holds."""
    body = model if isinstance(model, bytes) else model.SerializeToString()
    path.write_bytes(body + export._checksum(body))
    return path


def test_forgeries(tmp_path, small):
    def copy():
        model = onnx.load(small)
        model.metadata_props.pop()  # the checksum
        return model, {entry.key: entry for entry in model.metadata_props}

    path = tmp_path / "model.onnx"
    read_onnx(sealed(path, copy()[0]))  # as it is, it is sound
    unreadable(sealed(path, b"\xff" * 100), "not an ONNX file that this version can read")
    unreadable(sealed(path, onnx.ModelProto()), "not an ONNX file that this version can read")
    for key, value in [("idml.format", "0"), ("idml.config", "{"), ("idml.config", "[1]"), ("idml.config", '{"x": 1}')]:
        model, told = copy()
        told[key].value = value
        unreadable(sealed(path, model), "not an ONNX file that this version can read")
    model, _ = copy()
    model.graph.output[0].name = "other"
    unreadable(sealed(path, model), "its outputs have other names")
    model, _ = copy()
    model.graph.node[0].op_type = "NoSuchOperation"
    with pytest.raises(ValueError, match="ONNX Runtime cannot use the exported model") as caught:
        open_session(read_onnx(sealed(path, model)).data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["initializer", "attribute", "function"])
def test_external_data_is_refused_unread(tmp_path, small, where):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(4))
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[1], data_location=1)
    tensor.external_data.add(key="location", value="secret")
    node = onnx.helper.make_node("Constant", [], ["w"], value=tensor)
    model = onnx.load(small)
    model.metadata_props.pop()
    if where == "initializer":
        model.graph.initializer.append(tensor)
    elif where == "attribute":
        inner = onnx.helper.make_graph([node], "inner", [], [])
        model.graph.node.append(onnx.helper.make_node("If", ["c"], ["o"], then_branch=inner, else_branch=inner))
    else:
        model.functions.append(onnx.helper.make_function("own", "f", [], ["w"], [node], []))
    unreadable(sealed(tmp_path / "model.onnx", model), "refers to other files for its weights")


def test_a_model_that_was_never_trained_starts_as_in_the_torch_embedder(tmp_path):
    save_model(build_model("conv4", embedding_dim=8, image_size=28), tmp_path)
    images = [Image.fromarray(pixels.transpose(1, 2, 0)) for pixels in pictures(load_model(tmp_path).config, 5)]
    network, _, _ = export._load_network(tmp_path)
    _, found = network(torch.stack([prepare_image(image, 28) for image in images]))
    wanted = open_embedder(tmp_path, runtime="torch").embed(images).uncertainty
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


def test_pretrained_is_the_trunk_of_the_torch_embedder():
    network, config, fingerprint = export._load_network("pretrained")
    embedder = open_embedder("pretrained", runtime="torch")
    assert (list(network.heads), fingerprint) == ([], embedder.fingerprint)
    assert (config.embedding_dim, config.image_size) == (embedder.dimensions, 224)
    image = Image.fromarray(pictures(config, 3)[2].transpose(1, 2, 0))
    with torch.no_grad():
        (found,) = network(prepare_image(image, 224)[None])
    torch.testing.assert_close(found, embedder.embed([image]).semantic)

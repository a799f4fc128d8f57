"""Embeddings by ONNX Runtime: those of torch, from a file that fits the model; and when which runtime is chosen."""

import os
import shutil
import sys
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from idml import Embeddings
from idml.model import onnx as export
from idml.model.backbones import build_trunk
from idml.model.model import FILE, ModelConfig, build_model, fingerprint, fingerprint_of, save_model
from idml.model.onnx import export_onnx
from idml.search import embedder as embedders
from idml.search.embedder import MANY, ONNX_BATCH, OnnxEmbedder, open_embedder, prepare_image, share_cores
from idml.search.gallery import Gallery

ONNX = "model.onnx"
VARIANTS = [{}, {"in_chans": 1, "uncertainty": "gaussian"}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IDML_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """For each variant the bytes of a model and of its export, made once because an export takes seconds."""
    files = []
    for i, config in enumerate(VARIANTS):
        folder = tmp_path_factory.mktemp(f"run{i}")
        model = build_model("conv4", embedding_dim=8, image_size=28, **config)
        model(torch.rand(4, model.config.in_chans, 28, 28))
        model.uncertainty.scale *= 600
        save_model(model, folder)
        export_onnx(folder, folder / ONNX)
        files.append({name: (folder / name).read_bytes() for name in (FILE, ONNX)})
    return files


def place(folder, files):
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def run(made, tmp_path):
    """A run with its model.onnx."""
    return place(tmp_path / "run", made[0])


@pytest.fixture
def exports(made, tmp_path, monkeypatch):
    """The exports that were asked for; they come from those made before."""
    known = {fingerprint(place(tmp_path / f"known{i}", files)): files[ONNX] for i, files in enumerate(made)}
    asked = []

    def export(run):
        asked.append(run)
        return known[fingerprint(run)]

    monkeypatch.setattr(embedders, "export_model", export)
    return asked


def pictures(count, seed=0):
    """RGB pictures of all shapes, the first black and narrow."""
    noise = np.random.default_rng(seed)
    sizes = noise.integers(5, 90, (count, 2))
    images = [Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sizes]
    return [Image.new("RGB", (60, 3)), *images[1:]]


def by_torch(run):
    return open_embedder(run, runtime="torch")


def same(found, wanted):
    """Within 1e-4, and within 1e-4 of a row's largest value where all its values are small."""
    for ours, theirs in ((found.semantic, wanted.semantic), (found.uncertainty, wanted.uncertainty)):
        scale = 1.0 if theirs.shape[1] == 0 else theirs.abs().amax(dim=1, keepdim=True).clamp_max(1.0)
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_embeddings_equal_those_of_torch(tmp_path, made, variant):
    run = place(tmp_path / "run", made[variant])
    ours, theirs = open_embedder(run, runtime="onnx"), by_torch(run)
    assert isinstance(ours, OnnxEmbedder)
    for name in ("fingerprint", "dimensions", "uncertainty"):
        assert getattr(ours, name) == getattr(theirs, name)
    images = pictures(2 * ONNX_BATCH + 3)
    for count in (1, ONNX_BATCH, ONNX_BATCH + 1, len(images)):
        found = ours.embed(images[:count])
        assert len(found) == count
        same(found, theirs.embed(images[:count]))
    assert found.semantic.std() > 1e-3
    assert found.uncertainty.std() > 1e-4


def test_an_embedding_does_not_depend_on_the_batch(run):
    embedder, images = OnnxEmbedder(run), pictures(ONNX_BATCH + 5)
    together = embedder.embed(images)
    for i in (0, 3, ONNX_BATCH, ONNX_BATCH + 4):
        same(embedder.embed([images[i]]), together[i])


def test_threads_share_an_embedder(run):
    embedder, images = OnnxEmbedder(run), pictures(6)
    wanted, found = embedder.embed(images), {}

    def embed(i):
        for _ in range(10):
            found[i] = embedder.embed([images[i]])

    in_threads(embed, range(6))
    for i in range(6):
        same(found[i], wanted[i])


def test_the_file_of_the_run_is_used(run, cache, caplog, exports):
    for named in (run, str(run), run / FILE):
        embedder = OnnxEmbedder(named)
        assert (embedder.dimensions, embedder.uncertainty) == (8, 8)
        same(embedder.embed(pictures(3)), by_torch(run).embed(pictures(3)))
    assert exports == []
    assert not cache.exists()
    assert caplog.messages == []


def test_a_gallery_contains_the_exported_model(run, made, cache, tmp_path, exports):
    """The file of the run, or one that was exported after the gallery was made; then nothing is exported again."""
    (run / ONNX).unlink()
    Gallery.create(tmp_path / "g", run).close()
    carried = tmp_path / "g" / "model" / ONNX
    assert not carried.exists()
    (run / ONNX).write_bytes(made[0][ONNX])
    Gallery.open(tmp_path / "g", run=run).close()  # a reader takes nothing over
    assert not carried.exists()
    Gallery.open(tmp_path / "g", run=run, write=True).close()
    Gallery.create(tmp_path / "new", run).close()
    (run / ONNX).unlink()
    Gallery.open(tmp_path / "g", run=run, write=True).close()  # what the run lacks stays
    shutil.rmtree(run)
    for folder in ("g", "new"):
        assert (tmp_path / folder / "model" / ONNX).read_bytes() == made[0][ONNX]
        with Gallery.open(tmp_path / folder, runtime="onnx") as gallery:
            assert isinstance(gallery.embedder, OnnxEmbedder)
    assert exports == []
    assert not cache.exists()
    other = place(tmp_path / "other", {FILE: made[1][FILE]})
    (tmp_path / "half" / "model").mkdir(parents=True)
    (tmp_path / "half" / "model" / ONNX).write_bytes(made[0][ONNX])  # a kill left it
    Gallery.create(tmp_path / "half", other).close()
    assert not (tmp_path / "half" / "model" / ONNX).exists()


def test_a_missing_export_is_made_once_beside_the_model(run, made, cache, caplog, exports):
    (run / ONNX).unlink()
    first, again = OnnxEmbedder(run), OnnxEmbedder(run)
    assert (run / ONNX).read_bytes() == made[0][ONNX]
    assert sorted(p.name for p in run.iterdir()) == [".model.onnx.lock", ONNX, FILE]
    same(first.embed(pictures(3)), again.embed(pictures(3)))
    assert exports == [run]
    assert len(caplog.messages) == 1  # the export takes seconds
    assert not cache.exists()


@pytest.mark.parametrize("places", [1, 2])
def test_places_that_cannot_be_written(run, cache, exports, monkeypatch, places):
    """The cache instead of a read-only run; without a cache too, the exported model is used and not stored."""
    (run / ONNX).unlink()
    readonly = [run, cache][:places]
    lock = export.lock_file

    def refuse(path):
        if path.parent in readonly:
            raise PermissionError(13, "Permission denied", str(path))
        return lock(path)

    monkeypatch.setattr(export, "lock_file", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: path not in readonly)  # root may write everywhere
    for _ in range(2):
        same(OnnxEmbedder(run).embed(pictures(3)), by_torch(run).embed(pictures(3)))
    assert [p.name for p in run.iterdir()] == [FILE]
    assert len(list(cache.glob(f"model-{fingerprint(run)}-v*.onnx"))) == 2 - places
    assert len(exports) == places


def stale(run, made):
    (run / FILE).write_bytes(made[1][FILE])
    return "was made from another model"


def damaged(run, made):
    data = bytearray(made[0][ONNX])
    data[len(data) // 2] ^= 1
    (run / ONNX).write_bytes(data)
    return "is damaged: its checksum does not fit"


def foreign(run, made):
    (run / ONNX).write_bytes(b"\x80\x04 no ONNX at all")
    return "is not a complete file of `idml export`"


@pytest.mark.parametrize("how", [stale, damaged, foreign])
def test_an_unsuitable_export_is_made_again(run, made, how, caplog, exports):
    told = how(run, made)
    embedder = OnnxEmbedder(run)
    assert embedder.fingerprint == fingerprint(run)
    same(embedder.embed(pictures(4)), by_torch(run).embed(pictures(4)))
    line, exported = caplog.messages
    assert told in line
    assert "it is not used" in line
    assert str(run / ONNX) in line
    assert "\n" not in line
    assert "exporting the network" in exported
    assert (run / ONNX).read_bytes() == made[1 if how is stale else 0][ONNX]
    assert exports == [run]


def in_threads(function, values):
    threads = [threading.Thread(target=function, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_parallel_embedders_export_once(run, exports):
    (run / ONNX).unlink()
    found = []
    in_threads(lambda _: found.append(OnnxEmbedder(run)), range(4))
    assert (len(found), len(exports)) == (4, 1)


def test_a_model_that_changes_during_the_export(run, made, exports, monkeypatch):
    (run / ONNX).unlink()
    known = embedders.export_model

    def late(place):
        (run / FILE).write_bytes(made[1][FILE])
        return known(place)

    monkeypatch.setattr(embedders, "export_model", late)
    with pytest.raises(ValueError, match="changed during the export; try again"):
        OnnxEmbedder(run)


def test_the_runtime_is_chosen(run, made, exports, caplog, monkeypatch):
    """ONNX Runtime with an exported model that fits, or for many images; torch for few and on a GPU."""
    assert isinstance(open_embedder(run), OnnxEmbedder)
    assert not isinstance(open_embedder(run, runtime="torch"), OnnxEmbedder)
    monkeypatch.setattr(embedders, "best_device", lambda: "cuda")
    monkeypatch.setattr(embedders, "_open_torch", lambda run: "by torch")
    assert open_embedder(run, images=10**9) == "by torch"
    monkeypatch.undo()
    monkeypatch.setattr(embedders, "export_model", lambda run: exports.append(run) or made[0][ONNX])
    (run / ONNX).unlink()
    assert not isinstance(open_embedder(run), OnnxEmbedder)
    assert not isinstance(open_embedder(run, images=MANY), OnnxEmbedder)  # conv4 is fast
    assert (exports, caplog.messages) == ([], [])
    assert isinstance(open_embedder(run, images=10**9), OnnxEmbedder)
    assert (run / ONNX).read_bytes() == made[0][ONNX]


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_torch_where_a_library_is_missing(run, caplog, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    found = open_embedder(run, images=10**9)
    assert not isinstance(found, OnnxEmbedder)
    assert f"{missing} cannot be used" in caplog.text
    same(found.embed(pictures(2)), by_torch(run).embed(pictures(2)))


def test_mistakes(run, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there is no image to embed"):
        OnnxEmbedder(run).embed([])
    with pytest.raises(ValueError, match="images must be RGB"):
        OnnxEmbedder(run).embed([Image.new("L", (30, 30))])
    with pytest.raises(FileNotFoundError, match="there is no model at"):
        OnnxEmbedder(tmp_path / "absent")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ValueError, match=r"onnxruntime cannot be used .*pip install onnxruntime"):
        OnnxEmbedder(run)


def test_onnx_uses_the_thread_count_of_torch(run, monkeypatch):
    for count in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert OnnxEmbedder(run)._session.get_session_options().intra_op_num_threads == count


def test_pretrained(cache, monkeypatch):
    """The features of the trunk as s, and no u; a small trunk stands in, because the real one takes long to export."""
    trunk, config = (
        build_trunk("conv4", pretrained=False, image_size=28).eval(),
        ModelConfig("conv4", 256, image_size=28),
    )
    network = export._Network(trunk, {}).eval()
    monkeypatch.setattr(export, "_load_network", lambda run: (network, config, fingerprint_of(run)))
    embedder = OnnxEmbedder("pretrained")
    assert (embedder.fingerprint, embedder.dimensions, embedder.uncertainty) == (fingerprint_of("pretrained"), 256, 0)
    with torch.no_grad():
        features = trunk(torch.stack([prepare_image(image, 28) for image in pictures(3)]) / 255)
    same(embedder.embed(pictures(3)), Embeddings.certain(features))
    assert len(list(cache.glob("*.onnx"))) == 1


def test_callers_in_threads_have_a_core_each(run, monkeypatch):
    """Passes of one core each give the same embeddings; torch, which takes all cores in turn, stays as it is."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    whole, by_torch = OnnxEmbedder(run), open_embedder(run, runtime="torch")
    parts = {callers: share_cores(whole, callers) for callers in (1, 2, 4, 8)}
    threads = {n: one._session.get_session_options().intra_op_num_threads for n, one in parts.items()}
    assert threads == {1: 4, 2: 2, 4: 1, 8: 1}
    assert share_cores(by_torch, 4) is by_torch
    image = Image.effect_noise((40, 30), 50).convert("RGB")
    assert parts[4].fingerprint == whole.fingerprint
    torch.testing.assert_close(parts[4].embed([image]).semantic, whole.embed([image]).semantic)

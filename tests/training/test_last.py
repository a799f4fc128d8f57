"""The last stage trained on kept activations: what full training would compute with everything before it frozen."""

import pytest
import torch

from idml.data.datasets import load_dataset
from idml.data.pixel_cache import load_pixels
from idml.evaluation import evaluate_retrieval
from idml.model import build_model, load_model
from idml.model.feature_cache import embed_view
from idml.training.batches import FrozenStream, Stream
from idml.training.build import build, set_modes
from idml.training.config import from_dict
from idml.training.distributed import Processes
from idml.training.loop import train
from idml.training.step import compute_gradients


@pytest.fixture
def last(options):
    """Options of a run with the pretrained trunk, at a size where it takes seconds."""
    return {
        **options, "trunk": "tf_efficientnet_lite0", "pretrained": True, "image_size": 32, "train": "last", "crops": 2,
        "epochs": 2,
    }  # fmt: skip


def gradients(config, batch, numbers):
    torch.manual_seed(0)
    model, method = build(config, torch.zeros(0, dtype=torch.long), 12)
    set_modes(model, config, 0)
    terms, embeddings = compute_gradients(batch, numbers, model, method, config, Processes(), seed=1)
    return terms["pairs"], embeddings, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("method", ["plain", "idml"])
def test_a_step_is_that_of_full_training(last, method):
    """Loss, embeddings and the gradients of the last stage and the heads, up to the rounding to float16."""
    config = from_dict({"out": "-", **{**last, "method": method}})
    images = load_dataset(config.data).train
    _, trained = build(config, images.labels, len(images.classes))
    stream = Stream(load_pixels(images, 37), config, trained, 32, torch.device("cpu"))
    kept = FrozenStream(stream, build_model(image_size=32, embedding_dim=8), lambda done, total: None)
    assert kept.parts[0].dtype == "float16"
    numbers, activations = next(kept.batches(0, 0))
    batches = {tuple(n.tolist()): batch for n, batch in stream.batches(0, 0)}
    images = batches[tuple(numbers.tolist())]
    assert torch.equal(images.labels.ids, activations.labels.ids)
    everything = from_dict({"out": "-", **{**last, "method": method, "train": "all"}})
    expected, whole, full = gradients(everything, images, numbers)
    for micro in (0, 3):
        changed = from_dict({"out": "-", **{**last, "method": method, "micro_batch": micro}})
        value, embeddings, found = gradients(changed, activations, numbers)
        assert value == pytest.approx(expected, rel=5e-3)
        torch.testing.assert_close(embeddings.semantic, whole.semantic, rtol=2e-2, atol=2e-2 * whole.semantic.std())
        below = {name for name in full if name.startswith("trunk")} - {
            name for name in found if name.startswith("trunk")
        }
        assert below
        assert found.keys() == full.keys() - below
        for name, gradient in found.items():
            assert torch.cosine_similarity(gradient.flatten(), full[name].flatten(), dim=0) > 0.99, name


def test_the_last_stage_learns_and_the_model_is_whole(last, tmp_path):
    metrics = train(from_dict({"out": str(tmp_path), **last}))
    trained, fresh = load_model(tmp_path), build_model(image_size=32, embedding_dim=8)
    for part, stays in (("below", True), ("last", False)):
        pairs = zip(getattr(trained.stages, part).parameters(), getattr(fresh.stages, part).parameters(), strict=True)
        assert all(torch.equal(a, b) is stays for a, b in pairs)
    pixels = load_pixels(load_dataset(last["data"]).test, 37)
    whole = embed_view(trained, pixels, keep=False)  # the ordinary way, through the whole trunk
    kept = embed_view(trained, pixels, keep=True, last=True)
    assert torch.cosine_similarity(whole.semantic, kept.semantic).min() > 0.999
    figures = evaluate_retrieval(kept, pixels.images.labels[pixels.usable], recall_at=(1,))
    assert metrics["selected"]["recall@1"] == pytest.approx(figures["recall@1"])


def test_warm_up_keeps_the_last_stage(last, tmp_path):
    train(from_dict({"out": str(tmp_path), **{**last, "epochs": 1, "warmup_epochs": 1}}))
    trained, fresh = load_model(tmp_path), build_model(image_size=32, embedding_dim=8)
    for a, b in zip(trained.trunk.parameters(), fresh.trunk.parameters(), strict=True):
        assert torch.equal(a, b)


def test_killed_and_resumed_is_bit_identical(last, bit_identical_after_a_kill):
    bit_identical_after_a_kill(last)


def test_heads_is_another_name_of_freeze_trunk(last, tmp_path):
    models = []
    for name, options in (("old", {"freeze_trunk": True, "train": "all"}), ("new", {"train": "heads"})):
        train(from_dict({"out": str(tmp_path / name), **{**last, "epochs": 1, **options}}))
        models.append(load_model(tmp_path / name).state_dict())
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"freeze_trunk": True}, "leave it out to train the last stage too"),
        ({"pretrained": False}, "train last needs pretrained weights"),
        ({"train": "lats"}, "unknown train 'lats'; did you mean 'last'"),
        ({"train": "heads", "trunk": "conv4"}, "train heads needs pretrained weights"),
    ],
)
def test_what_makes_no_sense_is_refused(last, changes, words):
    with pytest.raises(ValueError, match=words):
        from_dict({"out": "-", **{**last, **changes}})

"""The model: how its uncertainty head starts and is detached; what it takes and refuses."""

import numpy as np
import pytest
import torch
from PIL import Image

from idml import Embeddings
from idml.data.images import load_square
from idml.model import BatchRows, ModelConfig, build_model, load_model, save_model

WIDTH = 256  # of conv4's features


def small(**config):
    return build_model("conv4", **{"embedding_dim": 16, "image_size": 28, **config})


def images(n=6, channels=3):
    return torch.rand(n, channels, 28, 28)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_start_is_small_whatever_the_scale(scale):
    model, features = small(), torch.rand(32, WIDTH) * scale
    assert model.heads(features).level.mean().item() == pytest.approx(0.05, rel=1e-3)
    assert torch.equal(model.uncertainty.linear.bias, torch.zeros(16))
    factor = model.uncertainty.scale.clone()
    assert model.heads(7 * features).level.mean().item() == pytest.approx(0.35, rel=1e-3)  # not rescaled again
    assert torch.equal(model.uncertainty.scale, factor)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_adam_does_not_blow_up_a_small_start(scale):
    model, features = small(), torch.rand(32, WIDTH) * scale
    optimizer = torch.optim.AdamW(model.uncertainty.parameters(), lr=2e-4)
    for _ in range(10):
        optimizer.zero_grad()
        (-model.heads(features).level.mean()).backward()  # every step makes u as large as it can
        optimizer.step()
    assert 0.05 < model.heads(features).level.mean().item() < 0.5


def test_start_leaves_the_semantic_head_alone_and_survives_saving(tmp_path):
    model, features = small(), torch.rand(32, WIDTH)
    before = model.semantic(features)
    assert torch.equal(model.heads(features).semantic, before)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert torch.equal(loaded.heads(7 * features).uncertainty, model.heads(7 * features).uncertainty)


def test_a_new_model_saved_before_its_first_batch_starts_later(tmp_path):
    save_model(small(), tmp_path)
    assert load_model(tmp_path).heads(100 * torch.rand(32, WIDTH)).level.mean().item() == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("config", [{}, {"uncertainty": "gaussian"}])
def test_features_without_a_scale_do_not_start_it(config):
    model = small(**config)
    weight = model.uncertainty.linear.weight.clone()
    embeddings = model.heads(torch.zeros(4, WIDTH))
    assert torch.isfinite(embeddings.semantic).all()
    assert torch.isfinite(embeddings.uncertainty).all()
    for endless in (float("nan"), float("inf")):
        model.heads(torch.cat([torch.full((4, 1), endless), torch.zeros(4, WIDTH - 1)], dim=1))
    assert not model.uncertainty.started
    assert torch.equal(model.uncertainty.linear.weight, weight)
    features = torch.rand(8, WIDTH)
    model.heads(features)
    assert model.uncertainty.started
    raw = features @ model.uncertainty.linear.weight.T * model.uncertainty.scale
    wanted = 0.05 * 4 if config.get("uncertainty") == "gaussian" else 0.05
    assert raw.norm(dim=1).mean().item() == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_gaussian_starts_narrow(scale):
    model, features = small(uncertainty="gaussian"), torch.rand(32, WIDTH) * scale
    sigma = model.heads(features).uncertainty
    torch.testing.assert_close(sigma, torch.full_like(sigma, np.exp(-6)), rtol=0.15, atol=0)
    for wild in (1e9 * torch.randn(32, WIDTH), torch.zeros(3, WIDTH)):
        sigma = model.heads(wild).uncertainty
        assert (sigma > 0).all()
        assert torch.isfinite(sigma).all()


@pytest.mark.parametrize("detach", [True, False])
def test_detach(detach):
    model = small(detach=detach).train()
    embeddings = model(images())
    embeddings.uncertainty.square().sum().backward(retain_graph=True)
    reached = [p for p in model.trunk.parameters() if p.grad is not None and p.grad.any()]
    assert bool(reached) is not detach
    assert model.uncertainty.linear.weight.grad.any()
    model.zero_grad()
    embeddings.semantic.square().sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in model.trunk.parameters())


def test_u_is_not_normalised():
    level = small().eval()(images() * torch.linspace(0, 1, 6).view(6, 1, 1, 1)).level
    assert level.max() > 1.05 * level.min()
    assert level.unique().numel() == 6


def test_uint8_and_float_images_are_the_same():
    model, pixels = small().eval(), torch.randint(256, (4, 3, 28, 28), dtype=torch.uint8)
    expected = model(pixels)
    for dtype in (torch.float32, torch.float64):
        got = model((pixels / 255).to(dtype))
        torch.testing.assert_close(got.semantic, expected.semantic, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(got.uncertainty, expected.uncertainty, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.rand(3, 28, 28),
        torch.rand(2, 1, 28, 28),
        torch.rand(2, 28, 28, 3),
        torch.rand(0, 3, 28, 28),
        torch.ones(2, 3, 28, 28, dtype=torch.int64),
        torch.ones(2, 3, 28, 28, dtype=torch.bool),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_wrong_images(wrong):
    with pytest.raises(ValueError, match=r"images must be|the batch is empty") as caught:
        small()(wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("channels", [1, 3])
def test_embed_files(tmp_path, channels):
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path, shape in zip(paths, [(40, 30, 3), (28, 28, 3), (50, 90, 3)], strict=True):
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path)
    model = small(in_chans=channels)
    pixels = torch.stack([load_square(path, 28, grey=channels == 1) for path in paths])
    expected = model.embed(pixels)
    assert isinstance(expected, Embeddings)
    assert expected.semantic.shape == expected.uncertainty.shape == (3, 16)
    assert not expected.semantic.requires_grad
    for given, rows in (
        (paths, slice(None)),
        ([str(p) for p in paths], slice(None)),
        (paths[1], 1),
        (str(paths[1]), 1),
    ):
        got = model.embed(given)
        torch.testing.assert_close(got.semantic, expected[rows].semantic, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got.uncertainty, expected[rows].uncertainty, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_embed_sees_images_one_by_one_and_restores_the_mode(training):
    model, x = small(), images(7)
    model.embed(x)  # starts it
    model.train(training)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model.embed(x)
    assert model.training is training
    assert model.trunk.training is training
    for size in (1, 3, 7):
        got = model.embed(x, batch_size=size)
        torch.testing.assert_close(got.semantic, expected.semantic, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got.uncertainty, expected.uncertainty, atol=1e-5, rtol=1e-5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_embed_keeps_frozen_layers_frozen():
    model = small().train()
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.eval()  # as training with frozen batch normalisation does
    model.embed(images())
    assert model.training
    assert not any(norm.training for norm in norms)


def test_embed_refuses_and_restores_the_mode(tmp_path):
    model = small().train()
    for nothing in ([], torch.rand(0, 3, 28, 28)):
        with pytest.raises(ValueError, match="no image to embed"):
            model.embed(nothing)
    with pytest.raises(FileNotFoundError, match=r"absent\.png"):
        model.embed([tmp_path / "absent.png"])
    assert model.training


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"embedding_dim": 0}, "embedding_dim must be a positive whole number, got 0"),
        ({"embedding_dim": 2.5}, "embedding_dim"),
        ({"embedding_dim": None}, "embedding_dim"),
        ({"in_chans": 0}, "in_chans"),
        ({"image_size": -1}, "image_size"),
        ({"uncertainty": "x"}, "uncertainty must be 'introspective' or 'gaussian', got 'x'"),
    ],
)
def test_bad_configuration(config, match):
    with pytest.raises(ValueError, match=match) as caught:
        ModelConfig(**config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("option", "nearest"), [("embeding_dim", "embedding_dim"), ("u_hiden", "u_hidden")])
def test_unknown_option_names_the_nearest(option, nearest):
    with pytest.raises(ValueError, match=rf"unknown model option '{option}'; did you mean '{nearest}'") as caught:
        build_model("conv4", **{option: 8})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_a_hidden_layer_starts_small_and_is_what_it_says(scale, tmp_path):
    model, features = small(u_hidden=12), torch.rand(64, WIDTH) * scale
    features[:, 3] = 7 * scale  # a constant feature says nothing
    assert model.heads(features).level.mean().item() > 0
    model.eval()
    embeddings = model.heads(features)
    assert embeddings.level.mean().item() == pytest.approx(0.05, rel=1e-2)
    head = model.uncertainty
    deviation = features.std(dim=0, correction=0)
    deviation[3] = 1.0
    hidden = ((features - features.mean(dim=0)) / deviation) @ head.hidden.weight.T + head.hidden.bias
    u = head.scale * (hidden.clamp_min(0) @ head.linear.weight.T) + head.linear.bias
    torch.testing.assert_close(embeddings.uncertainty, u, rtol=1e-3, atol=1e-4)
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path).heads(features).uncertainty, embeddings.uncertainty)


def test_half_of_a_hidden_layer_drops_out_in_training_alone():
    model, features = small(u_hidden=12).train(), torch.rand(8, WIDTH)
    model.heads(features)
    first, second = model.heads(features), model.heads(features)
    assert not torch.equal(first.uncertainty, second.uncertainty)
    assert torch.equal(first.semantic, second.semantic)
    model.eval()
    assert torch.equal(model.heads(features).uncertainty, model.heads(features).uncertainty)


def test_dropout_of_a_row_follows_from_the_step_and_its_place_in_the_batch():
    model, features = small(u_hidden=12).train(), torch.rand(7, WIDTH)
    order = torch.tensor([2, 6, 0, 5, 1, 3, 4])
    model.heads(features)  # starts it
    whole = model.heads(features, BatchRows(5, torch.arange(7), 7)).uncertainty
    torch.manual_seed(9)  # torch's own generator has no part in it
    for rows in order.split(3):
        part = model.heads(features[rows], BatchRows(5, rows, 7)).uncertainty
        torch.testing.assert_close(part, whole[rows], rtol=1e-5, atol=1e-7)
    same = model.heads(features[:1].expand(7, -1), BatchRows(5, torch.arange(7), 7)).uncertainty
    assert len(same.unique(dim=0)) == 7  # each row has masks of its own
    other = model.heads(features, BatchRows(6, torch.arange(7), 7)).uncertainty
    assert not (other == whole).all(dim=1).any()
    head = model.uncertainty
    x = (features - head.centre) / head.spread * 2 * BatchRows(5, torch.arange(7), 7).draw_mask("features", WIDTH)
    hidden = head.hidden(x).relu() * 2 * BatchRows(5, torch.arange(7), 7).draw_mask("hidden layer", 12)
    torch.testing.assert_close(whole, head.linear(hidden * head.scale), rtol=1e-4, atol=1e-6)
    masks = BatchRows(5, torch.arange(1000), 1000).draw_mask("features", 64)
    assert masks.double().mean(dim=0).sub(0.5).abs().max() < 0.07


@pytest.mark.parametrize(
    ("config", "words"),
    [({"u_hidden": -1}, "u_hidden must be"), ({"u_hidden": 4, "uncertainty": "gaussian"}, "Gaussian head is linear")],
)
def test_bad_hidden_layers(config, words):
    with pytest.raises(ValueError, match=words):
        ModelConfig(**config)

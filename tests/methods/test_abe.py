"""ABE: the divergence by loops, masks of 1 as the plain model, shared layers, and what it refuses."""

import pytest
import torch
from method_batches import assert_same, batch_of, gradients_of, method_of
from torch.nn.functional import normalize

from idml import Embeddings
from idml.methods.abe import divergence
from idml.model import build_model, load_model, save_model
from idml.training.config import from_dict


def test_divergence_by_loops():
    raw = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    learners = normalize(raw, dim=2)
    total = 0.0
    for row in learners:
        for p in range(3):
            for q in range(p + 1, 3):
                total = total + torch.relu(1.0 - (row[p] - row[q]).square().sum()) / 5
    found = divergence(learners, 1.0)
    torch.testing.assert_close(found, total)
    for a, b in zip(*(torch.autograd.grad(x, raw, retain_graph=True) for x in (found, total)), strict=True):
        torch.testing.assert_close(a, b)
    same = torch.ones(2, 4, 3) / 3**0.5
    assert float(divergence(same, 1.0)) == pytest.approx(6)  # m_div for each of the 6 pairs
    assert float(divergence(torch.eye(4)[None], 1.0)) == 0
    for cosine, active in ((0.51, True), (0.49, False)):
        pair = torch.tensor([[[1.0, 0.0], [cosine, (1 - cosine**2) ** 0.5]]])
        assert (float(divergence(pair, 1.0)) > 0) is active


def model_of(learners, **options):
    kind = method_of("abe", dim=8, learners=learners)
    torch.manual_seed(0)
    options = {"trunk": "conv4", **kind.model_options(kind.options), **options}
    return build_model(embedding_dim=8, image_size=32 if "test_vit" in options.values() else 16, **options).eval()


def test_one_learner_without_a_mask_is_the_plain_model(tmp_path):
    model, plain = model_of(1), build_model("conv4", embedding_dim=8, image_size=16).eval()
    plain.trunk.network.load_state_dict(model.trunk.network.state_dict())
    plain.semantic.load_state_dict(model.semantic.linears[0].state_dict())
    images = torch.rand(3, 3, 16, 16)
    model.trunk.masked = False
    torch.testing.assert_close(model(images).semantic, plain(images).unit)
    torch.testing.assert_close(model.training_outputs(images).semantic, plain(images).semantic)
    model.trunk.masked = True
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path)(images).semantic, model(images).semantic)


def test_learners_share_all_but_their_masks():
    model = model_of(4)
    images = torch.rand(3, 3, 16, 16)
    features = model.features(images).view(3, 4, -1)
    activations = model.stages.activations(images)
    shared = model.trunk.shared_attention(activations).relu()
    for m in range(4):
        masked = activations * torch.sigmoid(model.trunk.attentions[m](shared))
        positions = torch.nn.Sequential(*list(model.trunk.network.layers)[-3:])(masked).flatten(2)
        torch.testing.assert_close(features[:, m], positions.mean(dim=2) + positions.amax(dim=2))
        torch.testing.assert_close(
            model(images).semantic[:, 2 * m : 2 * m + 2], normalize(model.semantic.linears[0](features[:, m]))
        )
    torch.testing.assert_close(model.last_stage_outputs(activations).semantic, model.training_outputs(images).semantic)
    learning = {id(p) for p in model.stages.last.parameters()}
    assert all(id(p) in learning for p in model.trunk.attentions.parameters())


def test_the_loss_is_that_of_the_learners_and_one_learner_is_plain_training():
    method, (embeddings, batch) = method_of("abe", learners=3, divergence_weight=0.5), batch_of(12, 6)
    terms = method.loss(embeddings, batch, torch.arange(12), seed=0)
    parts = [Embeddings(embeddings.semantic[:, 2 * m : 2 * m + 2], embeddings.uncertainty) for m in range(3)]
    assert_same(
        terms["pairs"], sum(method.metric_loss[m](parts[m], batch.labels) for m in range(3)), embeddings.semantic
    )
    unit = torch.stack([part.unit for part in parts], dim=1)
    assert_same(terms["divergence"], 0.5 * divergence(unit, 1.0), embeddings.semantic)
    found, expected = (gradients_of(m, embeddings, batch) for m in (method_of("abe", learners=1), method_of("plain")))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train": "heads"}, "method abe learns attention masks within the trunk: it needs train last or all"),
        ({"learners": 0}, "learners must be a whole number of at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        from_dict({"data": "glyphs", "out": "-", "method": "abe", **options})


def test_a_trunk_whose_last_stage_is_not_known():
    with pytest.raises(ValueError, match="the last stage of VisionTransformer is not known"):
        model_of(2, trunk="test_vit", pretrained=False)

"""DREML: bags of classes, the loss against F.cross_entropy and loops, the ensemble, and the cosine at test."""

import pytest
import torch
from method_batches import batch_of, gradients_of, method_of
from torch.nn.functional import cross_entropy

from idml import IntrospectiveMetric, LabelSets
from idml.methods.dreml import bag_loss, draw_bags
from idml.model import build_model
from idml.training.config import from_dict


def test_bags_are_balanced_and_differ():
    bags = torch.stack([draw_bags(100, 12, 0, member) for member in range(200)])
    sizes = torch.stack([row.bincount(minlength=12) for row in bags])
    assert set(sizes.flatten().tolist()) == {8, 9}
    together = (bags[:, :, None] == bags[:, None, :]).double().mean(dim=0)
    pairs = together[~torch.eye(100, dtype=torch.bool)]
    assert float(pairs.mean()) == pytest.approx(float((sizes[0] * (sizes[0] - 1)).sum()) / (100 * 99))  # 0.0743
    assert float(pairs.mean()) == pytest.approx(0.0743, abs=1e-4)
    assert float(pairs.std()) < 0.03


def test_the_loss_is_cross_entropy_over_bags():
    embeddings, batch = batch_of(10, 12, classes=6)
    method = method_of("dreml", loss="softmax", classes=6, dim=12, members=4)
    found = method.loss(embeddings, batch, torch.arange(10), seed=0)["bags"]
    labels = torch.arange(10) % 6
    parts = [cross_entropy(embeddings.semantic[:, 3 * m : 3 * m + 3], method.bags[m][labels]) for m in range(4)]
    torch.testing.assert_close(found, sum(parts) / 4)
    expected = torch.autograd.grad(sum(parts) / 4, embeddings.semantic)[0]
    torch.testing.assert_close(gradients_of(method, embeddings, batch)[0], expected)


def test_label_sets_by_a_loop():
    sets = [{0, 1}, {2}, {3, 4, 5}, {0, 5}]
    logits = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    bags = torch.stack([draw_bags(6, 3, 0, member) for member in range(2)])
    terms = []
    for i, labels in enumerate(sets):
        for member in range(2):
            weights = logits[i, member].exp()
            own = {int(bags[member, label]) for label in labels}  # two labels in one bag make a set of one
            terms.append(-torch.log(sum(weights[bag] for bag in own) / weights.sum()))
    expected = sum(terms) / len(terms)
    found = bag_loss(logits, LabelSets.of(sets), bags)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(x, logits) for x in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shared", [True, False])
def test_the_cosine_at_test_is_the_mean_of_the_members(shared):
    kind = method_of("dreml", loss="softmax", classes=6, dim=6, members=3, shared_trunk=shared)
    model = build_model("conv4", embedding_dim=6, image_size=16, **kind.model_options(kind.options)).eval()
    images = torch.rand(5, 3, 16, 16)
    whole, raw = model(images), model.training_outputs(images)
    parts = [IntrospectiveMetric(rule="off").cosines(raw.semantic[:, 2 * m : 2 * m + 2]) for m in range(3)]
    torch.testing.assert_close(IntrospectiveMetric(rule="off").cosines(whole.semantic), sum(parts) / 3)
    torch.testing.assert_close(kind.embedding(raw).semantic, whole.semantic)
    assert model.trunk.width == (256 if shared else 768)
    one = model.slice(whole, "member 2")
    torch.testing.assert_close(one.semantic, torch.nn.functional.normalize(raw.semantic[:, 2:4]))


def test_members_with_trunks_of_their_own_learn_apart():
    kind = method_of("dreml", loss="softmax", classes=6, dim=6, members=3, shared_trunk=False)
    model = build_model("conv4", embedding_dim=6, image_size=16, **kind.model_options(kind.options)).eval()
    model.training_outputs(torch.rand(5, 3, 16, 16)).semantic[:, 2:4].sum().backward()
    moved = [any(bool(p.grad is not None and p.grad.any()) for p in net.parameters()) for net in model.trunk.network]
    assert moved == [False, True, False]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "contrastive"}, "minimises a cross-entropy of its own, not contrastive: say --loss softmax"),
        ({"shared_trunk": False, "train": "heads"}, "an ensemble of trunks needs train all"),
        ({"members": 0}, "members must be a whole number of at least 1"),
        ({"introspective": True}, "method dreml has no option 'introspective': it belongs to"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        from_dict({"data": "glyphs", "out": "-", "method": "dreml", "loss": "softmax", **options})


@pytest.mark.parametrize(("dim", "words"), [(7, "does not divide into 3 slices"), (30, "at most as many as classes")])
def test_members_must_fit(dim, words):
    with pytest.raises(ValueError, match=words):
        method_of("dreml", loss="softmax", classes=6, dim=dim, members=3)

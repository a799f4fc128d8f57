"""Divide and conquer: batches of a group, the loss of a slice, the whole embedding at the end, one group as plain."""

import pytest
import torch
from method_batches import batch_of, gradients_of, method_of

from idml import Embeddings, IntrospectiveMetric
from idml.methods.base import Method
from idml.model.heads import unit_slices

LABELS = torch.arange(48) % 6


def divided(loss="multi_similarity", **options):
    method = method_of("dac", loss=loss, classes=6, dim=8, labels=LABELS, **{"groups": 2, **options})
    method.groups.copy_(torch.arange(48) // 24)
    return method


def test_a_batch_comes_from_one_group_and_trains_one_slice():
    method = divided()
    plan = method.plan(torch.arange(48), batch_size=8, per_class=2, epoch=0)
    groups = [method.groups[batch].unique().tolist() for batch in plan]
    assert groups == [[0], [1]] * (len(plan) // 2)
    assert all(len(batch) == 8 for batch in plan)
    embeddings, batch = batch_of(8, 8, classes=4)
    numbers = plan[1]
    gradient = torch.autograd.grad(method.loss(embeddings, batch, numbers, 0)["pairs"], embeddings.semantic)[0]
    assert not gradient[:, :4].any()
    part = embeddings.semantic[:, 4:]
    expected = method.metric_loss[1](Embeddings(part, embeddings.uncertainty), batch.labels, seed=0)
    torch.testing.assert_close(gradient[:, 4:], torch.autograd.grad(expected, embeddings.semantic)[0][:, 4:])


def test_small_groups_are_repeated_and_images_alone_in_their_class_left_out():
    method = divided()
    method.groups.zero_()
    few = torch.tensor([0, 6, 1, 7, 2])  # classes 0 and 1 twice, class 2 once
    method.groups[few] = 1
    plan = method.plan(torch.arange(48), batch_size=8, per_class=2, epoch=0)
    of_few = [batch for batch in plan if int(method.groups[batch[0]]) == 1]
    assert len(of_few) == len(plan) // 2
    assert all(set(batch.tolist()) == {0, 6, 1, 7} for batch in of_few)
    method.groups.copy_(torch.arange(48) % 6 // 3)
    assert len(method.plan(torch.arange(48), batch_size=8, per_class=0, epoch=0)) > 1
    lonely = divided(groups=8)
    lonely.groups.copy_(torch.arange(48) // 6)
    with pytest.raises(ValueError, match="none of the 8 groups has two classes with two images each: use fewer groups"):
        lonely.plan(torch.arange(48), batch_size=8, per_class=2, epoch=0)


@pytest.mark.parametrize("loss", ["contrastive", "proxy_anchor"])
def test_the_last_epochs_train_the_whole_embedding(loss):
    method = divided(loss, whole_epochs=0.5)
    method.task = type(method.task)(**{**method.task.__dict__, "epochs": 4})
    points = torch.randn(48, 8) + 4 * torch.eye(8)[torch.arange(48) // 24]
    method.start_epoch(0, lambda: (torch.arange(48), Embeddings.certain(points)))
    assert not method.whole
    assert len(method.groups.unique()) == 2
    before = method.groups.clone()
    method.start_epoch(2, lambda: pytest.fail("nothing is clustered any more"))
    assert bool(method.whole)
    assert torch.equal(method.groups, before)
    plan = method.plan(torch.arange(48), batch_size=8, per_class=2, epoch=2)
    expected = Method.plan(method, torch.arange(48), batch_size=8, per_class=2, epoch=2)
    assert all(torch.equal(a, b) for a, b in zip(plan, expected, strict=True))
    embeddings, batch = batch_of(8, 8, classes=4)
    found = method.loss(embeddings, batch, plan[0], 0)["pairs"]
    whole = unit_slices(embeddings.semantic, 2)
    plain = IntrospectiveMetric(rule="off")
    if loss == "contrastive":
        value = method.metric_loss[0].function(plain.distances(whole), batch.labels.matches())
    else:
        proxies = torch.cat([torch.nn.functional.normalize(part.proxies) for part in method.metric_loss], dim=1)
        value = method.metric_loss[0].function(plain.cosines(whole, proxies), batch.labels.in_classes(6))
        assert torch.autograd.grad(found, method.metric_loss[1].proxies, retain_graph=True)[0].any()
    torch.testing.assert_close(found, value)


@pytest.mark.parametrize(("share", "begin"), [(0.7, 3), (0.2, 8), (0.25, 8), (0.0, 10), (1.0, 0)])
def test_when_the_last_epochs_begin(share, begin):
    method = divided(whole_epochs=share, regroup_epochs=100)
    method.task = type(method.task)(**{**method.task.__dict__, "epochs": 10})
    found = []
    for epoch in range(10):
        method.start_epoch(epoch, lambda: (torch.arange(48), Embeddings.certain(torch.randn(48, 8))))
        found.append(bool(method.whole))
    assert found == [epoch >= begin for epoch in range(10)]


def test_the_critic_of_a_loss_learns_with_the_whole_embedding():
    method = divided("rankmi")
    method.whole.fill_(True)
    embeddings, batch = batch_of(8, 8, classes=4)
    value = method.loss(embeddings, batch, torch.arange(8), 0)["pairs"]
    critics = {name: p for name, p in method.named_parameters() if name.endswith("critic.4.weight")}
    gradients = torch.autograd.grad(value, list(critics.values()), allow_unused=True)
    learns = {name: gradient is not None for name, gradient in zip(critics, gradients, strict=True)}
    names = [f"metric_loss.{k}.critic.4.weight" for k in range(2)]
    assert learns == {**dict.fromkeys(names, False), "whole_loss.0.critic.4.weight": True}
    assert method.learning_rate_factors()["whole_loss.0.critic.4.weight"] == 10


def test_one_group_is_plain_training():
    embeddings, batch = batch_of(12, 6)
    one, plain = method_of("dac", groups=1), method_of("plain")
    for a, b in zip(gradients_of(one, embeddings, batch), gradients_of(plain, embeddings, batch), strict=True):
        torch.testing.assert_close(a, b)
    plans = [m.plan(torch.arange(12), batch_size=8, per_class=2, epoch=1) for m in (one, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*plans, strict=True))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="embedding_dim 6 does not divide into 4 slices"):
        method_of("dac")
    with pytest.raises(ValueError, match="proxy_uncertainty is for whole embeddings"):
        method_of("dac", loss="proxy_anchor", introspective=True, proxy_uncertainty=True)
    with pytest.raises(ValueError, match="whole_epochs is a share of the epochs, at most 1"):
        method_of("dac", whole_epochs=2.0)
    method = divided(groups=2)
    with pytest.raises(ValueError, match="2 clusters need at least 2 images, but there are 1"):
        method.start_epoch(0, lambda: (torch.arange(1), Embeddings.certain(torch.randn(1, 8))))

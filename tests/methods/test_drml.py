"""DRML: the head and the loss by loops over images and nodes, its start, one node, and where gradients end."""

import pytest
import torch
from method_batches import assert_same, batch_of, method_of

from idml import Embeddings
from idml.losses import build_loss
from idml.model.heads import RelationHead


def head_of(parts, width=12, dim=8):
    torch.manual_seed(1)
    head = RelationHead(width, dim, parts).double()
    torch.nn.init.normal_(head.mix.weight, std=0.5)
    return head


def looped(head, h):
    """f, the nodes and the errors of one image."""
    parts = h.split(len(h) // head.parts)
    v = [layer(part) / layer(part).norm() for layer, part in zip(head.nodes, parts, strict=True)]
    a = [layer(part.detach()) for layer, part in zip(head.sources, parts, strict=True)]
    b = [layer(part.detach()) for layer, part in zip(head.targets, parts, strict=True)]
    out = []
    for j in range(head.parts):
        r = [torch.relu(head.edge(a[i] - b[j]))[0] for i in range(head.parts)]
        message = sum((r[i] / sum(r) * v[i] for i in range(head.parts)), 0 * v[0]) if sum(r) > 0 else 0 * v[0]
        out.append(head.mix.weight @ torch.cat([v[j], message]) + head.mix.bias)
    errors = [((head.decoders[k](v[k].detach()) - parts[k].detach()) ** 2).mean() for k in range(head.parts)]
    return torch.cat([*out, *v, torch.stack(errors)])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_head_by_loops(parts):
    head, features = head_of(parts), torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    found, expected = head.outputs(features), torch.stack([looped(head, h) for h in features])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(head(features), found[:, :8])
    weight = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view_as(found)
    inputs = [features, *head.parameters()]
    gradients = (torch.autograd.grad((x * weight).sum(), inputs, retain_graph=True) for x in (found, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_it_starts_at_the_nodes_and_permutes_with_them():
    head, features = RelationHead(12, 8, 4), torch.randn(5, 12)
    out = head.outputs(features)
    torch.testing.assert_close(out[:, :8], out[:, 8:16])
    head = head_of(4)
    order, moved = [2, 0, 3, 1], head_of(4)
    for name in ("nodes", "sources", "targets", "decoders"):
        for k, old in enumerate(order):
            getattr(moved, name)[k].load_state_dict(getattr(head, name)[old].state_dict())
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(
        moved(x[:, order].flatten(1)), head(x.flatten(1)).unflatten(1, (4, -1))[:, order].flatten(1)
    )


def test_the_gradients_of_edges_and_decoders_end_before_the_trunk():
    head, features = head_of(4), torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    assert not torch.autograd.grad(head.outputs(features)[:, 16:].sum(), features)[0].any()
    with torch.no_grad():
        head.mix.weight[:, :2] = 0.0  # only messages are left: their nodes pass gradient, their edges do not
    (gradient,) = torch.autograd.grad(head(features).sum(), features)
    assert gradient.any()


@pytest.mark.parametrize("introspective", [False, True])
def test_the_loss_by_a_loop(introspective):
    sets = [{0}, {1, 2}, {2}, {3}, {0, 1}, {3}, {1}, {2}]
    embeddings, batch = batch_of(8, 8 + 8 + 4, sets=sets, dim=8)
    method = method_of("drml", loss="proxy_anchor", dim=8, nodes=4, introspective=introspective)
    terms = method.loss(embeddings, batch, torch.arange(8), seed=0)
    s = embeddings.semantic
    nodes, winners = 0.0, s[:, 16:].argmin(dim=1).tolist()
    for k in range(4):
        rows = [i for i in range(8) if winners[i] == k]
        if rows:
            loss = build_loss("proxy_anchor", metric=method.node_losses[k].metric, num_classes=4, embedding_dim=2)
            loss.load_state_dict(method.node_losses[k].state_dict())
            nodes = nodes + loss(s[rows, 8 + 2 * k : 10 + 2 * k], batch.labels[rows])
    assert len(set(winners)) > 1
    assert_same(terms["nodes"], nodes, s)
    whole = method.metric_loss(Embeddings(s[:, :8], embeddings.uncertainty), batch.labels)
    assert_same(terms["pairs"], 10 * whole, s, embeddings.uncertainty)
    assert_same(terms["reconstruction"], s[:, 16:].mean(), s)
    assert method.node_losses[0].metric.rule == "off"
    assert method.metric_loss.metric.rule == ("similar" if introspective else "off")


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="method drml needs a loss with proxies: contrastive has none"):
        method_of("drml", loss="contrastive")
    with pytest.raises(ValueError, match="embedding_dim 6 does not divide into 4 slices"):
        method_of("drml", loss="proxy_anchor", dim=6)
    with pytest.raises(ValueError, match="the width of the features 10 does not divide into 4 slices"):
        RelationHead(10, 8, 4)

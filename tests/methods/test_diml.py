"""DIML in training: the pair matrix by loops over images and positions, value and gradient; what it refuses."""

import pytest
import torch
from method_batches import batch_of, gradients_of, method_of

from idml import Embeddings, IntrospectiveMetric
from idml.methods import diml
from idml.methods.diml import structural_pairs
from idml.model.structural_matching import transport_plans

DIM, GRID = 6, 16


def looped(outputs, metric, form):
    """½(pair + Σ T·value), one pair and one position at a time."""
    whole = [row / row.norm() for row in outputs.semantic[:, :DIM]]
    maps = [[p / p.norm() for p in row.view(GRID, DIM)] for row in outputs.semantic[:, DIM:]]
    e = Embeddings(outputs.semantic[:, :DIM], outputs.uncertainty)
    pairs = metric.distances(e) if form == "distance" else metric.cosines(e)
    rows = []
    for i in range(len(whole)):
        row = []
        for j in range(len(whole)):
            s = torch.stack([torch.stack([a @ b for b in maps[j]]) for a in maps[i]])
            mu = torch.stack([a @ whole[j] for a in maps[i]]).detach().relu()
            nu = torch.stack([b @ whole[i] for b in maps[j]]).detach().relu()
            mu, nu = (x / x.sum() if x.sum() > 1e-6 else torch.full((GRID,), 1 / GRID) for x in (mu, nu))
            plan = transport_plans((1 - s).detach()[None], mu[None], nu[None], rounds=500)[0]
            values = (2 - 2 * s).clamp_min(1e-12).sqrt() if form == "distance" else s
            row.append(0.5 * (pairs[i, j] + (plan * values).sum()))
        rows.append(torch.stack(row))
    return torch.stack(rows)


@pytest.mark.parametrize(("loss", "introspective"), [("circle", False), ("contrastive", True)])
def test_the_loss_by_loops(loss, introspective, monkeypatch):
    monkeypatch.setattr(diml, "_ROUNDS", 500)
    embeddings, batch = batch_of(4, DIM * (1 + GRID), classes=2, dim=DIM)
    method = method_of("diml", loss=loss, dim=DIM, introspective=introspective)
    metric = IntrospectiveMetric() if introspective else IntrospectiveMetric(rule="off")
    terms = method.loss(embeddings, batch, torch.arange(4), seed=0)
    pairs = looped(embeddings, metric, method.metric_loss.form)
    expected = method.metric_loss.loss_of_pairs(pairs, batch.labels.matches(), False, DIM, 0)
    assert float(terms["pairs"]) == pytest.approx(float(expected), rel=1e-4)
    (found,) = torch.autograd.grad(terms["pairs"], embeddings.semantic, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, embeddings.semantic)
    assert torch.nn.functional.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.99999
    assert ("u" in terms) is not introspective
    assert gradients_of(method, embeddings, batch)[1].any()


def test_equal_positions_add_nothing_of_their_own():
    """With all positions at the whole image's place the structural cosine is the cosine itself."""
    whole = torch.nn.functional.normalize(torch.randn(5, DIM))
    found = structural_pairs(whole[:, None].expand(5, GRID, DIM), whole, distance=False)
    torch.testing.assert_close(found, whole @ whole.T, rtol=1e-4, atol=1e-5)


def test_proxies_are_refused():
    with pytest.raises(ValueError, match="method diml compares pairs of images, not proxies: proxy_anchor has proxies"):
        method_of("diml", loss="proxy_anchor")

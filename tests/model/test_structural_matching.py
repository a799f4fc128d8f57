"""Transport plans against POT, the assignment problem and the closed form; the symmetries of the similarity."""

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from idml.model.structural_matching import marginals, structural_similarities, transport_plans


def unit(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=g, dtype=torch.float64), dim=-1)


def problem(seed=0, r=16):
    x, y, whole_x, whole_y = (
        unit(r, 8, seed=seed),
        unit(r, 8, seed=seed + 1),
        unit(8, seed=seed + 2),
        unit(8, seed=seed + 3),
    )
    return 1 - x @ y.T, marginals(x @ whole_y), marginals(y @ whole_x)


@pytest.mark.parametrize("seed", range(2))
def test_plans_are_those_of_pot(seed):
    cost, mu, nu = problem(seed)
    expected = ot.sinkhorn(
        mu.numpy(), nu.numpy(), cost.numpy(), 0.05, method="sinkhorn_log", numItermax=20000, stopThr=1e-13
    )
    plan = transport_plans(cost[None], mu[None], nu[None], rounds=3000)[0]
    np.testing.assert_allclose(plan.numpy(), expected, atol=1e-8)
    usual = transport_plans(cost[None], mu[None], nu[None])[0]  # as many rounds as a search makes
    assert float(((usual - plan) * (1 - cost)).sum().abs()) < 1e-2
    torch.testing.assert_close(usual.sum(dim=0), nu, rtol=0, atol=1e-9)


def test_a_large_epsilon_gives_the_product_and_a_small_one_the_assignment():
    cost, mu, nu = problem()
    torch.testing.assert_close(transport_plans(cost[None], mu[None], nu[None], epsilon=1e6)[0], mu[:, None] * nu)
    even = torch.full((1, 16), 1 / 16, dtype=torch.float64)
    plan = transport_plans(cost[None], even, even, epsilon=2e-3, rounds=3000)[0]
    rows, columns = linear_sum_assignment(cost.numpy())
    assert float((plan * cost).sum()) == pytest.approx(cost.numpy()[rows, columns].mean(), abs=5e-3)


def test_symmetries():
    x, y, whole = unit(4, 16, 8), unit(4, 16, 8, seed=5), unit(4, 8, seed=6)
    other = unit(4, 8, seed=7)
    found = structural_similarities(x, whole, y, other)
    order = torch.randperm(16)
    torch.testing.assert_close(structural_similarities(x[:, order], whole, y, other), found)
    swapped = structural_similarities(y, other, x, whole)
    torch.testing.assert_close(swapped, found, rtol=0, atol=5e-3)  # up to the rounds that are not made
    assert bool((structural_similarities(x, whole, x, whole) <= 1 + 1e-9).all())
    alone = structural_similarities(x[2:3], whole[2:3], y[2:3], other[2:3])
    torch.testing.assert_close(alone, found[2:3])


def test_images_that_point_away_from_each_other():
    x, y = unit(1, 16, 8), unit(1, 16, 8, seed=1)
    away = -torch.nn.functional.normalize(x.sum(dim=1)) * 0 - 1.0 / 8**0.5
    value = structural_similarities(x.abs(), -away, y, away)
    assert bool(torch.isfinite(value).all())

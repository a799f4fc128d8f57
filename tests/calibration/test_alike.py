"""P of single results against scikit-learn's isotonic regression and against laws."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from idml.calibration.evidence import Evidence
from idml.calibration.stored import Calibration, MatchCurve, split_queries


def lists(n, m, seed=0):
    """Ascending distances, some lists shorter, and results that are alike the rarer the farther they are."""
    g = torch.Generator().manual_seed(seed)
    distances = torch.rand(n, m, generator=g).sort(dim=1).values
    alike = torch.rand(n, m, generator=g) > distances.sqrt()
    ends = torch.randint(1, m + 1, (n, 1), generator=g)
    absent = torch.arange(m) >= ends
    return distances.masked_fill(absent, torch.inf), alike & ~absent


def test_between_the_ends_it_is_isotonic_regression():
    distances, alike = lists(400, 10)
    curve = MatchCurve.fit(distances, alike)
    seen = distances != torch.inf
    oracle = IsotonicRegression(increasing=False).fit(distances[seen].double().numpy(), alike[seen].numpy())
    at = torch.tensor(curve.knots, dtype=torch.float64)[1:-1]  # a knot is the mean of its step
    inner = oracle.predict(at.numpy())
    assert len(at) > 10
    assert curve.probability(at).tolist() == pytest.approx(inner.tolist(), abs=1e-6)


def test_a_few_results_never_make_certainty():
    curve = MatchCurve.fit(torch.tensor([[0.1, 0.2, 0.3, 0.8, 0.9]]), torch.tensor([[True, True, True, False, False]]))
    assert curve.probability(torch.tensor([0.0, 1.9])).tolist() == [4 / 5, 1 / 4]
    distances = torch.cat([torch.full((1, 1), 0.01), torch.full((1, 999), 0.5)], dim=1)
    mostly = torch.arange(1000) % 50 != 7
    mostly[0] = True
    near, far = MatchCurve.fit(distances, mostly[None]).probability(torch.tensor([0.01, 0.5])).tolist()
    assert near == far == pytest.approx(979 / 999)  # one right result at hand is no better than 979 of 999
    certain = MatchCurve.fit(torch.rand(1, 8), torch.ones(1, 8, dtype=torch.bool))
    assert certain.probability(torch.tensor(0.5)).item() == pytest.approx(0.9)


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=40))
def test_it_falls_and_stays_within_bounds(sample):
    distances = torch.tensor([[d / 8 for d, _ in sample]])
    alike = torch.tensor([[same for _, same in sample]])
    curve = MatchCurve.fit(distances, alike)
    p = curve.probability(torch.linspace(-1, 3, 101).view(1, 101))
    assert p.shape == (1, 101)
    assert bool((p.diff() <= 0).all())
    n = len(sample)
    assert 1 / (n + 2) - 1e-12 <= float(p.min()) <= float(p.max()) <= (n + 1) / (n + 2) + 1e-12


def test_bad_lists():
    with pytest.raises(ValueError, match="empty"):
        MatchCurve.fit(torch.full((2, 3), torch.inf), torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="no numbers"):
        MatchCurve.fit(torch.tensor([[0.1, math.nan]]), torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="bool mask"):
        MatchCurve.fit(torch.rand(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="1 of 2 distances are NaN"):
        MatchCurve((0.0,), (0.5,)).probability(torch.tensor([0.1, math.nan]))
    for knots, shares in (
        ((), ()),
        ((0.0, 1.0), (0.5,)),
        ((1.0, 0.0), (0.5, 0.4)),
        ((0.0, 1.0), (0.4, 0.5)),
        ((0.0,), (2.0,)),
    ):
        with pytest.raises(ValueError, match="does not fall"):
            MatchCurve(knots, shares)


def fitted(seed=0, **options):
    n = 300
    g = torch.Generator().manual_seed(1)
    distances, alike = lists(n, 12)
    noise = torch.rand(n, 4, generator=g)
    evidence = Evidence(noise[:, 0], distances[:, 0], noise[:, 1], noise[:, 2], noise[:, 3])
    listed = (distances, alike)
    return Calibration.fit(evidence, alike[:, 0], labelled=False, listed=listed, seed=seed, **options), listed


def test_a_calibration_fits_it_to_its_fitting_half_and_keeps_it(tmp_path):
    found, (distances, alike) = fitted(seed=3)
    _, used = split_queries(300, seed=3)
    assert found.match_curve == MatchCurve.fit(distances[used], alike[used])
    at = torch.rand(3, 4, 2)
    assert torch.equal(found.match_probability(at), found.match_curve.probability(at))
    found.save(tmp_path / "c.json")
    loaded = Calibration.load(tmp_path / "c.json")
    assert loaded == found
    assert torch.equal(loaded.match_probability(at), found.match_probability(at))


def test_a_calibration_without_it_says_so_and_older_files_are_refused(tmp_path):
    found, _ = fitted()
    evidence = Evidence(*(torch.rand(20) for _ in range(5)))
    plain = Calibration.fit(evidence, torch.rand(20) > 0.5, labelled=False)
    with pytest.raises(ValueError, match="knows nothing about single results"):
        plain.match_probability(torch.rand(3))
    found.save(tmp_path / "c.json")
    whole = json.loads((tmp_path / "c.json").read_text())
    assert whole["version"] == 4
    (tmp_path / "c.json").write_text(json.dumps({**whole, "version": 1}))
    with pytest.raises(ValueError, match=r"c\.json has version 1"):
        Calibration.load(tmp_path / "c.json")

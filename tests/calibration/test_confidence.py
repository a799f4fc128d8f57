"""The model of P(right) against scikit-learn, single scores and laws."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import population
from sklearn.linear_model import LogisticRegression

from idml.calibration.confidence import ConfidenceModel, isotonic, logistic
from idml.calibration.evidence import Evidence
from idml.calibration.risk_control import expected_calibration_error, reliability_bins
from idml.calibration.stored import Calibration
from idml.evaluation.uncertainty import auroc


def test_logistic_regression_against_scikit_learn():
    g = torch.Generator().manual_seed(0)
    z = torch.randn(300, 4, generator=g, dtype=torch.float64)
    wrong = (torch.rand(300, generator=g) < (z[:, 0] - 1).sigmoid()).double()
    weights, bias = logistic(z, wrong, 0.05)
    oracle = LogisticRegression(C=1 / (0.05 * 300), tol=1e-10, max_iter=1000).fit(z.numpy(), wrong.numpy())
    assert weights.tolist() == pytest.approx(oracle.coef_[0].tolist(), abs=1e-5)
    assert bias == pytest.approx(float(oracle.intercept_[0]), abs=1e-5)
    separable, _ = logistic(z, (z[:, 0] > 0).double(), 1e-4)
    assert bool(torch.isfinite(separable).all())


@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=1, max_size=30))
def test_isotonic_curve_falls(sample):
    knots, shares = isotonic(torch.tensor([float(x) for x, _ in sample]), torch.tensor([y for _, y in sample]))
    assert list(knots) == sorted(set(knots))
    assert list(shares) == sorted(shares, reverse=True)
    assert all(0 < share < 1 for share in shares)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_p_ranks_as_well_as_the_best_single_score(labelled, grouped):
    evidence, correct, known, _, classes = population(4000, 0.25, seed=2)
    found = Calibration.fit(evidence, correct, labelled=labelled, groups=classes if grouped else None, known=known)
    figures = {figure.name: figure.r_auroc for figure in found.confidence_model.candidates}
    singles = evidence.scores if labelled else {"level", "nearest", "kth", "spread", "gap", "pair"}
    assert set(figures) == {*singles, "mix", "mix without u"}
    chosen = [name for name, value in figures.items() if value >= max(figures.values()) - 0.01]
    assert found.confidence_model.name == ("mean of " + ", ".join(chosen) if len(chosen) > 1 else chosen[0])
    fresh, right, _, _, _ = population(20_000, 0.25, seed=3)
    of_model = auroc(-found.probability(fresh), ~right)
    best = max(auroc(fresh.scores[name], ~right) for name in singles)
    assert of_model > best - 0.002
    print(f"labelled {labelled}: P {of_model:.4f}, best single {best:.4f}, ECE {found.ece:.4f}")
    assert found.ece < 0.05
    assert expected_calibration_error(reliability_bins(found.probability(fresh), right)) < 0.03


def test_candidates_that_are_about_equally_good_are_averaged():
    """The doubt is their mean, stretched; none of it comes from those that are clearly worse."""
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(3000, generator=g)
    twins = [truth + 0.8 * torch.randn(3000, generator=g) for _ in range(2)]
    noise = torch.randn(3, 3000, generator=g)
    correct = truth + torch.randn(3000, generator=g) < 0
    evidence = Evidence(level=noise[0], nearest=twins[0], kth=noise[1], spread=twins[1], gap=noise[2])
    found = ConfidenceModel.fit(evidence, correct, labelled=False)
    assert found.name == "mean of mix, mix without u"  # both twins together are clearly better than one
    columns = [evidence.scores[name].double() for name in ("level", "nearest", "kth", "spread", "gap")]
    z = torch.stack([(x - x.mean()) / x.std(correction=0) for x in columns], dim=1)
    wrong = (~correct).double()
    (all_, b), (some, c) = logistic(z, wrong, 1e-4), logistic(z[:, 1:], wrong, 1e-4)
    mean = (b + z @ all_ + c + z[:, 1:] @ some) / 2
    assert float(torch.corrcoef(torch.stack([found.doubt(evidence), mean]))[0, 1]) > 0.99999  # but for the penalty
    one = replace(evidence, spread=noise[2])
    alone = ConfidenceModel.fit(one, correct, labelled=False)
    assert alone.name == "mean of nearest, mix, mix without u"
    assert auroc(-alone.probability(one), ~correct) == pytest.approx(auroc(one.nearest, ~correct), abs=0.005)


def test_a_single_score_keeps_its_order():
    g = torch.Generator().manual_seed(0)
    near = torch.rand(2000, generator=g)
    noise = [torch.zeros(2000) for _ in range(4)]
    evidence = Evidence(noise[0], near, *noise[1:])
    correct = torch.rand(2000, generator=g) > near**8  # no logistic curve
    found = ConfidenceModel.fit(evidence, correct, labelled=False)
    p = found.probability(evidence)
    order = near.argsort()
    assert bool((p[order].diff() <= 0).all())
    assert auroc(-p, ~correct) == pytest.approx(auroc(near, ~correct), abs=1e-9)
    assert float((p - (1 - near**8)).abs().mean()) < 0.05

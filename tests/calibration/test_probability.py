"""The probability that an answer is right, and the evidence for it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from simulated import population
from sklearn.linear_model import LogisticRegression

from idml import Embeddings, IntrospectiveMetric
from idml.calibration.confidence import ConfidenceModel, isotonic, logistic
from idml.calibration.evidence import Evidence, Profile, evidence_from_lists, first_right, gather_evidence
from idml.calibration.risk_control import drift, expected_calibration_error, reliability
from idml.calibration.stored import Calibration
from idml.evaluation import nearest, neighbour_scores
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
def test_never_below_the_best_single_score(labelled, grouped):
    evidence, correct, known, _, classes = population(4000, 0.25, seed=2)
    found = Calibration.fit(evidence, correct, labelled=labelled, groups=classes if grouped else None, known=known)
    figures = {figure.name: figure.r_auroc for figure in found.table}
    singles = evidence.scores if labelled else {"level", "nearest", "kth", "spread", "gap", "pair"}
    assert set(figures) == {*singles, "mix", "mix without u"}
    taken = [name for name, value in figures.items() if value >= max(figures.values()) - 0.01]
    assert found.confidence_model.name == ("mean of " + ", ".join(taken) if len(taken) > 1 else taken[0])
    fresh, right, _, _, _ = population(20_000, 0.25, seed=3)
    of_model = auroc(-found.probability(fresh), ~right)
    best = max(auroc(fresh.scores[name], ~right) for name in singles)
    assert of_model > best - 0.002
    print(f"labelled {labelled}: P {of_model:.4f}, best single {best:.4f}, ECE {found.ece:.4f}")
    assert found.ece < 0.05
    assert expected_calibration_error(reliability(found.probability(fresh), right)) < 0.03


def test_candidates_that_are_about_as_good_are_averaged():
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


def test_a_score_alone_keeps_its_order():
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


@pytest.mark.parametrize("metric", [None, IntrospectiveMetric()])
def test_evidence_against_loops(metric):
    g = torch.Generator().manual_seed(0)
    gallery = Embeddings(torch.randn(60, 3, generator=g), torch.rand(60, 2, generator=g))
    queries = Embeddings(torch.randn(20, 3, generator=g), torch.rand(20, 2, generator=g))
    labels = torch.randint(3, (60,), generator=g)
    found = gather_evidence(queries, gallery, labels, metric=metric, k=5, listed=9)
    indices, distances = nearest(queries, 9, gallery=gallery, metric=metric)
    assert torch.equal(found.indices, indices)
    rivals = neighbour_scores(
        queries, torch.zeros(20).long(), gallery=gallery, gallery_labels=labels, metric=metric, k=5
    )
    for ours, theirs in (("nearest", "nearest_distance"), ("kth", "kth_distance")):
        assert torch.equal(found.scores[ours], rivals.scores[theirs])
    for name in ("entropy", "disagreement"):
        assert torch.equal(found.scores[name], rivals.scores[name])
    for i in range(20):
        near, d = labels[indices[i, :5]], distances[i]
        others = [float(d[j]) for j in range(5) if near[j] != near[0]] or [float(d[4])]
        assert float(found.margin[i]) == pytest.approx(float(d[0]) - others[0], abs=1e-6)
        assert float(found.ratio[i]) == pytest.approx(float(d[0]) / others[0], abs=1e-6)
        assert float(found.gap[i]) == pytest.approx(float(d[0] - d[1]), abs=1e-6)
        beta = (queries.uncertainty[i] + gallery.uncertainty[indices[i, 0]]).norm()
        assert float(found.pair[i]) == pytest.approx(float(beta), abs=1e-6)
    plain = gather_evidence(queries, gallery, metric=metric, k=5)
    assert not plain.labelled
    assert torch.equal(plain.gap, found.gap)
    places = first_right(found.indices, torch.ones(20).long(), labels)
    assert places.tolist() == [next((j + 1 for j in range(9) if labels[r[j]] == 1), 0) for r in indices]


def test_small_galleries():
    one = Embeddings.certain(torch.tensor([[1.0, 0.0]]))
    alone = gather_evidence(one, one, ["cat"])
    assert {name: float(x) for name, x in alone.scores.items()} == {
        **dict.fromkeys(("level", "nearest", "kth", "gap", "pair", "margin", "entropy", "disagreement"), 0.0),
        **dict.fromkeys(("spread", "ratio"), 1.0),
    }
    same_class = Embeddings.certain(torch.randn(30, 4))
    found = gather_evidence(same_class, same_class, ["cat"] * 30, query_ids=range(30), gallery_ids=range(30))
    assert bool((found.disagreement == 0).all())
    assert bool((found.margin == found.nearest - found.kth).all())
    assert Calibration.fit(found, torch.ones(30, dtype=torch.bool)).find_guarantee(0.5).kept
    with pytest.raises(ValueError, match="1 of 1 queries found no image at all"):
        evidence_from_lists(torch.full((1, 3), torch.inf), torch.zeros(1))
    fewer = evidence_from_lists(torch.tensor([[0.5, torch.inf]]), torch.zeros(1), classes=torch.tensor([[4, -1]]))
    assert (float(fewer.gap), float(fewer.kth), float(fewer.disagreement)) == (0.0, 0.5, 0.0)


def test_reliability_bins():
    p = torch.tensor([0.05, 0.0, 0.95, 1.0, 0.95])
    low, high = reliability(p, torch.tensor([False, True, True, True, False]))
    assert (low.count, low.accuracy, high.count, high.low, high.high) == (2, 0.5, 3, 0.9, 1.0)
    assert high.interval == pytest.approx(tuple(binomtest(2, 3).proportion_ci(method="exact")))
    assert expected_calibration_error([low, high]) == pytest.approx((2 * 0.475 + 3 * (2.9 / 3 - 2 / 3)) / 5)
    with pytest.raises(ValueError, match=r"1 of 2 probabilities are not in \[0, 1\] \(first: number 1\)"):
        reliability(torch.tensor([0.5, math.nan]), torch.tensor([True, True]))


def test_drift():
    g = torch.Generator().manual_seed(0)
    images = Embeddings.certain(torch.randn(600, 4, generator=g))
    then = Profile.of(images)
    more = Embeddings.cat([images, Embeddings.certain(torch.randn(60, 4, generator=g))])
    assert not drift(then, then).changed
    assert not drift(then, Profile.of(more)).changed
    twins = Embeddings.certain(images.semantic[:300].repeat(2, 1) + 1e-3 * torch.randn(600, 4, generator=g))
    assert drift(then, Profile.of(twins)).reason == "its images lie nearer to each other than at calibration"
    larger = drift(then, Profile.of(Embeddings.cat([images] * 3)))
    assert larger.changed
    assert "3 times as many images" in larger.reason
    evidence, correct, *_ = population(100, 0.0)
    assert Calibration.fit(evidence, correct, profile=then).drift(Profile.of(twins)).changed

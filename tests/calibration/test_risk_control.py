"""Risk control: bounds against scipy, choices against brute force, reliability bins, drift."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, kstest
from simulated import excess

from idml import Embeddings
from idml.calibration.evidence import Profile
from idml.calibration.risk_control import (
    ThresholdCounts,
    candidate_thresholds,
    choose_set_sizes,
    clopper_pearson,
    conformal_p,
    expected_calibration_error,
    fewest_queries,
    measure_drift,
    p_values,
    reliability_bins,
    sequential_test,
    upper_bound,
)


def test_bounds_against_scipy():
    for n in (1, 7, 50, 1000):
        for k in {0, 1, n // 3, n - 1, n}:
            expected = binomtest(k, n).proportion_ci(0.95, method="exact")
            assert clopper_pearson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-9)
            one_sided = binomtest(k, n, alternative="less").proportion_ci(0.9, method="exact").high
            assert upper_bound(k, n, 0.1) == pytest.approx(one_sided, abs=1e-9)
            assert p_values([k], [n], 0.07) == pytest.approx([binom.cdf(k, n, 0.07)], abs=1e-9)
    assert clopper_pearson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="counted 3 of 2"):
        upper_bound(3, 2, 0.1)


@given(st.floats(0.001, 0.9), st.floats(0.001, 0.5))
def test_fewest_queries_is_the_first_number_that_passes(max_error, level):
    n = fewest_queries(max_error, level)
    assert p_values([0], [n], max_error)[0] <= level * (1 + 1e-9)
    assert n == 1 or p_values([0], [n - 1], max_error)[0] > level * (1 - 1e-9)


@given(st.lists(st.floats(0, 0.2), min_size=1, max_size=12), st.floats(0.01, 0.3))
def test_one_start_is_fixed_sequence_testing(p, level):
    passed = sequential_test(p, level)
    assert passed == [all(value <= level for value in p[: i + 1]) for i in range(len(p))]


@given(st.lists(st.floats(0, 0.2), min_size=6, max_size=6), st.sets(st.integers(0, 5), min_size=1))
def test_more_starts_against_brute_force(p, starts):
    """A test's level is a start's share for every start since the last failure."""
    passed = sequential_test(p, 0.1, sorted(starts))
    for i in range(6):
        since = max((j + 1 for j in range(i) if not passed[j]), default=0)
        level = 0.1 / len(starts) * sum(since <= s <= i for s in starts)
        assert passed[i] == (level > 0 and p[i] <= level + 1e-15)
    assert all(
        not a or b for a, b in zip(passed, sequential_test([x / 2 for x in p], 0.1, sorted(starts)), strict=True)
    )


def test_the_probability_that_any_true_null_passes_is_bounded():
    p = torch.rand(20_000, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wrongly = sum(any(sequential_test(row, 0.1, (0, 2, 4))) for row in p.tolist())
    assert excess(wrongly, 20_000, 0.1) > 0.001


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.lists(st.floats(0, 1), min_size=1)
)
def test_counts_against_loops(sample, thresholds):
    p, correct = torch.tensor([x for x, _ in sample], dtype=torch.float64), torch.tensor([y for _, y in sample])
    thresholds = sorted(thresholds, reverse=True)
    found = ThresholdCounts.of(p, correct, thresholds, (0,))
    assert found.answered == tuple(sum(x >= t for x, _ in sample) for t in thresholds)
    assert found.wrong == tuple(sum(x >= t and not y for x, y in sample) for t in thresholds)


@given(st.integers(0, 2**32 - 1), st.floats(0.02, 0.4), st.floats(0.02, 0.4))
def test_a_larger_error_rate_answers_more_queries(seed, a, b):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(300, generator=g, dtype=torch.float64)
    counts = ThresholdCounts.of(p, torch.rand(300, generator=g) < p.sqrt(), *candidate_thresholds(p))
    low, high = counts.find_guarantee(min(a, b), 0.9), counts.find_guarantee(max(a, b), 0.9)
    assert low.coverage <= high.coverage
    assert not low.possible or high.possible
    assert counts.find_guarantee(a, 0.99).coverage <= counts.find_guarantee(a, 0.8).coverage
    for promise in (low, high):
        assert promise.possible != bool(promise.reason)
        if promise.threshold is not None:
            assert upper_bound(promise.wrong, promise.answered, 0.1) <= promise.max_error + 1e-9


@pytest.mark.parametrize(
    ("n", "first", "starts"), [(100, 13, 3), (511, 32, 3), (512, 32, 4), (1024, 32, 5), (9000, 32, 5)]
)
def test_with_more_queries_the_tests_start_at_higher_thresholds(n, first, starts):
    p = torch.rand(n, dtype=torch.float64)
    thresholds, places = candidate_thresholds(p)
    assert len(places) == starts
    assert [int((p >= thresholds[i]).sum()) for i in places[-3:]] == [-(-n * s // 128) for s in (16, 32, 64)]
    answered = [int((p >= threshold).sum()) for threshold in thresholds]
    assert answered[0] == first
    assert all(b <= math.ceil(1.05 * a) + n // 128 + 1 for a, b in pairwise(answered))
    assert thresholds[-1] == 0.0


def test_an_impossible_guarantee_gives_its_reason():
    few = ThresholdCounts.of(torch.ones(20), torch.ones(20, dtype=torch.bool), *candidate_thresholds(torch.ones(20)))
    promise = few.find_guarantee(0.05, 0.9)
    assert not promise.possible
    assert promise.needed == 67
    assert "there are 20 calibration queries, at least 67 are needed" in promise.reason
    enough = ThresholdCounts.of(torch.ones(80), torch.ones(80, dtype=torch.bool), *candidate_thresholds(torch.ones(20)))
    assert enough.find_guarantee(0.05, 0.9).coverage == 1
    p = torch.rand(500)
    hopeless = ThresholdCounts.of(p, torch.rand(500) < 0.6, *candidate_thresholds(p)).find_guarantee(0.05, 0.9)
    assert "too many in the calibration; about 4" in hopeless.reason
    nothing = ThresholdCounts.of(p, torch.zeros(500, dtype=torch.bool), *candidate_thresholds(p)).find_guarantee(
        0.05, 0.9
    )
    assert "nothing can be promised" in nothing.reason
    with pytest.raises(ValueError, match="max_error must be between 0 and 1, got 0"):
        few.find_guarantee(0, 0.9)


def test_conformal_p_values_are_at_most_uniform():
    g = torch.Generator().manual_seed(0)
    p = torch.cat([conformal_p(torch.randn(1, generator=g), torch.randn(19, generator=g)) for _ in range(4000)])
    for share in (0.05, 0.1, 0.3, 0.31):
        assert excess(int((p <= share).sum()), 4000, share) > 0.001
    assert kstest(p.numpy() - torch.rand(4000, generator=g).numpy() / 20, "uniform").pvalue > 0.001
    tied = conformal_p(torch.zeros(1), torch.zeros(9))
    assert float(tied) == 1.0
    assert float(conformal_p(torch.ones(1), [])) == 1.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.floats(0, 1), st.floats(0, 1))
def test_set_sizes_fall_with_probability_and_with_doubt(p, a, b):
    still = [1.0, 0.6, 0.6, 0.2, 0.05]
    p = torch.tensor(sorted(p), dtype=torch.float64)
    few, many = choose_set_sizes(p, still, max(a, b)), choose_set_sizes(p, still, min(a, b))
    assert bool((few <= many).all())
    assert bool((few.diff() <= 0).all())
    for x, size in zip(p.tolist(), few.tolist(), strict=True):
        assert size == next((m + 1 for m, h in enumerate(still) if (1 - x) * h <= max(a, b)), 5)


def test_reliability_bins():
    p = torch.tensor([0.05, 0.0, 0.95, 1.0, 0.95])
    low, high = reliability_bins(p, torch.tensor([False, True, True, True, False]))
    assert (low.count, low.accuracy, high.count, high.low, high.high) == (2, 0.5, 3, 0.9, 1.0)
    assert high.interval == pytest.approx(tuple(binomtest(2, 3).proportion_ci(method="exact")))
    assert expected_calibration_error([low, high]) == pytest.approx((2 * 0.475 + 3 * (2.9 / 3 - 2 / 3)) / 5)
    with pytest.raises(ValueError, match=r"1 of 2 probabilities are not in \[0, 1\] \(first: number 1\)"):
        reliability_bins(torch.tensor([0.5, math.nan]), torch.tensor([True, True]))


def test_a_gallery_that_changed_much_has_drifted():
    g = torch.Generator().manual_seed(0)
    images = Embeddings.certain(torch.randn(600, 4, generator=g))
    then = Profile.of(images)
    more = Embeddings.cat([images, Embeddings.certain(torch.randn(60, 4, generator=g))])
    assert not measure_drift(then, then).changed
    assert not measure_drift(then, Profile.of(more)).changed
    twins = Embeddings.certain(images.semantic[:300].repeat(2, 1) + 1e-3 * torch.randn(600, 4, generator=g))
    assert measure_drift(then, Profile.of(twins)).reason == "its images lie nearer to each other than at calibration"
    larger = measure_drift(then, Profile.of(Embeddings.cat([images] * 3)))
    assert larger.changed
    assert "200 % larger" in larger.reason

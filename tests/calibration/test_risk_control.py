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
from idml.calibration.cluster_bound import ClusterMoments
from idml.calibration.evidence import Profile
from idml.calibration.risk_control import (
    ReliabilityBin,
    RiskGuarantee,
    ThresholdCounts,
    candidate_thresholds,
    check_rate,
    choose_set_sizes,
    clopper_pearson,
    clustered_p_values,
    conformal_p,
    expected_calibration_error,
    fewest_queries,
    measure_drift,
    notice_unknown,
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
    expected = binomtest(3, 40).proportion_ci(0.8, method="exact")
    assert clopper_pearson(3, 40, 0.8) == pytest.approx((expected.low, expected.high), abs=1e-9)
    for wrong, total in ((3, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"^cannot have counted {wrong} of {total}$"):
            upper_bound(wrong, total, 0.1)
    with pytest.raises(ValueError, match=r"^confidence must be between 0 and 1, got 1\.0$"):
        clopper_pearson(1, 2, 1.0)


def test_rates():
    for x in (1e-9, 0.5, 0.999):
        assert check_rate("max_error", x) == x
    for x in (0, 1, -0.5, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"^max_error must be between 0 and 1, got {x!r}$"):
            check_rate("max_error", x)
    with pytest.raises(ValueError, match=r"^max_error must be at least 1e-09, got 9e-10$"):
        check_rate("max_error", 9e-10)


def test_nothing_counted_promises_nothing():
    assert p_values([0, 0, 1], [0, 10, 10], 0.1) == pytest.approx([1.0, 0.9**10, 0.9**10 + 0.9**9])


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


def test_reasons_in_full():
    counts = ThresholdCounts((0.9, 0.5, 0.0), (60, 80, 100), (0, 8, 30), 100, (0, 1))
    promise = counts.find_guarantee(0.01, 0.9)
    assert promise == RiskGuarantee(
        0.01, 0.9, None, 100, 374,
        reason="cannot promise at most 1 % wrong matches here: "
        "there are 100 calibration queries, at least 374 are needed",
    )  # fmt: skip
    assert promise.needed == math.ceil(fewest_queries(0.01, 0.05) / 0.8)  # δ/2 for each start; 80 of 100 answered
    hopeless = ThresholdCounts((0.9, 0.0), (600, 1000), (60, 300), 1000, (0,))
    assert hopeless.find_guarantee(0.05, 0.9, what="missed images").reason == (
        "cannot promise at most 5 % missed images here: there were too many in the calibration; "
        "about 12 % could be promised"
    )
    assert p_values([60], [600], 0.12)[0] <= 0.1 < p_values([60], [600], 0.11)[0]
    for first, words in [((999,), "nothing can be promised"), ((980,), "about 99 % could be promised")]:
        worst = ThresholdCounts((0.0,), (1000,), first, 1000, (0,)).find_guarantee(0.123, 0.9)
        possible = p_values(first, (1000,), 0.99)[0] <= 0.1
        assert possible == words.startswith("about"), "the example is what it should be"
        assert worst.reason.startswith("cannot promise at most 12.3 % wrong matches here: there were too many")
        assert worst.reason.endswith(f"; {words}")
    good = ThresholdCounts((0.0,), (1000,), (2,), 1000, (0,)).find_guarantee(0.001, 0.9)
    assert good.reason.endswith("at least 2302 are needed")
    good = ThresholdCounts((0.0,), (3000,), (8,), 3000, (0,)).find_guarantee(0.001, 0.9)
    assert good.reason.endswith("too many in the calibration; about 1 % could be promised")


def test_a_guarantee_says_what_was_counted():
    counts = ThresholdCounts((0.9, 0.5, 0.0), (60, 80, 100), (0, 1, 30), 100, (0,))
    assert counts.find_guarantee(0.06, 0.9) == RiskGuarantee(0.06, 0.9, 0.5, 100, 64, 80, 1)
    found = counts.find_guarantee(0.05, 0.9)
    assert (found.threshold, found.answered, found.wrong, found.coverage, found.possible) == (0.5, 80, 1, 0.8, True)
    assert (found.reason, found.share, found.approximate) == ("", None, False)
    assert found.observed == 1 / 80
    weighted = ThresholdCounts((0.9, 0.0), (60, 100), (10, 30), 100, (0,), moments_of(50)).find_guarantee(0.05, 0.9)
    assert (weighted.wrong, weighted.observed) == (10, 0.0)  # the ten are unknown queries, which weigh nothing here
    nothing = RiskGuarantee(0.05, 0.9, None, 0, 45)
    assert (nothing.coverage, nothing.possible) == (0.0, False)
    assert RiskGuarantee(0.05, 0.9, 0.5, 10, 45, 5, share=0.25).coverage == 0.25
    assert RiskGuarantee(0.05, 0.9, 0.0, 10, 45, 5).possible
    with pytest.raises(ValueError, match=r"^confidence must be between 0 and 1, got 1$"):
        counts.find_guarantee(0.05, 1)
    unanswered = ThresholdCounts((0.9, 0.0), (0, 100), (0, 0), 100, (0,)).find_guarantee(0.05, 0.9)
    assert not unanswered.possible
    assert unanswered.needed == 45


def moments_of(clusters, answered=(0.6, 1.0), wrong=(0.0, 0.3), n=(600.0, 1000.0), spread=1e-6):
    none = (0.0, 0.0, 0.0)
    return ClusterMoments(answered, wrong, n, ((spread,) * 3,) * len(n), (none,) * len(n), clusters)


@pytest.mark.parametrize(
    ("clusters", "possible", "approximate"),
    [
        (0, True, False),
        (1, False, False),
        (2, False, False),
        (9, False, False),
        (10, True, True),
        (49, True, True),
        (50, True, False),
    ],
)
def test_promises_need_clusters(clusters, possible, approximate):
    found = ThresholdCounts((0.9, 0.0), (60, 100), (0, 30), 100, (0,), moments_of(clusters)).find_guarantee(0.05, 0.9)
    assert (found.possible, found.approximate) == (possible, approximate)
    assert found.share == (0.6 if possible else None)
    if not possible:
        counted = "1 class was" if clusters == 1 else f"{clusters} classes were"
        assert found.reason == (
            f"cannot promise at most 5 % wrong matches here: {counted} counted, at least 10 are needed "
            "to know about queries of unknown classes (without such queries: --unknown 0)"
        )
        assert clustered_p_values(moments_of(clusters), 0.05) == [1.0, 1.0]


def test_the_share_of_wrong_matches_is_that_with_the_promised_share_of_unknown_queries():
    moments = moments_of(60, answered=(0.5, 0.8), wrong=(0.02, 0.3))
    found = ThresholdCounts((0.9, 0.0), (60, 100), (0, 30), 100, (0,), moments).find_guarantee(0.2, 0.9)
    assert (found.share, found.wrong_share) == (0.5, 0.04)


def test_clustered_p_values_without_spread():
    """Without variance the ratio is infinite: only the bound by image is left, or all is lost."""
    low, high = clustered_p_values(moments_of(20, wrong=(0.0, 0.3), spread=0.0), 0.05)
    assert low == pytest.approx(0.95**600)
    assert high == 1.0
    assert clustered_p_values(moments_of(0, answered=(0.0,), wrong=(0.0,), n=(0.0,)), 0.05) == [1.0]
    all_wrong = moments_of(0, answered=(0.5,), wrong=(0.5,), n=(7.0,))
    assert clustered_p_values(all_wrong, 0.05) == [1.0]


def test_clustered_p_values_by_formula():
    from scipy.special import betainc
    from scipy.stats import t as student

    moments = ClusterMoments((0.5,), (0.03,), (80.5,), ((4e-4, 2e-4, 9e-4),), ((1e-4, 3e-5, 2e-5),), 30)
    for error in (0.03, 0.1, 0.3):
        terms = (1.0, -2 * error, error**2)
        spread = sum(a * b for a, b in zip(moments.variance[0], terms, strict=True))
        spread += 2 * max(0.0, sum(a * b for a, b in zip(moments.shared[0], terms, strict=True)))
        by_class = student.cdf((0.03 - error * 0.5) / math.sqrt(spread), 29)
        k = 80.5 * 0.03 / 0.5
        by_image = betainc(80.5 - k, k + 1, 1 - error)
        assert clustered_p_values(moments, error) == pytest.approx([max(by_class, by_image)], rel=1e-9)


def test_a_negative_covariance_between_kinds_does_not_count():
    shared = ((-5e-4, 0.0, 0.0),)
    one = ClusterMoments((0.5,), (0.03,), (800.0,), ((4e-4, 0.0, 0.0),), shared, 30)
    two = ClusterMoments((0.5,), (0.03,), (800.0,), ((4e-4, 0.0, 0.0),), ((0.0, 0.0, 0.0),), 30)
    assert clustered_p_values(one, 0.1) == clustered_p_values(two, 0.1)


def test_the_pilot_chooses_the_lowest_of_the_surest_thresholds():
    sure = moments_of(0, (0.2, 0.4, 0.6), (0.0, 0.0, 0.3), (200.0, 200.0, 600.0))
    counted = moments_of(0, (0.2, 0.4, 0.6), (0.1, 0.0, 0.3), (200.0, 400.0, 600.0))
    table = (0.9, 0.5, 0.0), (20, 40, 60), (10, 0, 30), 60, (0,)
    assert ThresholdCounts(*table, counted, sure).find_guarantee(0.05, 0.9).threshold == 0.5
    assert not ThresholdCounts(*table, counted).find_guarantee(0.05, 0.9).possible  # it starts at 0.9
    useless = moments_of(5, (0.2, 0.4, 0.6), (0.0, 0.0, 0.3), (200.0, 200.0, 600.0))  # all of its p-values are 1
    assert not ThresholdCounts(*table, counted, useless).find_guarantee(0.05, 0.9).possible
    assert ThresholdCounts(*table, counted, useless)._choose_starts(0.05) == (0,)


def test_tests_start_where_they_should():
    counts = ThresholdCounts((0.9, 0.0), (60, 1000), (30, 31), 1000, (1,))
    assert counts.find_guarantee(0.05, 0.9).threshold == 0.0
    assert not ThresholdCounts((0.9, 0.0), (60, 1000), (30, 31), 1000, (0,)).find_guarantee(0.05, 0.9).possible


def test_a_threshold_of_a_smaller_rate_is_used_too():
    """At 10 % the pilot starts where the sample fails; at 5 % it starts where it passes."""
    pilot = moments_of(0, (0.1, 1.0), (0.0, 0.045), (100.0, 1000.0))
    counted = moments_of(0, (0.1, 1.0), (0.0, 0.1), (100.0, 1000.0))
    counts = ThresholdCounts((0.9, 0.0), (100, 1000), (0, 100), 1000, (0,), counted, pilot)
    assert counts._choose_starts(0.05) == (0,)
    assert counts._choose_starts(0.1) == (1,)
    assert counts.find_guarantee(0.1, 0.9).threshold == 0.9


def test_reasons_with_clusters():
    table = (0.9, 0.0), (60, 100), (30, 60), 100, (0,)
    for clusters in (0, 10):
        bad = ThresholdCounts(*table, moments_of(clusters, wrong=(0.3, 0.6))).find_guarantee(0.05, 0.9)
        assert "there were too many in the calibration" in bad.reason
    exact = ThresholdCounts((0.0,), (45,), (1,), 45, (0,)).find_guarantee(0.05, 0.9)
    assert exact.needed == exact.total == 45
    assert "there were too many in the calibration" in exact.reason


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"thresholds": (), "answered": (), "wrong": ()}, "is empty, or its columns have different lengths"),
        ({"answered": (60,)}, "is empty, or its columns have different lengths"),
        ({"wrong": (0, 20, 30)}, "is empty, or its columns have different lengths"),
        ({"moments": moments_of(0, n=(1.0,), answered=(1.0,))}, "is empty, or its columns have different lengths"),
        ({"pilot": moments_of(0, n=(1.0,), answered=(1.0,))}, "is empty, or its columns have different lengths"),
        ({"wrong": (-1, 20)}, "has impossible counts"),
        ({"wrong": (61, 20)}, "has impossible counts"),
        ({"total": 99}, "has impossible counts"),
        ({"starts": ()}, "has impossible starts"),
        ({"starts": (2,)}, "has impossible starts"),
        ({"starts": (-1,)}, "has impossible starts"),
        ({"starts": (1, 0)}, "has impossible starts"),
        ({"starts": (0, 0)}, "has impossible starts"),
    ],
)
def test_impossible_tables_are_refused(change, complaint):
    table = {"thresholds": (0.9, 0.0), "answered": (60, 100), "wrong": (0, 20), "total": 100, "starts": (0, 1)}
    ThresholdCounts(**table)
    ThresholdCounts(**{**table, "wrong": (60, 100), "moments": moments_of(0), "pilot": moments_of(0)})
    with pytest.raises(ValueError, match=f"^the table of thresholds {complaint}$"):
        ThresholdCounts(**{**table, **change})


@pytest.mark.parametrize(
    "impossible",
    [
        {"answered": (0.6, 1.5)},
        {"answered": (0.6, 0.2)},  # fewer than the wrong ones
        {"wrong": (-0.1, 0.3)},
        {"wrong": (0.61, 0.3)},
        {"n": (-1.0, 1000.0)},
        {"n": (600.0, 1.1e12)},
        {"n": (600.0, math.nan)},
        {"spread": 10.1},
        {"spread": -10.1},
        {"spread": math.nan},
        {"clusters": -1},
        {"clusters": 2 * 10**12},
    ],
)
def test_impossible_sums_over_clusters_are_refused(impossible):
    table = (0.9, 0.0), (60, 100), (0, 30), 100, (0,)
    edge = {"answered": (0.6, 1.0), "wrong": (0.6, 1.0), "n": (0.0, 1e12), "spread": 10.0}
    ThresholdCounts(*table, moments_of(10, **edge), moments_of(0))
    bad = moments_of(**{"clusters": 10, **impossible})
    for moments, pilot in ((bad, None), (moments_of(10), bad)):
        with pytest.raises(ValueError, match=r"^the sums over clusters have impossible values$"):
            ThresholdCounts(*table, moments, pilot)


def test_a_share_that_was_rounded_up_is_possible():
    ThresholdCounts((0.0,), (9,), (9,), 9, (0,), moments_of(0, answered=(1 + 1e-12,), wrong=(1 + 1e-12,), n=(9.0,)))


def test_tables_in_disorder_are_refused():
    with pytest.raises(ValueError, match=r"^a lower threshold of the table answers fewer queries$"):
        ThresholdCounts((0.9, 0.0), (60, 50), (0, 20), 100, (0,))
    three = (60, 80, 100), (0, 10, 20), 100, (0,)
    for good in ((0.9, 0.5, 0.0), (0.0, 0.5, 1.0), (1.0, 1.0, 1.0)):
        ThresholdCounts(good, *three)
    for bad in ((0.9, 0.0, 0.5), (1.1, 0.5, 0.0), (0.9, 0.5, -0.1)):
        with pytest.raises(ValueError, match=r"^the thresholds are not between 0 and 1, or not in order$"):
            ThresholdCounts(bad, *three)


@pytest.mark.parametrize("n", [1, 20, 300, 511, 512, 5000])
def test_thresholds_by_their_definition(n):
    """Shares 1/128 … 1, below 1/4 also those in between, from 32 queries or 1/8 on; starts at powers of two."""
    p = torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    thresholds, starts = candidate_thresholds(p)
    first = min(32 / n, 1 / 8)
    shares = {step / 128 for step in range(1, 129) if step / 128 >= first}
    share = first
    while share < 0.25:
        shares.add(share)
        share *= 1.05
    falling = sorted(p.tolist(), reverse=True)
    expected = [falling[max(1, math.ceil(n * x - 1e-9)) - 1] for x in sorted(shares)]
    assert thresholds == [*expected[:-1], 0.0]
    wanted = [x for x in (1 / 32, 1 / 16) if n * x >= 32] + [1 / 8, 1 / 4, 1 / 2]
    assert [sorted(shares)[i] for i in starts] == wanted


def test_thresholds_of_no_queries():
    assert ThresholdCounts.of(torch.empty(0), torch.empty(0, dtype=torch.bool), [0.0], [0]).total == 0


def test_conformal_p_values_are_at_most_uniform():
    g = torch.Generator().manual_seed(0)
    p = torch.cat([conformal_p(torch.randn(1, generator=g), torch.randn(19, generator=g)) for _ in range(4000)])
    for share in (0.05, 0.1, 0.3, 0.31):
        assert excess(int((p <= share).sum()), 4000, share) > 0.001
    assert kstest(p.numpy() - torch.rand(4000, generator=g).numpy() / 20, "uniform").pvalue > 0.001
    tied = conformal_p(torch.zeros(1), torch.zeros(9))
    assert float(tied) == 1.0
    assert float(conformal_p(torch.ones(1), [])) == 1.0
    scores = torch.tensor([3.0, 2.0, 5.0], requires_grad=True)
    found = conformal_p(scores, [5.0, 1.0, 3.0, 3.0])
    assert found.tolist() == [4 / 5, 4 / 5, 2 / 5]
    assert found.dtype == torch.float64
    assert float(conformal_p(torch.tensor([0.7], dtype=torch.float64), [0.7])) == 1.0  # in double precision


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.floats(0, 1), st.floats(0, 1))
def test_set_sizes_fall_with_probability_and_with_doubt(p, a, b):
    still = [1.0, 0.6, 0.6, 0.2, 0.05]
    p = torch.tensor(sorted(p), dtype=torch.float64)
    few, many = choose_set_sizes(p, still, max(a, b)), choose_set_sizes(p, still, min(a, b))
    assert bool((few <= many).all())
    assert bool((few.diff() <= 0).all())
    for x, size in zip(p.tolist(), few.tolist(), strict=True):
        assert size == next((m + 1 for m, h in enumerate(still) if (1 - x) * h <= max(a, b)), 5)


def test_set_sizes_at_the_limit():
    none = torch.zeros(1, dtype=torch.float64)
    assert choose_set_sizes(none, [1.0, 0.3, 0.1], 0.3).tolist() == [2]
    assert choose_set_sizes(none.float(), [1.0, 0.3, 0.1], 0.05).tolist() == [3]


def test_reliability_bins():
    p = torch.tensor([0.05, 0.0, 0.95, 1.0, 0.95])
    low, high = reliability_bins(p, torch.tensor([False, True, True, True, False]))
    assert (low.count, low.accuracy, high.count, high.low, high.high) == (2, 0.5, 3, 0.9, 1.0)
    assert high.interval == pytest.approx(tuple(binomtest(2, 3).proportion_ci(method="exact")))
    assert expected_calibration_error([low, high]) == pytest.approx((2 * 0.475 + 3 * (2.9 / 3 - 2 / 3)) / 5)
    middle = reliability_bins(torch.tensor([0.5, 0.25]), torch.tensor([True, False]), bins=4)
    assert [(b.low, b.high, b.probability) for b in middle] == [(0.25, 0.5, 0.25), (0.5, 0.75, 0.5)]
    for p, correct, got in [
        (torch.rand(2, 2), torch.ones(2, 2).bool(), r"\[2, 2\] and torch.bool \[2, 2\]"),
        (torch.rand(0), torch.ones(0).bool(), r"\[0\] and torch.bool \[0\]"),
        (torch.rand(2), torch.ones(2), r"\[2\] and torch.float32 \[2\]"),
        (torch.rand(2), torch.ones(3).bool(), r"\[2\] and torch.bool \[3\]"),
    ]:
        with pytest.raises(ValueError, match=rf"^need P \[n\] and a bool mask \[n\], got {got}$"):
            reliability_bins(p, correct)
    for bad in (math.nan, -0.01, 1.01):
        with pytest.raises(ValueError, match=r"^2 of 3 probabilities are not in \[0, 1\] \(first: number 1\)$"):
            reliability_bins(torch.tensor([0.5, bad, bad]), torch.tensor([True, True, True]))
    assert reliability_bins(torch.tensor([0.5], requires_grad=True), torch.tensor([True]))[0].count == 1


def test_impossible_bins_are_refused():
    whole = {"low": 0.0, "high": 1.0, "count": 1, "probability": 0.5, "accuracy": 0.5, "interval": (0.0, 1.0)}
    ReliabilityBin(**whole)
    for change in (
        {"count": 0}, {"low": 1.0}, {"low": -0.1}, {"high": 1.1}, {"probability": 1.1}, {"accuracy": -0.1},
        {"interval": (-0.1, 1.0)}, {"interval": (0.0, 1.1)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^a bin of the reliability diagram has impossible values$"):
            ReliabilityBin(**{**whole, **change})


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


def evenly(n, low=0.0, high=1.0, size=None):
    """A profile of n distances that are spread evenly."""
    return Profile(size or n, tuple(low + (high - low) * (i + 0.5) / n for i in range(n)))


def test_drift_in_numbers():
    from scipy.stats import ks_2samp

    then, now = evenly(400), evenly(400, low=0.2, size=480)
    found = measure_drift(then, now)
    expected = ks_2samp(then.nearest, now.nearest, method="asymp")
    assert (found.size_ratio, found.changed) == (1.2, True)
    assert (found.distance, found.p_value) == pytest.approx((expected.statistic, expected.pvalue))
    assert found.reason == "its images lie farther from each other than at calibration"  # 20 % larger is covered
    both = measure_drift(evenly(400, low=0.2), evenly(400, size=1000))
    assert both.reason == (
        "the gallery is 150 % larger than at calibration; its images lie nearer to each other than at calibration"
    )
    assert measure_drift(evenly(400), evenly(400, size=484)).reason == "the gallery is 21 % larger than at calibration"
    for before, after, words in [
        (100, 121, "the gallery is 21 % larger than at calibration"),
        (100, 79, "the gallery is 21 % smaller than at calibration"),
        (100, 120, "the gallery is 20 % larger than at calibration; promises cover 20 %"),
        (100, 80, "the gallery is 20 % smaller than at calibration; promises cover 20 %"),
        (1000, 1006, "the gallery is 1 % larger than at calibration; promises cover 20 %"),
        (1000, 1004, ""),
        (100, 100, ""),
    ]:
        found = measure_drift(Profile(before, (0.1, 0.2)), Profile(after, (0.1, 0.2)))
        assert found.reason == words
        assert found.changed == (abs(after / before - 1) > 0.2 + 1e-9)
        assert (found.size_ratio, found.distance, found.p_value) == (after / before, 0.0, 1.0)


def test_drift_needs_a_large_move_that_is_no_chance():
    assert measure_drift(evenly(1000), evenly(1000, low=0.09, high=1.09)).changed is False  # too small a move
    assert measure_drift(evenly(1000), evenly(1000, low=0.11, high=1.11)).changed
    assert measure_drift(evenly(20), evenly(20, low=0.3, high=1.3)).changed is False  # too few images
    rounding = Profile(100, (1e-7,) * 50 + (0.5,) * 50)
    copies = Profile(100, (0.0,) * 25 + (9e-4,) * 25 + (0.5,) * 50)
    assert measure_drift(rounding, copies).distance == 0
    assert measure_drift(rounding, Profile(100, (1e-3,) * 50 + (0.5,) * 50)).distance == 0.5
    assert measure_drift(rounding, Profile(100, (0.7,) * 100)).distance == 1.0  # copies are nearer than everything
    at_the_limit = measure_drift(Profile(1000, (0.5,) * 100 + (1.0,) * 900), Profile(1000, (1.0,) * 1000))
    assert (at_the_limit.distance, at_the_limit.changed) == (0.1, True)
    fewer = measure_drift(evenly(400, size=1000), evenly(300, low=0.2, size=1000))  # the means, not the sums
    assert fewer.reason == "its images lie farther from each other than at calibration"


def test_more_unknown_queries_than_calibrated():
    rates = {"recognised": 0.6, "rejected": 0.04, "share": 0.25}
    assert notice_unknown(48, 100, **rates) == pytest.approx((0.48 - 0.04) / 0.56)
    assert notice_unknown(99, 100, **rates) == 1.0
    assert notice_unknown(19, 19, **rates) is None  # too few
    assert notice_unknown(20, 20, **rates) == 1.0
    expected = 0.25 * 0.6 + 0.75 * 0.04
    least = next(n for n in range(101) if binom.sf(n - 1, 100, expected) < 0.01)
    assert notice_unknown(least - 1, 100, **rates) is None
    assert notice_unknown(least, 100, **rates) == pytest.approx((least / 100 - 0.04) / 0.56)
    assert notice_unknown(90, 100, recognised=0.6, rejected=0.31, share=0.25) is None  # rarely recognised
    assert notice_unknown(90, 100, recognised=0.6, rejected=0.3, share=0.25) is not None
    assert notice_unknown(90, 100, recognised=0.049, rejected=0.0, share=0.25) is None
    assert notice_unknown(90, 100, recognised=0.06, rejected=0.02, share=0.25) is None
    assert notice_unknown(90, 100, recognised=0.05, rejected=0.0, share=0.25) is not None

"""The bound for queries that hang together: against explicit loops, exact where it should be, and promises kept."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import betainc
from scipy.stats import binom, t

from idml.calibration.cluster_bound import ClusterMoments
from idml.calibration.risk_control import (
    ERROR_RATES,
    ThresholdCounts,
    candidate_thresholds,
    clustered_p_values,
    p_values,
)
from idml.calibration.stored import draw_mixture, split_queries


def made(alike, each, rng):
    """P and right answers of known and unknown queries; ``alike`` says how much each class is like another one."""
    classes, alike = len(alike), alike[:, None]
    known = 1 / (1 + np.exp(-(3 - 0.7 * alike + rng.normal(0, 1.2, (classes, each)))))
    unknown = 1 / (1 + np.exp(-(-1.5 + alike + rng.normal(0, 0.5, (classes, each)))))
    right = rng.random((classes, each)) < known
    return known, right, unknown


def as_queries(known, right, unknown):
    p = torch.tensor(np.concatenate([known.ravel(), unknown.ravel()]))
    correct = torch.tensor(np.concatenate([right.ravel(), np.zeros(unknown.size, bool)]))
    groups = torch.arange(len(known)).repeat_interleave(known.shape[1]).repeat(2)
    return p, correct, torch.arange(len(p)) < known.size, groups


def loop_p_value(p, correct, known, groups, share, threshold, error):
    """The formulas of the module, one query after the other."""
    weights = [(1 - share) / int(known.sum()) if k else share / int((~known).sum()) for k in known]
    z = [float(x >= threshold) * ((not c) - error) for x, c in zip(p.tolist(), correct.tolist(), strict=True)]
    means = {kind: np.mean([z[i] for i in range(len(p)) if bool(known[i]) == kind]) for kind in (True, False)}
    centred = [w * (x - means[bool(k)]) for w, x, k in zip(weights, z, known, strict=True)]
    n, m = int(known.sum()), len(groups.unique())
    by_image = n / (n - 1) * sum(c**2 for c, k in zip(centred, known, strict=True) if k)
    by_class, known_by_class, both = 0.0, 0.0, 0.0
    for group in groups.unique():
        inside = [i for i in range(len(p)) if groups[i] == group]
        of_known, of_unknown = (sum(centred[i] for i in inside if bool(known[i]) == kind) for kind in (True, False))
        by_class += of_unknown**2
        known_by_class += of_known**2
        both += of_known * of_unknown
    spread = by_image / 2 + m / (m - 1) * (known_by_class / 2 + by_class) + max(0.0, both)  # f = 1/2
    total = sum(w * x for w, x in zip(weights, z, strict=True))
    return float(t.cdf(total / math.sqrt(spread), m - 1))


def test_p_values_are_those_of_loops():
    rng = np.random.default_rng(0)
    p, correct, known, groups = as_queries(*made(rng.normal(0, 1.5, 30), 6, rng))
    thresholds = [0.99, 0.9, 0.5]
    found = ClusterMoments.of(p, correct, thresholds, known=known, share=0.3, groups=groups, known_by_image=True)
    assert found.clusters == 30
    decided = 0
    for error in (0.05, 0.2, 0.5, 0.55):
        expected = [loop_p_value(p, correct, known, groups, 0.3, threshold, error) for threshold in thresholds]
        for got, wanted in zip(clustered_p_values(found, error), expected, strict=True):
            assert got >= wanted - 1e-12
        by_image = clustered_p_values(replace(found, clusters=0), error)
        for got, wanted, other in zip(clustered_p_values(found, error), expected, by_image, strict=True):
            assert got == pytest.approx(max(wanted, other), rel=1e-9, abs=1e-15)
            decided += wanted > other
    assert decided >= 3
    answered = 0.7 * (p[known] >= 0.9).double().mean() + 0.3 * (p[~known] >= 0.9).double().mean()
    assert found.answered[1] == pytest.approx(float(answered))


def test_without_unknown_queries_it_is_clopper_and_pearsons():
    rng = np.random.default_rng(1)
    p, correct, known, groups = as_queries(*made(rng.normal(0, 1.5, 20), 8, rng))
    thresholds = [0.95, 0.7, 0.0]
    found = ClusterMoments.of(p, correct, thresholds, known=known, share=0.0, groups=groups, known_by_image=True)
    answered = [int((p[known] >= x).sum()) for x in thresholds]
    wrong = [int(((p >= x) & ~correct & known).sum()) for x in thresholds]
    assert found.clusters == 0
    assert clustered_p_values(found, 0.1) == pytest.approx(p_values(wrong, answered, 0.1), rel=1e-9)


def test_no_error_at_all_still_needs_queries():
    """Without errors the variance is 0; the bound by image still asks for 45 of them at 5 %."""
    known, groups = torch.arange(80) < 40, torch.arange(40).repeat(2)
    p, correct = known.double(), known.clone()
    found = ClusterMoments.of(p, correct, [0.5], known=known, share=0.25, groups=groups, known_by_image=True)
    assert clustered_p_values(found, 0.05)[0] == pytest.approx(0.95**40)
    few = ClusterMoments.of(p, correct, [0.5], known=known, share=0.25, groups=groups % 5, known_by_image=True)
    assert clustered_p_values(few, 0.05) == [1.0]
    counts = ThresholdCounts.of(p, correct, [0.5], [0], few)
    assert "5 classes were counted, at least 10 are needed" in counts.find_guarantee(0.05, 0.9).reason


def count_broken(classes, *, clustered, share=0.5, error=0.2, draws=80):
    """In how many draws of whole classes the promise is broken, and the mean share of queries that are answered.

    New known queries are of the gallery's classes, new unknown ones of any others.
    """
    rng = np.random.default_rng(5)
    unknown = made(rng.normal(0, 1.5, 20_000), 3, rng)[2]
    broken, covered = 0, 0.0
    for draw in range(draws):
        alike = rng.normal(0, 1.5, 2 * classes)
        p, correct, is_known, groups = as_queries(*made(alike, 10, rng))
        known, right, _ = made(alike, 200, rng)
        held, used = split_queries(len(p), seed=draw, groups=groups)
        thresholds, starts = candidate_thresholds(p[draw_mixture(used, is_known, share, draw)])
        moments = ClusterMoments.of(
            p[held],
            correct[held],
            thresholds,
            known=is_known[held],
            share=share,
            groups=groups[held],
            known_by_image=True,
        )
        moments = moments if clustered else replace(moments, clusters=0)
        guarantee = ThresholdCounts.of(p[held], correct[held], thresholds, starts, moments).find_guarantee(error, 0.9)
        if guarantee.threshold is not None:
            x = guarantee.threshold
            matches = (1 - share) * (known >= x).mean() + share * (unknown >= x).mean()
            wrong = (1 - share) * ((known >= x) & ~right).mean() + share * (unknown >= x).mean()
            broken, covered = broken + (wrong > error * matches), covered + guarantee.coverage / draws
    return broken, covered


def test_promises_are_kept_where_classes_hang_together():
    """With 100 counted classes about a tenth of the promises may break; a bound by image breaks about a quarter."""
    broken, covered = count_broken(100, clustered=True)
    naive, naive_covered = count_broken(100, clustered=False)
    assert binom.sf(broken - 1, 80, 0.1) > 0.05
    assert binom.sf(naive - 1, 80, 0.1) < 0.01
    assert covered > 0.8 * naive_covered


@pytest.mark.parametrize("each", [1, 2])
def test_unknown_classes_count_however_many_queries_each_has(each):
    """With one query a class, queries and classes are as many; that makes the queries no less of few classes."""
    for classes, possible, approximate in ((9, False, False), (10, True, True), (49, True, True), (50, True, False)):
        known = torch.arange(400 + classes * each) < 400
        groups = torch.cat([torch.arange(400) % 100, 100 + torch.arange(classes).repeat(each)])
        p = torch.where(known, 0.9, 0.1)
        found = ClusterMoments.of(p, known, [0.5], known=known, share=0.25, groups=groups, known_by_image=True)
        assert found.clusters == classes
        guarantee = ThresholdCounts.of(p, known, [0.5], [0], found).find_guarantee(0.05, 0.9)
        assert (guarantee.possible, guarantee.approximate) == (possible, approximate)


def test_the_share_of_known_classes_that_is_counted():
    """f is 1/2 if all classes are asked; with 40 classes of a larger gallery f is smaller, and V larger."""
    rng = np.random.default_rng(4)
    p, correct, known, groups = as_queries(*made(rng.normal(0, 1.5, 40), 6, rng))

    def found(classes):
        options = {"known": known, "share": 0.3, "groups": groups, "known_by_image": True}
        moments = ClusterMoments.of(p, correct, [0.9], classes=classes, **options)
        return np.array(moments.variance[0]), np.array(moments.shared[0])

    (half, both), (all_counted, none), (quarter, more) = found(None), found(40), found(160)
    np.testing.assert_allclose(found(80)[0], half)
    np.testing.assert_allclose(quarter - half, (half - all_counted) / 2)
    np.testing.assert_allclose(none, 0)
    np.testing.assert_allclose(more, 1.5 * both)
    np.testing.assert_allclose(found(20)[0], all_counted)  # never more than all


# -------------------- more than half of the queries are unknown --------------------


def count_broken_by_look_alikes(share, error, classes, look_alike, *, draws=200):
    """In how many draws a promise is broken by the bound as it is, and without whole classes; how many are made.

    A few unknown classes look like one of the gallery: their P is that of known queries. The others are never answered.
    """
    rng, found = np.random.default_rng(7), np.zeros((2, 2), int)
    for _ in range(draws):
        tables = []
        for _ in ("fitted", "counted"):
            known, right = 0.5 + 0.5 * rng.random((classes, 10)), rng.random((classes, 10)) < 0.999
            unknown = 0.5 * rng.random((classes, 10)) + 0.5 * (rng.random((classes, 1)) < look_alike)
            tables.append(as_queries(known, right, unknown))
        thresholds = np.linspace(0.95, 0.3, 14).tolist()
        pilot, moments = (
            ClusterMoments.of(p, correct, thresholds, known=is_known, share=share, groups=groups, known_by_image=True)
            for p, correct, is_known, groups in tables
        )
        for i, change in enumerate(({}, {"unknown": None})):
            theirs = replace(moments, **change), replace(pilot, **change)
            guarantee = ThresholdCounts.of(*tables[1][:2], thresholds, [0], *theirs).find_guarantee(error, 0.9)
            if (x := guarantee.threshold) is not None:
                answered = 2 * (1 - max(x, 0.5))
                wrong = share * (look_alike * answered + (1 - look_alike) * 2 * max(0.0, 0.5 - x))
                total = (1 - share) * answered + wrong
                found[i] += (wrong + 0.001 * (1 - share) * answered > error * total, 1)
    return found


def test_classes_that_were_not_counted_break_few_promises_at_nine_tenths_unknown():
    """3 % of the classes look like one of the gallery, 2.8 % may be answered; 100 classes have none in 1 of 20 draws.

    At most 29 of 200 may break by chance where one in ten does.
    """
    (broken, _), (before, _) = count_broken_by_look_alikes(0.9, 0.2, 100, 0.03)
    assert broken <= 29 < before
    (broken, made), (_, before) = count_broken_by_look_alikes(0.9, 0.2, 200, 0.005, draws=20)
    assert broken == 0  # where unknown classes are recognised, about as much is promised
    assert made >= 0.8 * before > 0


@pytest.mark.parametrize("classes", [50, 100])
@pytest.mark.parametrize(("error", "look_alike"), [(0.05, 0.055), (0.1, 0.115), (0.2, 0.26)])
def test_classes_that_were_not_counted_break_few_promises_at_one_half_unknown(error, look_alike, classes):
    """Slightly more classes look like one of the gallery than may be answered: ε/(1 − ε) of them."""
    (broken, _), without = count_broken_by_look_alikes(0.5, error, classes, look_alike)
    assert broken <= 29
    assert broken == without[0]  # whole classes are not counted there


def test_the_bound_by_whole_classes_by_formula():
    """Unequal classes count as fewer; an answered class counts by its answered share."""
    known = torch.arange(1000) < 400
    groups = torch.cat([torch.arange(400) % 40, 100 + torch.arange(600) % 60])
    groups[400:430] = 100  # one class has more images
    correct = known & (torch.arange(1000) >= 4)
    p = torch.where(known, 0.9, 0.1)
    p[-9:] = 0.8
    found = ClusterMoments.of(p, correct, [0.5], known=known, share=0.8, groups=groups, known_by_image=True)
    sizes = np.bincount(groups[400:].numpy())
    m = 600**2 / (sizes**2).sum()
    assert m < 55
    assert found.unknown.classes == pytest.approx(m)
    assert found.unknown.answered == pytest.approx((0.8 * 9 / 600,))
    for error in (0.1, 0.2, 0.5):
        largest = (error * 0.2 - 0.2 * 0.01) / ((1 - error) * 0.8)
        k = m * 9 / 600
        expected = betainc(m - k, k + 1, 1 - largest)
        without = clustered_p_values(replace(found, unknown=None), error)[0]
        assert clustered_p_values(found, error) == pytest.approx([max(expected, without)], rel=1e-9)
        assert expected > without or error == 0.5
    assert clustered_p_values(found, 0.9) == clustered_p_values(
        replace(found, unknown=None), 0.9
    )  # all may be answered
    half = ClusterMoments.of(p, correct, [0.5], known=known, share=0.5, groups=groups, known_by_image=True)
    assert half.unknown is None  # measured up to here: nothing changes


def test_the_reason_names_the_classes_that_are_missing():
    known, groups = torch.arange(800) < 400, torch.arange(400).repeat(2) % 100
    p = known.double()
    found = ClusterMoments.of(p, known, [0.5], known=known, share=0.9, groups=groups, known_by_image=True)
    counts = ThresholdCounts.of(p, known, [0.5], [0], found)
    assert counts.find_guarantee(0.18, 0.9).possible
    assert counts.find_guarantee(0.05, 0.9).reason == (
        "cannot promise at most 5 % wrong matches here: the unknown classes count as 100 of equal size, at least 393 "
        "are needed with 90 % unknown queries; about 18 % could be promised"
    )


def test_shares_and_groups_are_checked():
    p, mask = torch.rand(20), torch.ones(20, dtype=torch.bool)
    with pytest.raises(ValueError, match="needs known and unknown queries"):
        ClusterMoments.of(p, mask, [0.5], known=mask, share=0.25, groups=torch.arange(20), known_by_image=True)
    known = torch.arange(100) % 2 == 0
    rows = draw_mixture(torch.arange(100), known, 0.25, 0)
    assert int((~known[rows]).sum()) == round(len(rows) * 0.25)
    assert int(known[rows].sum()) == 50
    rows = draw_mixture(torch.arange(100), known, 0.9, 0)
    assert (int(known[rows].sum()), int((~known[rows]).sum())) == (6, 50)
    held, used = split_queries(100, seed=1, groups=torch.arange(100) // 7)
    assert not {*(held // 7).tolist()} & {*(used // 7).tolist()}
    assert sorted([*held.tolist(), *used.tolist()]) == list(range(100))


def test_the_fitting_queries_choose_the_start_and_a_larger_rate_never_answers_less():
    rng = np.random.default_rng(3)
    possible, gained = 0, 0.0
    for draw in range(10):
        p, correct, is_known, groups = as_queries(*made(rng.normal(0, 1.5, 120), 8, rng))
        held, used = split_queries(len(p), seed=draw, groups=groups)
        thresholds, starts = candidate_thresholds(p[draw_mixture(used, is_known, 0.3, draw)])
        moments, pilot = (
            ClusterMoments.of(
                p[rows],
                correct[rows],
                thresholds,
                known=is_known[rows],
                share=0.3,
                groups=groups[rows],
                known_by_image=True,
            )
            for rows in (held, used)
        )
        counts = ThresholdCounts.of(p[held], correct[held], thresholds, starts, moments, pilot)
        fixed = ThresholdCounts.of(p[held], correct[held], thresholds, starts, moments)
        coverage = [counts.find_guarantee(rate, 0.9).coverage for rate in ERROR_RATES]
        assert coverage == sorted(coverage)
        for rate, found in zip(ERROR_RATES, coverage, strict=True):
            surest = int(np.argmin(clustered_p_values(pilot, rate)))
            if clustered_p_values(moments, rate)[surest] <= 0.1:  # the whole of δ is at the start
                assert found >= moments.answered[surest]
                possible += 1
        gained += sum(coverage) - sum(fixed.find_guarantee(rate, 0.9).coverage for rate in ERROR_RATES)
    assert possible > 40
    assert gained > 0


def test_a_query_at_the_threshold_is_answered():
    """Thresholds are values of P themselves, in double precision."""
    p = torch.tensor([0.1, 0.7, 0.7000000000000001, 0.9], dtype=torch.float64)
    every = torch.ones(4, dtype=torch.bool)
    found = ClusterMoments.of(
        p, every, [0.7, 0.7000000000000001], known=every, share=0.0, groups=torch.arange(4), known_by_image=True
    )
    assert found.answered == (0.75, 0.5)
    assert found.effective == pytest.approx((3.0, 2.0))


def test_a_threshold_that_nothing_reaches():
    every = torch.ones(4, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ClusterMoments.of(
            torch.rand(4), every, [2.0, 0.0], known=every, share=0.0, groups=torch.arange(4), known_by_image=True
        )
    assert (found.answered[0], found.wrong[0], found.effective[0]) == (0.0, 0.0, 0.0)
    assert found.effective[1] == pytest.approx(4.0)


@pytest.mark.parametrize("clusters", [1, 2, 3])
def test_few_clusters(clusters):
    """m/(m − 1) of two and more; one cluster says nothing about its variance, and is taken as it is."""
    known = torch.arange(12) < 6
    correct = known & (torch.arange(12) != 3)
    p = torch.where(torch.arange(12) % 3 == 0, 0.9, 0.1)
    groups = torch.arange(12) % clusters
    found = ClusterMoments.of(p, correct, [0.5], known=known, share=0.5, groups=groups, known_by_image=False)
    a, e = (p >= 0.5).double(), ((p >= 0.5) & ~correct).double()
    expected = np.zeros(3)
    for mask in (known, ~known):
        ze, za = (0.5 / 6 * (x[mask] - x[mask].mean()) for x in (e, a))
        sums = [(float(ze[groups[mask] == c].sum()), float(za[groups[mask] == c].sum())) for c in range(clusters)]
        factor = clusters / (clusters - 1) if clusters > 1 else 1.0
        expected += factor * np.array([[x * x, x * y, y * y] for x, y in sums]).sum(0)
    assert found.variance[0] == pytest.approx(expected, abs=1e-15)
    assert found.clusters == clusters

"""Promises against simulation, bounds against scipy, choices against brute force."""

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, kstest
from sklearn.linear_model import LogisticRegression

from idml import Embeddings, IntrospectiveMetric
from idml.evaluation import nearest, neighbour_scores
from idml.evaluation.calibration import Calibration, _thresholds
from idml.evaluation.evidence import Evidence, Profile, evidence_from_lists, first_right, gather_evidence
from idml.evaluation.guarantee import (
    Counts,
    clopper_pearson,
    conformal_p,
    least_queries,
    p_values,
    sequential_test,
    set_sizes,
    upper_bound,
)
from idml.evaluation.probability import RightModel, isotonic, logistic
from idml.evaluation.reliability import drift, expected_calibration_error, reliability
from idml.evaluation.uncertainty import auroc

DELTA = 0.1


def population(n, unknown, seed=0, classes=40):
    """Queries with some evidence for their answers, a share of them unknown: evidence, correct, known, places."""
    g = torch.Generator().manual_seed(seed)
    hard = torch.rand(n, generator=g)
    known = torch.rand(n, generator=g) >= unknown
    wrong = (torch.rand(n, generator=g) < hard**3) | ~known
    noise = lambda scale: scale * torch.randn(n, generator=g)  # noqa: E731
    near = (0.4 + 0.3 * hard + noise(0.08) + 0.25 * ~known).clamp_min(0)
    level, margin = hard + noise(0.3), -(1 - hard) * (0.5 + 0.5 * known) + noise(0.15)
    late = torch.randint(2, 13, (n,), generator=g)
    places = torch.where(wrong, torch.where(known & (late <= 10), late, 0), 1)
    evidence = Evidence(
        level=level.abs(),
        nearest=near,
        kth=near + 0.2,
        spread=near / (near + 0.2),
        gap=margin / 3,
        pair=2 * level.abs(),
        margin=margin,
        ratio=near / (near - margin.clamp_max(0) + 0.1),
        entropy=(hard + noise(0.2)).clamp_min(0),
        disagreement=(hard + noise(0.2)).clamp(0, 0.9),
        indices=torch.zeros(n, 10, dtype=torch.long),
        searched="10 nearest, euclidean",
    )
    return evidence, ~wrong, known, places, torch.randint(classes, (n,), generator=g)


def excess(broken, rounds, rate):
    """P(so many or more broken promises) if each is broken with probability ``rate``."""
    return float(binom.sf(broken - 1, rounds, rate))


ROUNDS = 250


@pytest.mark.parametrize("unknown", [0.0, 0.25, 0.5])
def test_the_share_of_wrong_answers_is_as_promised(unknown):
    """One model; many calibration samples drawn from a population whose true error at every threshold is known."""
    evidence, correct, *_ = population(21_000, unknown)
    model = RightModel.fit(evidence[:1000], correct[:1000])
    p, right = model.probability(evidence[1000:]), correct[1000:]
    thresholds, starts = _thresholds(model.probability(evidence[:1000]))
    truth = Counts.of(p, right, thresholds, starts)
    risk = {t: w / n for t, n, w in zip(thresholds, truth.answered, truth.wrong, strict=True)}
    samples = []
    for seed in range(ROUNDS):
        rows = torch.randint(len(p), (1000,), generator=torch.Generator().manual_seed(seed))
        samples.append(Counts.of(p[rows], right[rows], thresholds, starts))
    for max_error in (0.05, 0.1, 0.2):
        kept = [x for counts in samples if (x := counts.promise(max_error, 1 - DELTA)).threshold is not None]
        broken = sum(risk[x.threshold] > max_error for x in kept)
        coverage = sum(x.coverage for x in kept) / ROUNDS
        best = max(n for t, n in zip(thresholds, truth.answered, strict=True) if risk[t] <= max_error) / len(p)
        figures = f"broken {broken}, kept {len(kept)} of {ROUNDS}, coverage {coverage:.3f} of {best:.3f}"
        print(f"unknown {unknown}, ε {max_error}: {figures}")
        assert excess(broken, ROUNDS, DELTA) > 0.001
        if max_error >= 0.1:  # the promise is worth something; 5 % with many unknown takes more than 1000 queries
            assert coverage > 0.5 * best


def test_the_whole_procedure_keeps_its_promises():
    """Fits from the beginning, each judged on the whole population."""
    evidence, correct, known, places, _ = population(5000, 0.25, seed=1)
    broken, sent_away, rounds = {"match": 0, "sets": 0}, [], 60
    for seed in range(rounds):
        rows = torch.randint(len(evidence), (300,), generator=torch.Generator().manual_seed(seed))
        found = Calibration.fit(evidence[rows], correct[rows], known=known[rows], places=places[rows], seed=seed)
        promise, sets = found.promise(0.1, 1 - DELTA), found.promise_sets(0.2, 1 - DELTA)
        if promise.threshold is not None:
            answered = found.probability(evidence) >= promise.threshold
            broken["match"] += float((~correct)[answered].double().mean()) > 0.1
        if sets.threshold is not None:
            missed = (places == 0) | (places > found.set_sizes(evidence, sets.threshold))
            broken["sets"] += float(missed[known].double().mean()) > 0.2
        sent_away.append(float((found.novelty(evidence)[known] <= 0.1).double().mean()))
    mean = sum(sent_away) / rounds
    print(f"{broken} of {rounds} broken; known sent away {mean:.4f}, asked 0.1")
    assert all(excess(count, rounds, DELTA) > 0.001 for count in broken.values())
    assert mean <= 0.1 + 4 * math.sqrt(0.1 * 0.9 / 110 / rounds)  # about 110 known queries are held out


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
def test_least_queries_is_the_first_number_that_passes(max_error, level):
    n = least_queries(max_error, level)
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


def test_the_chance_that_any_true_null_passes_is_bounded():
    p = torch.rand(20_000, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wrongly = sum(any(sequential_test(row, 0.1, (0, 2, 4))) for row in p.tolist())
    assert excess(wrongly, 20_000, 0.1) > 0.001


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.lists(st.floats(0, 1), min_size=1)
)
def test_counts_against_loops(sample, thresholds):
    p, correct = torch.tensor([x for x, _ in sample], dtype=torch.float64), torch.tensor([y for _, y in sample])
    found = Counts.of(p, correct, thresholds, (0,))
    assert found.answered == tuple(sum(x >= t for x, _ in sample) for t in thresholds)
    assert found.wrong == tuple(sum(x >= t and not y for x, y in sample) for t in thresholds)


@given(st.integers(0, 2**32 - 1), st.floats(0.02, 0.4), st.floats(0.02, 0.4))
def test_more_error_answers_more(seed, a, b):
    g = torch.Generator().manual_seed(seed)
    p = torch.rand(300, generator=g, dtype=torch.float64)
    counts = Counts.of(p, torch.rand(300, generator=g) < p.sqrt(), *_thresholds(p))
    low, high = counts.promise(min(a, b), 0.9), counts.promise(max(a, b), 0.9)
    assert low.coverage <= high.coverage
    assert not low.kept or high.kept
    assert counts.promise(a, 0.99).coverage <= counts.promise(a, 0.8).coverage
    for promise in (low, high):
        assert promise.kept != bool(promise.reason)
        if promise.threshold is not None:
            assert upper_bound(promise.wrong, promise.answered, 0.1) <= promise.max_error + 1e-9


@pytest.mark.parametrize(
    ("n", "first", "starts"), [(100, 16, 3), (511, 16, 3), (512, 8, 4), (1024, 4, 5), (9000, 4, 5)]
)
def test_with_more_queries_tests_start_at_surer_ones(n, first, starts):
    p = torch.rand(n, dtype=torch.float64)
    thresholds, places = _thresholds(p)
    assert len(places) == starts
    assert [int((p >= thresholds[i]).sum()) for i in places[-3:]] == [-(-n * s // 128) for s in (16, 32, 64)]
    assert int((p >= thresholds[0]).sum()) == -(-n * first // 128)
    assert places[0] == 0
    assert thresholds[-1] == 0.0


def test_what_cannot_be_promised_says_why():
    few = Counts.of(torch.ones(20), torch.ones(20, dtype=torch.bool), *_thresholds(torch.ones(20)))
    promise = few.promise(0.05, 0.9)
    assert not promise.kept
    assert promise.needed == 67
    assert "20 calibration queries, and 67 are needed at best" in promise.reason
    enough = Counts.of(torch.ones(80), torch.ones(80, dtype=torch.bool), *_thresholds(torch.ones(20)))
    assert enough.promise(0.05, 0.9).coverage == 1
    p = torch.rand(500)
    hopeless = Counts.of(p, torch.rand(500) < 0.6, *_thresholds(p)).promise(0.05, 0.9)
    assert "too many in the calibration; about 4" in hopeless.reason
    nothing = Counts.of(p, torch.zeros(500, dtype=torch.bool), *_thresholds(p)).promise(0.05, 0.9)
    assert "nothing can be promised" in nothing.reason
    with pytest.raises(ValueError, match="max_error must be between 0 and 1, got 0"):
        few.promise(0, 0.9)


def test_conformal_p_values_are_uniform_at_most():
    g = torch.Generator().manual_seed(0)
    p = torch.cat([conformal_p(torch.randn(1, generator=g), torch.randn(19, generator=g)) for _ in range(4000)])
    for share in (0.05, 0.1, 0.3, 0.31):
        assert excess(int((p <= share).sum()), 4000, share) > 0.001
    assert kstest(p.numpy() - torch.rand(4000, generator=g).numpy() / 20, "uniform").pvalue > 0.001
    tied = conformal_p(torch.zeros(1), torch.zeros(9))
    assert float(tied) == 1.0
    assert float(conformal_p(torch.ones(1), [])) == 1.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.floats(0, 1), st.floats(0, 1))
def test_set_sizes_fall_with_probability_and_doubt(p, a, b):
    still = [1.0, 0.6, 0.6, 0.2, 0.05]
    p = torch.tensor(sorted(p), dtype=torch.float64)
    few, many = set_sizes(p, still, max(a, b)), set_sizes(p, still, min(a, b))
    assert bool((few <= many).all())
    assert bool((few.diff() <= 0).all())
    for x, size in zip(p.tolist(), few.tolist(), strict=True):
        assert size == next((m + 1 for m, h in enumerate(still) if (1 - x) * h <= max(a, b)), 5)


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
    assert found.right.name == ("mean of " + ", ".join(taken) if len(taken) > 1 else taken[0])
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
    found = RightModel.fit(evidence, correct, labelled=False)
    assert found.name == "mean of mix, mix without u"  # both twins together are clearly better than one
    columns = [evidence.scores[name].double() for name in ("level", "nearest", "kth", "spread", "gap")]
    z = torch.stack([(x - x.mean()) / x.std(correction=0) for x in columns], dim=1)
    wrong = (~correct).double()
    (all_, b), (some, c) = logistic(z, wrong, 1e-4), logistic(z[:, 1:], wrong, 1e-4)
    mean = (b + z @ all_ + c + z[:, 1:] @ some) / 2
    assert float(torch.corrcoef(torch.stack([found.doubt(evidence), mean]))[0, 1]) > 0.99999  # but for the penalty
    one = replace(evidence, spread=noise[2])
    alone = RightModel.fit(one, correct, labelled=False)
    assert alone.name == "mean of nearest, mix, mix without u"
    assert auroc(-alone.probability(one), ~correct) == pytest.approx(auroc(one.nearest, ~correct), abs=0.005)


def test_a_score_alone_keeps_its_order():
    g = torch.Generator().manual_seed(0)
    near = torch.rand(2000, generator=g)
    noise = [torch.zeros(2000) for _ in range(4)]
    evidence = Evidence(noise[0], near, *noise[1:])
    correct = torch.rand(2000, generator=g) > near**8  # no logistic curve
    found = RightModel.fit(evidence, correct, labelled=False)
    p = found.probability(evidence)
    order = near.argsort()
    assert bool((p[order].diff() <= 0).all())
    assert auroc(-p, ~correct) == pytest.approx(auroc(near, ~correct), abs=1e-9)
    assert float((p - (1 - near**8)).abs().mean()) < 0.05


def constant(n):
    return Evidence(*(torch.ones(n) for _ in range(5)))


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 300])
def test_all_right_or_all_wrong(right, n, tmp_path):
    for evidence in (constant(n), population(n, 0.0)[0]):
        found = Calibration.fit(evidence, torch.full((n,), right), labelled=False)
        p = found.probability(evidence)
        assert bool(((p > 0) & (p < 1)).all())
        assert found.promise(0.1).kept == (right and n == 300)
        found.save(tmp_path / "c.json")
        assert Calibration.load(tmp_path / "c.json") == found


def test_ties_everywhere():
    found = Calibration.fit(constant(400), torch.arange(400) % 50 > 0, labelled=False)
    assert found.promise(0.1).coverage == 1
    assert not found.promise(0.02).kept
    assert float(found.probability(constant(1))) == pytest.approx(0.98, abs=0.02)


def test_bad_evidence_is_counted_and_named():
    evidence, correct, known, _, _ = population(50, 0.5)
    nan = evidence.margin.clone()
    nan[[3, 9]] = torch.tensor([math.nan, math.inf])
    with pytest.raises(ValueError, match=r"2 of 50 values of margin are NaN or infinite \(first: query 3\)"):
        replace(evidence, margin=nan)
    with pytest.raises(ValueError, match="labelled=False"):
        Calibration.fit(constant(5), torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="unknown queries are marked as answered right"):
        Calibration.fit(evidence, torch.ones(50, dtype=torch.bool), known=known)
    with pytest.raises(ValueError, match=r"correct must be a bool mask \[50\]"):
        Calibration.fit(evidence, correct[:9])
    with pytest.raises(ValueError, match="no queries"):
        Calibration.fit(evidence[:0], correct[:0])
    evidence, correct, *_ = population(400, 0.5)
    found = Calibration.fit(evidence, correct)
    assert {"margin", "disagreement"} <= {*found.right.features}
    with pytest.raises(ValueError, match="calibrated for '10 nearest, euclidean'"):
        found.probability(replace(evidence, searched="5 nearest, euclidean"))
    lacking = Evidence(*(evidence.scores[name] for name in ("level", "nearest", "kth", "spread", "gap")))
    with pytest.raises(ValueError, match="the evidence lacks"):
        found.probability(replace(lacking, searched=found.searched))
    with pytest.raises(ValueError, match="without places"):
        found.promise_sets(0.1)
    with pytest.raises(ValueError, match="kept no profile"):
        found.drift(Profile(2, (0.1, 0.1)))


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
    assert Calibration.fit(found, torch.ones(30, dtype=torch.bool)).promise(0.5).kept
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


def test_save_and_load(tmp_path):
    evidence, correct, known, places, classes = population(600, 0.25)
    profile = Profile(7, (0.1, 0.2))
    options = {"known": known, "places": places, "groups": classes, "profile": profile, "model": "abc"}
    found = Calibration.fit(evidence, correct, **options)
    assert found == Calibration.fit(evidence, correct, **options)
    path = tmp_path / "calibration.json"
    found.save(path)
    loaded = Calibration.load(path, model="abc")
    assert loaded == found
    assert loaded.unknown == int((~known).sum()) / 600
    assert torch.equal(loaded.probability(evidence), found.probability(evidence))
    with pytest.raises(ValueError, match="belongs to another model"):
        Calibration.load(path, model="xyz")


def test_damaged_and_foreign_files(tmp_path):
    evidence, correct, *_ = population(60, 0.0)
    path = tmp_path / "calibration.json"
    Calibration.fit(evidence, correct).save(path)
    whole = path.read_bytes()
    digit = next(i for i in range(len(whole) // 2, len(whole)) if whole[i : i + 1].isdigit())
    other = b"1" if whole[digit : digit + 1] != b"1" else b"2"
    foreign = json.loads(whole)
    for data in (
        b"",
        whole[:-40],
        whole[:digit] + other + whole[digit + 1 :],
        b"\x80\x04pickle",
        b"[1, 2]",
        b'{"format": "something else"}',
        b"[" * 100_000,
        json.dumps({**foreign, "version": 2}).encode(),  # before it said for which share of unknown queries
        json.dumps({**foreign, "content": {}}).encode(),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"calibration\.json"):
            Calibration.load(path)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("counts", "total"), 2.5, "content.counts.total is not int"),
        (("right", "weights"), [1.0], "do not fit together"),
        (("right", "bias"), float("nan"), "content.right.bias is not float"),
        (("profile",), [], "content.profile should hold nearest, size"),
        (("bins",), {}, "content.bins is not"),
        (("extra",), 1, "content should hold"),
        (("unknown",), 25, "the share of unknown queries is a number from 0 to 1, not 25"),
    ],
)
def test_files_made_by_hand_are_read_strictly(tmp_path, place, value, message):
    from idml.evaluation.records import _checksum

    evidence, correct, *_ = population(60, 0.0)
    path = tmp_path / "calibration.json"
    Calibration.fit(evidence, correct).save(path)
    whole = json.loads(path.read_bytes())
    inner = whole["content"]
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path.write_text(json.dumps({**whole, "checksum": _checksum(whole["content"])}))
    with pytest.raises(ValueError, match=message):
        Calibration.load(path)

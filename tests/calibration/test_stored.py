"""Stored calibrations: guarantees against simulation, the curve of single results, bad input, files."""

import hashlib
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import excess, population
from sklearn.isotonic import IsotonicRegression

from idml.calibration.confidence import ConfidenceModel
from idml.calibration.evidence import Evidence, Profile
from idml.calibration.risk_control import ThresholdCounts, candidate_thresholds
from idml.calibration.stored import Calibration, Grouping, MatchCurve, split_queries

DELTA = 0.1
ROUNDS = 250


@pytest.mark.parametrize("unknown", [0.0, 0.25, 0.5])
def test_the_share_of_wrong_answers_is_as_guaranteed(unknown):
    """One model; many calibration samples drawn from a population whose true error at every threshold is known."""
    evidence, correct, *_ = population(21_000, unknown)
    model = ConfidenceModel.fit(evidence[:1000], correct[:1000])
    p, right = model.probability(evidence[1000:]), correct[1000:]
    thresholds, starts = candidate_thresholds(model.probability(evidence[:1000]))
    truth = ThresholdCounts.of(p, right, thresholds, starts)
    risk = {t: w / n for t, n, w in zip(thresholds, truth.answered, truth.wrong, strict=True)}
    samples = []
    for seed in range(ROUNDS):
        rows = torch.randint(len(p), (1000,), generator=torch.Generator().manual_seed(seed))
        samples.append(ThresholdCounts.of(p[rows], right[rows], thresholds, starts))
    for max_error in (0.05, 0.1, 0.2):
        kept = [x for counts in samples if (x := counts.find_guarantee(max_error, 1 - DELTA)).threshold is not None]
        broken = sum(risk[x.threshold] > max_error for x in kept)
        coverage = sum(x.coverage for x in kept) / ROUNDS
        best = max(n for t, n in zip(thresholds, truth.answered, strict=True) if risk[t] <= max_error) / len(p)
        figures = f"broken {broken}, kept {len(kept)} of {ROUNDS}, coverage {coverage:.3f} of {best:.3f}"
        print(f"unknown {unknown}, ε {max_error}: {figures}")
        assert excess(broken, ROUNDS, DELTA) > 0.001
        if max_error >= 0.1:  # the guarantee is useful; 5 % with many unknown takes more than 1000 queries
            assert coverage > 0.5 * best


def test_the_whole_procedure_keeps_its_guarantees():
    """Fits from the beginning, each judged on the whole population."""
    evidence, correct, known, same_class, _ = population(5000, 0.25, seed=1)
    broken, rejected, rounds = {"match": 0, "sets": 0}, [], 60
    for seed in range(rounds):
        rows = torch.randint(len(evidence), (300,), generator=torch.Generator().manual_seed(seed))
        found = Calibration.fit(
            evidence[rows], correct[rows], known=known[rows], same_class=same_class[rows], seed=seed
        )
        promise, sets = found.find_guarantee(0.1, 1 - DELTA), found.find_set_guarantee(0.2, 1 - DELTA)
        if promise.threshold is not None:
            answered = found.probability(evidence) >= promise.threshold
            broken["match"] += float((~correct)[answered].double().mean()) > 0.1
        if sets.threshold is not None:
            shown = torch.arange(10) < found.set_sizes(evidence, sets.threshold).unsqueeze(1)
            missed = ~(same_class & shown).any(dim=1)
            broken["sets"] += float(missed[known].double().mean()) > 0.2
        rejected.append(float((found.novelty(evidence)[known] <= 0.1).double().mean()))
    mean = sum(rejected) / rounds
    print(f"{broken} of {rounds} broken; known rejected {mean:.4f}, asked 0.1")
    assert all(excess(count, rounds, DELTA) > 0.001 for count in broken.values())
    assert mean <= 0.1 + 4 * math.sqrt(0.1 * 0.9 / 110 / rounds)  # about 110 known queries are held out


def constant(n):
    return Evidence(*(torch.ones(n) for _ in range(5)))


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 300])
def test_answers_that_are_all_right_or_all_wrong(right, n, tmp_path):
    for evidence in (constant(n), population(n, 0.0)[0]):
        found = Calibration.fit(evidence, torch.full((n,), right), labelled=False)
        p = found.probability(evidence)
        assert bool(((p > 0) & (p < 1)).all())
        assert found.find_guarantee(0.1).possible == (right and n == 300)
        found.save(tmp_path / "c.json")
        assert Calibration.load(tmp_path / "c.json") == found


def test_evidence_that_is_equal_for_all_queries():
    found = Calibration.fit(constant(400), torch.arange(400) % 50 > 0, labelled=False)
    assert found.find_guarantee(0.1).coverage == 1
    assert not found.find_guarantee(0.02).possible
    assert float(found.probability(constant(1))) == pytest.approx(0.98, abs=0.02)


def test_bad_evidence_is_refused():
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
    assert {"margin", "disagreement"} <= {*found.confidence_model.features}
    with pytest.raises(ValueError, match="calibrated for '10 nearest, euclidean'"):
        found.probability(replace(evidence, searched="5 nearest, euclidean"))
    lacking = Evidence(*(evidence.scores[name] for name in ("level", "nearest", "kth", "spread", "gap")))
    with pytest.raises(ValueError, match="the evidence lacks"):
        found.probability(replace(lacking, searched=found.searched))
    with pytest.raises(ValueError, match="fitted without same_class"):
        found.find_set_guarantee(0.1)
    with pytest.raises(ValueError, match="has no profile"):
        found.drift(Profile(2, (0.1, 0.1)))


def test_save_and_load(tmp_path):
    evidence, correct, known, same_class, classes = population(600, 0.25)
    profile = Profile(7, (0.1, 0.2))
    options = {"known": known, "same_class": same_class, "groups": classes, "profile": profile, "model": "abc"}
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


def test_damaged_and_foreign_files_are_refused(tmp_path):
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
        (("confidence_model", "weights"), [1.0], "do not fit together"),
        (("confidence_model", "bias"), float("nan"), "content.confidence_model.bias is not float"),
        (("profile",), [], "content.profile should hold nearest, size"),
        (("bins",), {}, "content.bins is not"),
        (("extra",), 1, "content should hold"),
        (("unknown",), 25, "the share of unknown queries is a number from 0 to 1, not 25"),
    ],
)
def test_files_made_by_hand_are_read_strictly(tmp_path, place, value, message):
    from idml.calibration.stored import _checksum

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


def test_a_calibration_measures_drift_against_its_own_profile():
    evidence, correct, *_ = population(100, 0.0)
    then, now = Profile(100, tuple(i / 100 for i in range(100))), Profile(100, tuple(i / 200 for i in range(100)))
    found = Calibration.fit(evidence, correct, profile=then)
    assert found.drift(now).changed
    assert not found.drift(then).changed


def lists(n, m, seed=0):
    """Ascending distances, some lists shorter, and results of the query's class, fewer at larger distances."""
    g = torch.Generator().manual_seed(seed)
    distances = torch.rand(n, m, generator=g).sort(dim=1).values
    same_class = torch.rand(n, m, generator=g) > distances.sqrt()
    ends = torch.randint(1, m + 1, (n, 1), generator=g)
    absent = torch.arange(m) >= ends
    return distances.masked_fill(absent, torch.inf), same_class & ~absent


def test_the_match_curve_is_isotonic_regression_between_its_ends():
    distances, same_class = lists(400, 10)
    curve = MatchCurve.fit(distances, same_class)
    seen = distances != torch.inf
    oracle = IsotonicRegression(increasing=False).fit(distances[seen].double().numpy(), same_class[seen].numpy())
    at = torch.tensor(curve.knots, dtype=torch.float64)[1:-1]  # a knot is the mean of its step
    inner = oracle.predict(at.numpy())
    assert len(at) > 10
    assert curve.probability(at).tolist() == pytest.approx(inner.tolist(), abs=1e-6)


def test_a_few_results_never_give_certainty():
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
def test_the_match_curve_falls_and_stays_within_bounds(sample):
    distances = torch.tensor([[d / 8 for d, _ in sample]])
    same_class = torch.tensor([[same for _, same in sample]])
    curve = MatchCurve.fit(distances, same_class)
    p = curve.probability(torch.linspace(-1, 3, 101).view(1, 101))
    assert p.shape == (1, 101)
    assert bool((p.diff() <= 0).all())
    n = len(sample)
    assert 1 / (n + 2) - 1e-12 <= float(p.min()) <= float(p.max()) <= (n + 1) / (n + 2) + 1e-12


def test_bad_lists_of_results_are_refused():
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


def fitted(seed=0):
    n = 300
    g = torch.Generator().manual_seed(1)
    distances, same_class = lists(n, 12)
    noise = torch.rand(n, 4, generator=g)
    evidence = Evidence(noise[:, 0], distances[:, 0], noise[:, 1], noise[:, 2], noise[:, 3])
    lists_ = {"distances": distances, "same_class": same_class}
    return Calibration.fit(evidence, same_class[:, 0], labelled=False, seed=seed, **lists_), lists_


def test_a_calibration_fits_the_match_curve_to_its_fitting_half(tmp_path):
    found, lists_ = fitted(seed=3)
    _, used = split_queries(300, seed=3)
    assert found.match_curve == MatchCurve.fit(*(x[used] for x in lists_.values()))
    at = torch.rand(3, 4, 2)
    assert torch.equal(found.match_probability(at), found.match_curve.probability(at))
    found.save(tmp_path / "c.json")
    loaded = Calibration.load(tmp_path / "c.json")
    assert loaded == found
    assert torch.equal(loaded.match_probability(at), found.match_probability(at))


def change(content, path, value):
    """Set one value in nested dictionaries."""
    *outer, last = path.split(".")
    for name in outer:
        content = content[name]
    content[last] = value(content[last]) if callable(value) else value


IMPOSSIBLE = {
    "confidence_model.blend": [1e308, -0.1, 2],
    "confidence_model.deviation": [lambda x: [0.0, *x[1:]], lambda x: [-1.0, *x[1:]]],
    "confidence_model.weights": [lambda x: [1e308, *x[1:]], lambda x: x[1:]],
    "confidence_model.bias": [-1e308],
    "confidence_model.features": [lambda x: ["colour", *x[1:]]],
    "confidence_model.knots": [lambda x: [*x, 1.0], lambda x: [*x[1:], x[0] - 1] if x else [1.0]],
    "counts.thresholds": [[], lambda x: [-0.5, *x[1:]], lambda x: [*x[:-1], -1.0], lambda x: [x[1] / 2, *x[1:]]],
    "counts.answered": [lambda x: [10**6, *x[1:]], lambda x: [-1, *x[1:]], [], lambda x: x[::-1]],
    "counts.wrong": [lambda x: [-5, *x[1:]], lambda x: [x[0] + 10**6, *x[1:]]],
    "counts.total": [-1, 0, 10**400],
    "counts.starts": [[], [10**6], [-1], [2, 1], [0, 0]],
    "novelty_score": ["colour"],
    "percentiles": [{}, lambda x: {**x, "level": []}, lambda x: {**x, "level": [2.0, 1.0]}],
    "sets.still_wrong": [[], [-1.0], [0.5, 0.9]],
    "sets.mean_size": [[], lambda x: [-1.0, *x[1:]]],
    "bins": [lambda x: [{**x[0], "count": 0}], lambda x: [{**x[0], "accuracy": 7.0}], lambda x: [{**x[0], "low": 1.0}]],
    "profile": [{"size": 0, "nearest": [0.1]}, {"size": 5, "nearest": []}, {"size": 5, "nearest": [-0.5]}],
    "unknown": [-1.0, 1.5],
    "recognised": [-1.0, 1.5, 1e308],
    "rejected": [-1.0, 1.5, 1e308],
}


@pytest.mark.parametrize("path", IMPOSSIBLE)
def test_impossible_content_with_a_right_checksum_is_refused(tmp_path, path):
    found, _ = fitted()
    found.save(tmp_path / "c.json")
    for value in IMPOSSIBLE[path]:
        whole = json.loads((tmp_path / "c.json").read_text())
        change(whole["content"], path, value)
        whole["checksum"] = hashlib.sha256(json.dumps(whole["content"], sort_keys=True).encode()).hexdigest()
        (tmp_path / "hostile.json").write_text(json.dumps(whole))
        with pytest.raises(ValueError, match=r"hostile\.json is damaged") as refusal:
            Calibration.load(tmp_path / "hostile.json")
        assert "\n" not in str(refusal.value)


CLUSTERED = {
    "counts.moments.wrong": [[], lambda x: [-0.5, *x[1:]], lambda x: [1.5, *x[1:]]],
    "counts.moments.effective": [lambda x: [-1.0, *x[1:]], lambda x: [1e308, *x[1:]], []],
    "counts.moments.variance": [lambda x: [[1e308, 0.0, 0.0], *x[1:]], lambda x: x[1:]],
    "counts.moments.shared": [lambda x: [[-1e308, 0.0, 0.0], *x[1:]], []],
    "counts.moments.clusters": [-1, 10**30],
    "counts.moments.unknown.share": [0.0, -1.0, 5e-324, 1.5],
    "counts.moments.unknown.classes": [0.0, -1.0, 1e308],
    "counts.moments.unknown.answered": [lambda x: [-1.0, *x[1:]], lambda x: [*x[:-1], 1.0], []],
}


def fit_grouped(share):
    """A calibration of 40 classes whose share of unknown queries is ``share``."""
    groups = torch.arange(240) // 6
    known = groups % 4 != 0
    same = (torch.rand(240, 5) > 0.3) & known[:, None]
    evidence = Evidence(*torch.rand(5, 240))
    grouping = Grouping(share, known_by_image=False)
    return Calibration.fit(evidence, same[:, 0], labelled=False, known=known, groups=groups, grouping=grouping)


def test_calibrations_of_earlier_programs_open_and_promise_only_what_they_counted():
    """Before, unknown classes with one query each, and whole classes at more than half unknown, were not counted."""
    for share, clusters, refused in ((0.25, 3, False), (0.25, 0, True), (0.75, 3, True), (0.0, 0, False)):
        whole = json.loads(fit_grouped(share).encode())
        moments = whole["content"]["counts"]["moments"]
        assert (moments.pop("unknown") is not None) == (share > 0.5)
        moments["clusters"] = clusters
        if whole["content"]["counts"]["pilot"] is not None:
            whole["content"]["counts"]["pilot"].pop("unknown")
        whole["checksum"] = hashlib.sha256(json.dumps(whole["content"], sort_keys=True).encode()).hexdigest()
        found = Calibration.decode(json.dumps(whole).encode(), "c.json").find_guarantee(0.05)
        assert ("did not count its unknown classes; calibrate again" in found.reason) == refused
        assert not (refused and found.possible)


@pytest.mark.parametrize("path", CLUSTERED)
def test_impossible_sums_over_clusters_are_refused(tmp_path, path):
    """Negative sums of wrong answers would promise what nobody counted."""
    found = fit_grouped(0.75 if ".unknown." in path else 0.25)
    for value in CLUSTERED[path]:
        whole = json.loads(found.encode())
        change(whole["content"], path, value)
        whole["checksum"] = hashlib.sha256(json.dumps(whole["content"], sort_keys=True).encode()).hexdigest()
        with pytest.raises(ValueError, match=r"hostile\.json is damaged: the sums over clusters"):
            Calibration.decode(json.dumps(whole).encode(), "hostile.json")
    assert Calibration.decode(found.encode(), "c.json") == found


def test_a_calibration_without_a_match_curve_says_so_and_older_files_are_refused(tmp_path):
    found, _ = fitted()
    evidence = Evidence(*(torch.rand(20) for _ in range(5)))
    plain = Calibration.fit(evidence, torch.rand(20) > 0.5, labelled=False)
    with pytest.raises(ValueError, match="has no curve of single results"):
        plain.match_probability(torch.rand(3))
    found.save(tmp_path / "c.json")
    whole = json.loads((tmp_path / "c.json").read_text())
    assert whole["version"] == 6
    (tmp_path / "c.json").write_text(json.dumps({**whole, "version": 1}))
    with pytest.raises(ValueError, match=r"c\.json has version 1"):
        Calibration.load(tmp_path / "c.json")

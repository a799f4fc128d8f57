"""A calibration as a whole: promises against simulation, probabilities, evidence, files."""

import json
import math
from dataclasses import replace

import pytest
import torch
from simulated import excess, population

from idml.calibration.confidence import ConfidenceModel
from idml.calibration.evidence import Evidence, Profile
from idml.calibration.risk_control import Counts
from idml.calibration.stored import Calibration, _thresholds

DELTA = 0.1
ROUNDS = 250


@pytest.mark.parametrize("unknown", [0.0, 0.25, 0.5])
def test_the_share_of_wrong_answers_is_as_promised(unknown):
    """One model; many calibration samples drawn from a population whose true error at every threshold is known."""
    evidence, correct, *_ = population(21_000, unknown)
    model = ConfidenceModel.fit(evidence[:1000], correct[:1000])
    p, right = model.probability(evidence[1000:]), correct[1000:]
    thresholds, starts = _thresholds(model.probability(evidence[:1000]))
    truth = Counts.of(p, right, thresholds, starts)
    risk = {t: w / n for t, n, w in zip(thresholds, truth.answered, truth.wrong, strict=True)}
    samples = []
    for seed in range(ROUNDS):
        rows = torch.randint(len(p), (1000,), generator=torch.Generator().manual_seed(seed))
        samples.append(Counts.of(p[rows], right[rows], thresholds, starts))
    for max_error in (0.05, 0.1, 0.2):
        kept = [x for counts in samples if (x := counts.find_guarantee(max_error, 1 - DELTA)).threshold is not None]
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
        promise, sets = found.find_guarantee(0.1, 1 - DELTA), found.find_set_guarantee(0.2, 1 - DELTA)
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


def constant(n):
    return Evidence(*(torch.ones(n) for _ in range(5)))


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 300])
def test_all_right_or_all_wrong(right, n, tmp_path):
    for evidence in (constant(n), population(n, 0.0)[0]):
        found = Calibration.fit(evidence, torch.full((n,), right), labelled=False)
        p = found.probability(evidence)
        assert bool(((p > 0) & (p < 1)).all())
        assert found.find_guarantee(0.1).kept == (right and n == 300)
        found.save(tmp_path / "c.json")
        assert Calibration.load(tmp_path / "c.json") == found


def test_ties_everywhere():
    found = Calibration.fit(constant(400), torch.arange(400) % 50 > 0, labelled=False)
    assert found.find_guarantee(0.1).coverage == 1
    assert not found.find_guarantee(0.02).kept
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
    assert {"margin", "disagreement"} <= {*found.confidence_model.features}
    with pytest.raises(ValueError, match="calibrated for '10 nearest, euclidean'"):
        found.probability(replace(evidence, searched="5 nearest, euclidean"))
    lacking = Evidence(*(evidence.scores[name] for name in ("level", "nearest", "kth", "spread", "gap")))
    with pytest.raises(ValueError, match="the evidence lacks"):
        found.probability(replace(lacking, searched=found.searched))
    with pytest.raises(ValueError, match="without places"):
        found.find_set_guarantee(0.1)
    with pytest.raises(ValueError, match="kept no profile"):
        found.drift(Profile(2, (0.1, 0.1)))


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
        (("confidence_model", "weights"), [1.0], "do not fit together"),
        (("confidence_model", "bias"), float("nan"), "content.confidence_model.bias is not float"),
        (("profile",), [], "content.profile should hold nearest, size"),
        (("bins",), {}, "content.bins is not"),
        (("extra",), 1, "content should hold"),
        (("unknown",), 25, "the share of unknown queries is a number from 0 to 1, not 25"),
    ],
)
def test_files_made_by_hand_are_read_strictly(tmp_path, place, value, message):
    from idml.files import _checksum

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

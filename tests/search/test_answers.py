"""What a person is told: the three states, their reasons, and that promises are kept by the rules."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import binom

from idml import Embeddings
from idml.calibration.evidence import Evidence, Profile
from idml.calibration.open_set import QueryPool
from idml.calibration.risk_control import ThresholdCounts
from idml.calibration.stored import Calibration
from idml.search.answers import Answer, RiskTargets, State, answer_queries


def made(classes, images, noise, seed=0, dimensions=16):
    """Images around class centres; ‖u‖ grows with an image's own noise."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, dimensions, generator=g)
    labels = torch.arange(classes).repeat_interleave(images)
    amount = noise * (0.5 + torch.rand(len(labels), 1, generator=g))
    semantic = centres[labels] + amount * torch.randn(len(labels), dimensions, generator=g)
    return Embeddings(semantic, amount * torch.ones(len(labels), 2)), labels


@pytest.fixture(scope="module")
def shop():
    """A gallery of 40 classes; queries of these and of 20 more; the calibration from half of the queries."""
    everything, labels = made(60, 40, 0.8)
    stored = (torch.arange(len(labels)) % 2 == 0) & (labels < 40)
    gallery, theirs = everything[stored], labels[stored]
    queries, own = everything[~stored], labels[~stored]
    found = QueryPool(queries, own, gallery, theirs).search()
    evidence, known, same_class = found.evidence, found.known, found.same_class
    places = torch.where(same_class.any(dim=1), same_class.int().argmax(dim=1) + 1, 0)  # of the first right result
    half = torch.rand(len(own), generator=torch.Generator().manual_seed(1)) < 0.5
    options = {"known": known[half], "same_class": same_class[half], "profile": Profile.of(gallery), "model": "m"}
    calibration = Calibration.fit(evidence[half], places[half] == 1, **options)
    blind = Calibration.fit(evidence[half], places[half] == 1, labelled=False, **options)
    return calibration, blind, evidence[~half], places[~half], known[~half]


def test_three_states_with_the_guaranteed_shares(shop):
    calibration, _, evidence, places, known = shop
    answers = answer_queries(evidence, calibration, RiskTargets(max_error=0.1, max_missed=0.1))
    states = [a.state for a in answers]
    assert set(states) == set(State)
    matched = torch.tensor([s is State.MATCH for s in states])
    novel = torch.tensor([s is State.NOVEL for s in states])
    wrong, given = int((places[matched] != 1).sum()), int(matched.sum())
    assert binom.sf(wrong - 1, given, 0.1) > 0.001  # not clearly above the promise; here it may be by chance
    assert float(matched[known].double().mean()) > 0.3
    assert float(novel[known].double().mean()) < 0.1
    assert float(novel[~known].double().mean()) > 4 * float(novel[known].double().mean())
    held = torch.tensor([a.results for a in answers]) >= torch.where(places == 0, 11, places)
    assert float(held[known].double().mean()) > 0.9
    assert all(a.calibrated and 0 <= a.probability <= 1 for a in answers)


def test_match_is_exactly_the_threshold(shop):
    calibration, _, evidence, _, _ = shop
    for max_error in (0.05, 0.1, 0.2):
        promise = calibration.find_guarantee(max_error, 0.9)
        answers = answer_queries(evidence, calibration, RiskTargets(max_error=max_error))
        p = calibration.probability(evidence).tolist()
        limit = 2.0 if promise.threshold is None else promise.threshold
        assert [a.state is State.MATCH for a in answers] == [x >= limit for x in p]


def one(shop, **changes):
    """A query in the middle of everything, but for some of its scores."""
    calibration, _, evidence, _, _ = shop
    middle = {name: x.median().reshape(1) for name, x in evidence.scores.items()}
    new = {name: torch.tensor([value]) for name, value in changes.items()}
    return Evidence(**{**middle, **new}, searched=evidence.searched), calibration


def test_reasons(shop):
    calibration = shop[0]
    # thresholds and novelty out of the way: only the reasons are looked at
    sure = replace(calibration, counts=replace(calibration.counts, wrong=calibration.counts.answered))
    targets = RiskTargets(max_rejected=1e-6)
    blurred, _ = one(shop, level=50.0, disagreement=0.0)
    tied, _ = one(shop, ratio=0.97, disagreement=0.5)
    for evidence in (blurred, tied):  # what cannot be promised comes before anything about the query
        assert answer_queries(evidence, sure, targets)[0].reason.startswith("cannot promise at most 5 % wrong matches")
    strict = replace(calibration, counts=ThresholdCounts((1.0,), (99,), (0,), 99, (0,)))  # P is never 1
    targets = RiskTargets(max_error=0.1, max_rejected=1e-6)
    for speaks, reason in ((True, "blurred or ambiguous query"), (False, "not certain enough")):
        told = answer_queries(blurred, replace(strict, level_speaks=speaks), targets)[0].reason
        assert told.startswith(reason)
    for changes, reason in (
        ({"ratio": 0.97, "disagreement": 0.1}, "two classes tie"),
        ({"ratio": 0.85, "disagreement": 0.5}, "two classes tie"),
        ({"ratio": 0.85, "disagreement": 0.1}, "not certain enough"),
        ({"ratio": 0.5, "disagreement": 0.6}, "neighbours of several classes"),
        ({"ratio": 1.0, "disagreement": 0.0}, "not certain enough"),  # one class alone does not tie
    ):
        told = answer_queries(one(shop, level=0.0, **changes)[0], strict, targets)[0]
        assert told.reason.startswith(reason)
        assert told.promised
        assert not answer_queries(one(shop, **changes)[0], strict, targets, void="it doubled")[0].promised
    far, _ = one(shop, nearest=2.0, kth=2.0, margin=0.0, disagreement=0.8, entropy=2.0)
    assert answer_queries(far, calibration)[0] == replace(
        answer_queries(far, calibration)[0], state=State.NOVEL, reason="far from everything"
    )


def test_a_match_that_is_likely_wrong_is_not_called_clear(shop):
    calibration, _, evidence, _, _ = shop
    lax = replace(calibration, counts=ThresholdCounts((0.0,), (99,), (20,), 99, (0,)))  # every answer is a match
    answers = answer_queries(evidence, lax, RiskTargets(max_error=0.5))
    assert {a.state for a in answers} == {State.MATCH}
    unlikely = "a match only because 50 % wrong matches are accepted: the first result is likely wrong"
    assert {a.reason for a in answers if a.probability < 0.5} == {unlikely}
    assert {a.reason for a in answers if a.probability >= 0.5} == {"clear match"}


@pytest.mark.parametrize("possible", [True, False])
def test_a_likely_right_query_is_never_rejected(shop, possible):
    """However far a query lies: if its first result is right, its class is in the collection."""
    calibration, _, evidence, _, _ = shop
    far = replace(calibration, novelty_score="nearest", novelty_reference=(-1.0,) * 99)  # all are farther than any was
    if not possible:
        far = replace(far, counts=replace(far.counts, wrong=far.counts.answered))  # no match can be promised
    threshold = far.find_guarantee(0.1, 0.9).threshold
    assert (threshold is not None) == possible
    answers = answer_queries(evidence, far, RiskTargets(max_error=0.1))
    for told, p in zip(answers, far.probability(evidence).tolist(), strict=True):
        assert told.novelty == 0.01
        if threshold is not None and p >= threshold:
            assert told.state is State.MATCH
        elif p < 0.5:
            assert (told.state, told.reason) == (State.NOVEL, "far from everything")
        else:
            assert told.state is State.UNSURE
            unlike = "unlike most images of the collection, but the first result is likely right"
            assert told.reason.startswith(unlike if possible else "cannot promise at most 10 % wrong matches here")
    assert {told.state for told in answers} == ({*State} if possible else {State.UNSURE, State.NOVEL})


def test_a_low_probability_names_the_threshold(shop):
    calibration, _, evidence, _, _ = shop
    found = answer_queries(evidence, calibration, RiskTargets(max_error=0.1, max_rejected=1e-6))
    assert any(a.reason.startswith("not certain enough: ") for a in found if a.state is State.UNSURE)


def test_galleries_without_labels(shop):
    _, blind, evidence, places, _ = shop
    plain = replace(evidence, margin=None, ratio=None, entropy=None, disagreement=None)
    answers = answer_queries(plain, blind, RiskTargets(max_error=0.2))
    matched = torch.tensor([a.state is State.MATCH for a in answers])
    assert bool(matched.any())
    chance = 2 * (0.2 * 0.8 / int(matched.sum())) ** 0.5  # these are fresh queries: their own luck is in the figure
    assert float((places[matched] != 1).double().mean()) < 0.2 + chance
    assert "two images tie" in {a.reason for a in answers}
    assert {a.reason for a in answers}.isdisjoint({"two classes tie"})
    with pytest.raises(ValueError, match=r"lacks|labels"):
        answer_queries(plain, shop[0])


def test_uncalibrated_answers_are_marked_and_careful(shop):
    calibration, _, evidence, places, _ = shop
    for found in (answer_queries(evidence), answer_queries(evidence, profile=calibration.profile)):
        assert all(not a.calibrated and a.probability is None and "uncalibrated" in a.reason for a in found)
    assert {a.state for a in answer_queries(evidence)} == {State.UNSURE}  # nothing is known about the gallery
    careful = answer_queries(evidence, profile=calibration.profile)
    matched = torch.tensor([a.state is State.MATCH for a in careful])
    assert float((places[matched] == 1).double().mean()) > 0.95
    plain = replace(evidence, margin=None, ratio=None, entropy=None, disagreement=None)
    assert {a.state for a in answer_queries(plain, profile=calibration.profile)} == set(State)


def test_a_model_without_uncertainty(shop):
    everything, labels = made(20, 20, 0.8)
    bare = Embeddings.certain(everything.semantic)
    found = QueryPool(bare, labels).search()
    calibration = Calibration.fit(found.evidence, found.correct)
    assert all(a.reason != "blurred or ambiguous query" for a in answer_queries(found.evidence, calibration))


def test_no_queries_and_bad_targets(shop):
    calibration, _, evidence, _, _ = shop
    assert answer_queries(evidence[:0], calibration) == []
    assert answer_queries(evidence[:0]) == []
    with pytest.raises(ValueError, match="max_rejected must be between 0 and 1, got 0"):
        RiskTargets(max_rejected=0)
    with pytest.raises(ValueError, match="max_missed must be between 0 and 1, got 1"):
        RiskTargets(max_missed=1)
    assert isinstance(answer_queries(evidence[:1], calibration)[0], Answer)


def test_a_loaded_calibration_answers_the_same(shop, tmp_path):
    calibration, _, evidence, _, _ = shop
    calibration.save(tmp_path / "calibration.json")
    loaded = Calibration.load(tmp_path / "calibration.json", model="m")
    assert answer_queries(evidence, loaded) == answer_queries(evidence, calibration)

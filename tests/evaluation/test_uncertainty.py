"""Figures of an uncertainty score against brute force over orders, explicit loops and scikit-learn."""

import math
from fractions import Fraction
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from idml.evaluation import evaluate_uncertainty
from idml.evaluation.uncertainty import auroc, paired_rise, risk_coverage

PAIRS = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=40)
FEW = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6)
NUMBERS = st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.booleans()), min_size=1, max_size=40)


def columns(pairs):
    scores, correct = zip(*pairs, strict=True)
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(correct)


def areas(correct_in_order):
    """AURC and AUGRC of one strict order, most certain first, in rational numbers."""
    n, errors, selective, generalised = len(correct_in_order), 0, Fraction(0), Fraction(0)
    for i, right in enumerate(correct_in_order, start=1):
        errors += not right
        selective += Fraction(errors, i)
        generalised += Fraction(errors, n)
    return selective / n, generalised / n


def over_all_orders(pairs):
    """The mean of both areas over every order that the scores allow."""
    allowed = [p for p in permutations(pairs) if all(a[0] <= b[0] for a, b in pairwise(p))]
    both = [areas([right for _, right in p]) for p in allowed]
    return [float(sum(x) / len(both)) for x in zip(*both, strict=True)]


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=40))
def test_auroc_is_the_one_of_scikit_learn(pairs):
    scores, positive = (torch.tensor(x) for x in zip(*pairs, strict=True))
    if positive.all() or not positive.any():
        with pytest.raises(ValueError, match="both positives and negatives"):
            auroc(scores.float(), positive)
    else:
        assert auroc(scores.float(), positive) == pytest.approx(roc_auc_score(positive, scores))


@pytest.mark.parametrize(
    ("scores", "positive", "words"),
    [
        (torch.tensor([0.0, float("nan")]), torch.tensor([True, False]), "1 of 2 scores are NaN"),
        (torch.zeros(2), torch.tensor([1, 0]), "bool mask"),
        (torch.zeros(3), torch.tensor([True, False]), r"\[3\] and \[2\]"),
    ],
)
def test_bad_input_of_auroc_is_refused(scores, positive, words):
    with pytest.raises(ValueError, match=words):
        auroc(scores, positive)


@given(FEW)
def test_ties_are_the_mean_over_all_orders(pairs):
    found = evaluate_uncertainty(*columns(pairs))
    assert [found["aurc"], found["augrc"]] == pytest.approx(over_all_orders(pairs), abs=1e-14)
    assert list(found) == ["r_auroc", "aurc", "augrc"]


@given(PAIRS)
def test_r_auroc_is_the_one_of_scikit_learn_against_wrong(pairs):
    scores, correct = columns(pairs)
    found = evaluate_uncertainty(scores, correct)["r_auroc"]
    if correct.all() or not correct.any():
        assert found is None
    else:
        assert found == pytest.approx(roc_auc_score(~correct, scores))


@given(PAIRS)
def test_augrc_is_what_traub_et_al_derive_from_auroc(pairs):
    scores, correct = columns(pairs)
    found = evaluate_uncertainty(scores, correct)
    accuracy = float(correct.double().mean())
    error = 1 - accuracy
    unsorted = 0.0 if found["r_auroc"] is None else (1 - found["r_auroc"]) * accuracy * error
    assert found["augrc"] == pytest.approx(unsorted + error**2 / 2 + error / (2 * len(scores)), abs=1e-12)


@given(NUMBERS, st.randoms(use_true_random=False))
def test_only_the_order_of_scores_counts(pairs, random):
    scores, correct = columns(pairs)
    found = evaluate_uncertainty(scores, correct)
    places = {score: i for i, score in enumerate(sorted({score for score, _ in pairs}))}
    rising = [math.exp(places[score] / 8) - 7 for score, _ in pairs]  # any transform that keeps order and ties
    for same in (rising, 1024 * scores, scores.float()):
        assert evaluate_uncertainty(same, correct) == found  # bit for bit
    shuffled = random.sample(pairs, len(pairs))
    assert evaluate_uncertainty(*columns(shuffled)) == found


@given(PAIRS)
def test_bounds_are_reached_by_the_best_and_the_worst_order(pairs):
    scores, correct = columns(pairs)
    n, wrong = len(correct), int((~correct).sum())
    found = evaluate_uncertainty(scores, correct)
    best, worst = evaluate_uncertainty(~correct, correct), evaluate_uncertainty(correct, correct)
    rows = torch.arange(n)
    first_right, first_wrong = (areas([i < n - wrong for i in range(n)]), areas([i >= wrong for i in range(n)]))
    strict = evaluate_uncertainty(rows, rows < n - wrong)
    assert (strict["aurc"], strict["augrc"]) == pytest.approx(tuple(map(float, first_right)), abs=1e-14)
    assert (best["aurc"], best["augrc"]) == pytest.approx((strict["aurc"], strict["augrc"]), abs=1e-14)
    assert (worst["aurc"], worst["augrc"]) == pytest.approx(tuple(map(float, first_wrong)), abs=1e-14)
    for name in ("aurc", "augrc"):
        assert best[name] - 1e-12 <= found[name] <= worst[name] + 1e-12
    if 0 < wrong < n:
        assert (best["r_auroc"], worst["r_auroc"]) == (1.0, 0.0)
        assert evaluate_uncertainty(-scores, correct)["r_auroc"] == pytest.approx(1 - found["r_auroc"])


def test_a_constant_score_is_chance():
    correct = torch.tensor([True] * 30 + [False] * 10)
    found = evaluate_uncertainty(torch.zeros(40), correct)
    assert found["r_auroc"] == 0.5
    assert found["aurc"] == pytest.approx(0.25)
    assert found["augrc"] == pytest.approx(0.25 * 41 / 80)


def test_answers_that_are_all_right_or_all_wrong():
    assert evaluate_uncertainty([1.0, 2.0], [True, True]) == {"r_auroc": None, "aurc": 0.0, "augrc": 0.0}
    assert evaluate_uncertainty([1.0, 2.0], [False, False]) == {"r_auroc": None, "aurc": 1.0, "augrc": 0.75}
    assert evaluate_uncertainty([5.0], [False]) == {"r_auroc": None, "aurc": 1.0, "augrc": 1.0}


def test_lists_arrays_and_tensors():
    scores, correct = torch.randn(50).half(), torch.rand(50) > 0.4
    wanted = evaluate_uncertainty(scores, correct)
    kinds = (scores.float(), scores.double(), scores.numpy(), scores.tolist(), tuple(scores.tolist()))
    for given_scores in (*kinds, scores.numpy()[::-1][::-1], scores.float().requires_grad_()):
        for mask in (correct, correct.numpy(), correct.tolist()):
            assert evaluate_uncertainty(given_scores, mask) == wanted
    assert evaluate_uncertainty(scores.bfloat16(), correct) == evaluate_uncertainty(scores.bfloat16().float(), correct)
    close = [1.0, 1.0 + 1e-15]  # distinct in float64 only
    assert evaluate_uncertainty(close, [True, False])["r_auroc"] == 1.0
    frozen = np.array(close)
    frozen.flags.writeable = False
    assert evaluate_uncertainty(frozen, [True, False])["r_auroc"] == 1.0
    assert evaluate_uncertainty([-0.0, 0.0], [True, False])["r_auroc"] == 0.5
    assert evaluate_uncertainty([-math.inf, 0.0, math.inf], [True, True, False])["r_auroc"] == 1.0


def test_a_large_input():
    n = 200_000
    scores, correct = torch.randint(500, (n,)), torch.rand(n) > 0.3
    found = evaluate_uncertainty(scores, correct)
    share = torch.bincount(scores, weights=(~correct).double()) / torch.bincount(scores)
    errors = share[scores.sort().values].cumsum(0)
    assert found["aurc"] == pytest.approx(float((errors / torch.arange(1, n + 1)).mean()), abs=1e-9)
    assert found["augrc"] == pytest.approx(float(errors.mean() / n), abs=1e-9)


@pytest.mark.parametrize("function", [evaluate_uncertainty, risk_coverage])
@pytest.mark.parametrize(
    ("scores", "correct", "words"),
    [
        ([], [], "there are no scores"),
        (torch.zeros(0), torch.zeros(0, dtype=torch.bool), "there are no scores"),
        ([0.0, math.nan, math.nan], [True] * 3, r"2 of 3 scores are NaN \(first: number 1\)"),
        ([0.0, 1.0], [True], "2 scores for 1 answers"),
        ([0.0, 1.0], [1, 0], r"correct must be a bool mask \[n\], got torch.int64 \[2\]"),
        (torch.zeros(2), torch.ones(2, 1, dtype=torch.bool), r"bool mask \[n\], got torch.bool \[2, 1\]"),
        (torch.zeros(2, 1), [True, False], r"scores must be one per query, got shape \[2, 1\]"),
        (0.5, [True], r"one per query, got shape \[\]"),
        (["a", "b"], [True, False], "scores must be numbers"),
        ([0.0, None], [True, False], "scores must be numbers"),
    ],
)
def test_bad_input_gives_one_line(function, scores, correct, words):
    with pytest.raises(ValueError, match=words) as error:
        function(scores, correct)
    assert "\n" not in str(error.value)


@given(PAIRS)
def test_risk_coverage_is_that_of_thresholds(pairs):
    coverage, risk = risk_coverage(*columns(pairs))
    wanted = []
    for threshold in sorted({score for score, _ in pairs}):
        answered = [right for score, right in pairs if score <= threshold]
        wanted.append((len(answered) / len(pairs), 1 - sum(answered) / len(answered)))
    assert torch.stack([coverage, risk], dim=1).tolist() == [pytest.approx(row) for row in wanted]
    assert coverage[-1] == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_paired_rise_counts_pairs(pairs):
    before, after = zip(*pairs, strict=True)
    wanted = sum(1.0 if b > a else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
    assert paired_rise(before, after) == pytest.approx(wanted)
    assert paired_rise(before, after) + paired_rise(after, before) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ([], [], "there are no scores before"),
        ([1.0], [1.0, 2.0], "1 scores before but 2 after"),
        ([1.0, 2.0], [1.0, math.nan], r"1 of 2 scores after are NaN \(first: number 1\)"),
    ],
)
def test_bad_pairs_give_one_line(before, after, words):
    with pytest.raises(ValueError, match=words):
        paired_rise(before, after)

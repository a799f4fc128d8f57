"""Trials against searches in the smaller gallery, comparisons against loops over folds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idml import Embeddings
from idml.calibration.calibrate import MIX, MIX_WITHOUT_U, compare, verdict
from idml.calibration.confidence import ConfidenceModel, _folds
from idml.calibration.evidence import first_right, gather_evidence
from idml.calibration.open_set import OpenSetQueries, QueryPool, draw_unknown
from idml.calibration.report import P
from idml.evaluation import auroc, evaluate_uncertainty


def made(n, classes, seed=0, spread=0.7, dimensions=6):
    """Embeddings around the centres of their classes, some of them twins, and the classes."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    semantic = torch.randn(classes, dimensions, generator=g)[labels] + spread * torch.randn(n, dimensions, generator=g)
    semantic[1::7] = semantic[0::7][: len(semantic[1::7])]  # equal images: ties everywhere
    return Embeddings(semantic, torch.rand(n, 3, generator=g)), labels


def equal(trial, found):
    width = found.indices.shape[1]
    assert torch.equal(trial.evidence.indices[:, :width], found.indices)
    assert bool((trial.evidence.indices[:, width:] == -1).all())
    assert trial.evidence.searched == found.searched
    assert set(trial.evidence.scores) == set(found.scores)
    for name, score in found.scores.items():
        torch.testing.assert_close(trial.evidence.scores[name], score, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("depth", [3, 30, 256])  # of 3, all are searched again; of 30 some, of 256 none
@pytest.mark.parametrize("listed", [4, 10, 25])
def test_lists_without_some_classes_equal_a_search_without_them(depth, listed):
    for seed in range(4):
        e, labels = made(150, 8, seed)
        unknown = draw_unknown(labels, 0.4, torch.Generator().manual_seed(seed))
        there = torch.tensor([int(c) not in unknown.tolist() for c in labels])
        rows = there.nonzero().flatten()
        trial = QueryPool(e, labels, depth=depth).search(without=unknown, listed=listed)
        ids = {"query_ids": torch.arange(150), "gallery_ids": rows}
        found = gather_evidence(e, e[rows], labels[rows], listed=max(10, listed), **ids)
        back = torch.where(found.indices < 0, -1, rows[found.indices.clamp_min(0)])[:, :listed]
        equal(trial, type(found)(**found.scores, indices=back, searched=found.searched))
        assert torch.equal(trial.gallery, there)
        assert torch.equal(trial.places, first_right(found.indices[:, :listed], labels, labels[rows]))
        assert torch.equal(trial.correct, trial.places == 1)
        assert not bool((trial.correct & ~trial.known).any())
        for i in range(150):
            others = [j for j in range(150) if j != i and bool(there[j]) and labels[j] == labels[i]]
            assert bool(trial.known[i]) == bool(others)


def test_a_gallery_of_its_own():
    queries, labels = made(60, 6, 1)
    gallery, theirs = made(90, 7, 2)
    unknown = torch.tensor([0, 3])
    rows = (~torch.isin(theirs, unknown)).nonzero().flatten()
    trial = QueryPool(queries, labels, gallery, theirs, depth=20).search(without=unknown)
    found = gather_evidence(queries, gallery[rows], theirs[rows])
    equal(trial, type(found)(**found.scores, indices=rows[found.indices], searched=found.searched))
    assert trial.known.tolist() == [int(c) in theirs[rows].tolist() for c in labels]


def test_small_galleries_end_in_nothing():
    e, labels = made(12, 4)
    trial = QueryPool(e, labels).search(without=labels.unique()[:2], listed=15)
    rows = trial.gallery.nonzero().flatten()
    assert trial.distances.shape == (12, 15)
    assert (trial.distances != torch.inf).sum(dim=1).tolist() == [len(rows) - int(i in rows) for i in range(12)]
    assert bool((trial.evidence.indices[trial.distances == torch.inf] == -1).all())
    assert not bool(trial.same_class[trial.distances == torch.inf].any())


@given(st.integers(0, 10_000), st.floats(0.01, 0.99), st.integers(3, 30))
def test_unknown_classes_hold_about_the_share(seed, share, classes):
    g = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.arange(classes), torch.randint(classes, (200,), generator=g)])
    drawn = draw_unknown(labels, share, g)
    counts = labels.bincount()
    assert len(drawn.unique()) == len(drawn)
    assert 1 <= len(drawn) <= classes - 2
    held = int(counts[drawn].sum()) / len(labels)
    if 1 < len(drawn) < classes - 2:
        assert abs(held - share) <= int(counts.max()) / len(labels)
    assert len(draw_unknown(labels, 0.0, g)) == 0
    with pytest.raises(ValueError, match="share of unknown queries"):
        draw_unknown(labels, 1.0, g)


@pytest.fixture(scope="module")
def trial():
    e, labels = made(900, 45, 5, spread=0.9)
    return QueryPool(e, labels).search(without=draw_unknown(labels, 0.25, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("labelled", [True, False])
def test_comparison_against_loops(trial, labelled):
    found = compare(trial, labelled=labelled, rounds=200)
    folds = _folds(900, trial.labels, 0)
    singles = set(found["scores"]) - {P, MIX, MIX_WITHOUT_U}
    assert singles == set(trial.evidence.scores) - (
        set() if labelled else {"margin", "ratio", "entropy", "disagreement"}
    )
    wanted = {name: {"r_auroc": [], "augrc": [], "unknown": []} for name in ("nearest", "level", P)}
    for fold in range(5):
        held, rest = folds == fold, folds != fold
        assert not set(trial.labels[held].tolist()) & set(trial.labels[rest].tolist())
        model = ConfidenceModel.fit(
            trial.evidence[rest], trial.correct[rest], labelled=labelled, groups=trial.labels[rest], seed=0
        )
        scores = {name: trial.evidence.scores[name][held] for name in ("nearest", "level")}
        for name, score in {**scores, P: 1 - model.probability(trial.evidence[held])}.items():
            figures = evaluate_uncertainty(score, trial.correct[held])
            wanted[name]["r_auroc"].append(figures["r_auroc"])
            wanted[name]["augrc"].append(figures["augrc"])
            wanted[name]["unknown"].append(auroc(score, ~trial.known[held]))
    for name, figures in wanted.items():
        for figure, values in figures.items():
            value, (low, high) = found["scores"][name][figure], found["scores"][name]["intervals"][figure]
            assert value == pytest.approx(sum(values) / 5)
            assert low < value < high
    assert found["best"] == max(singles, key=lambda name: found["scores"][name]["r_auroc"])
    best = found["scores"][found["best"]]
    assert found["gain"]["r_auroc"] == pytest.approx(found["scores"][P]["r_auroc"] - best["r_auroc"])
    assert found["gain"]["augrc"] == pytest.approx(best["augrc"] - found["scores"][P]["augrc"])
    u = found["scores"][MIX]["r_auroc"] - found["scores"][MIX_WITHOUT_U]["r_auroc"]
    assert found["gain_of_u"]["r_auroc"] == pytest.approx(u)
    print("\n".join(verdict(found)))
    assert found["gain"]["r_auroc"] > -0.02
    assert any("‖u‖ alone" in line and "chance" in line for line in verdict(found))


def test_words_say_where_p_is_below(trial):
    found = compare(trial, labelled=True, rounds=50)
    spans = {"r_auroc": [-0.05, -0.01], "augrc": [-0.01, 0.01]}
    worse = {**found, "gain": {"r_auroc": -0.03, "augrc": 0.0, "intervals": spans}}
    assert "is BELOW the best single score" in verdict(worse)[0]
    unclear = {**found, "gain": {"r_auroc": -0.03, "augrc": 0.0, "intervals": {**spans, "r_auroc": [-0.05, 0.01]}}}
    assert "is below, though not clearly, the best" in verdict(unclear)[0]
    right = torch.ones_like(trial.same_class)
    sure = OpenSetQueries(
        trial.evidence, trial.labels, torch.ones(900, dtype=torch.bool), trial.distances, right, trial.gallery
    )
    nothing = compare(sure, labelled=True, rounds=20)
    assert nothing["scores"][P]["r_auroc"] is None
    assert nothing["gain"]["r_auroc"] is None
    assert verdict(nothing) == ["all answers are right, or all are wrong: there is nothing to rank"]

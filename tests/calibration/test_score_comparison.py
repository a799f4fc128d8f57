"""The comparison of P(right) with single scores, against loops over folds."""

import pytest
import torch

from idml import Embeddings
from idml.calibration.confidence import MIX, MIX_WITHOUT_U, P_RIGHT, ConfidenceModel, assign_folds
from idml.calibration.open_set import OpenSetQueries, QueryPool, draw_unknown
from idml.calibration.score_comparison import compare_scores, describe_comparison
from idml.evaluation import auroc, evaluate_uncertainty


@pytest.fixture(scope="module")
def queries():
    """Embeddings around the centres of 45 classes, a quarter of the queries unknown."""
    g = torch.Generator().manual_seed(5)
    labels = torch.randint(45, (900,), generator=g)
    semantic = torch.randn(45, 6, generator=g)[labels] + 0.9 * torch.randn(900, 6, generator=g)
    e = Embeddings(semantic, torch.rand(900, 3, generator=g))
    return QueryPool(e, labels).search(without=draw_unknown(labels, 0.25, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("labelled", [True, False])
def test_figures_are_those_of_explicit_loops(queries, labelled):
    found = compare_scores(queries, labelled=labelled, rounds=200)
    folds = assign_folds(900, queries.labels, 0)
    singles = set(found["scores"]) - {P_RIGHT, MIX, MIX_WITHOUT_U}
    assert singles == set(queries.evidence.scores) - (
        set() if labelled else {"margin", "ratio", "entropy", "disagreement"}
    )
    wanted = {name: {"r_auroc": [], "augrc": [], "unknown": []} for name in ("nearest", "level", P_RIGHT)}
    for fold in range(5):
        held, rest = folds == fold, folds != fold
        assert not set(queries.labels[held].tolist()) & set(queries.labels[rest].tolist())
        model = ConfidenceModel.fit(
            queries.evidence[rest], queries.correct[rest], labelled=labelled, groups=queries.labels[rest], seed=0
        )
        scores = {name: queries.evidence.scores[name][held] for name in ("nearest", "level")}
        for name, score in {**scores, P_RIGHT: 1 - model.probability(queries.evidence[held])}.items():
            figures = evaluate_uncertainty(score, queries.correct[held])
            wanted[name]["r_auroc"].append(figures["r_auroc"])
            wanted[name]["augrc"].append(figures["augrc"])
            wanted[name]["unknown"].append(auroc(score, ~queries.known[held]))
    for name, figures in wanted.items():
        for figure, values in figures.items():
            value, (low, high) = found["scores"][name][figure], found["scores"][name]["intervals"][figure]
            assert value == pytest.approx(sum(values) / 5)
            assert low < value < high
    assert found["best"] == max(singles, key=lambda name: found["scores"][name]["r_auroc"])
    best = found["scores"][found["best"]]
    assert found["gain"]["r_auroc"] == pytest.approx(found["scores"][P_RIGHT]["r_auroc"] - best["r_auroc"])
    assert found["gain"]["augrc"] == pytest.approx(best["augrc"] - found["scores"][P_RIGHT]["augrc"])
    u = found["scores"][MIX]["r_auroc"] - found["scores"][MIX_WITHOUT_U]["r_auroc"]
    assert found["gain_of_u"]["r_auroc"] == pytest.approx(u)
    print("\n".join(describe_comparison(found)))
    assert found["gain"]["r_auroc"] > -0.02
    assert any("‖u‖ alone" in line and "chance" in line for line in describe_comparison(found))


def test_the_description_says_if_p_is_below(queries):
    found = compare_scores(queries, labelled=True, rounds=50)
    spans = {"r_auroc": [-0.05, -0.01], "augrc": [-0.01, 0.01]}
    worse = {**found, "gain": {"r_auroc": -0.03, "augrc": 0.0, "intervals": spans}}
    assert "is BELOW the best single score" in describe_comparison(worse)[0]
    unclear = {**found, "gain": {"r_auroc": -0.03, "augrc": 0.0, "intervals": {**spans, "r_auroc": [-0.05, 0.01]}}}
    assert "is below, but not clearly, the best" in describe_comparison(unclear)[0]
    right = torch.ones_like(queries.same_class)
    sure = OpenSetQueries(
        queries.evidence, queries.labels, torch.ones(900, dtype=torch.bool), queries.distances, right, queries.gallery
    )
    nothing = compare_scores(sure, labelled=True, rounds=20)
    assert nothing["scores"][P_RIGHT]["r_auroc"] is None
    assert nothing["gain"]["r_auroc"] is None
    assert describe_comparison(nothing) == ["all answers are right, or all are wrong: there is nothing to rank"]

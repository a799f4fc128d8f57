"""Sums for each class against explicit loops and against the evaluation."""

import pytest
import torch

from idml import Embeddings, IntrospectiveMetric
from idml.evaluation import evaluate_retrieval
from idml.evaluation.retrieval import class_sums


@pytest.mark.parametrize("metric", [None, IntrospectiveMetric(2.0, 0.5)])
@pytest.mark.parametrize("apart", [False, True])
def test_sums_of_classes_are_those_of_explicit_loops(metric, apart):
    torch.manual_seed(0)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 5])  # 2 and 5 are alone, 4 is empty
    e = Embeddings(torch.randn(11, 4).double(), torch.rand(11, 3).double())
    known, theirs, other = {}, labels, e
    if apart:
        theirs = torch.tensor([0, 1, 3, 3, 0, 0, 2, 4])
        other = Embeddings(torch.randn(8, 4).double(), torch.rand(8, 3).double())
        known = {"gallery": other, "gallery_labels": theirs}
    found = class_sums(e, labels, **known, metric=metric)
    distances = (metric or IntrospectiveMetric(rule="off")).distances(e, other)
    for c in range(6):
        queries = hits = precision = average = 0
        for i in (labels == c).nonzero().flatten().tolist():
            order = [j for j in distances[i].argsort().tolist() if apart or j != i]
            r = sum(int(theirs[j]) == c for j in order)
            if r == 0:
                continue
            right = [int(theirs[j]) == c for j in order]
            queries += 1
            hits += right[0]
            precision += sum(right[:r]) / r
            average += sum(sum(right[: p + 1]) / (p + 1) for p in range(r) if right[p]) / r
        assert int(found.queries[c]) == queries
        assert found.sums[:, c].tolist() == pytest.approx([hits, precision, average])
    whole = evaluate_retrieval(e, labels, **known, metric=metric, recall_at=(1,))
    assert found.figures == pytest.approx({key: whole[key] for key in ("recall@1", "r_precision", "map@r")})
    assert float(found.correct.double().mean()) == pytest.approx(whole["recall@1"])
    assert len(found.rows) == whole["queries"]

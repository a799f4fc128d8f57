import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from idml.evaluation.uncertainty import auroc


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
def test_bad_input(scores, positive, words):
    with pytest.raises(ValueError, match=words):
        auroc(scores, positive)

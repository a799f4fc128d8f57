import time

import pytest
import torch
from sklearn.metrics import roc_auc_score

from idml.evaluation import ErrorPredictor, evaluate_uncertainty


def errors_to_foresee(n, d, seed):
    """Errors that depend on the product of two hidden causes, so that no linear rule finds them; odd scales."""
    g = torch.Generator().manual_seed(seed)
    causes = torch.randn(n, 4, generator=g)
    wrong = causes[:, 0] * causes[:, 1] + 0.3 * torch.randn(n, generator=g) > 0.3
    mixed = causes @ torch.randn(4, d, generator=torch.Generator().manual_seed(0))
    return 1000 + 50 * mixed * torch.logspace(-3, 3, d), wrong


def test_error_predictor_foresees_errors_of_new_images():
    features, wrong = errors_to_foresee(4000, 64, 0)
    predictor = ErrorPredictor().fit(features, wrong)
    new, new_wrong = errors_to_foresee(1000, 64, 1)
    found = predictor.scores(new)
    assert found.shape == (1000,)
    assert roc_auc_score(new_wrong, found) > 0.8
    assert evaluate_uncertainty(found, ~new_wrong)["r_auroc"] == pytest.approx(roc_auc_score(new_wrong, found))


def test_error_predictor_is_the_same_for_the_same_seed():
    features, wrong = errors_to_foresee(300, 5, 0)
    before = torch.random.get_rng_state()
    with torch.no_grad():
        one, two, other = (ErrorPredictor(seed=s).fit(features, wrong).scores(features) for s in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    shifted = ErrorPredictor().fit(3 * features.double() - 5, wrong).scores(3 * features.double() - 5)
    torch.testing.assert_close(shifted, one, atol=0.05, rtol=0.05)  # it standardises
    constant = torch.cat([features, torch.full((300, 1), 0.1)], dim=1)
    fitted = ErrorPredictor().fit(constant, wrong)
    close = constant + torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.01])
    torch.testing.assert_close(fitted.scores(close), fitted.scores(constant), atol=0.1, rtol=0.1)
    half = (features / 1000).half()
    assert torch.isfinite(ErrorPredictor().fit(half, wrong).scores(half)).all()


def test_error_predictor_trains_in_seconds():
    start = time.process_time()
    ErrorPredictor().fit(torch.randn(6000, 1280), torch.rand(6000) < 0.4)
    assert time.process_time() - start < 30


def test_error_predictor_says_what_is_wrong():
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match="fit the error predictor"):
        ErrorPredictor().scores(x)
    with pytest.raises(ValueError, match=r"bool mask \[4\], got torch.bool \[3\]"):
        ErrorPredictor().fit(x, torch.tensor([True, False, True]))
    with pytest.raises(ValueError, match=r"bool mask \[4\], got torch.int64"):
        ErrorPredictor().fit(x, torch.tensor([1, 0, 1, 0]))
    for wrong in (torch.ones(4), torch.zeros(4)):
        with pytest.raises(ValueError, match="both right and wrong"):
            ErrorPredictor().fit(x, wrong.bool())
    fitted = ErrorPredictor().fit(x, torch.tensor([True, False, True, False]))
    with pytest.raises(ValueError, match="fit on 3 features, got 2"):
        fitted.scores(x[:, :2])

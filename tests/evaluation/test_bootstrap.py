"""Resampled figures against the same figures of queries that are really repeated."""

import pytest
import torch

from idml.evaluation import auroc, bootstrap, evaluate_uncertainty
from idml.evaluation.bootstrap import (
    Rounds,
    draw_classes,
    interval,
    resampled_auroc,
    resampled_mean,
    resampled_uncertainty,
)


@pytest.mark.parametrize("ties", [3, 20, 10_000])
@pytest.mark.parametrize("cells", [1, 1 << 17])
def test_rounds_equal_repeated_queries(monkeypatch, ties, cells):
    monkeypatch.setattr(bootstrap, "_CELLS", cells)
    labels, scores, correct = torch.randint(9, (80,)), torch.randint(ties, (80,)).float(), torch.rand(80) > 0.3
    drawn = draw_classes(labels, rounds=12)
    found = resampled_uncertainty(scores, correct, drawn)
    values = torch.rand(80)
    means, areas = resampled_mean(values, drawn), resampled_auroc(scores, ~correct, drawn)
    for i, counts in enumerate(drawn.counts):
        times = counts[drawn.classes].long()
        again, right = scores.repeat_interleave(times), correct.repeat_interleave(times)
        wanted = evaluate_uncertainty(again, right)
        assert {name: float(x[i]) for name, x in found.items()} == pytest.approx(wanted, abs=1e-12)
        assert float(areas[i]) == pytest.approx(auroc(again, ~right), abs=1e-12)
        assert float(means[i]) == pytest.approx(float(values.repeat_interleave(times).double().mean()), abs=1e-12)


def test_whole_classes_are_drawn():
    labels = torch.tensor([5, 5, 2, 9, 9, 9])
    drawn = draw_classes(labels, rounds=500)
    assert torch.equal(drawn.counts.sum(dim=1), torch.full((500,), 3.0))
    assert drawn.classes.tolist() == [1, 1, 0, 2, 2, 2]
    assert drawn.counts.mean(dim=0).tolist() == pytest.approx([1, 1, 1], abs=0.15)
    assert torch.equal(drawn.counts, draw_classes(labels, rounds=500).counts)
    assert not torch.equal(drawn.counts, draw_classes(labels, rounds=500, seed=1).counts)


def test_intervals_cover_the_true_value():
    """Right answers come class by class: about 95 of 100 intervals hold the true share; over queries, fewer would."""
    held = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        easy = torch.rand(60, generator=generator)  # a class's share of right answers, 0.5 on average
        labels = torch.arange(60).repeat_interleave(20)
        right = torch.rand(1200, generator=generator) < easy[labels]
        low, high = interval(resampled_mean(right.double(), draw_classes(labels, rounds=300)))
        held += low <= 0.5 <= high
    assert 88 <= held <= 100


def test_rounds_without_a_figure_are_left_out():
    drawn = Rounds(torch.tensor([[2.0, 0.0], [1.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 0, 1]))
    found = resampled_uncertainty(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, True, False]), drawn)
    assert found["r_auroc"].isnan().tolist() == [True, False, True]
    assert interval(found["r_auroc"]) == [1.0, 1.0]
    assert interval(found["r_auroc"][:1]) is None
    assert torch.isfinite(found["aurc"]).all()

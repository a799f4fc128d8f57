"""Evidence against explicit loops, small galleries, bad input."""

import math

import pytest
import torch

from idml import Embeddings
from idml.calibration.evidence import NEIGHBOURS, Profile, build_evidence, sample_profile_rows
from idml.evaluation import nearest, neighbour_scores


def loop_scores(queries, gallery, labels):
    """The scores of each query by their definitions, from all distances."""
    out = []
    for q in range(len(queries)):
        d = [math.dist(queries.unit[q].tolist(), gallery.unit[i].tolist()) for i in range(len(gallery))]
        near = sorted(range(len(gallery)), key=lambda i: (d[i], i))[:10]
        first, last = near[0], near[-1]
        same = [labels[i] == labels[first] for i in near]
        other = next((d[i] for i, s in zip(near, same, strict=True) if not s), d[last])
        shares = [[labels[i] for i in near].count(x) / len(near) for x in {labels[i] for i in near}]
        out.append(
            {
                "level": math.hypot(*queries.uncertainty[q].tolist()),
                "nearest": d[first],
                "kth": d[last],
                "spread": d[first] / d[last],
                "gap": d[first] - d[near[1]],
                "pair": math.hypot(*(queries.uncertainty[q] + gallery.uncertainty[first]).tolist()),
                "margin": d[first] - other,
                "ratio": d[first] / other,
                "entropy": -sum(p * math.log(p) for p in shares),
                "disagreement": 1 - sum(same) / len(near),
            }
        )
    return out


def made(n, seed, classes=3):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    return Embeddings(torch.randn(n, 3, generator=g), torch.rand(n, 2, generator=g)), labels


@pytest.mark.parametrize("listed", [10, 17])
def test_scores_are_those_of_explicit_loops(listed):
    """The evidence comes from the 10 nearest images, also if more are listed."""
    (queries, _), (gallery, labels) = made(20, 1), made(60, 2)
    indices, distances = nearest(queries, listed, gallery=gallery)
    found = build_evidence(queries, distances, gallery.uncertainty[indices[:, 0]], classes=labels[indices])
    for n, scores in enumerate(loop_scores(queries, gallery, labels.tolist())):
        for name, value in scores.items():
            assert float(found.scores[name][n]) == pytest.approx(value, abs=2e-6), name
    assert set(found.scores) == set(scores)


def test_scores_equal_those_of_the_evaluation():
    (queries, own), (gallery, labels) = made(20, 1), made(60, 2)
    indices, distances = nearest(queries, NEIGHBOURS, gallery=gallery)
    found = build_evidence(queries, distances, gallery.uncertainty[indices[:, 0]], classes=labels[indices])
    evaluated = neighbour_scores(queries, own, gallery=gallery, gallery_labels=labels, k=NEIGHBOURS).scores
    names = {"nearest": "nearest_distance", "kth": "kth_distance", "entropy": "entropy", "disagreement": "disagreement"}
    for name, theirs in names.items():
        assert torch.equal(found.scores[name], evaluated[theirs])


def test_without_labels_there_are_no_scores_of_classes():
    (queries, _), (gallery, labels) = made(20, 1), made(60, 2)
    indices, distances = nearest(queries, NEIGHBOURS, gallery=gallery)
    uncertainty = gallery.uncertainty[indices[:, 0]]
    plain = build_evidence(queries, distances, uncertainty)
    labelled = build_evidence(queries, distances, uncertainty, classes=labels[indices])
    assert labelled.labelled
    assert not plain.labelled
    assert set(labelled.scores) - set(plain.scores) == {"margin", "ratio", "entropy", "disagreement"}
    assert all(torch.equal(plain.scores[name], labelled.scores[name]) for name in plain.scores)
    some = labelled[[3, 5]]
    assert torch.equal(some.margin, labelled.margin[[3, 5]])


def test_a_gallery_of_one_image():
    one = Embeddings.certain(torch.tensor([[1.0, 0.0]]))
    alone = build_evidence(one, torch.zeros(1, 1), one.uncertainty, classes=torch.zeros(1, 1).long())
    assert {name: float(x) for name, x in alone.scores.items()} == {
        **dict.fromkeys(("level", "nearest", "kth", "gap", "pair", "margin", "entropy", "disagreement"), 0.0),
        **dict.fromkeys(("spread", "ratio"), 1.0),
    }


def test_lists_that_end_early_and_lists_of_one_class():
    certain = Embeddings.certain(torch.ones(1, 2))
    short = torch.tensor([[0.5, torch.inf]])
    fewer = build_evidence(certain, short, certain.uncertainty, classes=torch.tensor([[4, -1]]))
    assert (float(fewer.gap), float(fewer.kth), float(fewer.disagreement)) == (0.0, 0.5, 0.0)
    lists = torch.tensor([[0.1, 0.2, 0.7]])
    same = build_evidence(certain, lists, certain.uncertainty, classes=torch.ones(1, 3).long())
    assert float(same.disagreement) == 0
    assert float(same.margin) == pytest.approx(0.1 - 0.7)


def test_an_uncertainty_without_dimensions_counts_as_zero():
    lists, u = torch.tensor([[0.1, 0.2]]), torch.tensor([[3.0, 4.0]])
    bare, own = Embeddings.certain(torch.ones(1, 2)), Embeddings(torch.ones(1, 2), u)
    assert float(build_evidence(bare, lists, u).pair) == 5.0
    assert float(build_evidence(own, lists, u[:, :0]).pair) == 5.0
    assert float(build_evidence(bare, lists, u[:, :0]).pair) == 0.0


def test_bad_lists_are_refused():
    certain = Embeddings.certain(torch.ones(1, 2))
    with pytest.raises(ValueError, match="1 of 1 queries found no image at all"):
        build_evidence(certain, torch.full((1, 3), torch.inf), certain.uncertainty)
    with pytest.raises(ValueError, match=r"distances must be floats \[queries, k\]"):
        build_evidence(certain, torch.zeros(1, 0), certain.uncertainty)
    with pytest.raises(ValueError, match=r"classes must be numbers \[1, 2\], got \[1, 3\]"):
        build_evidence(certain, torch.rand(1, 2), certain.uncertainty, classes=torch.zeros(1, 3).long())
    with pytest.raises(ValueError, match="numbers of 0 or more"):
        build_evidence(certain, torch.rand(1, 2), certain.uncertainty, classes=torch.tensor([[1, -1]]))


def test_a_profile_holds_the_distances_of_a_sample():
    gallery, _ = made(1300, 3)
    rows = sample_profile_rows(1300)
    assert len(rows) == len(rows.unique()) == 1000
    distances = torch.cdist(gallery.unit.double(), gallery.unit.double())
    distances.fill_diagonal_(torch.inf)
    profile = Profile.of(gallery)
    assert profile.size == 1300
    assert profile.nearest == pytest.approx(distances[rows].amin(dim=1).sort().values.tolist(), abs=1e-6)
    with pytest.raises(ValueError, match="no image to find but themselves"):
        Profile.of(gallery[:1])

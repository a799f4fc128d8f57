"""Evidence against explicit loops, small galleries, bad input."""

import math

import pytest
import torch

from idml import Embeddings
from idml.calibration.evidence import NEIGHBOURS, Evidence, Profile, build_evidence, sample_profile_rows
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
    two = Embeddings.certain(torch.ones(2, 2))
    mixed = build_evidence(two, lists.repeat(2, 1), two.uncertainty, classes=torch.tensor([[1, 1, 1], [1, 2, 2]]))
    assert mixed.margin.tolist() == pytest.approx([0.1 - 0.7, 0.1 - 0.2])


def test_an_uncertainty_without_dimensions_counts_as_zero():
    lists, u = torch.tensor([[0.1, 0.2]]), torch.tensor([[3.0, 4.0]])
    bare, own = Embeddings.certain(torch.ones(1, 2)), Embeddings(torch.ones(1, 2), u)
    assert float(build_evidence(bare, lists, u).pair) == 5.0
    assert float(build_evidence(own, lists, u[:, :0]).pair) == 5.0
    assert float(build_evidence(bare, lists, u[:, :0]).pair) == 0.0


def test_bad_lists_are_refused():
    certain = Embeddings.certain(torch.ones(1, 2))
    three, lists = Embeddings.certain(torch.ones(3, 2)), torch.tensor([[0.5], [torch.inf], [torch.inf]])
    with pytest.raises(ValueError, match=r"^2 of 3 queries found no image at all \(first: query 1\)$"):
        build_evidence(three, lists, three.uncertainty)
    for bad, got in [
        (torch.zeros(1, 0), r"torch.float32 \[1, 0\]"),
        (torch.zeros(3), r"torch.float32 \[3\]"),
        (torch.zeros(1, 2).long(), r"torch.int64 \[1, 2\]"),
    ]:
        with pytest.raises(ValueError, match=rf"^distances must be floats \[queries, k\], got {got}$"):
            build_evidence(certain, bad, certain.uncertainty)
    with pytest.raises(ValueError, match=r"classes must be numbers \[1, 2\], got \[1, 3\]"):
        build_evidence(certain, torch.rand(1, 2), certain.uncertainty, classes=torch.zeros(1, 3).long())
    with pytest.raises(ValueError, match=r"^the classes of listed images must be numbers of 0 or more$"):
        build_evidence(certain, torch.rand(1, 2), certain.uncertainty, classes=torch.tensor([[1, -1]]))
    build_evidence(certain, torch.rand(1, 2), certain.uncertainty, classes=torch.tensor([[0, 1]]))


def test_images_after_the_tenth_are_ignored():
    """Also their classes, which may be anything."""
    (queries, _), (gallery, labels) = made(8, 1), made(60, 2)
    indices, distances = nearest(queries, 14, gallery=gallery)
    classes = labels[indices]
    classes[:, 10:] = -1
    u = gallery.uncertainty[indices[:, 0]]
    long = build_evidence(queries, distances, u, classes=classes)
    short = build_evidence(queries, distances[:, :10], u, classes=labels[indices[:, :10]])
    assert all(torch.equal(long.scores[name], short.scores[name]) for name in short.scores)


def test_evidence_needs_no_gradient_and_little_precision():
    s = torch.tensor([[1.0, 0.0]], requires_grad=True)
    u = torch.tensor([[0.3, 0.4]], requires_grad=True)
    distances = torch.tensor([[0.25, 0.5]])
    found = build_evidence(Embeddings(s, u), distances.half(), u * 2)
    assert not any(x.requires_grad for x in found.scores.values())
    assert {x.dtype for x in found.scores.values()} == {torch.float32}
    assert {name: round(float(x), 6) for name, x in found.scores.items()} == {
        "level": 0.5, "nearest": 0.25, "kth": 0.5, "spread": 0.5, "gap": -0.25, "pair": 1.5,
    }  # fmt: skip
    double = build_evidence(Embeddings(s, u), distances.double(), u * 2, classes=torch.tensor([[1, 2]]))
    assert {x.dtype for x in double.scores.values()} == {torch.float64}


def some_evidence(n, **more):
    columns = ("level", "nearest", "kth", "spread", "gap")
    return Evidence(**{**{name: torch.rand(n) for name in columns}, **more})


def test_scores_that_are_no_numbers_are_refused():
    for name in ("level", "pair", "disagreement"):
        for bad, got in [(torch.rand(2), r"torch.float32 \[2\]"), (torch.ones(3).long(), r"torch.int64 \[3\]")]:
            with pytest.raises(ValueError, match=rf"^{name} must be floats \[3\], got {got}$"):
                some_evidence(3, **{name: bad})
        for bad in (torch.nan, torch.inf):
            words = rf"^2 of 3 values of {name} are NaN or infinite \(first: query 1\)$"
            with pytest.raises(ValueError, match=words):
                some_evidence(3, **{name: torch.tensor([0.0, bad, bad])})


def test_parts_and_joins():
    whole = some_evidence(5, margin=torch.rand(5), searched="another search")
    assert len(whole) == 5
    assert whole.pair is None
    first, rest = whole[:2], whole[[2, 3, 4]]
    assert (len(first), len(rest), first.searched) == (2, 3, "another search")
    joined = Evidence.cat([first, rest])
    assert set(joined.scores) == {"level", "nearest", "kth", "spread", "gap", "margin"}
    assert all(torch.equal(joined.scores[name], whole.scores[name]) for name in whole.scores)
    assert joined.searched == "another search"
    assert some_evidence(1).searched == "10 nearest, euclidean"
    alone = Evidence.cat([whole])
    assert torch.equal(alone.margin, whole.margin)
    assert alone.searched == "another search"
    with pytest.raises(IndexError):
        whole[5]
    for other in (some_evidence(2, searched="another search"), some_evidence(2, margin=torch.rand(2))):
        for parts in ([whole, other], [other, whole]):
            with pytest.raises(ValueError, match=r"^only evidence with the same scores can be joined$"):
                Evidence.cat(parts)


def test_a_profile_holds_the_distances_of_a_sample():
    gallery, _ = made(1300, 3)
    rows = sample_profile_rows(1300)
    assert len(rows) == len(rows.unique()) == 1000
    distances = torch.cdist(gallery.unit.double(), gallery.unit.double())
    distances.fill_diagonal_(torch.inf)
    profile = Profile.of(gallery)
    assert profile.size == 1300
    assert profile.nearest == pytest.approx(distances[rows].amin(dim=1).sort().values.tolist(), abs=1e-6)
    assert all(type(d) is float for d in profile.nearest)
    with pytest.raises(ValueError, match="no image to find but themselves"):
        Profile.of(gallery[:1])
    twins = Profile.of(Embeddings.cat([gallery[:3], gallery[:3]]))  # each finds the other, not itself
    assert (twins.size, len(twins.nearest)) == (6, 6)
    assert twins.nearest == pytest.approx([0.0] * 6, abs=1e-3)


def test_a_profile_of_impossible_values_is_refused():
    assert Profile(2, (0.0, 0.0)).nearest == (0.0, 0.0)
    assert Profile(3, (0.5,)).size == 3
    for size, nearest_distances in [(3, (0.2, 0.1)), (3, (-0.1, 0.1)), (1, (0.1, 0.2)), (5, ()), (0, ())]:
        with pytest.raises(ValueError, match=r"^the profile of a gallery has impossible values$"):
            Profile(size, nearest_distances)


def test_the_sample_of_a_profile_is_always_the_same():
    """A stored profile is compared with a new one of the same gallery, so the draw must not change."""
    rows = sample_profile_rows(5000)
    assert rows.tolist() == sorted(torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:1000].tolist())
    assert sample_profile_rows(3).tolist() == [0, 1, 2]

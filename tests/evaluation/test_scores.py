"""The rival scores against explicit loops over all distances."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from idml import Embeddings, IntrospectiveMetric
from idml.evaluation import (
    GALLERY_AWARE,
    QUERY_ONLY,
    ErrorPredictor,
    evaluate_retrieval,
    evaluate_uncertainty,
    neighbour_scores,
    scores,
)
from idml.evaluation import knn as neighbours
from idml.evaluation.scores import inverse_norm, random_norm, sigma, vote_disagreement

SEARCHED = GALLERY_AWARE[:-1]


def loops(distances, labels, gallery_labels, k, reach, excluded):
    """Every definition, one query at a time, from the full list of distances."""
    rows = []
    for i, row in enumerate(distances):
        seen = sorted((d, j) for j, d in enumerate(row) if not excluded(i, j))
        near = [gallery_labels[j] for _, j in seen[:k]]
        others = [d for d, j in seen if gallery_labels[j] != near[0]]
        d1 = seen[0][0]
        shares = [count / len(near) for count in Counter(near).values()]
        rows.append(
            {
                "nearest_distance": d1,
                "kth_distance": seen[:k][-1][0],
                "margin": -(others[0] - d1) if others else -reach,
                "ratio": 0.0 if not others else 1.0 if others[0] == 0 else d1 / others[0],
                "entropy": -sum(p * math.log(p) for p in shares),
                "disagreement": 1 - near.count(near[0]) / len(near),
                "correct": near[0] == labels[i],
                "singleton": all(gallery_labels[j] != labels[i] for _, j in seen),
            }
        )
    return {name: [row[name] for row in rows] for name in rows[0]}


def same(found, wanted, tolerance=1e-5):
    assert tuple(found.scores) == SEARCHED
    for name, values in found.scores.items():
        assert values.tolist() == pytest.approx(wanted[name], rel=tolerance, abs=tolerance), name
        assert torch.isfinite(values).all(), name
    assert found.correct.tolist() == wanted["correct"]
    assert found.singleton.tolist() == wanted["singleton"]


def plain_distances(x, gallery):
    return [[math.dist(a, b) for b in gallery.double().tolist()] for a in x.double().tolist()]


def made(n, classes, d=6, seed=0, noise=1.0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=g)
    return torch.randn(classes, d, generator=g)[labels] + noise * torch.randn(n, d, generator=g), labels


CASES = {
    "random": made(70, 7),
    "classes far apart": (made(80, 4)[0] + 40 * torch.eye(4, 6)[made(80, 4)[1]], made(80, 4)[1]),
    "one class": (made(25, 1)[0], torch.zeros(25, dtype=torch.long)),
    "one class and a singleton": (made(25, 1)[0], torch.tensor([7] * 24 + [3])),
    "all singletons": (made(20, 3)[0], torch.arange(20)),
    "ties": (torch.randint(3, (60, 2)).float(), made(60, 5)[1]),
    "duplicates": (made(12, 4)[0][torch.arange(60) % 12], made(60, 4)[1]),
    "collapsed": (torch.ones(30, 3), made(30, 3)[1]),
    "fewer images than k": (made(5, 2)[0], torch.tensor([0, 1, 0, 1, 1])),
    "two images": (torch.tensor([[0.0], [3.0]]), torch.tensor([1, 2])),
}


@pytest.mark.parametrize("k", [1, 3, 10, 500])
@pytest.mark.parametrize("name", CASES)
def test_neighbour_scores_equal_loops(name, k):
    x, labels = CASES[name]
    reach = 2 * float(x.double().norm(dim=1).max())
    wanted = loops(plain_distances(x, x), labels.tolist(), labels.tolist(), k, reach, lambda i, j: i == j)
    same(neighbour_scores(x, labels, k=k), wanted)


@pytest.mark.parametrize("name", ["random", "classes far apart", "ties"])
def test_queries_against_a_gallery(name):
    x, labels = CASES[name]
    q, g = slice(0, 30), slice(20, 60)
    reach = float(x[q].norm(dim=1).max() + x[g].norm(dim=1).max())
    distances, kept = plain_distances(x[q], x[g]), labels.tolist()
    found = neighbour_scores(x[q], labels[q], gallery=x[g], gallery_labels=labels[g], k=5)
    same(found, loops(distances, kept[q], kept[g], 5, reach, lambda i, j: False))
    ids = [f"image {i % 50}" for i in range(80)]
    found = neighbour_scores(
        x[q],
        labels[q],
        gallery=x[g],
        gallery_labels=labels[g],
        k=5,
        query_ids=ids[q],
        gallery_ids=ids[20 : 20 + len(x[g])],
    )
    same(found, loops(distances, kept[q], kept[g], 5, reach, lambda i, j: ids[i] == ids[20 + j]))


@pytest.mark.parametrize("metric", [None, IntrospectiveMetric(rule="off"), IntrospectiveMetric(gamma=1.0)])
def test_embeddings_are_compared_by_their_unit_part_or_the_metric(metric):
    x, labels = made(60, 5, noise=0.3)
    e = Embeddings(x, 0.5 * torch.randn(60, 4))
    distances = (metric or IntrospectiveMetric(rule="off")).distances(e.to(torch.float64)).tolist()
    kept = labels.tolist()
    same(neighbour_scores(e, labels, metric=metric, k=4), loops(distances, kept, kept, 4, 2.0, lambda i, j: i == j))
    one = neighbour_scores(e, ["cat"] * 60, metric=metric)
    assert one.scores["margin"].tolist() == pytest.approx([-2.0] * 60)
    assert one.scores["ratio"].tolist() == [0.0] * 60


def test_correct_and_singletons_are_those_of_retrieval():
    x, labels = made(90, 40)
    found = neighbour_scores(x, labels)
    figures = evaluate_retrieval(x, labels)
    assert int(found.singleton.sum()) == figures["singletons"] > 0
    assert float(found.correct[~found.singleton].double().mean()) == pytest.approx(figures["recall@1"])
    assert not found.correct[found.singleton].any()


def test_labels_may_be_strings_and_numbers_in_half_precision():
    x, labels = made(50, 6)
    wanted = neighbour_scores(x.half().float(), labels)
    found = neighbour_scores(x.half(), [f"class {y}" for y in labels.tolist()])
    for name in SEARCHED:
        assert torch.equal(found.scores[name], wanted.scores[name])
    assert torch.equal(found.correct, wanted.correct)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (50, 40, 30)])
def test_chunk_sizes_do_not_change_the_scores(monkeypatch, sizes):
    x, labels = CASES["classes far apart"]
    wanted = neighbour_scores(x, labels, k=2)
    for room, name, size in zip((neighbours, neighbours, scores), ("_CHUNK", "_LIST", "_LISTED"), sizes, strict=True):
        monkeypatch.setattr(room, name, size)
    monkeypatch.setattr(scores, "_BLOCK", 3)
    found = neighbour_scores(x, labels, k=2)
    for name in SEARCHED:
        assert torch.equal(found.scores[name], wanted.scores[name]), name


def test_the_margin_is_exact_at_any_depth_without_listing_all_pairs(monkeypatch):
    n = 600
    x, labels = torch.arange(float(n)).unsqueeze(1), torch.arange(n) // 200
    listed = []
    top = neighbours.Search.top

    def noted(self, k, rows=None):
        found = top(self, k, rows)
        listed.append(found.indices.numel())
        return found

    monkeypatch.setattr(neighbours.Search, "top", noted)
    monkeypatch.setattr(scores, "_LISTED", 1 << 14)
    margin = neighbour_scores(x, labels, k=10).scores["margin"]
    kept = labels.tolist()
    for i in range(n):
        first = i - 1 if i else 1  # the left one, by the smaller index
        others = [abs(i - j) for j in range(n) if j != i and kept[j] != kept[first]]
        assert margin[i] == 1 - min(others)
    assert max(listed) <= 1 << 14


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_entropy_ties_for_equal_shares(near, random):
    one = torch.tensor([near])
    shuffled = torch.tensor([random.sample(near, len(near))])
    renamed = (one + 5) * 3
    seen = torch.ones_like(one, dtype=torch.bool)
    entropy = scores.label_entropy(one, seen)
    assert torch.equal(entropy, scores.label_entropy(shuffled, seen))
    assert torch.equal(entropy, scores.label_entropy(renamed, seen))
    assert 0 <= float(entropy) <= math.log(len(near)) + 1e-9


def test_different_lists_of_equal_entropy_tie():
    near = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4], [0, 0, 1, 1, 2, 2, 3, 3]])  # 4·ln 4 = 4 · 2·ln 2
    one, two = scores.label_entropy(near, torch.ones_like(near, dtype=torch.bool))
    assert one == two == pytest.approx(math.log(4))


X, Y = torch.randn(6, 3), [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embeddings": torch.zeros(0, 3), "labels": []}, "there are no query embeddings"),
        ({"embeddings": torch.zeros(1, 3), "labels": [0]}, r"1 queries have no image to find .*\(first: row 0\)"),
        ({"embeddings": torch.full((6, 3), math.nan)}, r"in 6 of 6 rows \(first: row 0\)"),
        ({"labels": [0, 1]}, "2 labels for 6 images"),
        ({"gallery": X}, "a gallery needs gallery_labels"),
        ({"gallery": X, "gallery_labels": [1]}, "1 gallery labels for 6 gallery images"),
        ({"query_ids": [1] * 6}, "6 queries have no image to find"),
        ({"k": 0}, "k must be a whole number above 0"),
    ],
)
def test_bad_input_gives_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        neighbour_scores(**({"embeddings": X, "labels": Y} | arguments))
    assert "\n" not in str(error.value)


def test_every_score_belongs_to_one_group():
    assert not set(QUERY_ONLY) & set(GALLERY_AWARE)
    assert QUERY_ONLY[0] == "level"


def test_sigma_and_norms_equal_loops():
    x = torch.randn(20, 7)
    e = Embeddings(x, x.abs() + 0.1)
    assert sigma(e).tolist() == pytest.approx([sum(row) / 7 for row in e.uncertainty.tolist()])
    assert sigma(e.to(torch.float16)).dtype == torch.float32
    assert inverse_norm(x).tolist() == pytest.approx([1 / math.hypot(*row) for row in x.tolist()])
    assert inverse_norm(x.half()).dtype == torch.float32
    assert inverse_norm(1e30 * x).tolist() == pytest.approx((1e-30 * inverse_norm(x)).tolist())
    assert inverse_norm(torch.zeros(1, 2)).tolist() == [pytest.approx(1e12)]
    for bad in (Embeddings(x, x), Embeddings.certain(x)):
        with pytest.raises(ValueError, match="not the embeddings of a Gaussian model"):
            sigma(bad)
    for bad in (torch.zeros(3), torch.zeros(3, 0), torch.zeros(3, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"floats \[images, dimensions\]"):
            inverse_norm(bad)
    with pytest.raises(ValueError, match="feature embeddings hold NaN or infinity in 1 of 2 rows"):
        inverse_norm(torch.tensor([[1.0], [math.inf]]))


def test_random_norm_is_seeded_and_keeps_lengths():
    features = torch.randn(40, 300) * torch.rand(40, 1)
    before = torch.random.get_rng_state()
    found = random_norm(features, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(found, random_norm(features, seed=1))
    assert not torch.equal(found, random_norm(features, seed=2))
    assert torch.allclose(2 * random_norm(2 * features, seed=1), found)
    ratio = random_norm(features, dimensions=20_000) / inverse_norm(features)
    assert ratio.min() > 0.95
    assert ratio.max() < 1.05
    assert random_norm(features.double()).dtype == torch.float64


def test_vote_disagreement_is_that_of_explicit_loops():
    votes = torch.randint(4, (5, 40), generator=torch.Generator().manual_seed(0))
    wanted = [1 - max(Counter(row).values()) / 5 for row in votes.T.tolist()]
    assert len(set(wanted)) > 1
    assert vote_disagreement(votes).tolist() == pytest.approx(wanted)
    assert vote_disagreement(votes[:1].expand(3, 40)).tolist() == [0.0] * 40


def predictable_errors(n, d, seed):
    """Errors that depend on the product of two hidden causes, so that no linear rule finds them; odd scales."""
    g = torch.Generator().manual_seed(seed)
    causes = torch.randn(n, 4, generator=g)
    wrong = causes[:, 0] * causes[:, 1] + 0.3 * torch.randn(n, generator=g) > 0.3
    mixed = causes @ torch.randn(4, d, generator=torch.Generator().manual_seed(0))
    return 1000 + 50 * mixed * torch.logspace(-3, 3, d), wrong


def test_the_error_predictor_predicts_errors_of_new_images():
    features, wrong = predictable_errors(4000, 64, 0)
    predictor = ErrorPredictor().fit(features, wrong)
    new, new_wrong = predictable_errors(1000, 64, 1)
    found = predictor.scores(new)
    assert found.shape == (1000,)
    assert roc_auc_score(new_wrong, found) > 0.8
    assert evaluate_uncertainty(found, ~new_wrong)["r_auroc"] == pytest.approx(roc_auc_score(new_wrong, found))


def test_the_error_predictor_depends_on_its_seed_only():
    features, wrong = predictable_errors(300, 5, 0)
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


def test_the_error_predictor_refuses_bad_input():
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

"""The scores of an audit against loops that leave each image out by hand; duplicates that were planted."""

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from idml import Embeddings
from idml.audit import label_errors as audit
from idml.audit.duplicates import find_duplicates, make_sketches, sketch_difference
from idml.audit.label_errors import SCORES, score_ambiguity, score_labels
from idml.evaluation import nearest


def blobs(classes=4, each=8, width=6, spread=0.4, seed=0):
    """Classes around random directions, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)[torch.randperm(classes * each, generator=generator)]
    centres = torch.randn(classes, width, generator=generator)
    return centres[labels] + spread * torch.randn(len(labels), width, generator=generator), labels


def planted(share=0.1, **options):
    s, labels = blobs(**options)
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7))[: round(share * len(labels))]
    wrong = labels.clone()
    wrong[rows] = (wrong[rows] + 1) % (int(labels.max()) + 1)
    return Embeddings.certain(s), labels, wrong


# ---- every score against a loop


def order(unit, i):
    """The other images by distance, then index, with their distances."""
    away = [(float(torch.linalg.vector_norm(unit[i] - unit[j])), j) for j in range(len(unit)) if j != i]
    return sorted(away)


def shares(unit, labels, k, weighted):
    """p [n, classes] by hand."""
    lists = [order(unit, i)[:k] for i in range(len(unit))]
    p = torch.zeros(len(unit), int(labels.max()) + 1, dtype=torch.float64)
    for i, near in enumerate(lists):
        for d, j in near:
            p[i, labels[j]] += math.exp((near[0][0] ** 2 - d**2) / (0.2 * near[-1][0] ** 2)) if weighted else 1.0
        p[i] /= p[i].sum()
    return p


def best_other(row, own):
    return max((float(v), -c) for c, v in enumerate(row) if c != own)


def by_hand(name, s, labels):
    """Score and suggestion of every image, each left out in turn."""
    unit = s.double() / torch.linalg.vector_norm(s.double(), dim=1, keepdim=True)
    n, classes = len(labels), int(labels.max()) + 1
    if name in ("disagreement", "disagreement_100", "vote", "confident"):
        k = {"disagreement": 10, "disagreement_100": 100}.get(name, 200)
        support = shares(unit, labels, min(k, n - 1), name in ("vote", "confident"))
        if name == "confident":
            own = support[torch.arange(n), labels]
            support = support - torch.stack([own[labels == c].mean() for c in range(classes)])
    else:
        support = torch.zeros(n, classes, dtype=torch.float64)
        means = torch.stack([unit[labels == c].mean(dim=0) for c in range(classes)])
        variance = sum((unit[i] - means[labels[i]]).square().sum() for i in range(n)) / (n - classes) / unit.shape[1]
        for i in range(n):
            others = torch.arange(n) != i
            means = torch.stack([unit[others & (labels == c)].mean(dim=0) for c in range(classes)])
            if name == "centroid":
                support[i] = torch.cosine_similarity(means, unit[i][None])
                continue
            scatter = sum(torch.outer(r, r) for j in range(n) if j != i for r in [unit[j] - means[labels[j]]])
            within = 0.7 * scatter / (n - classes) + 0.3 * variance * torch.eye(unit.shape[1])
            for c in range(classes):
                r = unit[i] - means[c]
                support[i, c] = -0.5 * torch.log(r @ torch.linalg.solve(within, r))
    score, suggested = [], []
    for i in range(n):
        value, label = best_other(support[i].tolist(), int(labels[i]))
        own = float(support[i, labels[i]])
        score.append(1 - own if name in ("disagreement", "disagreement_100", "vote") else value - own)
        suggested.append(-label)
    return torch.tensor(score, dtype=torch.float64), torch.tensor(suggested)


@pytest.mark.parametrize("name", SCORES)
def test_scores_equal_a_loop(name):
    embeddings, _, given = planted()
    found = score_labels(embeddings, given, score=name)
    score, suggested = by_hand(name, embeddings.semantic, given)
    torch.testing.assert_close(found.score, score, rtol=1e-4, atol=1e-5)
    assert bool(found.judged.all())
    sure = ~torch.isclose(score, torch.ones(()).double())  # where all classes but one have no share, any is second
    assert torch.equal(found.suggested[sure], suggested[sure])


@pytest.mark.parametrize("name", SCORES)
def test_block_size_does_not_change_scores(name, monkeypatch):
    embeddings, _, given = planted()
    whole = score_labels(embeddings, given, score=name)
    monkeypatch.setattr(audit, "_CELLS", 20)
    part = score_labels(embeddings, given, score=name)
    torch.testing.assert_close(part.score, whole.score)
    assert torch.equal(part.suggested, whole.suggested)


@pytest.mark.parametrize("name", SCORES)
def test_planted_labels_come_first(name):
    embeddings, labels, given = planted(classes=6, each=40, width=12, spread=0.3)
    found = score_labels(embeddings, given, score=name)
    wrong = given != labels
    first = found.score.argsort(descending=True)[: int(wrong.sum())]
    assert float(wrong[first].double().mean()) > 0.9
    if name != "disagreement_100":  # which looks beyond a class of 40
        assert float((found.suggested == labels)[wrong].double().mean()) > 0.9
    if name in ("centroid", "discriminant", "confident"):
        assert bool((found.score[wrong] > 0).all())


@given(seed=st.integers(0, 99), scale=st.floats(1e-3, 1e3))
def test_neither_the_order_nor_the_scale_nor_the_names_of_classes_matter(seed, scale):
    embeddings, _, given = planted(seed=seed % 5)
    found = score_labels(embeddings, given)
    shuffled = torch.randperm(len(given), generator=torch.Generator().manual_seed(seed))
    other = score_labels(Embeddings.certain(embeddings.semantic[shuffled] * scale), 1000 - 7 * given[shuffled])
    torch.testing.assert_close(other.score, found.score[shuffled], rtol=1e-4, atol=1e-5)
    assert torch.equal(other.suggested, 1000 - 7 * found.suggested[shuffled])


@pytest.mark.parametrize("name", SCORES)
def test_an_image_alone_in_its_class_is_not_judged_and_never_first(name):
    embeddings, _, given = planted()
    given = given.clone()
    given[3] = 17
    found = score_labels(embeddings, given, score=name)
    assert found.judged.tolist() == [i != 3 for i in range(len(given))]
    assert found.score[3] == -math.inf
    assert bool(torch.isfinite(found.score[found.judged]).all())
    alone = score_labels(embeddings, torch.arange(len(given)), score=name)
    assert not bool(alone.judged.any())
    assert bool((alone.score == -math.inf).all())


@pytest.mark.parametrize("name", SCORES)
def test_identical_images_can_be_scored(name):
    found = score_labels(Embeddings.certain(torch.ones(8, 3)), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), score=name)
    assert not bool(found.score.isnan().any())


def test_bad_input_is_one_line():
    embeddings, _, given = planted()
    with pytest.raises(ValueError, match="all images have the same class: there is no other label"):
        score_labels(embeddings, torch.zeros(len(given), dtype=torch.long))
    with pytest.raises(ValueError, match="unknown score 'knn' \\(one of disagreement"):
        score_labels(embeddings, given, score="knn")
    with pytest.raises(ValueError, match=r"one whole number for each of 32 images, got \[3\] labels"):
        score_labels(embeddings, given[:3])
    with pytest.raises(ValueError, match="semantic"):
        score_labels(Embeddings.certain(torch.full((32, 2), math.nan)), given)


# ---- ambiguous


def test_ambiguity_equals_a_loop():
    s, labels = blobs(spread=1.0)
    unit = Embeddings.certain(s).unit
    p = shares(unit, labels, 10, weighted=True)
    told = score_ambiguity(labels, nearest(unit, 30))
    for i, row in enumerate(p.tolist()):
        (a, one), (b, two) = sorted(((v, -c) for c, v in enumerate(row)), reverse=True)[:2]
        assert float(told.score[i]) == pytest.approx((a + b) * b / a, abs=1e-5)
        assert (int(told.first[i]), int(told.second[i])) == (-one, -two if b else -one)


def test_a_clear_image_with_a_wrong_label_is_not_ambiguous_and_one_between_two_classes_is():
    near = torch.randn(20, 2) * 0.1
    x = torch.cat([near, 4 - near, torch.full((1, 2), 2.0)])
    labels = torch.tensor([0] * 20 + [1] * 20 + [0])
    labels[0] = 1  # wrong, and clear
    told = score_ambiguity(labels, nearest(x, 10))
    assert int(told.score.argmax()) == 40
    assert float(told.score[0]) < 0.1 < 0.9 < float(told.score[40])
    alone = score_ambiguity(torch.zeros(41, dtype=torch.long), nearest(x, 10))
    assert float(alone.score.max()) == 0.0


# ---- duplicates


def photograph(seed, side=128):
    """Something with large and small shapes, as uint8."""
    noise = np.random.default_rng(seed)
    image = np.zeros((side, side, 3))
    for grain in (4, 16, 64):
        coarse = Image.fromarray(noise.integers(0, 256, (grain, grain, 3), dtype=np.uint8))
        image += np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), float)
    return (255 * (image - image.min()) / np.ptp(image)).astype(np.uint8)


def compressed(pixels, quality=50):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file).convert("RGB"))


def cropped(pixels):
    side = len(pixels)
    return np.asarray(Image.fromarray(pixels).crop((3, 3, side - 3, side - 3)).resize((side, side)))


def groups(images, embeddings, labels=None, splits=None, near=0.0):
    n = len(images)
    return find_duplicates(
        Embeddings.certain(embeddings),
        [image.tobytes() for image in images],
        make_sketches(np.stack(images)),
        labels or ["a"] * n,
        splits or ["train"] * n,
        near=near,
    )


def test_the_same_pixels_a_compressed_copy_and_a_crop_are_found():
    images = [photograph(seed) for seed in range(30)]
    images += [images[3], compressed(images[5]), cropped(images[7]), images[3]]
    torch.manual_seed(1)
    s = torch.randn(30, 8)
    s = torch.cat([s, s[3:4], s[5:6] + 0.2, s[7:8] + 0.05, s[3:4]])
    labels = [*("abc"[i % 3] for i in range(30)), "a", "c", "c", "b"]
    splits = ["train"] * 31 + ["test"] * 3
    found = groups(images, s, labels, splits, near=0.2)
    assert [(g.rows, g.exact, g.across_classes, g.across_splits) for g in found] == [
        ((3, 30, 33), True, True, True),
        ((5, 31), False, False, True),
        ((7, 32), False, True, True),
    ]
    assert found[0].difference == 0.0 < found[1].difference < 0.02 < found[2].difference
    without = groups(images, s, labels, splits, near=0.0)  # a crop needs the model's word
    assert [g.rows for g in without] == [(3, 30, 33), (5, 31)]


def test_near_but_different_and_similar_but_far_images_are_no_duplicates():
    images = [photograph(seed) for seed in range(20)]
    s = torch.randn(20, 8)
    s[1] = s[0] + 1e-4
    assert groups(images, s, near=1.0) == []
    images[1] = cropped(images[0])
    s[1] = -s[0]
    assert groups(images, s, near=0.5) == []


def test_images_of_a_dense_class_are_no_duplicates():
    """Only a hundredth of the nearest pairs may go by the weaker rule, whatever the model makes of crops."""
    base = photograph(0)
    images = [(base * 0.7 + photograph(seed) * 0.3).astype(np.uint8) for seed in range(1, 41)]
    few = make_sketches(np.stack(images[:2])), torch.tensor([0]), torch.tensor([1])
    assert float(sketch_difference(*few, side=16)) < 0.2  # alike, but not the same
    found = groups(images, torch.randn(40, 8) * 0.01 + 1, near=2.0)
    assert sum(len(g.rows) for g in found) <= 3


def test_chains_are_one_group_and_flat_images_only_match_themselves():
    flat = [np.full((32, 32, 3), grey, np.uint8) for grey in (10, 11, 12, 10)]
    assert [g.rows for g in groups(flat, torch.ones(4, 2), near=2.0)] == [(0, 3)]
    a = photograph(0)
    chain = [a, compressed(a, 90), compressed(a, 70), *(photograph(seed) for seed in range(5, 9))]
    assert [g.rows for g in groups(chain, torch.randn(7, 4))] == [(0, 1, 2)]


def test_small_sets_and_uneven_lists():
    assert groups([photograph(0)], torch.ones(1, 2)) == []
    assert [g.rows for g in groups([photograph(0)] * 2, torch.ones(2, 2))] == [(0, 1)]
    with pytest.raises(ValueError, match="2 images need as many checksums"):
        find_duplicates(Embeddings.certain(torch.ones(2, 2)), [b""], torch.zeros(2, 32, 32), [0, 0], [0, 0], near=0.1)


def test_the_difference_of_sketches_is_one_minus_their_correlation():
    images = np.stack([photograph(seed, 64) for seed in range(3)])
    small = images.reshape(3, 32, 2, 32, 2, 3).mean(axis=(2, 4, 5)).round()
    expected = 1 - np.corrcoef(small.reshape(3, -1))
    rows, columns = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
    found = sketch_difference(make_sketches(images), rows, columns)
    np.testing.assert_allclose(found.numpy(), expected[rows, columns], atol=0.01)

"""Batches: right composition, an epoch covers the images, everything a function of (seed, epoch)."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idml.data.sampling import class_batches, random_batches, random_stream

SIZES = st.lists(st.integers(1, 12), min_size=4, max_size=12)


def labels_of(sizes, seed=0):
    """Class c with sizes[c] images, in mixed order, with gaps in the class numbers."""
    labels = torch.arange(len(sizes)).mul(3).repeat_interleave(torch.tensor(sizes))
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]


def most_batches(groups, classes):
    """The most batches of distinct classes, by taking greedily from the classes with the most groups left."""
    left, batches = sorted(groups, reverse=True), 0
    while len(left) >= classes and left[classes - 1] > 0:
        left = sorted([g - 1 for g in left[:classes]] + left[classes:], reverse=True)
        batches += 1
    return batches


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5), st.integers(0, 5))
def test_random_batches_are_a_permutation_cut(n, batch_size, seed, epoch):
    if batch_size > n:
        return
    batches = random_batches(torch.zeros(n, dtype=torch.long), batch_size, seed=seed, epoch=epoch)
    assert [len(b) for b in batches] == [batch_size] * (n // batch_size)
    images = torch.cat(batches).tolist()
    assert len(set(images)) == len(images)
    assert set(images) <= set(range(n))


@given(SIZES, st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_class_batches_have_the_right_composition(sizes, per_class, classes, seed):
    labels = labels_of(sizes, seed)
    usable = [s for s in sizes if s > 1 or per_class == 1]
    batch_size = per_class * classes
    if len(usable) < classes or len(labels) < batch_size:
        return
    batches = class_batches(labels, batch_size, per_class, seed=seed, epoch=1)
    for batch in batches:
        in_class = Counter(labels[batch].tolist())
        assert list(in_class.values()) == [per_class] * classes
        times = Counter(batch.tolist())
        for image, count in times.items():  # repeated only as often as the class is too small
            size = int((labels == labels[image]).sum())
            assert count <= -(-per_class // size)
    groups = [-(-s // per_class) for s in usable]
    assert len(batches) == most_batches(groups, classes)


@given(SIZES, st.integers(1, 4), st.integers(1, 3))
def test_an_epoch_of_class_batches_covers_the_images(sizes, per_class, classes):
    labels = labels_of(sizes)
    usable = [s for s in sizes if s > 1 or per_class == 1]
    batch_size = per_class * classes
    if len(usable) < classes or len(labels) < batch_size:
        return
    batches = class_batches(labels, batch_size, per_class, seed=0, epoch=0)
    seen = set(torch.cat(batches).tolist())
    lone = {i for i, s in enumerate(labels.bincount()[labels].tolist()) if s == 1} if per_class > 1 else set()
    assert not seen & lone
    too_large = sum(max(0, s - len(batches) * per_class) for s in usable)
    missed = len(labels) - len(lone) - len(seen)
    assert missed < batch_size + too_large
    # no image a second time before all images of its class were seen
    for c in labels.unique().tolist():
        members = set((labels == c).nonzero().flatten().tolist())
        drawn = [i for i in torch.cat(batches).tolist() if i in members]
        assert len(set(drawn)) == min(len(members), len(drawn))


@given(st.integers(2, 6), st.integers(2, 8), st.integers(1, 4))
def test_equal_classes_that_divide_evenly_are_covered_exactly_once(groups, classes, per_class):
    labels = labels_of([groups * per_class] * classes)
    batches = class_batches(labels, per_class * classes, per_class, seed=3, epoch=0)
    assert sorted(torch.cat(batches).tolist()) == list(range(len(labels)))


def test_every_class_is_as_frequent_as_its_images_and_meets_every_other():
    labels = labels_of([8] * 12 + [16] * 6)
    together, count = torch.zeros(18, 18), torch.zeros(18)
    for epoch in range(60):
        for batch in class_batches(labels, 24, 4, seed=0, epoch=epoch):
            present = torch.bincount(labels[batch] // 3, minlength=18) > 0
            together += torch.outer(present.float(), present.float())
            count += present
    assert torch.equal(count, torch.tensor([2.0] * 12 + [4.0] * 6) * 60)
    off_diagonal = together[:12, :12][~torch.eye(12, dtype=torch.bool)]
    assert off_diagonal.min() > 0.5 * off_diagonal.mean()
    assert off_diagonal.max() < 1.6 * off_diagonal.mean()


def test_one_huge_class_is_in_every_batch_and_changes_from_epoch_to_epoch():
    labels = labels_of([500, 8, 8, 8])
    epochs = [class_batches(labels, 8, 4, seed=0, epoch=e) for e in range(30)]
    for batches in epochs:
        assert len(batches) == 6  # as many as the 3 × 2 groups of the others can fill
        assert all((labels[b] == 0).sum() == 4 for b in batches)
    seen = {i for batches in epochs for b in batches for i in b.tolist()}
    assert len(seen) > 24 + 6 * 4 * 10


def test_images_alone_in_their_class_are_left_out():
    labels = torch.tensor([5, 0, 0, 7, 1, 1, 2, 2])
    for epoch in range(5):
        assert sorted(torch.cat(class_batches(labels, 6, 2, seed=0, epoch=epoch)).tolist()) == [1, 2, 4, 5, 6, 7]
    one_each = class_batches(labels, 5, 1, seed=0, epoch=0)  # without pairs to make, they take part
    assert all({0, 3} <= set(batch.tolist()) for batch in one_each)


def test_small_classes_repeat_evenly():
    batch = class_batches(torch.arange(4).repeat_interleave(2), 8, 4, seed=0, epoch=0)[0]
    assert set(Counter(batch.tolist()).values()) == {2}


@pytest.mark.parametrize(
    "draw",
    [
        lambda seed, epoch: random_batches(torch.arange(40) // 4, 8, seed=seed, epoch=epoch),
        lambda seed, epoch: class_batches(torch.arange(40) // 4, 8, 2, seed=seed, epoch=epoch),
    ],
    ids=["random", "class"],
)
def test_batches_are_a_function_of_seed_and_epoch_alone(draw):
    def numbers(seed, epoch):
        return torch.stack(draw(seed, epoch))

    first = numbers(1, 2)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(numbers(1, 2), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(numbers(1, 3), first)
    assert not torch.equal(numbers(2, 2), first)
    assert not torch.equal(numbers(2, 1), first)


def test_streams_differ_in_purpose_and_numbers():
    keys = [("a",), ("b",), ("a", 0), ("a", 0, 0), ("a", 1, 0), ("a", 0, 1), ("a", 11), ("a", 1, 1), ("a", -1)]
    drawn = [float(torch.rand((), dtype=torch.float64, generator=random_stream(*key))) for key in keys]
    assert len(set(drawn)) == len(keys)
    assert drawn[2] == float(torch.rand((), dtype=torch.float64, generator=random_stream("a", torch.tensor(0))))
    with pytest.raises(TypeError):
        random_stream("a", 0.5)


def test_the_largest_data_set_is_sampled_whole():
    labels = torch.arange(59_551) % 11_318
    batches = class_batches(labels, 120, 4, seed=0, epoch=0)
    assert len(torch.cat(batches).unique()) > 59_551 - 120


@pytest.mark.parametrize(
    ("labels", "arguments", "message"),
    [
        ([], (4,), "no images"),
        ([0, 1, 1], (4,), "needs 4 images, but there are 3"),
        ([0, 1], (0,), "batch_size must be 1 or larger"),
        ([0, 0, 0, 0, 1, 1], (4, 3), "batch_size 4 must be a multiple of per_class 3"),
        ([0, 0, 0, 0, 1, 1], (4, 0), "multiple of per_class 0"),
        ([0, 0, 0, 0], (4, 2), "needs 2 classes, but there are 1: training compares classes, so it needs two or more"),
        ([0, 0, 0, 0, 1, 1, 1, 1], (8, 2), "but there are 2: choose a batch_size of 4 or less"),
        ([0, 0, 0, 1, 2], (4, 2), "there are 1 with two images or more, and 2 of one image, left out"),
        ([0, 0, -1, 1], (2, 2), "0 or larger"),
    ],
)
def test_what_cannot_fill_a_batch_is_said(labels, arguments, message):
    labels = torch.tensor(labels, dtype=torch.long)
    sample = class_batches if len(arguments) == 2 else random_batches
    with pytest.raises(ValueError, match=message):
        sample(labels, *arguments, seed=0, epoch=0)


def test_labels_must_be_integers():
    with pytest.raises(ValueError, match="1-D tensor of integers"):
        random_batches(torch.rand(5), 2, seed=0, epoch=0)

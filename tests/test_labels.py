import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idml import LabelSets
from idml.labels import pair_masks

SETS = st.lists(st.sets(st.integers(0, 12), min_size=1, max_size=6), min_size=1, max_size=9)


def by_python(a, b):
    return torch.tensor([[bool(set(x) & set(y)) for y in b] for x in a])


@given(SETS, SETS)
def test_matches_is_intersection(a, b):
    assert torch.equal(LabelSets.of(a).matches(LabelSets.of(b)), by_python(a, b))
    assert torch.equal(LabelSets.of(a).matches(), by_python(a, a))


@given(SETS)
def test_matching_is_symmetric_and_reflexive(a):
    m = LabelSets.of(a).matches()
    assert torch.equal(m, m.T)
    assert m.diagonal().all()


@given(SETS, st.integers(13, 40))
def test_in_classes_is_membership(a, classes):
    table = LabelSets.of(a).in_classes(classes)
    assert torch.equal(table, torch.tensor([[c in s for c in range(classes)] for s in a]))


@given(SETS, SETS)
def test_cat_index_and_tolist(a, b):
    joined = LabelSets.cat([LabelSets.of(a), LabelSets.of(b)])
    assert joined.tolist() == [sorted(s) for s in a + b]
    assert joined[torch.tensor([0, len(a)])].tolist() == [sorted(a[0]), sorted(b[0])]
    assert joined[-1].tolist() == [sorted(b[-1])]


def test_mixed_images_match_both_parents():
    labels = torch.tensor([0, 1, 2, 3])
    mixed = LabelSets.mixed(labels, labels[torch.tensor([1, 0, 2, 2])])
    expected = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(mixed.matches(LabelSets(labels)), torch.tensor(expected).bool())


def test_a_set_of_one_is_a_plain_label():
    labels = torch.tensor([3, 1, 3, 0])
    assert LabelSets.of([[int(x)] for x in labels]).tolist() == LabelSets(labels).tolist()
    assert torch.equal(LabelSets(labels.to(torch.int32)).matches(), LabelSets(labels).matches())


def test_pair_masks_leave_out_the_image_itself():
    positive, negative = pair_masks(LabelSets(torch.tensor([0, 0, 1])).matches())
    assert positive.nonzero().tolist() == [[0, 1], [1, 0]]
    assert negative.nonzero().tolist() == [[0, 2], [1, 2], [2, 0], [2, 1]]


def test_fast_for_240_against_11318_classes():
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(11318, (120,), generator=g)
    sets = LabelSets.cat([LabelSets(labels), LabelSets.mixed(labels, labels.flip(0))])
    classes = LabelSets(torch.arange(11318))
    assert torch.equal(sets.in_classes(11318), sets.matches(classes))
    mask = sets.in_classes(11318)
    own, copying = (min(_seconds(call) for _ in range(9)) for call in (lambda: sets.in_classes(11318), mask.clone))
    assert own < 60 * copying, f"{own * 1e3:.2f} ms, copying the result {copying * 1e3:.2f} ms"


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LabelSets(torch.tensor([0.0, 1.0])), "1-D tensor of integers"),
        (lambda: LabelSets(torch.tensor([True, False])), "1-D tensor of integers"),
        (lambda: LabelSets(torch.zeros(2, 2, dtype=torch.long)), "shape \\[2, 2\\]"),
        (lambda: LabelSets([0, 1]), "got list"),
        (lambda: LabelSets(torch.tensor([0, -1])), "0 or larger, got -1"),
        (lambda: LabelSets.of([[0], []]), "image 1 has no label"),
        (lambda: LabelSets.of([[0, -3]]), "0 or larger"),
        (lambda: LabelSets.mixed(torch.tensor([0]), torch.tensor([0, 1])), "differ in length: 1 and 2"),
        (lambda: LabelSets.cat([]), "empty"),
        (lambda: LabelSets(torch.tensor([0, 7])).in_classes(7), "label 7 is outside the 7 classes"),
        (
            lambda: LabelSets(torch.tensor([0])).matches(LabelSets(torch.tensor([0])).to("meta")),
            "on cpu and meta",
        ),
    ],
)
def test_wrong_labels(make, words):
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)

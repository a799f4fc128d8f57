import pytest
import torch

from idml import Embeddings
from idml.embeddings import unit_rows


def make(n=5, d=4):
    return Embeddings(torch.randn(n, d), torch.randn(n, d))


def test_semantic_is_kept_and_unit_is_normalised():
    s = 7 * torch.randn(5, 4)
    e = Embeddings(semantic=s, uncertainty=torch.zeros(5, 4))
    assert e.semantic is s
    torch.testing.assert_close(e.unit, torch.nn.functional.normalize(s))
    torch.testing.assert_close(e.level, torch.zeros(5))


def test_level_is_the_norm_of_raw_u():
    e = Embeddings(torch.randn(3, 2), torch.tensor([[3.0, 4.0], [0.0, 0.0], [-6.0, 8.0]]))
    torch.testing.assert_close(e.level, torch.tensor([5.0, 0.0, 10.0]))


def test_indexing_cat_and_len_agree_with_tensors():
    e = make()
    for index in (slice(1, 3), torch.tensor([4, 0]), [2, 2], torch.tensor([True, False, True, False, False])):
        assert torch.equal(e[index].semantic, e.semantic[index])
        assert torch.equal(e[index].uncertainty, e.uncertainty[index])
    assert torch.equal(e[3].semantic, e.semantic[3:4])
    assert torch.equal(e[-1].semantic, e.semantic[-1:])
    assert torch.equal(Embeddings.cat([e[:2], e[2:]]).uncertainty, e.uncertainty)
    assert len(list(e)) == len(e) == 5
    with pytest.raises(IndexError):
        e[5]


def test_to_casts_and_moves():
    e = make().to(torch.float64)
    assert e.semantic.dtype == e.uncertainty.dtype == torch.float64
    assert e.to("meta").semantic.device.type == "meta"


def test_half_precision_is_normalised_in_float32():
    e = make().to(torch.float16)
    assert e.unit.dtype == e.level.dtype == torch.float32
    torch.testing.assert_close(e.unit.norm(dim=1), torch.ones(5))


def test_unit_rows_gradient():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(unit_rows, (x,))
    y = x.detach().clone().requires_grad_()
    weight = torch.randn(4, 3, dtype=torch.float64)
    ours = torch.autograd.grad((unit_rows(x) * weight).sum(), x)[0]
    theirs = torch.autograd.grad((torch.nn.functional.normalize(y) * weight).sum(), y)[0]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-8, 1.0, 1e8, 1e18, 1e37])
def test_unit_rows_at_any_scale(scale):
    x = (torch.randn(4, 3) * scale).requires_grad_()
    unit = unit_rows(x)
    unit.sum().backward()
    assert torch.isfinite(unit).all()
    assert torch.isfinite(x.grad).all()
    if scale >= 1e-8:
        torch.testing.assert_close(unit.norm(dim=1), torch.ones(4))
    else:  # no direction
        assert not unit.any()
        assert not x.grad.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_is_named(bad):
    s = torch.randn(6, 3)
    s[4, 1] = bad
    with pytest.raises(ValueError, match=r"semantic embeddings hold NaN or infinity in 1 of 6 rows \(first: row 4\)"):
        Embeddings(s, torch.zeros(6, 3)).unit  # noqa: B018
    with pytest.raises(ValueError, match="uncertainty embeddings hold NaN"):
        Embeddings(torch.ones(6, 3), s).level  # noqa: B018


@pytest.mark.parametrize(
    ("semantic", "uncertainty", "words"),
    [
        (torch.zeros(3), torch.zeros(3), "semantic must be a floating-point tensor"),
        (torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2), "semantic must be a floating-point tensor"),
        ([[1.0]], torch.zeros(1, 1), "got list"),
        (torch.zeros(3, 2), torch.zeros(2, 2), "semantic has 3 rows but uncertainty has 2"),
        (torch.zeros(3, 2), torch.zeros(3, 2).double(), "float32 but uncertainty is torch.float64"),
        (torch.zeros(3, 2), torch.zeros(3, 2, device="meta"), "cpu but uncertainty is on meta"),
        (torch.zeros(3, 0), torch.zeros(3, 2), "at least one dimension"),
    ],
)
def test_wrong_parts(semantic, uncertainty, words):
    with pytest.raises(ValueError, match=words) as caught:
        Embeddings(semantic=semantic, uncertainty=uncertainty)
    assert "\n" not in str(caught.value)


def test_cat_of_different_sizes_and_of_nothing():
    with pytest.raises(ValueError, match="different sizes"):
        Embeddings.cat([make(d=3), make(d=4)])
    with pytest.raises(ValueError, match="empty"):
        Embeddings.cat([])

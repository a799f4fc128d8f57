"""Products in blocks against the whole."""

import math

import pytest
import torch

from idml.evaluation.distance_bounds import add_product


@pytest.mark.parametrize(("rows", "columns"), [(7, 9), (300, 1030), (256, 1024), (1, 2049)])
def test_blocks_make_the_whole_product(rows, columns):
    a, b, start = torch.randn(rows, 5), torch.randn(columns, 5), torch.randn(columns)
    out = torch.full((rows, columns), math.nan)
    assert add_product(start, a, b, -2.0, out) is out
    torch.testing.assert_close(out, start - 2 * a @ b.T)

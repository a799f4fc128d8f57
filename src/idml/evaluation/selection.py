"""The few lowest numbers of every row of a wide matrix.

Columns are put into groups. At least ``count`` numbers of a row are not above the count-th lowest of the groups'
minima, and all that are not above it lie in groups whose minimum is not: only these are looked at. numpy finds that
minimum several times faster than torch ranks columns.
"""

import math

import numpy as np
import torch
from torch import Tensor

_GROUPS = 8  # at least so many groups for each number that is looked for: few of them share one
_LARGEST = 32  # columns in a group


def lowest(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The ``count`` lowest of each row or some more: their columns, ascending, the numbers, and a bound of the rest.

    Lists that are shorter than the longest end in column 0 and ∞. What is left out is not below the bound [rows].

    >>> lowest(torch.tensor([[3.0, 1.0, 2.0, 1.0]]), 2)
    (tensor([[1, 3]]), tensor([[1., 1.]]), tensor([1.]))
    """
    size = min(_LARGEST, matrix.shape[1] // (_GROUPS * count))
    if size > 1 and matrix.device.type == "cpu":
        found = _by_groups(matrix, count, size)
        if found is not None:
            return found
    index = matrix.topk(count, dim=1, largest=False, sorted=False).indices.sort(dim=1).values
    values = matrix.gather(1, index)
    return index, values, values.amax(dim=1)


def _by_groups(matrix: Tensor, count: int, size: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """The same; None if a list would be long because many numbers are equal."""
    n, m = matrix.shape
    width = m // size
    whole = width * size
    minima = matrix[:, :whole].unflatten(1, (size, width)).amin(dim=1).numpy()  # column j is in group j mod width
    limit = np.partition(minima, count - 1, axis=1)[:, count - 1 : count].copy()
    line, group = np.nonzero(minima <= limit)
    if len(line) > 2 * count * n:
        return None
    numbers = matrix.numpy().reshape(-1)
    places = (line * m + group)[:, None] + np.arange(0, whole, width)
    places = places[numbers[places] <= limit[line]]
    line, column = np.nonzero(matrix[:, whole:].numpy() <= limit)
    places = np.sort(np.concatenate([places, line * m + column + whole]))
    line = places // m
    lengths = np.bincount(line, minlength=n)
    longest = int(lengths.max())
    if longest > 4 * count:
        return None
    at = line * longest + np.arange(len(line)) - np.repeat(lengths.cumsum() - lengths, lengths)
    index = np.zeros((n, longest), dtype=np.int64)
    index.reshape(-1)[at] = places - line * m
    values = np.full((n, longest), math.inf, dtype=minima.dtype)
    values.reshape(-1)[at] = numbers[places]
    return torch.from_numpy(index), torch.from_numpy(values), torch.from_numpy(limit[:, 0])

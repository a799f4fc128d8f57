"""Duplicate images: images with the same pixels, or nearly the same.

The model proposes candidates, and a comparison of small grey versions (*sketches*) decides. An image and one of its ten
nearest neighbours are near duplicates if their sketches agree, where c = 1 − correlation of the grey values:

    c of 32 × 32 ≤ 0.02                       compressed, scaled or brightened again, at any distance in the model
    c of 16 × 16 ≤ 0.2 and distance ≤ near    cropped slightly differently, or the next picture of a burst

Neither test is enough alone: a model puts all images of a class close together, and the sketches of different things on
a white background agree. ``near`` is the distance of slightly cropped copies in the model. If more than 1 % of all
images have a neighbour that near, the distance does not separate duplicates, and only the nearest 1 % count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.embeddings import Embeddings, unit_rows
from idml.evaluation.knn import nearest

_SAME, _SIMILAR = 0.02, 0.2  # largest c
_FINE, _COARSE = 32, 16
_NEAREST_SHARE = 0.01
_CANDIDATES = 10
_BLOCK = 1024  # images or pairs processed together


@dataclass(frozen=True)
class DuplicateGroup:
    """Rows that are duplicates of each other, directly or through other rows of the group.

    ``exact``: all have the same pixels. ``difference``: the largest c between linked rows.
    """

    rows: tuple[int, ...]
    exact: bool
    difference: float
    across_classes: bool
    across_splits: bool


def find_duplicates(
    embeddings: Embeddings,
    checksums: Sequence[bytes],
    sketches: Tensor,
    labels: Sequence[object],
    splits: Sequence[object],
    *,
    near: float,
) -> list[DuplicateGroup]:
    """Find groups of two or more duplicates among n images, in the order of their first rows.

    Args:
        embeddings: their unit semantic vectors are compared.
        checksums: of the pixels; images with equal checksums are the same.
        sketches: see `make_sketches`.
        labels: the classes.
        splits: the splits (train, test …).
        near: the distance of slightly cropped copies.
    """
    n = len(embeddings)
    if not n == len(checksums) == len(sketches) == len(labels) == len(splits):
        raise ValueError(f"{n} images need as many checksums, sketches, labels and splits")
    first: dict[bytes, int] = {}
    of = torch.tensor([first.setdefault(checksum, row) for row, checksum in enumerate(checksums)])
    alone = torch.tensor(sorted(first.values()))
    links = [torch.stack([torch.arange(n), of])]
    differences = torch.zeros(n)
    if len(alone) > 1:
        found = nearest(embeddings[alone].unit, _CANDIDATES)
        near = min(near, float(found.distances[:, 0].quantile(_NEAREST_SHARE)))
        i, place = (found.indices >= 0).nonzero().unbind(1)
        a, b = alone[i], alone[found.indices[i, place]]
        fine, coarse = sketch_difference(sketches, a, b), sketch_difference(sketches, a, b, side=_COARSE)
        linked = (fine <= _SAME) | ((coarse <= _SIMILAR) & (found.distances[i, place] <= near))
        links.append(torch.stack([a, b])[:, linked])
        differences = torch.cat([differences, fine[linked]])
    return _connect(torch.cat(links, dim=1), differences, checksums, labels, splits)


def sketch_difference(sketches: Tensor, a: Tensor, b: Tensor, *, side: int = _FINE) -> Tensor:
    """Compute c [m] = 1 − correlation of the sketches of rows ``a`` and ``b`` [m]; it is 1 for a uniform sketch."""

    def grey(rows: Tensor) -> Tensor:
        values = torch.nn.functional.adaptive_avg_pool2d(sketches[rows].unsqueeze(1).float(), side).flatten(1)
        return unit_rows(values - values.mean(dim=1, keepdim=True))

    pairs = zip(a.split(_BLOCK), b.split(_BLOCK), strict=True)
    return torch.cat([1 - (grey(x) * grey(y)).sum(dim=1) for x, y in pairs])


def make_sketches(images: NDArray[np.uint8]) -> Tensor:
    """Reduce images [n, side, side, 3] to grey values at 32 × 32, as uint8 [n, 32, 32].

    >>> make_sketches(np.full((1, 64, 64, 3), (0, 100, 200), np.uint8))[0, 0, :3]
    tensor([100, 100, 100], dtype=torch.uint8)
    """
    small = torch.empty(len(images), _FINE, _FINE, dtype=torch.uint8)
    for start in range(0, len(images), _BLOCK):
        part = torch.from_numpy(images[start : start + _BLOCK].astype(np.float32)).mean(dim=3).unsqueeze(1)
        grey = torch.nn.functional.adaptive_avg_pool2d(part, _FINE).squeeze(1)
        small[start : start + _BLOCK] = grey.round().clamp(0, 255).to(torch.uint8)
    return small


def _connect(
    links: Tensor, differences: Tensor, checksums: Sequence[bytes], labels: Sequence[object], splits: Sequence[object]
) -> list[DuplicateGroup]:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(checksums)
    pairs = coo_array((np.ones(links.shape[1], bool), (links[0].numpy(), links[1].numpy())), shape=(n, n))
    group = torch.from_numpy(connected_components(pairs, directed=False)[1].astype(np.int64))
    worst = torch.zeros(int(group.max()) + 1).scatter_reduce_(0, group[links[0]], differences, "amax")
    members: dict[int, list[int]] = {}
    for row, number in enumerate(group.tolist()):
        members.setdefault(number, []).append(row)
    return [
        DuplicateGroup(
            tuple(rows),
            len({checksums[row] for row in rows}) == 1,
            float(worst[number]),
            len({labels[row] for row in rows}) > 1,
            len({splits[row] for row in rows}) > 1,
        )
        for number, rows in members.items()
        if len(rows) > 1
    ]

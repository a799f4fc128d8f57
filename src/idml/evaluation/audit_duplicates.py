"""Images that are there twice: the same pixels, or nearly.

The model nominates and the eye decides. Of each image's ten nearest, one is nearly the same if the two *sketches* agree
(16 × 16 grey means, c = 1 − their correlation):

    c ≤ 0.02                       compressed, enlarged or brightened anew: whatever the model makes of it
    c ≤ 0.2 and distance ≤ near    a little more or less of the scene, or the next picture of a burst

``near`` is a distance of the model at hand: what it makes of slightly cropped copies. Neither would do alone: a model
puts images of one class close together, and sketches of different things on a white ground agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.embeddings import Embeddings, unit_rows
from idml.evaluation.neighbours import nearest

_SAME, _SIMILAR = 0.02, 0.2
_NOMINATED = 10
_SIDE = 16
_BLOCK = 1024  # images sketched together


@dataclass(frozen=True)
class DuplicateGroup:
    """Rows that are duplicates of each other, or hang together by duplicates.

    ``exact`` says that all have the same pixels, ``difference`` is the largest c among the links.
    """

    rows: tuple[int, ...]
    exact: bool
    difference: float
    across_classes: bool
    across_splits: bool


def duplicates(
    embeddings: Embeddings,
    checksums: Sequence[bytes],
    sketches: Tensor,
    labels: Sequence[object],
    splits: Sequence[object],
    *,
    near: float,
) -> list[DuplicateGroup]:
    """Groups of two or more images [n], in the order of their first rows.

    Args:
        embeddings: their unit semantic part is compared.
        checksums: of the pixels; equal ones are the same image.
        sketches: see `sketch`.
        labels: the classes.
        splits: the parts (train, test …).
        near: the distance within which images whose sketches only resemble each other are duplicates.
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
        found = nearest(embeddings[alone].unit, _NOMINATED)
        i, place = (found.indices >= 0).nonzero().unbind(1)
        j = found.indices[i, place]
        a, b = alone[i], alone[j]
        c = torch.cat([difference(sketches, x, y) for x, y in zip(a.split(_BLOCK), b.split(_BLOCK), strict=True)])
        linked = (c <= _SAME) | ((c <= _SIMILAR) & (found.distances[i, place] <= near))
        links.append(torch.stack([a, b])[:, linked])
        differences = torch.cat([differences, c[linked]])
    return _groups(torch.cat(links, dim=1), differences, checksums, labels, splits)


def difference(sketches: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """c = 1 − the correlation of the sketches of rows ``a`` and ``b``, in 0 … 2."""
    return (1 - (sketches[a] * sketches[b]).sum(dim=1)).clamp(0, 2)


def sketch(images: NDArray[np.uint8]) -> Tensor:
    """16 × 16 grey means of each image [n, side, side, 3], less their mean, of length 1 [n, 256]; a flat one is 0.

    >>> sketch(np.zeros((1, 32, 32, 3), np.uint8)).abs().sum()
    tensor(0.)
    """
    parts = []
    for start in range(0, len(images), _BLOCK):
        grey = torch.from_numpy(images[start : start + _BLOCK]).float().mean(dim=3, keepdim=True).permute(0, 3, 1, 2)
        small = torch.nn.functional.interpolate(grey, (_SIDE, _SIDE), mode="area").flatten(1)
        parts.append(unit_rows(small - small.mean(dim=1, keepdim=True)))
    return torch.cat(parts)


def _groups(
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

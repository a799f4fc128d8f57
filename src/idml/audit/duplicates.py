"""Images that are there twice: the same pixels, or nearly.

The model nominates and the eye decides. Of each image's ten nearest, one is nearly the same if their *sketches* agree,
c = 1 − correlation of their grey values:

    c of 32 × 32 ≤ 0.02                       compressed, scaled or brightened anew, whatever the model makes of it
    c of 16 × 16 ≤ 0.2 and distance ≤ near    a little more or less of the scene, or the next picture of a burst

Neither would do alone: a model puts images of one class close together, and sketches of different things on a white
ground agree. ``near`` is what the model makes of slightly cropped copies; where more than a hundredth of all images
have a neighbour as near as that, it tells nothing, and only that hundredth counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.embeddings import Embeddings, unit_rows
from idml.evaluation.knn import nearest

_SAME, _SIMILAR = 0.02, 0.2  # c
_FINE, _COARSE = 32, 16
_OUTSTANDING = 0.01
_NOMINATED = 10
_BLOCK = 1024  # images, or pairs, looked at together


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
        found = nearest(embeddings[alone].unit, _NOMINATED)
        near = min(near, float(found.distances[:, 0].quantile(_OUTSTANDING)))
        i, place = (found.indices >= 0).nonzero().unbind(1)
        a, b = alone[i], alone[found.indices[i, place]]
        fine, coarse = difference(sketches, a, b), difference(sketches, a, b, side=_COARSE)
        linked = (fine <= _SAME) | ((coarse <= _SIMILAR) & (found.distances[i, place] <= near))
        links.append(torch.stack([a, b])[:, linked])
        differences = torch.cat([differences, fine[linked]])
    return _groups(torch.cat(links, dim=1), differences, checksums, labels, splits)


def difference(sketches: Tensor, a: Tensor, b: Tensor, *, side: int = _FINE) -> Tensor:
    """c [m] = 1 − the correlation of the sketches of rows ``a`` and ``b`` [m]; a flat one has 1 with all others."""

    def grey(rows: Tensor) -> Tensor:
        values = torch.nn.functional.adaptive_avg_pool2d(sketches[rows].unsqueeze(1).float(), side).flatten(1)
        return unit_rows(values - values.mean(dim=1, keepdim=True))

    pairs = zip(a.split(_BLOCK), b.split(_BLOCK), strict=True)
    return torch.cat([1 - (grey(x) * grey(y)).sum(dim=1) for x, y in pairs])


def sketch(images: NDArray[np.uint8]) -> Tensor:
    """The grey values of each image [n, side, side, 3] at 32 × 32, as uint8 [n, 32, 32].

    >>> sketch(np.full((1, 64, 64, 3), (0, 100, 200), np.uint8))[0, 0, :3]
    tensor([100, 100, 100], dtype=torch.uint8)
    """
    small = torch.empty(len(images), _FINE, _FINE, dtype=torch.uint8)
    for start in range(0, len(images), _BLOCK):
        part = torch.from_numpy(images[start : start + _BLOCK].astype(np.float32)).mean(dim=3).unsqueeze(1)
        grey = torch.nn.functional.adaptive_avg_pool2d(part, _FINE).squeeze(1)
        small[start : start + _BLOCK] = grey.round().clamp(0, 255).to(torch.uint8)
    return small


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

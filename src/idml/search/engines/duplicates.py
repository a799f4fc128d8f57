"""Groups of items that are, or look, the same."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.search.engines.exact import Side, squared

_BLOCK = 2048  # rows against rows at a time: 16 MB of products


class Groups:
    """Rows that belong together: ``group[row]`` is equal for those that do."""

    def __init__(self, rows: int) -> None:
        self.group: NDArray[np.int64] = np.arange(rows)

    def join(self, i: NDArray[np.int64], j: NDArray[np.int64]) -> None:
        """Put each row i and its row j, and all that hang together with them, into one group."""
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        i, j = self.group[i], self.group[j]
        if np.any(i != j):
            n = len(self.group)
            labels = connected_components(coo_array((np.ones(len(i), bool), (i, j)), shape=(n, n)), directed=False)[1]
            self.group = labels[self.group].astype(np.int64)

    def apart(self, i: NDArray[np.int64], j: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these pairs are not in one group yet."""
        different: NDArray[np.bool_] = self.group[i] != self.group[j]
        return different


def duplicate_rows(items: Side, checksums: Sequence[str], threshold: float) -> list[list[int]]:
    """Groups of two or more rows, linked by equal checksums or by α = ‖a − b‖ < threshold; dead rows are in none.

    A chain of links makes one group, so its ends may lie further apart than the threshold. Groups come in the order of
    their first rows. Only pairs that the product's rounding leaves open are measured.
    """
    live = np.flatnonzero(np.isfinite(items.s_squares))
    groups = Groups(len(items.s))
    first: dict[str, int] = {}
    twins = [(first.setdefault(checksums[row], row), row) for row in live.tolist()]
    if twins:
        groups.join(*np.array(twins).T)
    for a in range(0, len(items.s), _BLOCK):
        for b in range(a, len(items.s), _BLOCK):
            _link(groups, items, slice(a, a + _BLOCK), slice(b, b + _BLOCK), threshold)
    members: defaultdict[int, list[int]] = defaultdict(list)
    for row in live.tolist():
        members[int(groups.group[row])].append(row)
    return [rows for rows in members.values() if len(rows) > 1]


def _link(groups: Groups, items: Side, a: slice, b: slice, threshold: float) -> None:
    """Join the near pairs of two blocks of rows."""
    lows = torch.from_numpy(items.s[a] @ items.s[b].T)  # lower bounds of α²
    torch.add(items.s_low[a].unsqueeze(1) + items.s_low[b], lows, alpha=-2, out=lows)
    limit = float(np.nextafter(np.float32(threshold**2), np.float32(np.inf)))
    pairs = (lows <= limit).nonzero()
    if not len(pairs):
        return
    low = lows[pairs[:, 0], pairs[:, 1]].double().numpy()
    i, j = (pairs[:, 0] + a.start).numpy(), (pairs[:, 1] + b.start).numpy()
    # the bounds are at most this much too low: twice c·(‖a‖² + ‖b‖²), and rounding
    width = 2.1 * (items.s.shape[1] + 32) * 2.0**-24 * (items.s_squares[i] + items.s_squares[j]) + 1e-29
    sure = low + width < threshold**2
    groups.join(i[sure], j[sure])
    left = ~sure
    left[left] = groups.apart(i[left], j[left])
    i, j = i[left], j[left]
    near = _alpha_squared(items, i, j).numpy() < threshold**2
    groups.join(i[near], j[near])


def _alpha_squared(items: Side, i: NDArray[np.int64], j: NDArray[np.int64]) -> Tensor:
    return squared(items.s, items.s, torch.from_numpy(i), torch.from_numpy(j), -1)

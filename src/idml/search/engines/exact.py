"""Exact search over rows that lie in memory-mapped files: one matrix product, and a few pairs measured again.

For unit vectors a of queries and b of items, one float32 product gives a lower bound of every squared distance:

    α² = ‖a − b‖² ≥ (1 − c)·(‖a‖² + ‖b‖²) − 2a·b,   c = (dimensions + 32)·2⁻²⁴ covers all rounding

and likewise an upper bound of β² = ‖u + v‖². The metric D = α·exp(−(β + γ)/(τα)) grows with α and falls with β, so
both give a lower bound of log D. The k and a few more rows with the lowest bounds are measured again in float64. If the
k-th of these lies below all other bounds no other row can be among the k; if not (near ties, duplicates), every row
whose bound is not above it is measured. So the answer does not depend on the product's rounding.

Order: by distance, then by row. Distances whose squares (of the metric: α² and β²) agree to 2⁻⁴⁰ are equal.

The products are numpy's: they are float32 whatever torch is told about precision.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.metric import IntrospectiveMetric

Rows = NDArray[np.float32]
_CHUNK = 1 << 22  # pairs bounded at a time: 16 MB, which stay near the processor
_QUERIES = 256  # queries at a time: more would not make the product faster
_LIST = 1 << 20  # pairs listed at a time
_EXACT = 1 << 18  # numbers subtracted at a time: they stay in the cache
_SHARE = 1 << 21  # numbers that are worth a thread: 8 MB
_DOTS = getattr(np, "vecdot", np.matmul)  # numpy 1 has none
_FLOOR = 1e-30  # covers products too small for float32
LARGEST = 1e15  # squares of larger numbers leave float32


@dataclass(frozen=True, eq=False)
class Side:
    """Queries or items: vectors s and u (of no dimensions where there is no metric), with their squared lengths [n].

    ∞ in ``s_squares`` marks a row that must not be found.
    """

    s: Rows
    s_squares: NDArray[np.float64]
    u: Rows
    u_squares: NDArray[np.float64]

    @classmethod
    def of(cls, s: Rows, u: Rows) -> "Side":
        """Rows with their lengths."""
        return cls(s, squares(s), u, squares(u))

    @cached_property
    def s_low(self) -> Tensor:
        """(1 − c)·‖s‖² − a little, in float32."""
        c = (self.s.shape[1] + 32) * 2.0**-24
        return torch.from_numpy(self.s_squares * (1 - c) - _FLOOR).float()

    @cached_property
    def u_high(self) -> Tensor:
        """(1 + c)·‖u‖² + a little, in float32."""
        c = (self.u.shape[1] + 32) * 2.0**-24
        return torch.from_numpy(self.u_squares * (1 + c) + _FLOOR).float()


def squares(x: Rows) -> NDArray[np.float64]:
    """The squared lengths of rows."""
    wide = x.astype(np.float64)
    out: NDArray[np.float64] = np.einsum("ij,ij->i", wide, wide)
    return out


class ExactSearch:
    """A search of some queries, which have u if there is a metric, among items."""

    def __init__(self, queries: Side, items: Side, metric: IntrospectiveMetric | None) -> None:
        self.queries, self.items, self.metric = queries, items, metric
        size = min(len(queries.s), _QUERIES) * len(items.s)
        self._rooms = [np.empty(min(size, _CHUNK), np.float32) for _ in range(1 if metric is None else 2)]

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Rows and distances [n, min(k, items)] of the k nearest items of every query."""
        k = min(k, int(np.isfinite(self.items.s_squares).sum()))
        n = len(self.queries.s)
        rows, keys = torch.empty(n, k, dtype=torch.long), torch.empty(n, k, dtype=torch.float64)
        for first in range(0, n if k else 0, _QUERIES):
            part = torch.arange(first, min(first + _QUERIES, n))
            rows[part], keys[part], unsure = self._part(part, k)
            for some in unsure.split(max(1, _LIST // len(self.items.s))) if len(unsure) else ():
                rows[some], keys[some] = self._measured(some, keys[some, -1], k)
        return rows, (keys.sqrt() if self.metric is None else keys.exp()).float()

    def _part(self, part: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and keys [r, k] of some queries, and which of them might be wrong."""
        longer = k + max(8, k // 8)
        lows, rows = torch.empty(len(part), 0), torch.empty(len(part), 0, dtype=torch.long)
        for first, bounds in self._blocks(part):
            low, row = bounds.topk(min(longer, bounds.shape[1]), dim=1, largest=False, sorted=False)
            lows, rows = torch.cat([lows, low], dim=1), torch.cat([rows, row + first], dim=1)
            if lows.shape[1] > longer:
                lows, place = lows.topk(longer, dim=1, largest=False, sorted=False)
                rows = rows.gather(1, place)
        rows, order = rows.sort(dim=1)
        lows = lows.gather(1, order)
        keys = self._keys(part.repeat_interleave(rows.shape[1]), rows.flatten()).view(rows.shape)
        keys = keys.masked_fill(lows == math.inf, math.inf)
        keys, order = keys.sort(dim=1, stable=True)
        rows, keys = rows.gather(1, order)[:, :k], keys[:, :k]
        if longer >= len(self.items.s):  # all were measured
            return rows, keys, part[:0]
        return rows, keys, part[lows.amax(dim=1) <= self._limits(part, keys[:, -1])]

    def _measured(self, some: Tensor, last: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The first k by (key, row), all rows being measured whose bound is not above the ``last`` key."""
        limits = self._limits(some, last).unsqueeze(1)
        pairs = [(bounds <= limits).nonzero() + torch.tensor([0, first]) for first, bounds in self._blocks(some)]
        line, row = torch.cat(pairs).unbind(1)
        key = self._keys(some[line], row)
        order = torch.from_numpy(np.lexsort([row, key, line]))  # by the last first
        begin = torch.searchsorted(line[order], torch.arange(len(some)))
        chosen = order[begin.unsqueeze(1) + torch.arange(k)]
        return row[chosen], key[chosen]

    def _limits(self, part: Tensor, keys: Tensor) -> Tensor:
        """The bounds, as `_blocks` gives them, up to which a row may have a key as low as these [r]."""
        if self.metric is None:
            keys = keys - self.queries.s_low[part]
        return torch.nextafter(keys.float(), torch.tensor(math.inf))  # rounded up

    def _blocks(self, part: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The first row of a block of items, and lower bounds [r, block] of its keys: of log D, or of α² − ‖a‖².

        The next block's bounds are written over them.
        """
        step, count = len(self._rooms[0]) // len(part), len(self.items.s)
        own = self.queries.s_low[part].unsqueeze(1)
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            gap = self._product(self._rooms[0], self.queries.s[part.numpy()], self.items.s[rows])
            torch.add(self.items.s_low[rows], gap, alpha=-2, out=gap)
            if self.metric is not None:
                spread = self._product(self._rooms[1], self.queries.u[part.numpy()], self.items.u[rows])
                torch.add(self.items.u_high[rows], spread, alpha=2, out=spread)
                for i in range(0, len(part), lines := max(1, (1 << 18) // step)):
                    some = slice(i, i + lines)
                    plus = self.queries.u_high[part[some]].unsqueeze(1)
                    self._soften(gap[some].add_(own[some]), spread[some].add_(plus), self.metric)
            yield first, gap

    @staticmethod
    def _product(room: Rows, a: Rows, b: Rows) -> Tensor:
        out = room[: len(a) * len(b)].reshape(len(a), len(b))
        if len(a) < 4:
            _dots(a, b, out)
        else:
            np.matmul(a, b.T, out=out)
        return torch.from_numpy(out)

    @staticmethod
    def _soften(gap: Tensor, spread: Tensor, metric: IntrospectiveMetric) -> None:
        """log D from below, in place of α² from below, given β² from above; 1e-6 and 1e-5 cover rounding."""
        share = (1 + 1e-6) / metric.tau
        alpha, beta = gap.clamp_min_(0.0).sqrt_(), spread.clamp_min_(0.0).sqrt_()
        x = beta.mul_(share).add_(share * metric.gamma).clamp_min_(_FLOOR).div_(alpha)
        alpha.log_().sub_(1e-5).sub_(x)

    def _keys(self, i: Tensor, j: Tensor) -> Tensor:
        """What the order goes by, for pairs of a query i and a row j: α², or log D = log α − (β + γ)/(τα)."""
        queries, items = self.queries, self.items
        square = squared(queries.s, items.s, i, j, -1)
        if self.metric is None:
            return square
        alpha, beta = square.sqrt(), squared(queries.u, items.u, i, j, +1).sqrt()
        key = alpha.log() - (beta + self.metric.gamma) / (self.metric.tau * alpha)
        return key.masked_fill_(alpha == 0, -math.inf)  # identical images: D = 0


def _dots(a: Rows, b: Rows, out: Rows) -> None:
    """a·bᵀ of few rows a: it takes as long as b takes to come from memory, so a product of matrices would be slower.

    Parts of b are for threads of our own. Those of a BLAS wait busily when they are done, in the way of torch's.
    """
    threads = max(1, min(torch.get_num_threads(), b.size // _SHARE))

    def part(n: int) -> None:
        rows = slice(len(b) * n // threads, len(b) * (n + 1) // threads)
        for line, row in zip(out, a, strict=True):
            _DOTS(b[rows], row, out=line[rows])

    if threads == 1:
        part(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(part, range(threads)))


def squared(a: Rows, b: Rows, i: Tensor, j: Tensor, sign: int) -> Tensor:
    """‖aᵢ − bⱼ‖² (sign −1) or ‖aᵢ + bⱼ‖² (sign +1) of pairs, in float64, rounded to 40 bits."""
    out = torch.empty(len(i), dtype=torch.float64)
    step = max(1, _EXACT // max(1, a.shape[1]))
    for n in range(0, len(i), step):
        left, right = (torch.from_numpy(x[k[n : n + step].numpy()]) for x, k in ((a, i), (b, j)))
        torch.sum(left.double().add_(right, alpha=sign).square_(), dim=1, out=out[n : n + step])
    mantissa, exponent = torch.frexp(out)
    return torch.ldexp((mantissa * 2.0**40).round_().mul_(2.0**-40), exponent)

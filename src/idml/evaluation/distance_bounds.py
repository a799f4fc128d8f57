"""The kernel of exact search: cheap bounds of the distances of all pairs, exact keys of a few.

Evaluation and the search of galleries share it: `Pairs` is for all pairs of two sets of embeddings (`evaluation.knn`),
`ExactSearch` for a few queries against the stored rows of a gallery, some of which may be removed (`search.engines`).

The key of a pair is α², or for the introspective metric log D² = log α² − 2(β + γ)/(τα). A product in float32
gives a *lower bound* of every key, from d̃² − E ≤ d², where E covers all rounding:

    d² = ‖a‖² + ‖b‖² − 2a·b,   E = c·(‖a‖² + ‖b‖²),   c = (dimensions + 32)·2⁻²⁴

The exact key comes from differences, Σ(a − b)², in float64. Squares that agree to 2⁻⁴⁰ count as equal, so that equal
rows tie on every machine and with every chunk size.
"""

import math
import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from idml.metric import IntrospectiveMetric

_EXACT = 1 << 18  # numbers subtracted at a time: they stay in the cache
_PRODUCT = 1 << 22  # pairs multiplied in float64 at a time
_BLOCK = 1024  # rows made ready at a time
_FLOOR = 1e-30  # covers products too small for float32
LOG_ERROR = 2e-5  # of a bound of log D², by rounding


def exact_squares(a: Tensor, b: Tensor, rows: Tensor, index: Tensor, sign: int, scale: float = 1.0) -> Tensor:
    """‖a − b‖² (sign −1) or ‖a + b‖² (sign +1) of rows of a and listed rows of b [r, l], in float64.

    They come from differences or sums of the rows times ``scale``, and are rounded to 40 bits.
    """
    out = torch.empty(index.shape, dtype=torch.float64, device=index.device)
    size = b.shape[1]
    width = max(1, min(index.shape[1], _EXACT // max(1, size)))
    step = max(1, _EXACT // max(1, size * width))
    taken = b.new_empty(step * width, size)
    gaps = torch.empty_like(taken, dtype=torch.float64)
    for i in range(0, len(rows), step):
        own = a.index_select(0, rows[i : i + step]).double().mul_(scale).unsqueeze(1)
        for j in range(0, index.shape[1], width):
            part = index[i : i + step, j : j + width]
            torch.index_select(b, 0, part.flatten(), out=taken[: part.numel()])
            gap = gaps[: part.numel()].copy_(taken[: part.numel()])
            if scale != 1.0:
                gap *= scale
            gap = gap.view(*part.shape, size).add_(own, alpha=sign)
            torch.sum(gap.square_(), dim=2, out=out[i : i + step, j : j + width])
    mantissa, exponent = torch.frexp(out)
    return torch.ldexp((mantissa * 2.0**40).round_().mul_(2.0**-40), exponent)


def bound_log_squares(gap: Tensor, spread: Tensor, metric: IntrospectiveMetric, scale: float = 1.0) -> None:
    """Write a lower bound of log D² over ``gap``, which is α² or less; ``spread`` is β² or more, times scale².

    Rounding makes the bound at most `LOG_ERROR` too large.
    """
    share = 2 * (1 + 1e-6) / metric.tau  # the 1e-6 covers rounding
    alpha, beta = gap.clamp_min_(0.0), spread.clamp_min_(_FLOOR)
    x = beta.div_(alpha).sqrt_().mul_(share / scale)
    if metric.gamma:
        x += alpha.rsqrt().mul_(share * metric.gamma)
    alpha.log_().sub_(x)


def exact_keys(square: Tensor, other: Tensor, metric: IntrospectiveMetric, scale: float = 1.0) -> Tensor:
    """log D² from α² and β², the latter times scale²; −∞ for identical images, whose D is 0."""
    alpha, beta = square.sqrt(), other.sqrt() / scale
    key = square.log() - 2 * (beta + metric.gamma) / (metric.tau * alpha)
    return key.masked_fill_(alpha == 0, -math.inf)


class Squares:
    """‖a − b‖² (sign −1, bounded from below) or ‖a + b‖² (sign +1, bounded from above) of all pairs."""

    def __init__(self, a: Tensor, b: Tensor, sign: int) -> None:
        self.a, self.b, self.sign = a, b, sign
        self.dtype = torch.promote_types(a.dtype, b.dtype)
        largest = max((abs(float(v)) for x in (a, b) if x.numel() for v in torch.aminmax(x)), default=0.0)
        self.scale = 1.0 if 2.0**-30 < largest < 2.0**30 or largest == 0 else 2.0 ** -math.frexp(largest)[1]
        self.c = (a.shape[1] + 32) * 2.0**-24
        mean = b.new_zeros(b.shape[1], dtype=torch.float64)
        spread = 0.0
        for part in b.split(_BLOCK):
            rows = part.double() * (self.scale / math.sqrt(len(b)))
            mean += rows.sum(0) / math.sqrt(len(b))
            spread += float(rows.square_().sum())
        # far from the origin, a shift makes E small; elsewhere the rows serve as they are, without a copy
        self.shift = mean if sign < 0 and float(mean.square().sum()) > 0.5 * spread else None
        self.low = b
        if self._copies(b):
            self.low = torch.empty_like(b, dtype=torch.float32)
            for to, part in zip(self.low.split(_BLOCK), b.split(_BLOCK), strict=True):
                to.copy_(self._shifted(part))
        self.lengths = self.low.new_empty(len(b))
        for to, part in zip(self.lengths.split(_BLOCK), self.low.split(_BLOCK), strict=True):
            to.copy_(part.double().square_().sum(1).mul_(1 + sign * self.c))
        self.longest = float(self.lengths.max()) / (1 - self.c)
        self.room = threading.local()

    def _copies(self, x: Tensor) -> bool:
        return self.shift is not None or self.scale != 1.0 or x.dtype != torch.float32

    def _shifted(self, x: Tensor) -> Tensor:
        x = x.double() * self.scale
        return x if self.shift is None else x - self.shift

    def bound(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds [r, m], up to a constant [r] of each row. A thread's next call writes over them: pages cost time."""
        a = self.a[rows]
        a = self._shifted(a).float() if self._copies(a) else a
        if len(getattr(self.room, "rows", ())) < len(rows):
            self.room.rows = a.new_empty(len(rows), len(self.low))
        matrix = add_product(self.lengths, a, self.low, 2.0 * self.sign, self.room.rows[: len(rows)])
        own = a.double().square_().sum(1) * (1 + self.sign * self.c) + self.sign * _FLOOR
        return matrix, own.float()

    def width(self, rows: Tensor) -> Tensor:
        """At least 2E: how far above its lower bound the square of a pair with any gallery row may lie [r]."""
        own = self._shifted(self.a[rows]).square_().sum(1)
        return (own + self.longest).mul_(2 * self.c).add_(4 * _FLOOR)

    def product(self, rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """The squares of listed pairs [r, l] from float64 products, and a bound of their error."""
        square, error = (torch.empty(index.shape, dtype=torch.float64, device=rows.device) for _ in range(2))
        step = max(1, _PRODUCT // len(self.b))
        for i in range(0, len(rows), step):
            a, listed = self._shifted(self.a[rows[i : i + step]]), index[i : i + step]
            own, dots, lengths = a.square().sum(1, keepdim=True), [], []
            for part in self.b.split(_BLOCK):
                b = self._shifted(part)
                dots.append(a @ b.T)
                lengths.append(b.square_().sum(1))
            sizes = own + torch.cat(lengths)[listed]
            torch.add(sizes, torch.cat(dots, dim=1).gather(1, listed), alpha=2.0 * self.sign, out=square[i : i + step])
            torch.mul(sizes, (a.shape[1] + 32) * 2.0**-53 + 2.0**-39, out=error[i : i + step])
        return square.clamp_min_(0.0), error

    def exact(self, rows: Tensor, index: Tensor) -> Tensor:
        """The squares of listed pairs [r, l], from differences or sums in float64, rounded to 40 bits."""
        return exact_squares(self.a, self.b, rows, index, self.sign, self.scale)


class Pairs:
    """Queries a [n, d] and a gallery b [m, d], with their uncertainties u and v where the introspective metric counts.

    ``rows`` below are queries, ``index`` [r, l] lists gallery rows for each of them.
    """

    def __init__(self, a: Tensor, b: Tensor, u: Tensor, v: Tensor, metric: IntrospectiveMetric | None) -> None:
        self.alpha, self.gallery, self.metric = Squares(a, b, -1), len(b), metric
        self.beta = None if metric is None else Squares(*_padded(u, v), +1)

    def bounds(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Lower bounds of the keys [r, m], up to a constant [r] of each row."""
        gap, own = self.alpha.bound(rows)
        if self.metric is None or self.beta is None:
            return gap, own.double()
        spread, plus = self.beta.bound(rows)
        for i in range(0, len(rows), step := max(1, (1 << 18) // self.gallery)):
            block = slice(i, i + step)
            alpha, beta = gap[block].add_(own[block, None]), spread[block].add_(plus[block, None])
            bound_log_squares(alpha, beta, self.metric, self.beta.scale)
        return gap, torch.full_like(own, -LOG_ERROR, dtype=torch.float64)

    def keys(self, rows: Tensor, index: Tensor) -> Tensor:
        """The exact keys of listed pairs [r, l], in float64."""
        return self._key(self.alpha.exact(rows, index), None if self.beta is None else self.beta.exact(rows, index))

    def _key(self, square: Tensor, other: Tensor | None) -> Tensor:
        if self.metric is None or self.beta is None or other is None:
            return square
        return exact_keys(square, other, self.metric, self.beta.scale)

    def distances(self, keys: Tensor) -> Tensor:
        """α or D, in the embeddings' own precision."""
        distances = keys.sqrt() / self.alpha.scale if self.metric is None else (0.5 * keys).exp()
        return distances.to(self.alpha.dtype)

    def order_keys(self, rows: Tensor, index: Tensor, lower: Tensor) -> Tensor | None:
        """Upper bounds of the keys [r, l] in the keys' order, from lower bounds; None if too much has to be measured.

        A key lies in [b, b + 2E]. Where this interval meets no other, b + 2E has the key's place; the rest is measured.
        """
        if self.beta is not None:
            return None
        width = self.alpha.width(rows).unsqueeze(1)
        ordered, order = lower.sort(dim=1)
        meets = ordered.diff(dim=1) <= width  # ∞ − ∞ is NaN and meets nothing
        meets = torch.nn.functional.pad(meets, (1, 0)) | torch.nn.functional.pad(meets, (0, 1))
        line, place = meets.nonzero().unbind(1)
        if len(line) > lower.numel() // 4:
            return None
        key, column = lower + width, order[line, place]
        key[line, column] = self.distinct(rows[line], index[line, column])
        return key

    def long_keys(self, rows: Tensor, index: Tensor) -> Tensor:
        """Keys of long lists [r, l]: from float64 products, and exact wherever these leave the order open.

        A key lies between those of (α² − e, β² + e) and (α² + e, β² − e). Where this interval is wider than usual, or
        α² hardly larger than e, it is measured; so is whatever then is nearer to the next one than two such intervals,
        until none is left.
        """
        square, e = self.alpha.product(rows, index)
        other = f = None
        if self.beta is not None:
            other, f = self.beta.product(rows, index)
        key = self._key(square, other)
        lower, upper = (
            self._key(
                (square + t * e).clamp_min_(0),
                None if other is None or f is None else (other - t * f).clamp_min_(0),
            )
            for t in (-1, 1)
        )
        gap = torch.where(upper > lower, upper - lower, 0.0)  # 0 also where both are −∞
        usual = 2 * gap.median(dim=1, keepdim=True).values
        usual = usual.masked_fill(usual == math.inf, 0.0)
        todo = (gap > usual) | (square < 2.0**18 * e)
        known = torch.zeros_like(todo)
        while True:
            line, place = todo.nonzero().unbind(1)
            key[line, place] = self.distinct(rows[line], index[line, place])
            known |= todo
            ordered, order = key.sort(dim=1)
            close = ordered.diff(dim=1) <= 2 * usual
            close = torch.nn.functional.pad(close, (1, 0)) | torch.nn.functional.pad(close, (0, 1))
            todo = torch.zeros_like(close).scatter_(1, order, close) & ~known
            if not todo.any():
                return key

    def distinct(self, i: Tensor, j: Tensor) -> Tensor:
        """The exact keys of pairs of a query i and a gallery row j; of many pairs, equal gallery rows measured once."""
        if len(i) < self.gallery:  # finding equal rows would cost more
            return self.keys(i, j.unsqueeze(1)).squeeze(1)
        pair, back = (i * self.gallery + self._twin[j]).unique(return_inverse=True)
        return self.keys(pair // self.gallery, (pair % self.gallery).unsqueeze(1)).squeeze(1)[back]

    @cached_property
    def _twin(self) -> Tensor:
        """For each gallery row, the first row equal to it."""
        parts = [self.alpha.b] if self.beta is None else [self.alpha.b, self.beta.b]
        marks = torch.zeros(self.gallery, dtype=torch.float64, device=self.alpha.b.device)
        own = torch.arange(self.gallery, device=marks.device)
        for x in parts:  # equal rows have equal marks
            weights = torch.arange(1, x.shape[1] + 1, device=x.device).double().sqrt()
            for some in own.split(_BLOCK):
                marks[some] += (x[some].double() * weights).sum(1)
        group = marks.unique(return_inverse=True)[1]
        twin = torch.full_like(own, self.gallery).scatter_reduce(0, group, own, "amin")[group]
        for some in own.split(_BLOCK):
            equal = torch.stack([(x[some] == x[twin[some]]).all(1) for x in parts]).all(0)
            twin[some] = torch.where(equal, twin[some], some)
        return twin


def _padded(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Certain embeddings, u = 0 of no dimensions, brought to the other side's size."""
    size = max(u.shape[1], v.shape[1])
    u, v = (x if x.shape[1] else x.new_zeros(len(x), size) for x in (u, v))
    return u, v


# -------------------- products --------------------


_HEIGHT, _WIDTH = 256, 1024  # of a block of the product


def add_product(start: Tensor, a: Tensor, b: Tensor, factor: float, out: Tensor) -> Tensor:
    """start + factor·a·bᵀ, from a start [m], a [n, d] and b [m, d], written to ``out`` [n, m].

    In blocks that fit the cache: as a whole, MKL took 1.4 times as long on an AMD EPYC.

    >>> a, b = torch.eye(2), torch.tensor([[1.0, 2.0]])
    >>> add_product(torch.tensor([5.0]), a, b, -1.0, torch.empty(2, 1))
    tensor([[4.],
            [3.]])
    """
    if a.device.type != "cpu":
        return torch.addmm(start, a, b.T, alpha=factor, out=out)
    for j in range(0, len(b), _WIDTH):
        some = slice(j, j + _WIDTH)
        for i in range(0, len(a), _HEIGHT):
            rows = slice(i, i + _HEIGHT)
            torch.addmm(start[some], a[rows], b[some].T, alpha=factor, out=out[rows, some])
    return out


# -------------------- search of stored rows --------------------
# The k and a few more rows with the lowest bounds are measured exactly. If the k-th of these lies below all other
# bounds no other row can be among the k; if not (near ties, duplicates), every row whose bound is not above it is
# measured. So the answer does not depend on the product's rounding. Order: by key, then by row. The products are
# numpy's: they are float32 with every setting of torch's precision.


Rows = NDArray[np.float32]
_CHUNK = 1 << 22  # pairs bounded at a time: 16 MB, which stay near the processor
_QUERIES = 256  # queries at a time: more would not make the product faster
_LIST = 1 << 20  # pairs listed at a time
_WIDE = 256  # rows in float64 at a time: what a process has used once it keeps
_MAPPED = 1 << 21  # numbers of a room, above which it is mapped: 8 MB
_BLOCK = 64  # bounds of one query that one minimum stands for
_FEW = 4  # fewer queries are limited by memory alone
_SERIAL = 1 << 15  # numbers that torch works on in one thread
_SHARE = 1 << 21  # numbers that are worth a thread: 8 MB
_DOTS = getattr(np, "vecdot", np.matmul)  # numpy 1 has none
LARGEST = 1e15  # squares of larger numbers leave float32


@dataclass(frozen=True, eq=False)
class RowVectors:
    """Queries or items: vectors s and u (of no dimensions where there is no metric), with their squared lengths [n].

    ∞ in ``s_squares`` marks a row that must not be found.
    """

    s: Rows
    s_squares: NDArray[np.float64]
    u: Rows
    u_squares: NDArray[np.float64]

    @classmethod
    def of(cls, s: Rows, u: Rows) -> "RowVectors":
        """Rows with their lengths."""
        return cls(s, squares(s), u, squares(u))

    @cached_property
    def finite(self) -> int:
        """How many rows may be found."""
        return int(np.isfinite(self.s_squares).sum())

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
    out = np.empty(len(x))
    for to, rows in ((out[i : i + _WIDE], x[i : i + _WIDE]) for i in range(0, len(x), _WIDE)):
        wide = rows.astype(np.float64)
        np.einsum("ij,ij->i", wide, wide, out=to)
    return out


class ExactSearch:
    """A search of some queries, which have u if there is a metric, among items."""

    def __init__(self, queries: RowVectors, items: RowVectors, metric: IntrospectiveMetric | None) -> None:
        self.queries, self.items, self.metric = queries, items, metric
        size = min(len(queries.s), _QUERIES) * len(items.s)
        self._rooms = [_room(min(size, _CHUNK)) for _ in range(1 if metric is None else 2)]

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """Rows and distances [n, min(k, items)] of the k nearest items of every query."""
        k = min(k, self.items.finite)
        n = len(self.queries.s)
        rows, keys = torch.empty(n, k, dtype=torch.long), torch.empty(n, k, dtype=torch.float64)
        for first in range(0, n if k else 0, _QUERIES):
            part = torch.arange(first, min(first + _QUERIES, n))
            if n == 1 and self.metric is None and len(self.items.s) >= _BLOCK * 4 * _extended(k):
                return self._nearest_of_one(k)
            rows[part], keys[part], unsure = self._part(part, k)
            for some in unsure.split(max(1, _LIST // len(self.items.s))) if len(unsure) else ():
                rows[some], keys[some] = self._measured(some, keys[some, -1], k)
        return rows, (keys.sqrt() if self.metric is None else (0.5 * keys).exp()).float()

    def _nearest_of_one(self, k: int) -> tuple[Tensor, Tensor]:
        """What `top` returns for one query without a metric, by fewer operations: many rows make each of them slow.

        The ``longer``-th smallest of the minima of blocks is not below the ``longer``-th smallest bound. So the rows
        with bounds up to it hold the k and a few more. They are measured; then every row that may be as near as the
        k-th of them is measured too.
        """
        items, query = self.items, self.queries.s[0]
        bounds = np.empty(len(items.s), np.float32)
        _dots(-2 * query[None], items.s, bounds[None])  # a power of two rounds nothing
        bounds += items.s_low.numpy()
        whole = len(bounds) // _BLOCK * _BLOCK
        minima = np.fmin.reduce(bounds[:whole].reshape(_BLOCK, -1), axis=0)  # rows that must not be found may hold NaN
        limit, measured = np.fmin(np.partition(minima, _extended(k))[_extended(k)], np.finfo(np.float32).max), -1
        while True:
            rows = np.flatnonzero(bounds <= limit)
            if len(rows) == measured:
                break
            measured, keys = len(rows), _exact_squares_of_one(query, items.s, rows)
            order = np.argsort(keys, kind="stable")[:k]
            furthest = keys[order[-1]] - float(self.queries.s_low)
            needed = np.nextafter(np.float32(furthest), np.float32(np.inf))  # rounded up
            if needed < limit:
                break
            limit = needed
        return torch.from_numpy(rows[order])[None], torch.from_numpy(np.sqrt(keys[order])).float()[None]

    def _part(self, part: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and keys [r, k] of some queries, and which of them might be wrong."""
        longer = _extended(k)
        lows, rows = torch.empty(len(part), 0), torch.empty(len(part), 0, dtype=torch.long)
        for first, bounds in self._blocks(part):
            low, row = bounds.topk(min(longer, bounds.shape[1]), dim=1, largest=False, sorted=False)
            lows, rows = torch.cat([lows, low], dim=1), torch.cat([rows, row + first], dim=1)
            if lows.shape[1] > longer:
                lows, place = lows.topk(longer, dim=1, largest=False, sorted=False)
                rows = rows.gather(1, place)
        rows, order = rows.sort(dim=1)
        lows = lows.gather(1, order)
        keys = self._keys(part, rows)
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
        key = self._keys(some[line], row.unsqueeze(1)).squeeze(1)
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
        """The first row of a block of items, and lower bounds [r, block] of its keys: of log D², or of α² − ‖a‖².

        The next block's bounds are written over them.
        """
        step, count = len(self._rooms[0]) // len(part), len(self.items.s)
        own = self.queries.s_low[part].unsqueeze(1)
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            gap = self._product(self._rooms[0], self.queries.s[part.numpy()], self.items.s[rows])
            add_scaled(self.items.s_low[rows], gap, -2)
            if self.metric is not None:
                spread = self._product(self._rooms[1], self.queries.u[part.numpy()], self.items.u[rows])
                add_scaled(self.items.u_high[rows], spread, 2)
                for i in range(0, len(part), lines := max(1, (1 << 18) // step)):
                    some = slice(i, i + lines)
                    plus = self.queries.u_high[part[some]].unsqueeze(1)
                    bound_log_squares(gap[some].add_(own[some]), spread[some].add_(plus), self.metric)
                    gap[some].sub_(LOG_ERROR)
            yield first, gap

    @staticmethod
    def _product(room: Rows, a: Rows, b: Rows) -> Tensor:
        out = room[: len(a) * len(b)].reshape(len(a), len(b))
        if len(a) < _FEW:
            _dots(a, b, out)
        else:
            np.matmul(a, b.T, out=out)
        return torch.from_numpy(out)

    def _keys(self, rows: Tensor, index: Tensor) -> Tensor:
        """The order of listed pairs [r, l] of queries and items: by α², or by log D²."""
        queries, items = self.queries, self.items
        square = exact_squares(torch.from_numpy(queries.s), torch.from_numpy(items.s), rows, index, -1)
        if self.metric is None:
            return square
        other = exact_squares(torch.from_numpy(queries.u), torch.from_numpy(items.u), rows, index, +1)
        return exact_keys(square, other, self.metric)


def _extended(k: int) -> int:
    """How many rows are measured at least to find k."""
    return k + max(8, k // 8)


def _exact_squares_of_one(query: Rows, items: Rows, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """`exact_squares` of one query and some rows, in numpy."""
    out = np.empty(len(rows))
    for first in range(0, len(rows), _WIDE):
        gap = items[rows[first : first + _WIDE]].astype(np.float64)
        gap -= query
        np.einsum("ij,ij->i", gap, gap, out=out[first : first + _WIDE])
    mantissa, exponent = np.frexp(out)
    squares: NDArray[np.float64] = np.ldexp(np.rint(mantissa * 2.0**40) * 2.0**-40, exponent)
    return squares


def add_scaled(row: Tensor, to: Tensor, factor: float) -> None:
    """to ← row + factor·to, for [m] and [r, m].

    Of few rows it takes pieces that torch works on in one thread: its threads wait for each other longer than the sum
    takes, several milliseconds where they have been asleep.
    """
    if len(to) >= _FEW:
        torch.add(row, to, alpha=factor, out=to)
        return
    for line in to:
        for piece, own in zip(line.split(_SERIAL), row.split(_SERIAL), strict=True):
            torch.add(own, piece, alpha=factor, out=piece)


def _room(size: int) -> Rows:
    """Room for numbers. Much of it is mapped: memory of malloc would stay with the process after the search."""
    if size <= _MAPPED:
        return np.empty(size, np.float32)
    return np.frombuffer(mmap.mmap(-1, 4 * size), np.float32)


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

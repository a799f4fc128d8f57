"""What pairs of a query and a gallery image are ordered by: cheap bounds of all pairs, exact keys of a few.

The key of a pair is α², or for the introspective metric log D² = log α² − 2(β + γ)/(τα). A product in float32
gives a *lower bound* of every key, from d̃² − E ≤ d², where E covers all rounding:

    d² = ‖a‖² + ‖b‖² − 2a·b,   E = c·(‖a‖² + ‖b‖²),   c = (dimensions + 32)·2⁻²⁴

The exact key comes from differences, Σ(a − b)², in float64. Squares that agree to 2⁻⁴⁰ count as equal, so that equal
rows tie on every machine and with every chunk size.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from idml.metric import IntrospectiveMetric

_EXACT = 1 << 18  # numbers subtracted at a time: they stay in the cache
_PRODUCT = 1 << 22  # pairs multiplied in float64 at a time
_BLOCK = 1024  # rows made ready at a time
_FLOOR = 1e-30  # covers products too small for float32


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
        out = torch.empty(index.shape, dtype=torch.float64, device=index.device)
        size = self.b.shape[1]
        width = max(1, min(index.shape[1], _EXACT // max(1, size)))
        step = max(1, _EXACT // max(1, size * width))
        taken = self.b.new_empty(step * width, size)
        gaps = torch.empty_like(taken, dtype=torch.float64)
        for i in range(0, len(rows), step):
            own = self.a.index_select(0, rows[i : i + step]).double().mul_(self.scale).unsqueeze(1)
            for j in range(0, index.shape[1], width):
                part = index[i : i + step, j : j + width]
                torch.index_select(self.b, 0, part.flatten(), out=taken[: part.numel()])
                gap = gaps[: part.numel()].copy_(taken[: part.numel()])
                if self.scale != 1.0:
                    gap *= self.scale
                gap = gap.view(*part.shape, size).add_(own, alpha=self.sign)
                torch.sum(gap.square_(), dim=2, out=out[i : i + step, j : j + width])
        mantissa, exponent = torch.frexp(out)
        return torch.ldexp((mantissa * 2.0**40).round_().mul_(2.0**-40), exponent)


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
        share = 2 * (1 + 1e-6) / self.metric.tau  # the 1e-6 here and the 2e-5 below cover rounding
        for i in range(0, len(rows), step := max(1, (1 << 18) // self.gallery)):
            block = slice(i, i + step)
            alpha = gap[block].add_(own[block, None]).clamp_min_(0.0)  # at most α²
            beta = spread[block].add_(plus[block, None]).clamp_min_(_FLOOR)  # at least β²
            x = beta.div_(alpha).sqrt_().mul_(share / self.beta.scale)
            if self.metric.gamma:
                x += alpha.rsqrt().mul_(share * self.metric.gamma)
            alpha.log_().sub_(x)
        return gap, torch.full_like(own, -2e-5, dtype=torch.float64)

    def keys(self, rows: Tensor, index: Tensor) -> Tensor:
        """The exact keys of listed pairs [r, l], in float64."""
        return self._key(self.alpha.exact(rows, index), None if self.beta is None else self.beta.exact(rows, index))

    def _key(self, square: Tensor, other: Tensor | None) -> Tensor:
        if self.metric is None or self.beta is None or other is None:
            return square
        alpha, beta = square.sqrt(), other.sqrt() / self.beta.scale
        key = square.log() - 2 * (beta + self.metric.gamma) / (self.metric.tau * alpha)
        return key.masked_fill_(alpha == 0, -math.inf)  # identical images: D = 0

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
# Large float32 products in blocks, and work in parts on all cores.
#
# Cores share the work by parts of the queries, each part on one thread from the product to the answer. The threads that
# torch starts by itself wait for each other after every step, and spin while they wait.


_HEIGHT, _WIDTH = 256, 1024  # of a block of the product
_alone = threading.Lock()  # the number of threads is the whole process's


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


def in_parts(work: Callable[[int], None], starts: Sequence[int], device: str) -> None:
    """Call ``work`` for each start, in true float32: on the CPU as many at once as torch has threads, else in turn."""
    from threadpoolctl import threadpool_limits

    threads = min(torch.get_num_threads(), len(starts)) if device == "cpu" else 1
    if threads == 1 or not _alone.acquire(blocking=False):  # another search has the cores
        with _full_float32(), threadpool_limits(torch.get_num_threads(), user_api="blas"):
            for start in starts:
                _one(work, start, device)
        return
    try:
        with _full_float32(), _single_threaded(), ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda start: _one(work, start, device), starts):
                pass
    finally:
        _alone.release()


def _one(work: Callable[[int], None], start: int, device: str) -> None:
    with torch.no_grad(), torch.autocast(device, enabled=False):  # settings of each thread
        work(start)


@contextmanager
def _full_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _single_threaded() -> Iterator[None]:
    """One thread for every product and every pass over a tensor in the threads that start within."""
    from threadpoolctl import threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, user_api="blas"):
            yield
    finally:
        torch.set_num_threads(before)

"""Exact nearest neighbours from matrix products, without ever holding all pairs.

For a chunk of queries one product gives a *lower bound* of every distance, d̃² − E ≤ d², where E covers all rounding:

    d² = ‖a‖² + ‖b‖² − 2a·b,   E = c·(‖a‖² + ‖b‖²),   c = (dimensions + 32)·2⁻²⁴

The k and a few more with the lowest bounds are measured again from differences, Σ(a − b)², in float64. If the k-th of
these is below every bound that was left out, no other image can be among the k; if not (near ties, duplicates), all
images whose bound is below it are measured. So the answer never depends on the product's rounding.

Order: by distance, then by the smaller gallery index. Distances whose squares (for the introspective metric: α² and
β²) agree to 2⁻⁴⁰ count as equal, so that equal rows tie on every machine and with every chunk size.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from idml.embeddings import Embeddings, full_precision, require_finite, unit_rows
from idml.metric import IntrospectiveMetric

Points = Embeddings | Tensor
Names = Tensor | np.ndarray | Sequence[int] | Sequence[str]  # labels or ids

_CHUNK = 1 << 24  # pairs bounded at a time: 64 MB
_LIST = 1 << 20  # pairs listed at a time
_EXACT = 1 << 18  # numbers subtracted at a time: they stay in the cache
_BLOCK = 4096  # rows made ready at a time
_LONG = 32  # a list longer than this, and than this part of the gallery, is measured by products first
_FLOOR = 1e-30  # covers products too small for float32


class Neighbours(NamedTuple):
    """``indices`` into the gallery and ``distances`` [n, k], nearest first; −1 and ∞ where there are fewer than k."""

    indices: Tensor
    distances: Tensor


def nearest(
    queries: Points,
    k: int,
    *,
    gallery: Points | None = None,
    metric: IntrospectiveMetric | None = None,
    query_ids: Names | None = None,
    gallery_ids: Names | None = None,
) -> Neighbours:
    """The ``k`` nearest gallery images of every query, exactly.

    Args:
        queries: a plain tensor is compared by Euclidean distance as it is, Embeddings by their unit semantic part.
        k: how many; where fewer exist, rows end in −1 and ∞, and columns that no query can fill are left out.
        gallery: where to search; without it, the queries themselves, each query left out of its own answer.
        metric: compares Embeddings; rules ``similar`` and ``off``.
        query_ids: names of the queries. A gallery image that has the query's id is never its neighbour.
        gallery_ids: names of the gallery's images, in the same naming.

    >>> nearest(torch.tensor([[0.0], [1.0], [1.0], [5.0]]), 2).indices
    tensor([[1, 2],
            [2, 0],
            [1, 0],
            [1, 2]])
    """
    return Search(queries, gallery, metric, query_ids, gallery_ids).top(k)


class Search:
    """Queries and a gallery made ready; ``top`` answers for all queries or some of them."""

    @torch.no_grad()
    def __init__(
        self,
        queries: Points,
        gallery: Points | None = None,
        metric: IntrospectiveMetric | None = None,
        query_ids: Names | None = None,
        gallery_ids: Names | None = None,
    ) -> None:
        self.metric = metric if metric is not None and metric.rule == "similar" else None
        a, u = _points("query", queries, metric)
        b, v = (a, u) if gallery is None else _points("gallery", gallery, metric)
        for kind, x, y in (("", a, b), ("uncertainty ", u, v)):
            if x.shape[1] != y.shape[1] and not (kind and 0 in (x.shape[1], y.shape[1])):
                raise ValueError(f"queries have {x.shape[1]} {kind}dimensions but the gallery has {y.shape[1]}")
        if a.device != b.device:
            raise ValueError(f"queries are on {a.device} but the gallery is on {b.device}")
        self.alpha = _Squares(a, b, -1)
        self.beta = _Squares(*_padded(u, v), +1) if self.metric else None
        self.queries, self.gallery = len(a), len(b)
        self._ids(query_ids, gallery_ids, gallery is None)

    def _ids(self, own: Names | None, theirs: Names | None, same: bool) -> None:
        """Which gallery rows each query must not find: ``order[first : first + count]``."""
        n, m, device = self.queries, self.gallery, self.alpha.a.device
        if same:
            if theirs is not None:
                raise ValueError("gallery_ids need a gallery; without one, query_ids name both sides")
            own = theirs = torch.arange(n) if own is None else own
        if own is None and theirs is None:
            self.order = self.first = self.count = torch.zeros(n, dtype=torch.long, device=device)
            return
        if own is None or theirs is None:
            raise ValueError("query_ids and gallery_ids go together: ids of one side alone exclude nothing")
        for side, ids, length in (("query", own, n), ("gallery", theirs, m)):
            if len(ids) != length:
                raise ValueError(f"{len(ids)} {side} ids for {length} {side} images")
        left, right = (x.to(device) for x in numbered("ids", own, theirs))
        self.order = right.argsort(stable=True)
        ids = right[self.order]
        self.first = torch.searchsorted(ids, left)
        self.count = torch.searchsorted(ids, left, right=True) - self.first

    def excluded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs that must not be found: positions in ``rows``, and gallery rows with the same id."""
        count = self.count[rows]
        line = torch.arange(len(rows), device=rows.device).repeat_interleave(count)
        within = torch.arange(len(line), device=rows.device) - (count.cumsum(0) - count)[line]
        return line, self.order[self.first[rows][line] + within]

    @torch.no_grad()
    def top(self, k: int, rows: Tensor | None = None) -> Neighbours:
        """The ``k`` nearest of the queries ``rows`` (all of them if not given)."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be a whole number above 0, got {k!r}")
        if rows is None:
            rows = torch.arange(self.queries, device=self.first.device)
        k = min(k, self.gallery - int(self.count[rows].min())) if len(rows) else 0
        dtype = self.alpha.dtype
        if k == 0:
            return Neighbours(self.first.new_empty(len(rows), 0), self.first.new_empty(len(rows), 0).to(dtype))
        longer = min(k + max(8, k // 8), self.gallery)
        step = max(1, min(_CHUNK // self.gallery, _LIST // longer))
        indices, distances = [], []
        with _full_float32(self.first.device.type):
            for part in rows.split(step):
                index, key = self._chunk(part, k, longer)
                indices.append(torch.where(key == math.inf, -1, index))
                key = key.exp() if self.metric else key.sqrt() / self.alpha.scale
                distances.append(key.to(dtype))
        return Neighbours(torch.cat(indices), torch.cat(distances))

    def _chunk(self, rows: Tensor, k: int, longer: int) -> tuple[Tensor, Tensor]:
        """Indices and keys [r, k] of a chunk of queries; key ∞ for what must not be found."""
        bounds, constant = self._bounds(rows)
        bounds[self.excluded(rows)] = math.inf
        low, index = bounds.topk(longer, dim=1, largest=False, sorted=False)
        index = index.sort(dim=1).values
        line = torch.arange(len(rows), device=rows.device).unsqueeze(1)
        if longer > _LONG and longer * _LONG > self.gallery:
            key = self._long(rows, index)
        else:
            key = self._keys(rows.repeat_interleave(longer), index.flatten()).view(len(rows), longer)
        key = key.masked_fill(bounds[line, index] == math.inf, math.inf)
        key, order = key.sort(dim=1, stable=True)
        index, key = index.gather(1, order)[:, :k].contiguous(), key[:, :k].contiguous()
        if longer < self.gallery:  # could a row that was not measured be as near as the k-th?
            left_out = low.amax(dim=1).double()
            unsure = ((left_out + constant <= key[:, -1]) & (left_out != math.inf)).nonzero().flatten()
            for some in unsure.split(max(1, _LIST // self.gallery)):
                near = bounds[some].double() + constant[some, None] <= key[some, -1:]
                index[some], key[some] = self._measured(rows[some], near & (bounds[some] != math.inf), k)
        return index, key

    def _bounds(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Lower bounds of the keys [r, m], up to a constant of each row: of α², or of log D = log α − (β + γ)/(τα)."""
        gap, own = self.alpha.bound(rows)
        if self.metric is None or self.beta is None:
            return gap, own.double()
        spread, plus = self.beta.bound(rows)
        share = (1 + 1e-6) / self.metric.tau  # the 1e-6 here and the 1e-5 below cover rounding
        for i in range(0, len(rows), step := max(1, (1 << 18) // self.gallery)):
            block = slice(i, i + step)
            alpha = (gap[block] + own[block, None]).clamp_min_(0.0).sqrt_()  # at most α
            beta = (spread[block] + plus[block, None]).clamp_min_(0.0).sqrt_()  # at least β
            x = beta.mul_(share / self.beta.scale).add_(share * self.metric.gamma).clamp_min_(_FLOOR).div_(alpha)
            torch.sub(alpha.log_().sub_(1e-5), x, out=gap[block])
        return gap, torch.zeros_like(own, dtype=torch.float64)

    def _keys(self, i: Tensor, j: Tensor) -> Tensor:
        """What the order goes by, in float64, for pairs of a query i and a gallery row j: α², or log D."""
        return self._key(self.alpha.exact(i, j), None if self.beta is None else self.beta.exact(i, j))

    def _key(self, square: Tensor, other: Tensor | None) -> Tensor:
        if self.metric is None or self.beta is None or other is None:
            return square
        alpha, beta = square.sqrt(), other.sqrt() / self.beta.scale
        key = alpha.log() - (beta + self.metric.gamma) / (self.metric.tau * alpha)
        return key.masked_fill_(alpha == 0, -math.inf)  # identical images: D = 0

    def _long(self, rows: Tensor, index: Tensor) -> Tensor:
        """Keys of long lists [r, l]: from float64 products, and exact wherever these leave the order open.

        A key lies between those of (α² − e, β² + e) and (α² + e, β² − e). Where this interval is wider than usual it
        is measured; so is whatever then is nearer to the next one than two such intervals, until none is left.
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
        todo = gap > usual
        known = torch.zeros_like(todo)
        while True:
            line, place = todo.nonzero().unbind(1)
            key[line, place] = self._distinct(rows[line], index[line, place])
            known |= todo
            ordered, order = key.sort(dim=1)
            close = ordered.diff(dim=1) <= 2 * usual
            close = torch.nn.functional.pad(close, (1, 0)) | torch.nn.functional.pad(close, (0, 1))
            todo = torch.zeros_like(close).scatter_(1, order, close) & ~known
            if not todo.any():
                return key

    def _distinct(self, i: Tensor, j: Tensor) -> Tensor:
        """Keys of pairs, equal gallery rows measured once."""
        pair, back = (i * self.gallery + self._twin[j]).unique(return_inverse=True)
        return self._keys(pair // self.gallery, pair % self.gallery)[back]

    def _measured(self, rows: Tensor, near: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The first k by (key, index) among the marked gallery rows."""
        line, column = near.nonzero().unbind(1)
        keys = torch.full(near.shape, math.inf, dtype=torch.float64, device=near.device)
        keys[near] = self._distinct(rows[line], column)
        last = keys.kthvalue(k, dim=1, keepdim=True).values
        nearer, tied = keys < last, keys == last
        chosen = nearer | (tied & (tied.cumsum(1) <= k - nearer.sum(1, keepdim=True)))
        index = chosen.nonzero()[:, 1].view(len(rows), k)
        key, order = keys.gather(1, index).sort(dim=1, stable=True)
        return index.gather(1, order), key

    @cached_property
    def _twin(self) -> Tensor:
        """For each gallery row, the first row equal to it."""
        parts = [self.alpha.b] if self.beta is None else [self.alpha.b, self.beta.b]
        marks = torch.zeros(self.gallery, dtype=torch.float64, device=self.first.device)
        own = torch.arange(self.gallery, device=marks.device)
        for x in parts:  # equal rows have equal marks
            weights = torch.arange(1, x.shape[1] + 1, device=x.device).double().sqrt()
            for some in own.split(_BLOCK):
                marks[some] += (x[some].double() * weights).sum(1)
        group = marks.unique(return_inverse=True)[1]
        twin = torch.full_like(own, self.gallery).scatter_reduce(0, group, own, "amin")[group]
        equal = torch.cat(
            [torch.stack([(x[some] == x[twin[some]]).all(1) for x in parts]).all(0) for some in own.split(_BLOCK)]
        )
        return torch.where(equal, twin, own)


class _Squares:
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
        self.shift = mean if sign < 0 and float(mean.square().sum()) > 0.1 * spread else None
        self.low = torch.cat([self._low(part) for part in b.split(_BLOCK)]) if self._copies(b) else b
        lengths = torch.cat([part.double().square_().sum(1) for part in self.low.split(_BLOCK)])
        self.lengths = (lengths * (1 + sign * self.c)).float()
        self.room = self.low.new_empty(0, len(b))

    def _copies(self, x: Tensor) -> bool:
        return self.shift is not None or self.scale != 1.0 or x.dtype != torch.float32

    def _low(self, x: Tensor) -> Tensor:
        """Rows shifted and scaled, in float32."""
        return self._shifted(x).float()

    def _shifted(self, x: Tensor) -> Tensor:
        x = x.double() * self.scale
        return x if self.shift is None else x - self.shift

    def bound(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds [r, m], up to a constant [r] of each row. The next call writes over them: fresh pages cost time."""
        a = self.a[rows]
        a = self._low(a) if self._copies(a) else a
        if len(self.room) < len(rows):
            self.room = a.new_empty(len(rows), len(self.low))
        matrix = torch.addmm(self.lengths, a, self.low.T, alpha=2.0 * self.sign, out=self.room[: len(rows)])
        own = a.double().square_().sum(1) * (1 + self.sign * self.c) + self.sign * _FLOOR
        return matrix, own.float()

    def product(self, rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """The squares of listed pairs [r, l] from float64 products, and a bound of their error."""
        square, error = (torch.empty(index.shape, dtype=torch.float64, device=rows.device) for _ in range(2))
        step = max(1, (_CHUNK >> 2) // len(self.b))
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

    def exact(self, i: Tensor, j: Tensor) -> Tensor:
        """The squares of pairs, from differences or sums in float64, rounded to 40 bits."""
        out = torch.empty(len(i), dtype=torch.float64, device=i.device)
        step = max(1, _EXACT // max(1, self.a.shape[1]))
        for n in range(0, len(i), step):
            part = slice(n, n + step)
            gap, other = self.a[i[part]].double(), self.b[j[part]].double()
            if self.scale != 1.0:
                gap, other = gap.mul_(self.scale), other.mul_(self.scale)
            torch.sum(gap.add_(other, alpha=self.sign).square_(), dim=1, out=out[part])
        mantissa, exponent = torch.frexp(out)
        return torch.ldexp((mantissa * 2.0**40).round_().mul_(2.0**-40), exponent)


def _points(side: str, x: Points, metric: IntrospectiveMetric | None) -> tuple[Tensor, Tensor]:
    """What is compared: the rows themselves or the unit semantic part, and the uncertainty."""
    if metric is not None and metric.rule not in ("similar", "off"):
        raise ValueError(f"rule {metric.rule!r} does not rank images; rules that do: 'similar', 'off'")
    if isinstance(x, Tensor):
        if x.ndim != 2 or not x.is_floating_point() or x.shape[1] == 0:
            raise ValueError(f"{side} embeddings must be floats [images, dimensions], got {x.dtype} {list(x.shape)}")
        if metric is not None and metric.rule == "similar":
            raise ValueError("the introspective metric needs Embeddings(semantic, uncertainty), not a plain tensor")
    elif not isinstance(x, Embeddings):
        raise ValueError(f"{side} embeddings must be a tensor or Embeddings, got {type(x).__name__}")
    if len(x) == 0:
        raise ValueError(f"there are no {side} embeddings")
    if isinstance(x, Tensor) and metric is None:
        _finite(side, x)
        rows = full_precision(x.detach())
        return rows, rows[:, :0]
    e = (Embeddings.certain(x) if isinstance(x, Tensor) else x).detach()
    _finite(f"{side} semantic", e.semantic)
    unit = torch.empty_like(e.semantic, dtype=full_precision(e.semantic[:1]).dtype)
    for i in range(0, len(e), _BLOCK):
        unit[i : i + _BLOCK] = unit_rows(e.semantic[i : i + _BLOCK])
    if metric is None or metric.rule == "off":
        return unit, unit[:, :0]
    _finite(f"{side} uncertainty", e.uncertainty)
    return unit, full_precision(e.uncertainty)


def _finite(name: str, x: Tensor) -> None:
    if x.numel() and not all(math.isfinite(v) for v in torch.aminmax(x)):  # this much needs no memory
        require_finite(name, x)


def _padded(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Certain embeddings, u = 0 of no dimensions, brought to the other side's size."""
    size = max(u.shape[1], v.shape[1])
    u, v = (x if x.shape[1] else x.new_zeros(len(x), size) for x in (u, v))
    return u, v


def numbered(what: str, *lists: Names) -> list[Tensor]:
    """Labels or ids, whole numbers or strings, as numbers that are equal where the names are, in the names' order."""
    arrays = [x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x) for x in lists]
    kinds: set[str] = set()
    for x, array in zip(lists, arrays, strict=True):
        if array.ndim != 1:
            raise ValueError(f"{what} must be one per image, got shape {list(array.shape)}")
        plain = isinstance(x, Tensor | np.ndarray) and array.dtype.kind != "O"
        kinds |= {array.dtype.kind} if plain else {_kind(name) for name in x}
    if not (kinds <= set("iub") or kinds <= {"U"}):
        raise ValueError(f"{what} must be all whole numbers or all strings")
    arrays = [array.astype(str if "U" in kinds else np.int64) for array in arrays]
    codes = torch.from_numpy(np.unique(np.concatenate(arrays), return_inverse=True)[1].reshape(-1))
    return list(codes.split([len(array) for array in arrays]))


def _kind(name: object) -> str:
    return "U" if isinstance(name, str) else "i" if isinstance(name, int | np.integer) else "other"


@contextmanager
def _full_float32(device: str) -> Iterator[None]:
    """Products in true float32, whatever the session allows elsewhere: the bounds count on it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)

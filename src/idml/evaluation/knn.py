"""Exact nearest neighbours from matrix products; the distances of all pairs are never in memory at once.

For a chunk of queries, one product gives a lower bound of every key (see `idml.evaluation.distance_bounds`). The images
with the k lowest bounds, and a few more, are measured exactly. If the k-th of these is below every bound that was left
out, no other image can be among the k. If not (near ties, duplicates), all images whose bound is below it are measured.
So the result never depends on the rounding of the product.

Order: by distance, then by the smaller gallery index. Distances whose squares (for the introspective metric: α² and
β²) agree to 2⁻⁴⁰ count as equal.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from idml.embeddings import Embeddings, full_precision, require_finite, unit_rows
from idml.evaluation.distance_bounds import Pairs
from idml.metric import IntrospectiveMetric

Points = Embeddings | Tensor
Names = Tensor | np.ndarray | Sequence[int] | Sequence[str]  # labels or ids

_CHUNK = 1 << 23  # pairs that a thread bounds at a time: 32 MB
_ROWS = 1 << 9  # queries that a thread handles at a time
_LIST = 1 << 20  # pairs listed at a time
_LONG = 16  # a list longer than this, and than this part of the gallery, is measured by products first
_BLOCK = 1024  # rows made unit at a time


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
    """Find the ``k`` nearest gallery images of every query, exactly.

    Args:
        queries: a plain tensor is compared by Euclidean distance as it is, Embeddings by their unit semantic part.
        k: how many. If there are fewer, rows end in −1 and ∞, and columns that no query can fill are left out.
        gallery: where to search; without it, the queries themselves, each left out of its own result.
        metric: the metric for Embeddings; rules ``similar`` and ``off``.
        query_ids: ids of the queries. A gallery image with the query's id is never its neighbour.
        gallery_ids: ids of the gallery's images.

    >>> nearest(torch.tensor([[0.0], [1.0], [1.0], [5.0]]), 2).indices
    tensor([[1, 2],
            [2, 0],
            [1, 0],
            [1, 2]])
    """
    return Search(queries, gallery, metric, query_ids, gallery_ids).top(k)


class Search:
    """A prepared search of queries in a gallery; ``top`` finds the neighbours of all queries or of some."""

    @torch.no_grad()
    def __init__(
        self,
        queries: Points,
        gallery: Points | None = None,
        metric: IntrospectiveMetric | None = None,
        query_ids: Names | None = None,
        gallery_ids: Names | None = None,
    ) -> None:
        a, u = _points("query", queries, metric)
        b, v = (a, u) if gallery is None else _points("gallery", gallery, metric)
        for kind, x, y in (("", a, b), ("uncertainty ", u, v)):
            if x.shape[1] != y.shape[1] and not (kind and 0 in (x.shape[1], y.shape[1])):
                raise ValueError(f"queries have {x.shape[1]} {kind}dimensions but the gallery has {y.shape[1]}")
        if a.device != b.device:
            raise ValueError(f"queries are on {a.device} but the gallery is on {b.device}")
        self.metric = metric if metric is not None and metric.rule == "similar" else None
        self.pairs = Pairs(a, b, u, v, self.metric)
        self.alpha = self.pairs.alpha
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

    def require_neighbours(self) -> None:
        """Raise ``ValueError`` if a query has no image to find except itself."""
        alone = (self.count >= self.gallery).nonzero().flatten()
        if len(alone):
            raise ValueError(f"{len(alone)} queries have no image to find but themselves (first: row {int(alone[0])})")

    @torch.no_grad()
    def top(self, k: int, rows: Tensor | None = None) -> Neighbours:
        """The ``k`` nearest of the queries ``rows`` (all of them if not given)."""
        k, rows = self._asked(k, rows)
        # allocated first: small results between large temporaries would prevent that their memory is used again
        found = Neighbours(rows.new_empty(len(rows), k), self.alpha.a.new_empty(len(rows), k, dtype=self.alpha.dtype))
        self._fill(rows, k, found.indices, found.distances)
        return found

    @torch.no_grad()
    def ranked(self, k: int, rows: Tensor | None = None) -> Tensor:
        """``top(k, rows).indices``, but faster: only pairs whose order the bounds do not decide are measured."""
        k, rows = self._asked(k, rows)
        found = rows.new_empty(len(rows), k)
        self._fill(rows, k, found, None)
        return found

    def _asked(self, k: int, rows: Tensor | None) -> tuple[int, Tensor]:
        """How many neighbours can be found at most, and for which queries."""
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be a whole number above 0, got {k!r}")
        if rows is None:
            rows = torch.arange(self.queries, device=self.first.device)
        return min(k, self.gallery - int(self.count[rows].min())) if len(rows) else 0, rows

    def _fill(self, rows: Tensor, k: int, indices: Tensor, distances: Tensor | None) -> None:
        if k == 0:
            return
        longer = min(k + max(8, k // 8), self.gallery)
        step = max(1, min(_ROWS, _CHUNK // self.gallery, _LIST // longer))

        def answer(i: int) -> None:
            index, key = self._chunk(rows[i : i + step], k, longer, distances is None)
            indices[i : i + step] = torch.where(key == math.inf, -1, index)
            if distances is not None:
                distances[i : i + step] = self.pairs.distances(key)

        in_parts(answer, range(0, len(rows), step), rows.device.type)

    def _chunk(self, rows: Tensor, k: int, longer: int, order_only: bool) -> tuple[Tensor, Tensor]:
        """Indices and keys [r, k] of a chunk of queries; key ∞ for what must not be found.

        With ``order_only`` a key may be an upper bound that leaves the order as it is.
        """
        bounds, constant = self.pairs.bounds(rows)
        bounds[self.excluded(rows)] = math.inf
        index, bound, rest = lowest(bounds, longer)
        key = self.pairs.order_keys(rows, index, bound.double() + constant[:, None]) if order_only else None
        if key is None:
            long = longer > _LONG and longer * _LONG > self.gallery
            key = (self.pairs.long_keys if long else self.pairs.keys)(rows, index)
        key, order = key.masked_fill_(bound == math.inf, math.inf).sort(dim=1, stable=True)
        index, key = index.gather(1, order)[:, :k].contiguous(), key[:, :k].contiguous()
        if longer < self.gallery:  # could a row that was not measured be as near as the k-th?
            unsure = ((rest.double() + constant <= key[:, -1]) & (rest != math.inf)).nonzero().flatten()
            for some in unsure.split(max(1, _LIST // self.gallery)):
                near = bounds[some].double() + constant[some, None] <= key[some, -1:]
                index[some], key[some] = self._measured(rows[some], near & (bounds[some] != math.inf), k)
        return index, key

    def _measured(self, rows: Tensor, near: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The first k by (key, index) among the marked gallery rows."""
        line, column = near.nonzero().unbind(1)
        keys = torch.full(near.shape, math.inf, dtype=torch.float64, device=near.device)
        keys[near] = self.pairs.distinct(rows[line], column)
        last = keys.kthvalue(k, dim=1, keepdim=True).values
        nearer, tied = keys < last, keys == last
        chosen = nearer | (tied & (tied.cumsum(1) <= k - nearer.sum(1, keepdim=True)))
        index = chosen.nonzero()[:, 1].view(len(rows), k)
        key, order = keys.gather(1, index).sort(dim=1, stable=True)
        return index.gather(1, order), key


def _points(side: str, x: Points, metric: IntrospectiveMetric | None) -> tuple[Tensor, Tensor]:
    """The vectors that are compared: the rows themselves or the unit semantic part, and the uncertainty."""
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
    if x.numel() and not all(math.isfinite(v) for v in torch.aminmax(x)):  # this check needs no memory
        require_finite(name, x)


def numbered(what: str, *lists: Names) -> list[Tensor]:
    """Encode labels or ids (whole numbers or strings) as numbers: equal for equal names, in the order of the names."""
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


# -------------------- parts on threads --------------------
#
# Cores share the work by parts of the queries, each part on one thread from the product to the answer. The threads that
# torch starts by itself wait for each other after every step, and spin while they wait.


_alone = threading.Lock()  # the number of threads is the whole process's


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


# -------------------- the lowest numbers of every row --------------------
#
# Columns are put into groups. At least ``count`` numbers of a row are not above the count-th lowest of the groups'
# minima. All numbers that are not above it lie in groups whose minimum is not above it, so only these groups are read.
# numpy finds that minimum several times faster than torch ranks columns.


_GROUPS = 8  # at least this many groups for each number to find: few of them share a group
_LARGEST = 32  # columns in a group


def lowest(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the ``count`` lowest numbers of each row, or a few more: columns (ascending), numbers, a bound of the rest.

    Lists that are shorter than the longest end in column 0 and ∞. The numbers left out are not below the bound [rows].

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

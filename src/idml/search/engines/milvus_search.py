"""Search in Milvus: it gives candidates by the distance of unit vectors, which are then measured exactly.

With the index FLAT the result is that of the embedded engine. Milvus compares all items; its float32 distances are off
by less than e = 4·(dimensions + 32)·2⁻²⁴, so that every item it left out has α² > f − e, f being the last one given.
With a metric such an item has, ℓ being the largest ‖u‖ of the gallery,

    D = α·exp(−(β + γ)/(τα)) > a·exp(−(‖u‖ + ℓ + γ)/(τa)),   a = √(f − e)

because D grows with α and falls with β ≤ ‖u‖ + ℓ. If the k-th candidate lies below that, no other item can be among
the k; if not, four times as many candidates are asked for, until all are there or Milvus gives no more at a time.

With HNSW or IVF_FLAT the candidates are what the index finds, asked for once: items may be missing.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from idml.evaluation.distance_bounds import LARGEST, ExactSearch, RowVectors
from idml.metric import IntrospectiveMetric
from idml.search.engines.base import Found, Item, Properties
from idml.search.engines.milvus_connection import Connection
from idml.search.engines.milvus_schema import page_rows, read_item, semantic, uncertainty

_PROBES = 64  # of 1024 lists
_EF = 128  # at least as long a list of candidates within HNSW
_QUERIES = 64  # at a time: more would make an exact search of a large gallery slower than the time limit
_ROUND = 1 + 1e-6


def search_parameters(index: str, limit: int) -> dict[str, Any]:
    """Return what Milvus is told about a search: how many candidates or lists the index goes through."""
    own: dict[str, dict[str, int]] = {"HNSW": {"ef": max(_EF, 2 * limit)}, "IVF_FLAT": {"nprobe": _PROBES}}
    return {"metric_type": "L2", "params": own.get(index, {})}


def largest_level(connection: Connection) -> float:
    """An upper bound of every ‖u‖, at most a fifth too large; found by counting the items above a limit nine times."""
    steps = range(-160, 4 * math.ceil(math.log2(LARGEST)) + 4)
    first = bisect_left(steps, True, key=lambda step: connection.count(f"level > {2 ** (step / 4)!r}") == 0)
    return float(2 ** (steps[min(first, len(steps) - 1)] / 4)) * _ROUND


class MilvusSearch:
    """A search of some queries, which have u if there is a metric."""

    def __init__(
        self,
        connection: Connection,
        properties: Properties,
        index: str,
        queries: RowVectors,
        metric: IntrospectiveMetric | None,
        largest: float,
    ) -> None:
        self.connection, self.properties, self.index = connection, properties, index
        self.queries, self.metric, self.largest = queries, metric, largest
        self.items: dict[str, Item] = {}  # that were found, by id
        self.fields = ["key", "semantic", *([] if metric is None else ["uncertainty"]), "item", "added"]
        self.most = page_rows(properties, self.fields)
        self.slack = 4 * (properties.dimensions + 32) * 2.0**-24

    @cached_property
    def count(self) -> int:
        """How many items there are."""
        return self.connection.count()

    def top(self, k: int) -> Found:
        """The k nearest items of every query, or all if there are fewer."""
        if k > self.most and self.count > self.most:
            raise ValueError(f"Milvus gives at most {self.most} results of this gallery at a time, got k = {k}")
        found: list[tuple[list[str], Tensor]] = [([], torch.empty(0))] * len(self.queries.s)
        todo, limit = list(range(len(found))), min(self.most, k + max(8, k // 8) if self.metric is None else 4 * k + 32)
        while todo:
            again = []
            for part in _split(todo, max(1, min(_QUERIES, self.most // limit))):
                for i, hits in zip(part, self._candidates(part, limit), strict=True):
                    ids, distances, sure = self._measured(i, hits, k, limit)
                    found[i] = ids, distances
                    again += [] if sure or limit == self.most else [i]
            todo, limit = again, min(self.most, 4 * limit)
        width = min((len(ids) for ids, _ in found), default=0)
        every = [distances[:width] for _, distances in found]
        return Found([ids[:width] for ids, _ in found], torch.stack(every) if every else torch.empty(0, 0))

    def _candidates(self, part: Sequence[int], limit: int) -> list[list[dict[str, Any]]]:
        hits: list[list[dict[str, Any]]] = self.connection.read(
            "search",
            data=list(self.queries.s[part]),
            anns_field="semantic",
            limit=limit,
            output_fields=self.fields,
            search_params=search_parameters(self.index, limit),
        )
        return hits

    def _measured(self, i: int, hits: list[dict[str, Any]], k: int, limit: int) -> tuple[list[str], Tensor, bool]:
        """Ids and distances of a query's first k candidates, and whether no other item can be among them."""
        rows = sorted((hit["entity"] for hit in hits), key=lambda row: (row["added"], row["key"]))
        u = uncertainty(rows, self.properties) if self.metric is not None else np.empty((len(rows), 0), np.float32)
        items, q, one = RowVectors.of(semantic(rows, self.properties), u), self.queries, slice(i, i + 1)
        query = RowVectors(q.s[one], q.s_squares[one], q.u[one], q.u_squares[one])
        order, distances = ExactSearch(query, items, self.metric).top(k)
        first = [read_item(rows[row]) for row in order[0].tolist()]
        self.items.update((item.id, item) for item in first)
        if self.index != "FLAT":
            sure = True  # as sure as it gets
        elif len(hits) < limit:  # all, unless Milvus listed a row twice while it moved it
            sure = len(hits) >= self.count
        else:
            sure = float(distances[0, -1]) * _ROUND < self._lower_bound(i, max(hit["distance"] for hit in hits))
        return [item.id for item in first], distances[0], sure

    def _lower_bound(self, i: int, last: float) -> float:
        """A distance that is below that of every item outside the candidates."""
        alpha = math.sqrt(max(0.0, last - self.slack))
        if self.metric is None or alpha == 0:
            return alpha
        beta = math.sqrt(self.queries.u_squares[i]) + self.largest
        return alpha * math.exp(-(beta + self.metric.gamma) / (self.metric.tau * alpha))


def _split(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]

"""What Prometheus is told: requests, answers, batches, the gallery and the process."""

from collections.abc import Callable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST
_METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE")  # a client may invent others
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The numbers of one service."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("idml_requests", "Requests", ["method", "route", "status"], registry=registry)
        self._seconds = Histogram(
            "idml_request_seconds", "Time to the end of an answer", ["route"], buckets=_SECONDS, registry=registry
        )
        self._answers = Counter("idml_answers", "Answered queries", ["state"], registry=registry)
        self._batches = Histogram(
            "idml_batch_queries", "Queries searched together", buckets=(1, 2, 4, 8, 16), registry=registry
        )
        self._queue = Gauge("idml_queue", "Uploads being worked on or waiting for it", registry=registry)
        self._items = Gauge("idml_gallery_items", "Items in the gallery", registry=registry)

    def watch(self, queue: Callable[[], int]) -> None:
        """Where the length of the queue is asked."""
        self._queue.set_function(queue)

    def served(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request has ended; status 0: its client was gone before there was an answer."""
        method = method if method in _METHODS else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def answered(self, state: str) -> None:
        """A query got an answer."""
        self._answers.labels(state).inc()

    def searched(self, queries: int) -> None:
        """So many queries were searched together."""
        self._batches.observe(queries)

    def text(self, items: int) -> bytes:
        """All of it, in Prometheus's format."""
        self._items.set(items)
        return generate_latest(self._registry)

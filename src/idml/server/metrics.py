"""Metrics for Prometheus: requests, answers, batches, the gallery and the process."""

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
_METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE")  # clients may send any other
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The metrics of one service."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("idml_requests", "Requests", ["method", "route", "status"], registry=registry)
        self._seconds = Histogram(
            "idml_request_seconds", "Time to the end of a response", ["route"], buckets=_SECONDS, registry=registry
        )
        self._answers = Counter("idml_answers", "Answered queries", ["state"], registry=registry)
        self._batches = Histogram(
            "idml_batch_queries", "Queries searched together", buckets=(1, 2, 4, 8, 16), registry=registry
        )
        self._queue = Gauge("idml_queue", "Uploads and changes being processed or waiting", registry=registry)
        self._items = Gauge("idml_gallery_items", "Items in the gallery", registry=registry)

    def set_queue(self, queue: Callable[[], int]) -> None:
        """Set the function that returns the length of the queue."""
        self._queue.set_function(queue)

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a finished request; status 0 means that the client left before the response."""
        method = method if method in _METHODS else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_answer(self, state: str) -> None:
        """Count the answer to a query."""
        self._answers.labels(state).inc()

    def count_batch(self, queries: int) -> None:
        """Count a batch of queries that were searched together."""
        self._batches.observe(queries)

    def render(self, items: int) -> bytes:
        """Render all metrics in the format of Prometheus."""
        self._items.set(items)
        return generate_latest(self._registry)

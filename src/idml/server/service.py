"""The gallery behind the routes: which thread does what, what waits, and what is refused.

worker      one thread that embeds, searches and changes the gallery, one batch of queries or one change at a time
decoders    two processes that decode images, and a thread for each (`idml.server.decoders`)
readers     four threads for everything that only reads
mapper      one thread for the map, which takes long
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeVar

import numpy as np
from PIL.Image import Image

from idml.data.images import MAX_SIDE
from idml.data.metadata import write_again
from idml.search import tsne_map
from idml.search.answers import RiskTargets
from idml.search.engines import DamagedGallery, Item
from idml.search.feedback import Feedback, add_feedback, delete_feedback, read_feedback
from idml.search.gallery import Gallery
from idml.search.gallery_folder import MissingMap
from idml.search.results import Reply
from idml.search.uploads import Upload
from idml.server.decoders import Decoders
from idml.server.limits import Limits
from idml.server.metrics import Metrics
from idml.server.responses import ApiError, json_text, shutting_down
from idml.server.schemas import GalleryInfo, LabelCount, LabelPage, MapPoint, available_rerankers
from idml.server.uploads import UNREADABLE, read_clean_image, read_image_file

Order = Literal["added", "uncertain", "mixed"]
Search = Callable[[Sequence[Image], int, RiskTargets, str | None], Sequence[Reply]]
T = TypeVar("T")
log = logging.getLogger("idml.server")
_ID = re.compile("[0-9A-Za-z_-]{1,64}")
_REWRITTEN = 2  # pictures at a time
_POLL_SECONDS = 1.0  # how often to look for changes by other processes


class Service:
    """The gallery behind the routes. Call `start` and `close` in the event loop that serves requests."""

    def __init__(self, gallery: Gallery, limits: Limits, metrics: Metrics) -> None:
        self.gallery, self._limits, self._metrics = gallery, limits, metrics
        self._worker = ThreadPoolExecutor(1, "worker")
        self._decoders = Decoders(limits)
        self._readers = ThreadPoolExecutor(4, "reader")
        self._mapper = ThreadPoolExecutor(1, "mapper")
        self._batcher = Batcher(
            self._search, self._worker, size=limits.batch, seconds=limits.batch_seconds, on_batch=metrics.count_batch
        )
        self._rewriting = asyncio.Semaphore(_REWRITTEN)
        self._busy, self._open = 0, False
        self._working_since: float | None = None  # when the worker began what it does now
        self._version = 0  # counts the changes of the gallery
        self._cache: dict[str, tuple[int, Any]] = {}  # values with the version they were computed for
        self._map: tuple[int, asyncio.Future[list[MapPoint]]] | None = None
        self._poller: asyncio.Task[None] | None = None
        metrics.set_queue(lambda: self._busy)

    def start(self) -> None:
        """Begin to serve."""
        self._open = True
        self._batcher.start()
        self._poller = asyncio.create_task(self._poll_changes())

    async def close(self) -> None:
        """Finish the requests in progress, then close the gallery. Nothing waits for a decoder."""
        self._open = False
        await self._decoders.close()
        if self._poller is not None:
            self._poller.cancel()
        await self._batcher.close()
        for pool in (self._readers, self._worker):
            await asyncio.to_thread(pool.shutdown)
        self._mapper.shutdown(wait=False, cancel_futures=True)
        self.gallery.close()

    # ---- searching and changing ----

    async def check_rerank(self, rerank: str | None, targets: RiskTargets) -> None:
        """Refuse a search that cannot be re-ranked."""
        if rerank is not None:
            try:
                await self.read(self.gallery.check_rerank, rerank, targets)
            except ValueError as error:
                raise ApiError(409, str(error)) from None

    async def search(self, data: bytes, k: int, targets: RiskTargets, rerank: str | None) -> Reply:
        """Search for an uploaded image."""
        with self._queue_slot():
            async with self._decoders.decode(data) as decoded:
                with _readable(), _mapped():
                    reply = await self._batcher.search(decoded.image, k, targets, rerank)
        self._metrics.count_answer(reply.answer.state.value)
        return reply

    async def search_item(self, id: str, k: int, targets: RiskTargets, rerank: str | None) -> Reply:
        """Search for an item of the gallery, without itself."""

        def search() -> Reply:
            item = self._get_item(id)
            try:
                return self.gallery.search_items([item.id], k, targets, rerank=rerank)[0]
            except ValueError:
                self._get_item(id)  # 404 if it is removed at that moment
                raise

        with self._queue_slot(), _readable(), _mapped():
            reply = await self._run(self._worker, search)
        self._metrics.count_answer(reply.answer.state.value)
        return reply

    async def add(self, data: bytes, label: str | None) -> tuple[str, bool]:
        """Add an uploaded image; return its id and whether it is new."""
        self.check_writable()
        with self._queue_slot():
            async with self._decoders.decode(data) as decoded:
                upload = Upload(data, label, "upload", decoded)
                added = await self._run(self._worker, self._change_gallery, lambda: self.gallery.add([upload]))
        return upload.id, added.new == 1

    async def judge(self, data: bytes, right: bool, label: str | None, result: str | None = None) -> Feedback:
        """Keep a judgement about the first result for an uploaded image; refuse it if that is no longer ``result``."""
        self.check_writable()
        gallery = self.gallery

        def keep(image: Image) -> Feedback:
            query = gallery.embedder.embed([image])
            results = gallery.search_embeddings(query, 1, counted=False)[0].results
            found = results[0].label if results else None
            if result is not None and (not results or results[0].id != result):
                raise ApiError(409, "another result is the first one now: search again")
            try:
                return add_feedback(
                    gallery.location,
                    gallery.engine.properties,
                    query,
                    query="upload",
                    right=right,
                    found=found,
                    label=label,
                )
            except DamagedGallery:
                raise
            except ValueError as error:
                raise ApiError(409, str(error)) from None  # the label contradicts the verdict

        with self._queue_slot():
            async with self._decoders.decode(data) as decoded:
                return await self._run(self._worker, self._change_gallery, lambda: keep(decoded.image))

    def judgements(self) -> list[Feedback]:
        """Read the judgements; call it in a thread."""
        return read_feedback(self.gallery.location, self.gallery.engine.properties)

    async def forget(self, id: str) -> None:
        """Delete a judgement."""

        def delete() -> None:
            if not delete_feedback(self.gallery.location, self.gallery.engine.properties, [id]):
                raise ApiError(404, "there is no such judgement")

        await self._change(delete)

    async def relabel(self, id: str, label: str | None) -> None:
        """Change the label of an item; None removes it."""
        await self._change(lambda: self.gallery.relabel({self._get_item(id).id: label}))

    async def remove(self, id: str) -> None:
        """Remove an item."""
        await self._change(lambda: self.gallery.remove([self._get_item(id).id]))

    def check_writable(self) -> None:
        """Refuse a change if the gallery is open for reading only."""
        if not self.gallery.writable:
            raise ApiError(403, "the gallery is open for reading only: its files cannot be written")

    async def _change(self, work: Callable[[], object]) -> None:
        self.check_writable()
        with self._queue_slot():
            await self._run(self._worker, self._change_gallery, work)

    def _change_gallery(self, work: Callable[[], T]) -> T:
        """Change the gallery, in the worker thread; cached values become outdated."""
        try:
            with self._working():
                return work()
        except DamagedGallery as error:
            raise _damaged(error) from None
        except OSError:
            log.exception("a change was not stored")
            raise ApiError(507, "this could not be stored (a full disk?); the server's log says why") from None
        finally:
            self._version += 1

    def _search(self, images: Sequence[Image], k: int, targets: RiskTargets, rerank: str | None) -> list[Reply]:
        with self._working():
            return self.gallery.search(images, k, targets, rerank=rerank)

    # ---- reading ----

    async def read(self, work: Callable[..., T], *args: Any) -> T:
        """Read something from the gallery, in a thread."""
        if not self._open:
            raise shutting_down()
        with _readable():
            return await self._run(self._readers, work, *args)

    async def read_item(self, id: str, work: Callable[[Item], T]) -> T:
        """Read something about an item, in a thread; 404 also if the item is removed at that moment."""

        def read() -> T:
            item = self._get_item(id)
            try:
                return work(item)
            except ValueError:
                self._get_item(id)
                raise

        return await self.read(read)

    async def picture(self, id: str) -> bytes:
        """Read the picture of an item, upright and without metadata. What must be decoded is decoded by a process."""

        def find_file(item: Item) -> Path:
            path = self.gallery.image_file(item.id)
            if path is None:
                raise ApiError(404, "this item has no file")
            return path

        clean = await self.read_item(id, lambda item: read_clean_image(find_file(item)))
        if clean is not None:
            return clean
        async with self._rewriting:
            data = await self.read_item(id, lambda item: read_image_file(find_file(item)))
            try:
                async with self._decoders.decode(data, MAX_SIDE) as decoded:
                    return await self.read(write_again, decoded.image)
            except ApiError as error:
                raise error if error.status == 503 else ApiError(404, UNREADABLE) from None

    def info(self) -> GalleryInfo:
        """Describe the gallery; call it in a thread.

        Position maps come without a change of the gallery, and the latest queries may make promises void.
        """
        info = self._cached("info", lambda: GalleryInfo.of(self.gallery))
        fresh = {"rerankers": available_rerankers(self.gallery), "drift": self.gallery.status().drift}
        return info.model_copy(update=fresh)

    def listing(self) -> "Listing":
        """Return the sorted items; call it in a thread."""
        return self._cached("listing", lambda: Listing(self.gallery))

    async def map(self) -> list[MapPoint] | None:
        """Return the map; None if it is still being computed. All requests wait a moment for the same one."""
        if not self._open:
            raise shutting_down()
        if self._map is None or self._map[0] != self._version or (self._map[1].done() and self._map[1].exception()):
            self._map = self._version, asyncio.ensure_future(self._run(self._mapper, self._compute_map))
            self._map[1].add_done_callback(lambda map: map.cancelled() or map.exception())  # perhaps nobody waits
        done, _ = await asyncio.wait([self._map[1]], timeout=self._limits.map_seconds)
        return self._map[1].result() if done else None

    def _compute_map(self) -> list[MapPoint]:
        def check() -> None:
            if not self._open:
                raise shutting_down()

        return [MapPoint.of(point) for point in tsne_map.gallery_map(self.gallery, check=check)]

    def _get_item(self, id: str) -> Item:
        item = self.gallery.get(id) if _ID.fullmatch(id) else None
        if item is None:
            raise ApiError(404, "there is no such item")
        return item

    def _cached(self, name: str, compute: Callable[[], T]) -> T:
        """Compute a value once for each version of the gallery."""
        with self.gallery.write_lock:
            if self._cache.get(name, (-1, None))[0] != self._version:
                self._cache[name] = self._version, compute()
            value: T = self._cache[name][1]
            return value

    # ---- threads and queue ----

    async def _poll_changes(self) -> None:
        """Take over the changes of other processes."""
        reported = ""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                await self._run(self._worker, self._refresh)
            except Exception as error:
                if str(error) != reported:  # once, not every second
                    log.warning("the gallery cannot be read again: %s", error)
                reported = str(error)

    def _refresh(self) -> None:
        with self._working():
            if self.gallery.refresh():
                self._version += 1

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Note in the worker thread since when it works."""
        self._working_since = monotonic()
        try:
            yield
        finally:
            self._working_since = None

    async def check_health(self) -> int:
        """Return the number of items; a 503 says that the service cannot answer now."""
        since = self._working_since
        if since is not None and (seconds := monotonic() - since) > self._limits.stuck_seconds:
            raise ApiError(503, f"stuck: one batch or change has taken {seconds:.0f} seconds so far", retry_after=10)
        if self._decoders.failure:
            raise ApiError(503, self._decoders.failure, retry_after=10)
        try:
            async with asyncio.timeout(self._limits.stuck_seconds):
                return await self.read(len, self.gallery)
        except TimeoutError:
            seconds = self._limits.stuck_seconds
            raise ApiError(503, f"stuck: reading takes longer than {seconds:g} seconds", retry_after=10) from None

    @contextmanager
    def _queue_slot(self) -> Iterator[None]:
        """Hold a slot in the queue; refuse the request if the queue is full."""
        if not self._open:
            raise shutting_down()
        if self._busy >= self._limits.queue:
            raise ApiError(503, "too much to do, try again", retry_after=1)
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *args)


@contextmanager
def _readable() -> Iterator[None]:
    """Refuse a request if the gallery is damaged, or cannot be read now: a Milvus server may be there again soon."""
    try:
        yield
    except DamagedGallery as error:
        raise _damaged(error) from None
    except OSError as error:
        log.warning("the gallery cannot be read: %s", error)
        raise ApiError(503, "the gallery cannot be read now; the server's log says why", retry_after=1) from None


def _damaged(error: DamagedGallery) -> ApiError:
    log.warning("the gallery is damaged: %s", error)
    return ApiError(503, "what this needs of the gallery is damaged; the server's log says what")


@contextmanager
def _mapped() -> Iterator[None]:
    """Refuse a request if the gallery lacks a position map that it needs."""
    try:
        yield
    except MissingMap as error:
        raise ApiError(409, str(error)) from None


# -------------------- pages of items --------------------


class Listing:
    """The ids, labels and uncertainty levels of all items at one moment, page by page."""

    def __init__(self, gallery: Gallery) -> None:
        items = [(item.id, item.label) for item in gallery.items()]
        self._ids, self._labels = [id for id, _ in items], [label for _, label in items]
        self._levels = gallery.engine.levels(self._ids).numpy()
        self._orders = {
            "uncertain": np.argsort(-self._levels, kind="stable").tolist(),
            "mixed": sorted(range(len(self._ids)), key=self._ids.__getitem__),  # an id is a hash of the image
        }
        counts = Counter(json_text(label) for label in self._labels if label is not None)
        self._counts = sorted(counts.items(), key=lambda pair: (pair[0].casefold(), pair[0]))

    def page(self, order: Order, label: str | None, offset: int, limit: int) -> tuple[int, list[tuple[str, float]]]:
        """Return how many items have the label (None: any), and the ids and levels of those on the page."""
        rows: Sequence[int] = self._orders.get(order, range(len(self._ids)))
        total = len(self._ids)
        if label is not None:
            rows = [row for row in rows if (own := self._labels[row]) is not None and json_text(own) == label]
            total = len(rows)
        return total, [(self._ids[row], float(self._levels[row])) for row in islice(rows, offset, offset + limit)]

    def labels(self, text: str, offset: int, limit: int) -> LabelPage:
        """Return the labels that contain a text, ignoring case, with the number of their items."""
        wanted = text.casefold()
        found = [pair for pair in self._counts if wanted in pair[0].casefold()]
        shown = found[offset : offset + limit]
        return LabelPage(total=len(found), labels=[LabelCount(label=label, items=n) for label, n in shown])


# -------------------- batches of queries --------------------


@dataclass(eq=False)
class _Query:
    image: Image
    k: int
    targets: RiskTargets
    rerank: str | None
    reply: asyncio.Future[Reply]


class Batcher:
    """Searches queries that arrive together in one batch. Call `start` in the event loop.

    A batch ends when it has ``size`` queries, or ``seconds`` after its first query.

    Args:
        search: searches images that have the same k, targets and re-ranking.
        worker: the thread for it.
        size: the largest batch.
        seconds: how long the first query waits for others.
        on_batch: called with the size of each batch.
    """

    def __init__(
        self, search: Search, worker: Executor, *, size: int, seconds: float, on_batch: Callable[[int], None]
    ) -> None:
        self._search, self._worker, self._size, self._seconds, self._on_batch = search, worker, size, seconds, on_batch
        self._waiting: asyncio.Queue[_Query | None] = asyncio.Queue()  # None marks the end
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to search."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Answer the waiting queries, then stop."""
        task, self._task = self._task, None
        if task is not None:
            self._waiting.put_nowait(None)
            await task

    async def search(self, image: Image, k: int, targets: RiskTargets, rerank: str | None = None) -> Reply:
        """Return the reply to one query; raise what the search for this image raises."""
        if self._task is None:
            raise shutting_down()
        query = _Query(image, k, targets, rerank, asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(query)
        return await query.reply

    async def _run(self) -> None:
        while await self._search_batch():
            pass

    async def _search_batch(self) -> bool:
        """Search the next batch; False if it was the last. A separate method frees the batch at its end."""
        loop = asyncio.get_running_loop()
        batch = [await self._waiting.get()]
        until = loop.time() + self._seconds
        with suppress(TimeoutError):
            while len(batch) < self._size and None not in batch:
                async with asyncio.timeout_at(until):
                    batch.append(await self._waiting.get())
        queries = [query for query in batch if query is not None and not query.reply.done()]  # done: cancelled
        if queries:
            self._on_batch(len(queries))
            replies = await loop.run_in_executor(self._worker, self._answer, queries)
            for query, reply in zip(queries, replies, strict=True):
                if query.reply.done():
                    continue
                if isinstance(reply, Exception):
                    query.reply.set_exception(reply)
                else:
                    query.reply.set_result(reply)
        return None not in batch

    def _answer(self, queries: Sequence[_Query]) -> list[Reply | Exception]:
        """Search the queries in the worker thread, those with equal k, targets and re-ranking together."""
        replies: dict[_Query, Reply | Exception] = {}
        groups: dict[tuple[int, RiskTargets, str | None], list[_Query]] = {}
        for query in queries:
            groups.setdefault((query.k, query.targets, query.rerank), []).append(query)
        for group in groups.values():
            replies.update(self._answer_group(group))
        return [replies[query] for query in queries]

    def _answer_group(self, group: Sequence[_Query]) -> dict[_Query, Reply | Exception]:
        try:
            first = group[0]
            found = self._search([query.image for query in group], first.k, first.targets, first.rerank)
            return dict(zip(group, found, strict=True))
        except Exception as error:
            if len(group) == 1:
                return {group[0]: error}
        # One of them fails: search each of them alone.
        return {query: reply for one in group for query, reply in self._answer_group([one]).items()}

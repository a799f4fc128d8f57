"""A gallery at work for many clients: which thread does what, what waits, and what is refused.

worker      one thread that embeds, searches and changes the gallery, a batch of queries or a change at a time
decoders    two threads that look at uploaded images and decode them
readers     four threads for what is only looked up
mapper      one thread for the map, which takes long
"""

import asyncio
import io
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from idml.search.answers import RiskTargets
from idml.search.gallery_folder import Upload
from idml.server.limits import Limits, Room
from idml.server.metrics import Metrics
from idml.server.responses import Refusal, text
from idml.server.schemas import About, Place
from idml.server.uploads import decode, look

if TYPE_CHECKING:
    from PIL.Image import Image

    from idml.search.engines import Item
    from idml.search.gallery import Gallery, Reply


# -------------------- listing --------------------
# The items of a gallery in an order, page by page.


Order = Literal["uncertain", "added"]


class Listing:
    """The ids, labels and uncertainty levels of a gallery at one moment."""

    def __init__(self, gallery: "Gallery") -> None:
        items = [(item.id, item.label) for item in gallery.items()]
        self._ids, self._labels = [id for id, _ in items], [label for _, label in items]
        self._levels = gallery.engine.levels(self._ids).numpy()
        self._falling = np.argsort(-self._levels, kind="stable")

    def page(self, order: Order, label: str | None, offset: int, limit: int) -> tuple[int, list[tuple[str, float]]]:
        """How many items have the label (all if None), and the id and level of those on the page."""
        rows = range(len(self._ids)) if order == "added" else self._falling.tolist()
        total = len(self._ids)
        if label is not None:
            rows = [row for row in rows if (own := self._labels[row]) is not None and text(own) == label]
            total = len(rows)
        return total, [(self._ids[row], float(self._levels[row])) for row in islice(rows, offset, offset + limit)]


T = TypeVar("T")
log = logging.getLogger("idml.server")
_ID = re.compile("[0-9A-Za-z_-]{1,64}")
_FOLLOW = 1.0  # seconds after which another process's changes are seen


class Service:
    """The gallery behind the routes. `start` and `close` are called in the event loop that serves."""

    def __init__(self, gallery: "Gallery", limits: Limits, metrics: Metrics) -> None:
        self.gallery, self._limits, self._metrics = gallery, limits, metrics
        self._worker = ThreadPoolExecutor(1, "worker")
        self._decoders = ThreadPoolExecutor(2, "decoder")
        self._readers = ThreadPoolExecutor(4, "reader")
        self._mapper = ThreadPoolExecutor(1, "mapper")
        self._batcher = Batcher(
            self._search, self._worker, size=limits.batch, seconds=limits.batch_seconds, seen=metrics.searched
        )
        self._room = Room(limits.pixels)
        self._busy, self._open = 0, False
        self._state, self._made = 0, dict[str, tuple[int, Any]]()  # counts the changes; what was made at which
        self._map: tuple[int, asyncio.Future[list[Place]]] | None = None
        self._follower: asyncio.Task[None] | None = None
        metrics.watch(lambda: self._busy)

    def start(self) -> None:
        """Begin to serve."""
        self._open = True
        self._batcher.start()
        self._follower = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Finish what was begun, then close the gallery."""
        self._open = False
        if self._follower is not None:
            self._follower.cancel()
        await self._batcher.close()
        for pool in (self._decoders, self._readers, self._worker):
            await asyncio.to_thread(pool.shutdown)
        self._mapper.shutdown(wait=False, cancel_futures=True)
        self.gallery.close()

    async def search(self, data: bytes, k: int, targets: RiskTargets) -> "Reply":
        """The reply to an uploaded image."""
        with self._admitted():
            head = await self._run(self._decoders, look, io.BytesIO(data))
            async with self._room.taken(head.pixels):
                image = await self._run(self._decoders, decode, data)
                reply = await self._batcher.ask(image, k, targets)
        self._metrics.answered(reply.answer.state.value)
        return reply

    async def add(self, data: bytes, label: str | None) -> tuple[str, bool]:
        """Add an uploaded image: its id, and whether it is new."""
        self.check_writable()
        upload = Upload(data, label, "upload")
        with self._admitted():
            head = await self._run(self._decoders, look, io.BytesIO(data))
            async with self._room.taken(head.pixels):
                await self._run(self._decoders, decode, data)  # what fails later is not the client's fault
                added = await self._run(self._worker, self._changed, lambda: self.gallery.add([upload]))
        return upload.id, added.new == 1

    async def relabel(self, id: str, label: str | None) -> None:
        """Give an item another label, or none."""
        await self._change(lambda: self.gallery.relabel({self._item(id).id: label}))

    async def remove(self, id: str) -> None:
        """Remove an item."""
        await self._change(lambda: self.gallery.remove([self._item(id).id]))

    async def read(self, work: Callable[..., T], *args: Any) -> T:
        """Look something up, in a thread."""
        if not self._open:
            raise _closing()
        return await self._run(self._readers, work, *args)

    async def read_item(self, id: str, work: Callable[["Item"], T]) -> T:
        """Look something up about an item, in a thread; 404 also if it goes in that moment."""

        def look_up() -> T:
            item = self._item(id)
            try:
                return work(item)
            except ValueError:
                self._item(id)
                raise

        return await self.read(look_up)

    def about(self) -> About:
        """What the gallery says about itself; call it in a thread."""
        return self._once("about", lambda: About.of(self.gallery))

    def listing(self) -> Listing:
        """The items in their orders; call it in a thread."""
        return self._once("listing", lambda: Listing(self.gallery))

    async def map(self) -> list[Place]:
        """The map; whoever asks while it is being made waits for the same one."""
        if not self._open:
            raise _closing()
        if self._map is None or self._map[0] != self._state or (self._map[1].done() and self._map[1].exception()):
            self._map = self._state, asyncio.ensure_future(self._run(self._mapper, self._make_map))
        return await asyncio.shield(self._map[1])

    def check_writable(self) -> None:
        """Refuse what changes a gallery that is open for reading only."""
        if not self.gallery.writable:
            raise Refusal(403, "the gallery is open for reading only: another process writes to it, or nobody may")

    async def _change(self, work: Callable[[], object]) -> None:
        self.check_writable()
        with self._admitted():
            await self._run(self._worker, self._changed, work)

    def _item(self, id: str) -> "Item":
        item = self.gallery.get(id) if _ID.fullmatch(id) else None
        if item is None:
            raise Refusal(404, "there is no such item")
        return item

    def _changed(self, work: Callable[[], T]) -> T:
        """In the worker: what was made of the gallery before has to be made again."""
        try:
            return work()
        except OSError:
            log.exception("a change was not stored")
            raise Refusal(507, "this could not be stored (a full disk?); the server's log says why") from None
        finally:
            self._state += 1

    def _search(self, images: Sequence["Image"], k: int, targets: RiskTargets) -> list["Reply"]:
        return self.gallery.search(images, k, targets)

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """What ``make`` gives, made once for each state of the gallery."""
        with self.gallery.write_lock:
            if self._made.get(name, (-1, None))[0] != self._state:
                self._made[name] = self._state, make()
            made: T = self._made[name][1]
            return made

    def _make_map(self) -> list[Place]:
        from idml.search.tsne_map import gallery_map

        return [Place.of(point) for point in gallery_map(self.gallery)]

    async def _follow(self) -> None:
        """See what other processes change."""
        said = ""
        while True:
            await asyncio.sleep(_FOLLOW)
            try:
                await self._run(self._worker, self._refresh)
            except Exception as error:
                if str(error) != said:  # once, not every second
                    log.warning("the gallery cannot be read again: %s", error)
                said = str(error)

    def _refresh(self) -> None:
        if self.gallery.refresh():
            self._state += 1

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """A place in the queue."""
        if not self._open:
            raise _closing()
        if self._busy >= self._limits.queue:
            raise Refusal(503, "too much to do, try again", retry_after=1)
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *args)


def _closing() -> Refusal:
    return Refusal(503, "the service is shutting down", retry_after=10)


# -------------------- batching --------------------
# Queries that arrive together are embedded and searched together, in one worker thread.


Search = Callable[[Sequence["Image"], int, RiskTargets], Sequence["Reply"]]


@dataclass(eq=False)
class _Query:
    image: "Image"
    k: int
    targets: RiskTargets
    reply: "asyncio.Future[Reply]"


class Batcher:
    """Collects queries until there are ``size``, or ``seconds`` after the first; `start` it in the event loop.

    Args:
        search: answers some images with the same k and targets.
        worker: the thread for it.
        size: the largest batch.
        seconds: how long the first query waits for others.
        seen: is told the size of every batch.
    """

    def __init__(
        self, search: Search, worker: Executor, *, size: int, seconds: float, seen: Callable[[int], None]
    ) -> None:
        self._search, self._worker, self._size, self._seconds, self._seen = search, worker, size, seconds, seen
        self._waiting: asyncio.Queue[_Query | None] = asyncio.Queue()  # None: the end
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to answer."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Answer what is waiting, then no more."""
        task, self._task = self._task, None
        if task is not None:
            self._waiting.put_nowait(None)
            await task

    async def ask(self, image: "Image", k: int, targets: RiskTargets) -> "Reply":
        """The reply to one query; it raises what searching for this image raises."""
        if self._task is None:
            raise Refusal(503, "the service is shutting down", retry_after=10)
        query = _Query(image, k, targets, asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(query)
        return await query.reply

    async def _run(self) -> None:
        while await self._next():
            pass

    async def _next(self) -> bool:
        """Answer the next batch; False if it was the last. (What it held is free before the next one is waited for.)"""
        loop = asyncio.get_running_loop()
        batch = [await self._waiting.get()]
        until = loop.time() + self._seconds
        with suppress(TimeoutError):
            while len(batch) < self._size and None not in batch:
                async with asyncio.timeout_at(until):
                    batch.append(await self._waiting.get())
        queries = [query for query in batch if query is not None and not query.reply.done()]  # done: given up
        if queries:
            self._seen(len(queries))
            replies = await loop.run_in_executor(self._worker, self._answer, queries)
            for query, reply in zip(queries, replies, strict=True):
                if query.reply.done():
                    continue
                if isinstance(reply, Exception):
                    query.reply.set_exception(reply)
                else:
                    query.reply.set_result(reply)
        return None not in batch

    def _answer(self, queries: Sequence[_Query]) -> list["Reply | Exception"]:
        """In the worker: the queries that ask for the same go together."""
        replies: dict[_Query, Reply | Exception] = {}
        groups: dict[tuple[int, RiskTargets], list[_Query]] = {}
        for query in queries:
            groups.setdefault((query.k, query.targets), []).append(query)
        for group in groups.values():
            replies.update(self._together(group))
        return [replies[query] for query in queries]

    def _together(self, group: Sequence[_Query]) -> dict[_Query, "Reply | Exception"]:
        try:
            found = self._search([query.image for query in group], group[0].k, group[0].targets)
            return dict(zip(group, found, strict=True))
        except Exception as error:
            if len(group) == 1:
                return {group[0]: error}
        return {query: reply for one in group for query, reply in self._together([one]).items()}  # who is it?

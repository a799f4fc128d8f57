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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from idml.search.answers import Wishes
from idml.search.thumbnails import Upload
from idml.server.batching import Batcher
from idml.server.limits import Limits, Room
from idml.server.listing import Listing
from idml.server.metrics import Metrics
from idml.server.replies import Refusal
from idml.server.shapes import About, Place
from idml.server.uploads import decode, look

if TYPE_CHECKING:
    from PIL.Image import Image

    from idml.search.engines import Item
    from idml.search.gallery import Gallery, Reply

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

    async def search(self, data: bytes, k: int, wishes: Wishes) -> "Reply":
        """The reply to an uploaded image."""
        with self._admitted():
            head = await self._run(self._decoders, look, io.BytesIO(data))
            async with self._room.taken(head.pixels):
                image = await self._run(self._decoders, decode, data)
                reply = await self._batcher.ask(image, k, wishes)
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

    def _search(self, images: Sequence["Image"], k: int, wishes: Wishes) -> list["Reply"]:
        return self.gallery.search(images, k, wishes)

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """What ``make`` gives, made once for each state of the gallery."""
        with self.gallery.still:
            if self._made.get(name, (-1, None))[0] != self._state:
                self._made[name] = self._state, make()
            made: T = self._made[name][1]
            return made

    def _make_map(self) -> list[Place]:
        from idml.search.map import gallery_map

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

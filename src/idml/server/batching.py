"""Queries that arrive together are embedded and searched together, in one worker thread."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from idml.search.answers import Wishes
from idml.server.replies import Refusal

if TYPE_CHECKING:
    from PIL.Image import Image

    from idml.search.gallery import Reply

Search = Callable[[Sequence["Image"], int, Wishes], Sequence["Reply"]]


@dataclass(eq=False)
class _Query:
    image: "Image"
    k: int
    wishes: Wishes
    reply: "asyncio.Future[Reply]"


class Batcher:
    """Collects queries until there are ``size``, or ``seconds`` after the first; `start` it in the event loop.

    Args:
        search: answers some images with the same k and wishes.
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

    async def ask(self, image: "Image", k: int, wishes: Wishes) -> "Reply":
        """The reply to one query; it raises what searching for this image raises."""
        if self._task is None:
            raise Refusal(503, "the service is shutting down", retry_after=10)
        query = _Query(image, k, wishes, asyncio.get_running_loop().create_future())
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
        groups: dict[tuple[int, Wishes], list[_Query]] = {}
        for query in queries:
            groups.setdefault((query.k, query.wishes), []).append(query)
        for group in groups.values():
            replies.update(self._together(group))
        return [replies[query] for query in queries]

    def _together(self, group: Sequence[_Query]) -> dict[_Query, "Reply | Exception"]:
        try:
            found = self._search([query.image for query in group], group[0].k, group[0].wishes)
            return dict(zip(group, found, strict=True))
        except Exception as error:
            if len(group) == 1:
                return {group[0]: error}
        return {query: reply for one in group for query, reply in self._together([one]).items()}  # who is it?

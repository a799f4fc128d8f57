"""Batches: together what comes together, each with its own answer."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from idml.search.answers import RiskTargets
from idml.server.responses import ApiError
from idml.server.service import Batcher

TARGETS = RiskTargets()


class Searched:
    """A search that remembers its calls; an image is a number, and its reply says what was asked."""

    def __init__(self, seconds=0.0):
        self.calls, self.threads, self.seconds = [], set(), seconds

    def __call__(self, images, k, targets, rerank):
        self.calls.append(list(images))
        self.threads.add(threading.get_ident())
        time.sleep(self.seconds)
        if "broken" in images:
            raise ZeroDivisionError("broken")
        return [(image, k, targets.max_error) for image in images]


def served(work, search, size=4, seconds=0.005):
    sizes = []

    async def run():
        with ThreadPoolExecutor(1) as worker:
            batcher = Batcher(search, worker, size=size, seconds=seconds, on_batch=sizes.append)
            batcher.start()
            try:
                return await work(batcher)
            finally:
                await batcher.close()

    return asyncio.run(run()), sizes


def test_batches_are_full_and_no_larger():
    search = Searched()

    async def work(batcher):
        return await asyncio.gather(*(batcher.search(n, 3, TARGETS) for n in range(10)))

    replies, sizes = served(work, search)
    assert replies == [(n, 3, 0.05) for n in range(10)]
    assert search.calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sizes == [4, 4, 2]
    assert len(search.threads) == 1


def test_different_targets_are_searched_separately():
    search = Searched()
    asked = [(0, 3, TARGETS), (1, 5, TARGETS), (2, 3, RiskTargets(max_error=0.2)), (3, 3, TARGETS)]

    async def work(batcher):
        return await asyncio.gather(*(batcher.search(*query) for query in asked))

    replies, sizes = served(work, search)
    assert replies == [(n, k, targets.max_error) for n, k, targets in asked]
    assert search.calls == [[0, 3], [1], [2]]
    assert sizes == [4]


def test_queries_to_re_rank_are_searched_separately():
    search = Searched()

    async def work(batcher):
        return await asyncio.gather(*(batcher.search(n, 3, TARGETS, ("diml", None)[n % 2]) for n in range(4)))

    assert served(work, search)[1] == [4]
    assert search.calls == [[0, 2], [1, 3]]


def test_a_broken_image_fails_only_itself():
    async def work(batcher):
        return await asyncio.gather(*(batcher.search(n, 3, TARGETS) for n in (0, "broken", 2)), return_exceptions=True)

    replies, _ = served(work, Searched())
    assert replies[0] == (0, 3, 0.05)
    assert isinstance(replies[1], ZeroDivisionError)
    assert replies[2] == (2, 3, 0.05)


def test_a_single_query_waits_for_others_and_is_searched_alone():
    async def work(batcher):
        started = time.perf_counter()
        await batcher.search(0, 3, TARGETS)
        return time.perf_counter() - started

    seconds, sizes = served(work, Searched(), seconds=0.02)
    assert seconds > 0.015
    assert sizes == [1]


def test_queries_that_wait_for_the_worker_form_one_batch():
    search = Searched(seconds=0.05)

    async def work(batcher):
        first = asyncio.create_task(batcher.search("first", 3, TARGETS))
        await asyncio.sleep(0.02)
        rest = [asyncio.create_task(batcher.search(n, 3, TARGETS)) for n in range(3)]
        await asyncio.gather(first, *rest)

    _, sizes = served(work, search)
    assert sizes == [1, 3]


def test_cancelled_queries_are_not_searched():
    search = Searched(seconds=0.05)

    async def work(batcher):
        first = asyncio.create_task(batcher.search("first", 3, TARGETS))
        await asyncio.sleep(0.02)
        gone, stays = (asyncio.create_task(batcher.search(name, 3, TARGETS)) for name in ("gone", "stays"))
        await asyncio.sleep(0)
        gone.cancel()
        assert await first == ("first", 3, 0.05)
        assert await stays == ("stays", 3, 0.05)
        with pytest.raises(asyncio.CancelledError):
            await gone

    served(work, search)
    assert search.calls == [["first"], ["stays"]]


def test_closing_answers_waiting_queries_and_refuses_new_ones():
    search = Searched(seconds=0.02)

    async def work(batcher):
        tasks = [asyncio.create_task(batcher.search(n, 3, TARGETS)) for n in range(10)]
        await asyncio.sleep(0)
        await batcher.close()
        assert [await task for task in tasks] == [(n, 3, 0.05) for n in range(10)]
        with pytest.raises(ApiError, match="shutting down") as refusal:
            await batcher.search(11, 3, TARGETS)
        assert refusal.value.status == 503

    served(work, search)

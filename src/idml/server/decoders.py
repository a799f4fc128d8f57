"""The decoder processes of the service: uploaded images are decoded within a deadline, or their process is killed."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from idml.data import decoder_process
from idml.data.decoder_process import Decoded, DecoderDied, DecoderProcess, RefusedImage
from idml.data.images import FORMATS, MAX_PIXELS, MAX_SIDE
from idml.server.limits import Budget, Limits
from idml.server.responses import ApiError, shutting_down

T = TypeVar("T")
log = logging.getLogger("idml.server")
_PROCESSES = 2


class Decoders:
    """Decodes uploaded images in two processes. Call `close` in the event loop that decodes.

    All decoded images that are held at once have at most ``limits.pixels`` pixels; further images wait.
    """

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.decode_seconds
        self._pixels = Budget(limits.pixels)
        self._processes = [DecoderProcess(decoder_process.COMMAND) for _ in range(_PROCESSES)]
        self._idle: asyncio.LifoQueue[DecoderProcess] = asyncio.LifoQueue()  # the second starts when it is needed
        for process in self._processes:
            self._idle.put_nowait(process)
        self._threads = ThreadPoolExecutor(_PROCESSES, "decoder")  # each waits for one process
        self._open = True
        self.failure = ""  # why no process starts, in one line

    @asynccontextmanager
    async def decode(self, data: bytes, min_side: int = 0) -> AsyncIterator[Decoded]:
        """Decode an image and hold it until the end of the block; an `ApiError` says what is wrong with it.

        ``min_side`` is that of `idml.data.images.decode_image`.
        """
        async with AsyncExitStack() as held:
            process = await self._idle.get()
            try:
                header = await self._call(process, process.decode, data, "upload", min_side)
                await held.enter_async_context(self._pixels.reserve(header.width * header.height))
                decoded = await self._call(process, process.read_pixels)
            except RefusedImage as error:
                raise _refusal(error) from None
            except BaseException:
                process.kill()  # it may still be at work
                raise
            finally:
                self._idle.put_nowait(process)
            yield decoded

    async def _call(self, process: DecoderProcess, work: Callable[..., T], *args: object) -> T:
        """Run one part of a job; kill the process at the deadline."""
        if not self._open:
            raise shutting_down()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._seconds, process.kill)
        try:
            result = await loop.run_in_executor(self._threads, work, *args)
            self.failure = ""
            return result
        except OSError as error:
            self.failure = str(error)
            raise
        except DecoderDied:
            if not self._open:
                raise shutting_down() from None
            if loop.time() < timer.when():
                log.warning("a decoder process died; it is started again")
                raise ApiError(422, "the image cannot be decoded") from None
            raise ApiError(422, f"decoding the image took longer than {self._seconds:g} seconds") from None
        finally:
            timer.cancel()

    async def close(self) -> None:
        """Kill the processes; decoding that is under way fails with a 503."""
        self._open = False
        for process in self._processes:
            process.kill()
        await asyncio.to_thread(self._threads.shutdown)


def _refusal(error: RefusedImage) -> ApiError:
    if error.kind == "format":
        return ApiError(415, f"this is not an image of a known format ({', '.join(FORMATS)})")
    if error.kind == "size":
        return ApiError(413, f"the image has more than {MAX_PIXELS:,} pixels, or a side of more than {MAX_SIDE:,}")
    return ApiError(422, str(error))

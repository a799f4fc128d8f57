"""The page's files, and the images of the gallery, as they are sent."""

import asyncio
import os
import stat
from pathlib import Path
from typing import BinaryIO

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from idml.server.responses import Refusal
from idml.server.uploads import Head, look

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
_CHUNK = 1 << 16


class Files:
    """The files of the page, known by name since the start: no name leads anywhere else."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {path.name: path for path in folder.iterdir() if path.suffix in _TYPES}

    async def response(self, name: str) -> Response:
        """The file with this name."""
        path = self._files.get(name)
        if path is None:
            raise Refusal(404, "there is no such file")
        content = await asyncio.to_thread(path.read_bytes)
        return Response(content, headers={"cache-control": "no-cache"}, media_type=_TYPES[path.suffix])


def picture_headers(head: Head, id: str) -> dict[str, str]:
    """The headers of an image; its name is made of its id, not of what somebody called it."""
    return {
        "content-type": head.media_type,
        "content-disposition": f'inline; filename="{id}.{head.ending}"',
        "cache-control": "private, max-age=60",
        "vary": "x-api-key, authorization",
    }


def open_picture(path: Path, id: str) -> "Picture":
    """An image file, open; what is no image (any more), or no plain file, is refused."""
    try:
        # A link or a pipe put there in the meantime is not followed, not waited for.
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError:
        raise Refusal(404, "the file of this item is not there") from None
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise Refusal(404, "the file of this item is no file")
        try:
            head = look(file)
        except Refusal:
            raise Refusal(404, "the file of this item is no image of a known format") from None
        file.seek(0)
        return Picture(file, status.st_size, picture_headers(head, id))
    except BaseException:
        file.close()
        raise


class Picture(Response):
    """An open file, sent piece by piece."""

    def __init__(self, file: BinaryIO, size: int, headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "content-length": str(size)})
        self._file, self._left = file, size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while self._left:
                chunk = await asyncio.to_thread(self._file.read, min(_CHUNK, self._left))
                if not chunk:
                    raise OSError("an image file became shorter while it was sent")
                self._left -= len(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": self._left > 0})
        finally:
            self._file.close()

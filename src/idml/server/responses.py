"""Responses of the service: JSON, one-line errors, the files of the page, and image files."""

import asyncio
import json
import math
from pathlib import Path

from starlette.responses import Response

PAGE_FOLDER = Path(__file__).parent / "static"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}


# -------------------- JSON and errors --------------------


class ApiError(Exception):
    """A request that is refused: the HTTP status, a reason in one line, and after how many seconds to try again.

    ``close`` also closes the connection.
    """

    def __init__(self, status: int, reason: str, *, retry_after: int | None = None, close: bool = False) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after, self.close = status, reason, retry_after, close

    def response(self) -> "JsonResponse":
        """Build the response that reports the error."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.close:
            headers["connection"] = "close"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JsonResponse({"error": " ".join(self.reason.split())}, self.status, headers)


def shutting_down() -> ApiError:
    """Build the error of a request that comes too late."""
    return ApiError(503, "the service is shutting down", retry_after=10)


class JsonResponse(Response):
    """A JSON response in ASCII, without NaN, that caches must not store."""

    media_type = "application/json"

    def __init__(self, content: object, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(content, status_code, {"cache-control": "no-store", **(headers or {})})

    def render(self, content: object) -> bytes:
        """Encode the content."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def json_number(value: float | None) -> float | None:
    """Convert a number for JSON: NaN and infinity become null.

    >>> json_number(0.5), json_number(float("nan")), json_number(None)
    (0.5, None, None)
    """
    return None if value is None or not math.isfinite(value) else float(value)


def json_text(value: str) -> str:
    """Convert a name for JSON: bytes of a file name that are not UTF-8 become the replacement character.

    >>> json_text("caf\\udce9")
    'caf\ufffd'
    """
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


# -------------------- files --------------------


class PageFiles:
    """The static files of the page. Their names are listed once at the start, so no name can lead to another file."""

    def __init__(self, folder: Path = PAGE_FOLDER) -> None:
        self._files = {path.name: path for path in folder.iterdir() if path.suffix in _MEDIA_TYPES}

    async def response(self, name: str) -> Response:
        """Build the response with the file of this name."""
        path = self._files.get(name)
        if path is None:
            raise ApiError(404, "there is no such file")
        content = await asyncio.to_thread(path.read_bytes)
        return Response(content, headers={"cache-control": "no-cache"}, media_type=_MEDIA_TYPES[path.suffix])


def image_headers(media_type: str, file_name: str) -> dict[str, str]:
    """Build the headers of an image."""
    return {
        "content-type": media_type,
        "content-disposition": f'inline; filename="{file_name}"',
        "cache-control": "private, max-age=60",
        "vary": "x-api-key, authorization",
    }

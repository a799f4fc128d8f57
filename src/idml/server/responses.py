"""What the service says: JSON that every reader accepts, and refusals of one line."""

import json
import math

from starlette.responses import Response


class Refusal(Exception):
    """A request that is not served: the HTTP status, one line that says why, and when to try again."""

    def __init__(self, status: int, reason: str, *, retry_after: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after = status, reason, retry_after

    def response(self) -> "Json":
        """The answer that says so."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Json({"error": " ".join(self.reason.split())}, self.status, headers)


class Json(Response):
    """A JSON answer in ASCII, without NaN; what a person must not see from a cache is not kept by one."""

    media_type = "application/json"

    def __init__(self, content: object, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(content, status_code, {"cache-control": "no-store", **(headers or {})})

    def render(self, content: object) -> bytes:
        """The bytes."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def number(value: float | None) -> float | None:
    """A number as JSON can hold it: what is not finite becomes null.

    >>> number(0.5), number(float("nan")), number(None)
    (0.5, None, None)
    """
    return None if value is None or not math.isfinite(value) else float(value)


def text(value: str) -> str:
    """A name as JSON readers accept it: bytes of a file name that were no UTF-8 become the replacement character.

    >>> text("caf\\udce9")
    'caf\ufffd'
    """
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

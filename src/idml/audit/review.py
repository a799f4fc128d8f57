"""`idml audit … --review`: a local page that shows one suspicious image at a time and stores the decisions.

The page listens only on the loopback interface. Requests with another host name, or from the page of another site, are
refused, so that no other page can read the images or make decisions.
"""

import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from idml.audit.decisions import (
    KINDS,
    CleanedList,
    CurrentDecisions,
    Decision,
    append_decision,
    current_time,
    read_decisions,
    write_cleaned,
)
from idml.audit.findings import AuditImages, image_checksum
from idml.audit.run import read_audit
from idml.data.datasets import load_dataset
from idml.progress import Note, silent
from idml.server.responses import ApiError, JsonResponse

ALL = "all"
PORT = 8001
_HOSTS = ("127.0.0.1", "localhost")
_STATIC = {"index.html": "text/html", "style.css": "text/css", "review.js": "text/javascript"}
_LARGE, _SMALL = 768, 192  # pixels along the longer side
_MAX_BODY = 10_000  # bytes of a request
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


# -------------------- the review --------------------


class Review:
    """An audit, its images, and the decisions on them. A finding is identified by its position in audit.json.

    Decisions are read again for every request, so reviews of one folder in several tabs or processes see each other's
    decisions.
    """

    def __init__(self, folder: Path, data: str, split: str = "official") -> None:
        self.folder, self.audit = folder, read_audit(folder)
        self.images = AuditImages.of(load_dataset(data, split=split))
        if self.images.version != self.audit["images_version"]:
            raise ValueError(f"{folder} is the audit of other images, or the images have changed: audit {data} again")
        self.findings: list[dict[str, Any]] = self.audit["findings"]
        named = ([finding, *finding["partners"]] for finding in self.findings)
        self.shown = {about["number"] for several in named for about in several}
        self.decisions()  # report a damaged file now, not at the first decision

    def decisions(self) -> CurrentDecisions:
        """Read the decisions that are in force, including those of other processes."""
        return CurrentDecisions(read_decisions(self.folder))

    def describe(self, position: int | None) -> dict[str, Any]:
        """Describe a finding for the page, with the progress of the review."""
        decisions, item = self.decisions(), None
        if position is not None:
            finding = self.findings[position]
            decision = self._find_decision(finding, decisions)
            item = {**finding, "id": position, "decision": None if decision is None else asdict(decision)}
        counts = {kind: {"total": 0, "open": 0} for kind in (ALL, *KINDS)}
        for finding in self.findings:
            is_open = self._find_decision(finding, decisions) is None
            for kind in (ALL, finding["kind"]):
                counts[kind]["total"] += 1
                counts[kind]["open"] += is_open
        return {"item": item, "progress": counts}

    def find_next(self, kind: str, after: int, *, decided: bool) -> int | None:
        """Return the position of the next finding of a kind without a decision; None if there is none.

        The search continues at the first finding after the last one. With ``decided``, findings with a decision are
        included, and the search ends at the last one, because it would never end otherwise.
        """
        if kind not in (ALL, *KINDS):
            raise ValueError(f"unknown kind {kind[:40]!r}; use one of {ALL}, {', '.join(KINDS)}")
        n, decisions = len(self.findings), self.decisions()
        start = min(max(after + 1, 0), n)
        for position in range(start, n) if decided else (*range(start, n), *range(start)):
            finding = self.findings[position]
            if kind in (ALL, finding["kind"]) and (decided or self._find_decision(finding, decisions) is None):
                return position
        return None

    def decide(self, position: int, decision: str, label: str) -> None:
        """Store a decision; a ``ValueError`` says what is wrong with it."""
        finding = self.findings[position]
        if decision == "relabel" and label == finding["label"]:
            raise ValueError(f"{label!r} is its label already; keep it, or choose another label")
        digest = image_checksum(self.images.sources[finding["number"]])
        if digest != finding["checksum"]:
            raise ValueError(f"{finding['image']!r} has changed since the audit: run it again")
        about = (current_time(), finding["kind"], finding["image"], finding["label"])
        append_decision(self.folder, Decision(*about, decision, label if decision == "relabel" else "", digest))

    def clean(self) -> CleanedList:
        """Write cleaned.csv; a ``ValueError`` says why that is not possible."""
        return write_cleaned(self.images, self.decisions(), self.folder)

    def find_labels(self, text: str) -> list[str]:
        """Return up to 50 class names that contain the text; those that begin with it come first."""
        wanted = text.strip().casefold()
        found = [name for name in self.images.classes if wanted in name.casefold()]
        return sorted(found, key=lambda name: not name.casefold().startswith(wanted))[:50]

    def make_jpeg(self, number: int, side: int) -> bytes:
        """Make a JPEG of an image, at most ``side`` pixels wide and high; small images are not enlarged."""
        image = self.images.sources[number].decode(min_side=side)
        image.thumbnail((side, side))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        return file.getvalue()

    def _find_decision(self, finding: dict[str, Any], decisions: CurrentDecisions) -> Decision | None:
        return decisions.find(finding["kind"], finding["image"], finding["label"], finding["checksum"])


# -------------------- the page --------------------


def serve_review(
    folder: str | Path,
    data: str,
    *,
    split: str = "official",
    port: int = PORT,
    note: Note = silent,
) -> None:
    """Serve the review of the audit in ``folder`` on 127.0.0.1 until it is interrupted; port 0 chooses a free port."""
    if not 0 <= port < 65536:
        raise ValueError(f"a port is a number from 0 to 65535, got {port}")
    app = review_app(folder, data, split=split)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise OSError(f"cannot listen on port {port} ({error.strerror}); choose another with --port") from None
        note(f"review at http://127.0.0.1:{listener.getsockname()[1]}/ (Ctrl-C ends it; decisions are stored at once)")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def review_app(folder: str | Path, data: str, *, split: str = "official") -> FastAPI:
    """Build the application for the audit in ``folder``, which was made with this ``data`` and ``split``."""
    review = Review(Path(folder), data, split)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        with suppress(ValueError):  # images in a tar file; the button of the page reports it
            if review.decisions().images():
                review.clean()

    app = FastAPI(title="idml audit review", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.middleware("http")
    async def check_request(request: Request, handle: Callable[[Request], Awaitable[Response]]) -> Response:
        reason = _reason_to_refuse(request)
        response = await handle(request) if reason is None else ApiError(403, reason).response()
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(ApiError)
    async def handle_api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail)).response()

    @app.exception_handler(RequestValidationError)
    async def handle_invalid_parameter(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return ApiError(422, f"{first['loc'][-1]}: {first['msg']}").response()

    @app.exception_handler(ValueError)
    async def handle_value_error(request: Request, error: ValueError) -> Response:
        return ApiError(422, str(error)).response()

    @app.exception_handler(OSError)
    async def handle_os_error(request: Request, error: OSError) -> Response:
        return ApiError(507, f"nothing was stored: {error.strerror or error}").response()

    def image_response(number: int, side: int) -> Response:
        if number not in review.shown:
            raise ApiError(404, f"the audit lists no image {number}")
        try:
            data = review.make_jpeg(number, side)
        except (ValueError, OSError) as error:
            raise ApiError(404, str(error)) from None
        return Response(data, media_type="image/jpeg", headers={"cache-control": "private, max-age=60"})

    @app.get("/")
    def page() -> Response:
        return static("index.html")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in _STATIC:
            raise ApiError(404, "there is no such file")
        content = (files("idml.audit") / "static" / name).read_bytes()
        return Response(content, media_type=_STATIC[name], headers={"cache-control": "no-cache"})

    @app.get("/favicon.ico")
    def icon() -> Response:
        return Response(status_code=204)

    @app.get("/api/review")
    def about() -> Response:
        audit = review.audit
        size = f"{audit['images']:,} images of {audit['classes']:,} classes"
        return JsonResponse({"about": f"{audit['data']}: {size}; model: {audit['model']}", "notes": audit["notes"]})

    @app.get("/api/next")
    def next_finding(kind: str = ALL, after: int = -1, decided: bool = False) -> Response:
        return JsonResponse(review.describe(review.find_next(kind, after, decided=decided)))

    @app.get("/api/labels")
    def labels(text: str = "") -> Response:
        return JsonResponse({"labels": review.find_labels(text)})

    @app.get("/api/images/{number}")
    def image(number: int) -> Response:
        return image_response(number, _LARGE)

    @app.get("/api/thumbnails/{number}")
    def thumbnail(number: int) -> Response:
        return image_response(number, _SMALL)

    @app.post("/api/decisions")
    async def decide(request: Request) -> Response:
        given = await _read_json(request)
        position, decision, label = given.get("item"), given.get("decision"), given.get("label", "")
        if type(position) is not int or not isinstance(decision, str) or not isinstance(label, str):
            raise ApiError(422, "a decision needs an item (a number), a decision and, for relabel, a label")
        if not 0 <= position < len(review.findings):
            raise ApiError(404, f"the audit has no item {position}")
        await run_in_threadpool(review.decide, position, decision, label.strip())
        return JsonResponse(await run_in_threadpool(review.describe, position))

    @app.post("/api/cleaned")
    async def clean(request: Request) -> Response:
        await _read_json(request)
        return JsonResponse(asdict(await run_in_threadpool(review.clean)))

    return app


def _reason_to_refuse(request: Request) -> str | None:
    """Return why a request must be refused: another host name (DNS rebinding), or the page of another site; or None."""
    host = request.headers.get("host", "")
    if host.rsplit(":", 1)[0].lower() not in _HOSTS:
        return "the review accepts only the host names 127.0.0.1 and localhost"
    origin = request.headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host}".lower():
        return "the review accepts requests only from its own page"
    linked = request.url.path == "/"  # any site may link to the page
    if not linked and request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return "the review accepts requests only from its own page"
    return None


async def _read_json(request: Request) -> dict[str, Any]:
    """Read the JSON object in the body. Forms, which the page of another site could send, are refused."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send application/json")
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > _MAX_BODY:
            raise ApiError(413, f"a decision has at most {_MAX_BODY:,} bytes")
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        raise ApiError(422, "the body is not JSON") from None
    if not isinstance(given, dict):
        raise ApiError(422, "the body is not a JSON object")
    return given

"""`idml audit … --review`: a page on this machine that shows one suspicious image at a time and keeps what is decided.

It listens on the loopback interface only, for the one who audits. Requests under another host name, or sent by another
site's page, are refused, so that no page elsewhere can read the images or decide anything.
"""

import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idml.audit.decisions import KINDS, Cleaned, Decision, Settled, append, now, read, write_cleaned
from idml.audit.findings import AuditImages, checksum
from idml.audit.report import read_audit
from idml.data.datasets import load_dataset
from idml.progress import Note, silent

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request


PORT = 8001
_HOSTS = ("127.0.0.1", "localhost")
_STATIC = {"index.html": "text/html", "style.css": "text/css", "review.js": "text/javascript"}
_LARGE, _SMALL = 768, 192  # pixels along the longer side
_BODY = 10_000  # bytes of a request
_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def serve_review(
    folder: str | Path,
    data: str,
    *,
    split: str = "official",
    port: int = PORT,
    note: Note = silent,
) -> None:
    """Serve the review of the audit in ``folder`` on 127.0.0.1 until it is interrupted; port 0 takes any free one."""
    import uvicorn

    if not 0 <= port < 65536:
        raise ValueError(f"a port lies in 0 … 65535, got {port}")
    app = review_app(folder, data, split=split)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise OSError(f"cannot listen on port {port} ({error.strerror}); give another by --port") from None
        note(f"review at http://127.0.0.1:{listener.getsockname()[1]}/ (Ctrl-C ends it; decisions are kept at once)")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


def review_app(folder: str | Path, data: str, *, split: str = "official") -> "FastAPI":
    """The application that reviews the audit in ``folder``; ``data`` and ``split`` are those it was made with."""
    from fastapi import FastAPI
    from fastapi.exceptions import RequestValidationError
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response

    from idml.server.responses import ApiError, JsonResponse

    review = Review(Path(folder), data, split)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        with suppress(ValueError):  # images in a tar: the button says it
            if review.settled().images():
                review.clean()

    app = FastAPI(title="idml audit review", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.middleware("http")
    async def guarded(request: Request, following: Callable[[Request], Awaitable[Response]]) -> Response:
        stranger = _stranger(request)
        response = await following(request) if stranger is None else ApiError(403, stranger).response()
        response.headers.update(_HEADERS)
        return response

    @app.exception_handler(ApiError)
    async def refused(request: Request, refusal: ApiError) -> Response:
        return refusal.response()

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail)).response()

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return ApiError(422, f"{first['loc'][-1]}: {first['msg']}").response()

    @app.exception_handler(ValueError)
    async def impossible(request: Request, error: ValueError) -> Response:
        return ApiError(422, str(error)).response()

    @app.exception_handler(OSError)
    async def broken(request: Request, error: OSError) -> Response:
        return ApiError(507, f"nothing was kept: {error.strerror or error}").response()

    def picture(number: int, side: int) -> Response:
        if number not in review.shown:
            raise ApiError(404, f"the audit names no image {number}")
        try:
            data = review.picture(number, side)
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
        content = (files("idml.server") / "static_review" / name).read_bytes()
        return Response(content, media_type=_STATIC[name], headers={"cache-control": "no-cache"})

    @app.get("/favicon.ico")
    def icon() -> Response:
        return Response(status_code=204)

    @app.get("/api/review")
    def about() -> Response:
        told = review.audit
        size = f"{told['images']:,} images of {told['classes']:,} classes"
        words = f"{told['data']}: {size}, as {told['model']} sees them"
        return JsonResponse({"about": words, "notes": told["notes"]})

    @app.get("/api/next")
    def following(kind: str = ALL, after: int = -1, decided: bool = False) -> Response:
        return JsonResponse(review.told(review.next(kind, after, decided=decided)))

    @app.get("/api/labels")
    def labels(text: str = "") -> Response:
        return JsonResponse({"labels": review.labels(text)})

    @app.get("/api/images/{number}")
    def image(number: int) -> Response:
        return picture(number, _LARGE)

    @app.get("/api/thumbnails/{number}")
    def thumbnail(number: int) -> Response:
        return picture(number, _SMALL)

    @app.post("/api/decisions")
    async def decide(request: Request) -> Response:
        given = await _body(request)
        place, decision, label = given.get("item"), given.get("decision"), given.get("label", "")
        if type(place) is not int or not isinstance(decision, str) or not isinstance(label, str):
            raise ApiError(422, "a decision has an item (a number), a decision and, to relabel, a label")
        if not 0 <= place < len(review.findings):
            raise ApiError(404, f"the audit has no item {place}")
        await run_in_threadpool(review.decide, place, decision, label.strip())
        return JsonResponse(await run_in_threadpool(review.told, place))

    @app.post("/api/cleaned")
    async def clean(request: Request) -> Response:
        await _body(request)
        return JsonResponse(asdict(await run_in_threadpool(review.clean)))

    return app


def _stranger(request: "Request") -> str | None:
    """Why a request is not from the one who audits: sent to another name (DNS rebinding), or by another site's page."""
    host = request.headers.get("host", "")
    if host.rsplit(":", 1)[0].lower() not in _HOSTS:
        return "the review answers to 127.0.0.1 and localhost only"
    origin = request.headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host}".lower():
        return "the review answers to its own page only"
    linked = request.url.path == "/"  # a link to the page may stand anywhere
    if not linked and request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return "the review answers to its own page only"
    return None


async def _body(request: "Request") -> dict[str, Any]:
    """The JSON object that was sent. A form, which another site's page could send, is none."""
    from idml.server.responses import ApiError

    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send application/json")
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > _BODY:
            raise ApiError(413, f"a decision has at most {_BODY:,} bytes")
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        raise ApiError(422, "the body is not JSON") from None
    if not isinstance(given, dict):
        raise ApiError(422, "the body is not a JSON object")
    return given


# -------------------- reviewing --------------------
# A review: an audit, the images it is about, and what has been decided about each.


ALL = "all"


class Review:
    """The audit in a folder; a finding goes by its place in audit.json. Decisions are read anew for every question, so
    that reviews of one folder in several tabs or processes see each other's.
    """

    def __init__(self, folder: Path, data: str, split: str = "official") -> None:
        self.folder, self.audit = folder, read_audit(folder)
        self.images = AuditImages.of(load_dataset(data, split=split))
        if self.images.version != self.audit["images_version"]:
            raise ValueError(f"{folder} holds the audit of other images, or they have changed: audit {data} again")
        self.findings: list[dict[str, Any]] = self.audit["findings"]
        named = ([finding, *finding["partners"]] for finding in self.findings)
        self.shown = {about["number"] for several in named for about in several}
        self.settled()  # a damaged file is refused now, not at the first decision

    def settled(self) -> Settled:
        """What holds after all decisions made until now, by anybody."""
        return Settled(read(self.folder))

    def told(self, place: int | None) -> dict[str, Any]:
        """A finding as the page shows it, and the progress."""
        settled, item = self.settled(), None
        if place is not None:
            decision = self._decision(self.findings[place], settled)
            item = {**self.findings[place], "id": place, "decision": None if decision is None else asdict(decision)}
        counts = {kind: {"total": 0, "open": 0} for kind in (ALL, *KINDS)}
        for finding in self.findings:
            is_open = self._decision(finding, settled) is None
            for kind in (ALL, finding["kind"]):
                counts[kind]["total"] += 1
                counts[kind]["open"] += is_open
        return {"item": item, "progress": counts}

    def next(self, kind: str, after: int, *, decided: bool) -> int | None:
        """The place of the next open finding of a kind, going round; None if all are decided.

        With ``decided`` those come too, and the way ends at the last one, for otherwise it never would.
        """
        if kind not in (ALL, *KINDS):
            raise ValueError(f"the kind {kind[:40]!r} is none of {ALL}, {', '.join(KINDS)}")
        n, settled = len(self.findings), self.settled()
        start = min(max(after + 1, 0), n)
        for place in range(start, n) if decided else (*range(start, n), *range(start)):
            finding = self.findings[place]
            if kind in (ALL, finding["kind"]) and (decided or self._decision(finding, settled) is None):
                return place
        return None

    def decide(self, place: int, decision: str, label: str) -> None:
        """Write a decision down; a ``ValueError`` says what is wrong with it."""
        finding = self.findings[place]
        if decision == "relabel" and label == finding["label"]:
            raise ValueError(f"{label!r} is its label already; keep it, or give another")
        digest = checksum(self.images.sources[finding["number"]])
        if digest != finding["checksum"]:
            raise ValueError(f"{finding['image']!r} has changed since the audit: run it again")
        about = (now(), finding["kind"], finding["image"], finding["label"])
        append(self.folder, Decision(*about, decision, label if decision == "relabel" else "", digest))

    def clean(self) -> Cleaned:
        """Write cleaned.csv; a ``ValueError`` says why there can be none."""
        return write_cleaned(self.images, self.settled(), self.folder)

    def labels(self, text: str) -> list[str]:
        """Some class names that hold the text, those that begin with it first."""
        wanted = text.strip().casefold()
        found = [name for name in self.images.classes if wanted in name.casefold()]
        return sorted(found, key=lambda name: not name.casefold().startswith(wanted))[:50]

    def picture(self, number: int, side: int) -> bytes:
        """An image as a JPEG of at most ``side`` pixels each way; small ones are not enlarged."""
        image = self.images.sources[number].decode(min_side=side)
        image.thumbnail((side, side))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        return file.getvalue()

    def _decision(self, finding: dict[str, Any], settled: Settled) -> Decision | None:
        return settled.of(finding["kind"], finding["image"], finding["label"], finding["checksum"])

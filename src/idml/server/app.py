"""The routes of the service."""

import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Annotated, Any, get_args

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, WithJsonSchema
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from idml.calibration.risk_control import SMALLEST_RATE
from idml.errors import unknown_name
from idml.search.answers import RiskTargets
from idml.search.gallery import Gallery
from idml.search.uploads import MAX_LABEL
from idml.server.limits import Limits
from idml.server.metrics import CONTENT_TYPE, Metrics
from idml.server.responses import ApiError, JsonResponse, PageFiles, image_headers, json_text
from idml.server.schemas import (
    AddedItem,
    Error,
    GalleryInfo,
    GalleryMap,
    Health,
    ItemInfo,
    ItemPage,
    Judgement,
    Judgements,
    LabelPage,
    MapProgress,
    Reranker,
    SearchAnswer,
)
from idml.server.security import Keys, RequestGuard, Role, required_role
from idml.server.service import Order, Service
from idml.server.uploads import LABEL_PATTERN, clean_label, read_form, read_header
from idml.version import __version__

_MAX_LABEL_BODY = 5000  # bytes
_LONGEST_NAME = 40  # characters of a parameter's name in a message
_RATE = {"type": "number", "minimum": SMALLEST_RATE, "exclusiveMaximum": 1}  # null cannot be sent in an address
_RERANK = {"type": "string", "enum": [*get_args(Reranker)]}
_LABEL_TEXT = {"maxLength": MAX_LABEL, "pattern": LABEL_PATTERN}


def build_app(gallery: Gallery, *, keys: Keys, limits: Limits, hosts: frozenset[str] | None) -> FastAPI:
    """Build the ASGI application, which closes the gallery at shutdown. See `RequestGuard` for the arguments."""
    metrics = Metrics()
    service = Service(gallery, limits, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="idml",
        description="Image search that knows when it does not know.",
        version=__version__,
        docs_url=None,  # FastAPI's page would load scripts from another host; /docs is our own
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        dependencies=[Depends(_check_parameter_names)],
    )
    app.add_middleware(RequestGuard, keys=keys, limits=limits, metrics=metrics, hosts=hosts)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(RequestValidationError, _handle_invalid_parameter)
    _add_search_routes(app, service)  # the page of the API shows them in this order
    _add_read_routes(app, service)
    _add_change_routes(app, service)
    _add_feedback_routes(app, service)
    _add_page_routes(app, service, metrics)
    _describe_keys(app, keys)
    return app


def _add_page_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    files = PageFiles()

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return await files.response("index.html")

    @app.get("/docs", include_in_schema=False)
    async def documentation() -> Response:
        return await files.response("docs.html")

    @app.get("/static/{file}", include_in_schema=False)
    async def static(file: str) -> Response:
        return await files.response(file)

    @app.get("/api/health", response_model=Health, responses=_errors(403, 429, 503))
    async def health() -> Response:
        """Check that the service can answer; needs no key. 503 if it is stuck or shutting down."""
        return _json(Health(items=await service.check_health()))

    @app.get("/metrics", **_reading(), response_class=Response)
    async def prometheus() -> Response:
        """Get metrics for Prometheus: requests, answers, batches, the gallery and the process."""
        content = await service.read(lambda: metrics.render(len(service.gallery)))
        return Response(content, headers={"content-type": CONTENT_TYPE})


def _add_read_routes(app: FastAPI, service: Service) -> None:
    @app.get("/api/gallery", response_model=GalleryInfo, **_reading())
    async def gallery(request: Request) -> Response:
        """Describe the gallery, and what can be guaranteed about its answers."""
        info = await service.read(service.info)
        writable = info.writable and request.scope["role"] == Role.WRITER
        return _json(info.model_copy(update={"writable": writable}))

    @app.get("/api/items", response_model=ItemPage, **_reading())
    async def items(
        order: Order = "added",
        label: Annotated[str, Query(max_length=400)] = "",
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 60,
    ) -> Response:
        """List items, all or those with one label.

        They come in the order in which they were added, the most uncertain first, or mixed: in an order that depends
        on their content alone, so that the first items are a sample of the whole gallery.
        """

        def read_page() -> ItemPage:
            total, rows = service.listing().page(order, label or None, offset, limit)
            found = zip(service.gallery.get_many([id for id, _ in rows]), rows, strict=True)
            shown = [ItemInfo.of(item, level) for item, (_, level) in found if item is not None]
            return ItemPage(total=total, items=shown)

        return _json(await service.read(read_page))

    @app.get("/api/labels", response_model=LabelPage, **_reading())
    async def labels(
        text: Annotated[str, Query(max_length=400)] = "",
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> Response:
        """List the labels in alphabetical order, all or those that contain a text, with the number of their items."""
        return _json(await service.read(lambda: service.listing().labels(text, offset, limit)))

    @app.get("/api/items/{id}", response_model=ItemInfo, **_reading(404))
    async def item(id: str) -> Response:
        """Get one item."""
        levels = service.gallery.engine.levels
        return _json(await service.read_item(id, lambda item: ItemInfo.of(item, float(levels([item.id])[0]))))

    @app.get("/api/items/{id}/thumbnail", **_reading(404), response_class=Response)
    async def thumbnail(id: str) -> Response:
        """Get the thumbnail of an item."""
        content = await service.read_item(id, lambda item: service.gallery.thumbnail(item.id))
        if not content:
            raise ApiError(404, "this item has no thumbnail")
        header = read_header(io.BytesIO(content))
        return Response(content, headers=image_headers(header.media_type, header.file_name(id)))

    @app.get("/api/items/{id}/image", **_reading(404), response_class=Response)
    async def image(id: str) -> Response:
        """Get the picture of an item, upright and without metadata such as the place where it was taken."""
        content = await service.picture(id)
        header = await service.read(read_header, io.BytesIO(content))
        return Response(content, headers=image_headers(header.media_type, header.file_name(id)))

    @app.get("/api/map", response_model=GalleryMap, **_reading(202))
    async def map() -> Response:
        """Get the map (t-SNE), with similar items close together; 202 while it is being computed after a change."""
        points = await service.map()
        if points is None:
            return JsonResponse(MapProgress().model_dump(), 202, {"retry-after": "1"})
        return _json(GalleryMap(points=points))


def _add_search_routes(app: FastAPI, service: Service) -> None:
    @app.post("/api/search", response_model=SearchAnswer, **_reading(408, 409, 413, 415), openapi_extra=_form("image"))
    async def search(
        request: Request,
        k: Annotated[int, Query(ge=1, le=100)] = 12,
        max_error: Annotated[float, Query(ge=SMALLEST_RATE, lt=1)] = 0.05,
        max_missed: Annotated[float | None, Query(ge=SMALLEST_RATE, lt=1), WithJsonSchema(_RATE)] = None,
        rerank: Annotated[Reranker | None, Query(), WithJsonSchema(_RERANK)] = None,
    ) -> Response:
        """Search for an image. At most ``max_error`` of the answers *match* are wrong, where this can be guaranteed.

        With ``max_missed``, the result list is long enough to contain a right image for all but this share of the
        queries whose class is in the collection. ``set_size`` is this length, which may be more than ``k``.

        ``rerank=diml`` sorts the first 100 results anew by matching positions. Nothing is guaranteed then. It needs the
        position maps of ``idml index --maps``; a gallery without them answers 409.
        """
        targets = RiskTargets(max_error=max_error, max_missed=max_missed)
        await service.check_rerank(rerank, targets)
        fields = await read_form(request, ("image",))
        started = perf_counter()
        reply = await service.search(fields["image"], k, targets, rerank)
        return _json(SearchAnswer.of(reply, perf_counter() - started))

    @app.get("/api/items/{id}/similar", response_model=SearchAnswer, **_reading(404, 409))
    async def similar(
        id: str,
        k: Annotated[int, Query(ge=1, le=100)] = 12,
        max_error: Annotated[float, Query(ge=SMALLEST_RATE, lt=1)] = 0.05,
        rerank: Annotated[Reranker | None, Query(), WithJsonSchema(_RERANK)] = None,
    ) -> Response:
        """Search for an item of the gallery. It is left out: the answer is that of a gallery that lacks this image.

        ``rerank`` is that of a search.
        """
        targets = RiskTargets(max_error=max_error)
        await service.check_rerank(rerank, targets)
        started = perf_counter()
        reply = await service.search_item(id, k, targets, rerank)
        return _json(SearchAnswer.of(reply, perf_counter() - started))


def _add_feedback_routes(app: FastAPI, service: Service) -> None:
    form = _form("image", "verdict", "label", "result")

    @app.post(
        "/api/feedback",
        status_code=201,
        response_model=Judgement,
        **_reading(403, 408, 409, 413, 415, 507),
        openapi_extra=form,
    )
    async def judge(request: Request) -> Response:
        """Keep a judgement about the first result for an image: it is a query of the next calibration.

        ``verdict`` is *right* or *wrong*; with *wrong*, ``label`` may say what it shows. ``result`` may be the id of
        the result that was judged: 409 if it is not the first one any more. The picture is not kept; a judgement about
        the same picture is replaced.
        """
        service.check_writable()
        fields = await read_form(request, ("image", "verdict", "label", "result"))
        verdict = fields.get("verdict", b"")
        if verdict not in (b"right", b"wrong"):
            raise ApiError(422, "verdict: must be right or wrong")
        try:
            label = fields.get("label", b"").decode()
        except UnicodeDecodeError:
            raise ApiError(422, "the label is not UTF-8") from None
        result = fields["result"].decode(errors="replace") if "result" in fields else None
        kept = await service.judge(fields["image"], verdict == b"right", clean_label(label), result)
        return _json(Judgement.of(kept), 201)

    @app.get("/api/feedback", response_model=Judgements, **_reading())
    async def judgements() -> Response:
        """List what people said about answers."""
        return _json(Judgements(feedback=[Judgement.of(one) for one in await service.read(service.judgements)]))

    @app.delete("/api/feedback/{id}", status_code=204, **_reading(403, 404, 507))
    async def forget(id: str) -> Response:
        """Delete a judgement."""
        await service.forget(id)
        return Response(status_code=204)


def _add_change_routes(app: FastAPI, service: Service) -> None:
    form = _form("image", "label")

    @app.post(
        "/api/items", status_code=201, response_model=AddedItem, **_reading(408, 413, 415, 507), openapi_extra=form
    )
    async def add(request: Request) -> Response:
        """Add an image, with or without a label."""
        service.check_writable()
        fields = await read_form(request, ("image", "label"))
        try:
            label = fields.get("label", b"").decode()
        except UnicodeDecodeError:
            raise ApiError(422, "the label is not UTF-8") from None
        id, new = await service.add(fields["image"], clean_label(label))
        return _json(AddedItem(id=id, new=new), 201)

    @app.patch("/api/items/{id}", status_code=204, **_reading(404, 408, 413, 415, 507), openapi_extra=_LABEL)
    async def relabel(id: str, request: Request) -> Response:
        """Change or remove the label of an item."""
        await service.relabel(id, await _read_label(request))
        return Response(status_code=204)

    @app.delete("/api/items/{id}", status_code=204, **_reading(404, 507))
    async def remove(id: str) -> Response:
        """Remove an item."""
        await service.remove(id)
        return Response(status_code=204)


async def _read_label(request: Request) -> str | None:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, 'send {"label": …} as application/json')
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_LABEL_BODY:
            raise ApiError(413, f"the request is larger than {_MAX_LABEL_BODY} bytes")
    try:
        content = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise ApiError(422, "the body is not JSON") from None
    label = content.get("label", 0) if isinstance(content, dict) and len(content) == 1 else 0
    if not (label is None or isinstance(label, str)):
        raise ApiError(422, 'the body must be {"label": text or null}')
    return clean_label(label)


def _json(content: BaseModel, status: int = 200) -> JsonResponse:
    return JsonResponse(content.model_dump(), status)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    """Answer a request with an unknown address or method."""
    assert isinstance(error, HTTPException)
    reason = {404: "there is nothing here", 405: "this method is not known here"}.get(error.status_code, "bad request")
    headers = {"allow": _allowed_methods(request)} if error.status_code == 405 else {}
    return JsonResponse({"error": reason}, error.status_code, headers)


def _allowed_methods(request: Request) -> str:
    """List the methods of all routes at the address of a request; each route knows only its own."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
    methods = {method for route in routes for method in getattr(route, "methods", None) or ()}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


async def _check_parameter_names(request: Request) -> None:
    """Refuse a parameter that the route does not have: a misspelt one would silently mean the default."""
    if not request.url.path.startswith("/api/"):
        return
    known = [parameter.alias for parameter in request.scope["route"].dependant.query_params]
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known:
            raise ApiError(422, unknown_name("parameter", name[:_LONGEST_NAME], known))
        if names.count(name) > 1:
            raise ApiError(422, f"{name} is given more than once")


async def _handle_invalid_parameter(request: Request, error: Exception) -> Response:
    """Report the first invalid parameter."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return ApiError(422, f"{json_text(str(first['loc'][-1]))}: {first['msg']}").response()


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": MapProgress if status == 202 else Error} for status in statuses}


def _describe_keys(app: FastAPI, keys: Keys) -> None:
    """Let OpenAPI say which requests need a key (none, if no key is set), and in which headers it is sent."""
    ways: list[dict[str, list[str]]] = [{}] if keys.open else [{"key": []}, {"bearer": []}]
    schemes = {
        "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        "bearer": {"type": "http", "scheme": "bearer"},
    }
    build: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            content = build()
            content.setdefault("components", {})["securitySchemes"] = schemes
            for path, operations in content["paths"].items():
                for method, operation in operations.items():
                    public = required_role(method.upper(), path) == Role.NOBODY
                    operation["security"] = [{}] if public else ways
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation does it


def _reading(*statuses: int) -> dict[str, Any]:
    """Build the OpenAPI description of the answers of a route that needs a key."""
    return {"responses": _errors(401, 403, *statuses, 422, 429, 500, 503)}


def _body(kind: str, *required: str, **properties: object) -> dict[str, Any]:
    schema = {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}


def _form(*fields: str) -> dict[str, Any]:
    kinds = {
        "image": {"type": "string", "format": "binary"},
        "label": {"type": "string", **_LABEL_TEXT},
        "verdict": {"type": "string", "enum": ["right", "wrong"]},
        "result": {"type": "string"},
    }
    required = [name for name in fields if name not in ("label", "result")]
    return _body("multipart/form-data", *required, **{name: kinds[name] for name in fields})


_LABEL = _body("application/json", "label", label={"type": ["string", "null"], **_LABEL_TEXT})

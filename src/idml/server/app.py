"""The routes."""

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Query, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

import idml
from idml.search.answers import RiskTargets
from idml.server.limits import Limits
from idml.server.metrics import CONTENT_TYPE, Metrics
from idml.server.page import Files, open_picture, picture_headers
from idml.server.responses import Json, Refusal, text
from idml.server.schemas import About, Answered, Error, Health, Kept, Map, Page, Shown
from idml.server.security import Guard, Keys, Role
from idml.server.service import Order, Service
from idml.server.uploads import clean_label, look, read_form

if TYPE_CHECKING:
    from idml.search.engines import Item
    from idml.search.gallery import Gallery


_LABEL_BODY = 5000  # bytes


def build_app(gallery: "Gallery", *, keys: Keys, limits: Limits, hosts: frozenset[str] | None) -> FastAPI:
    """The service as an ASGI application; it closes the gallery at its end. See `Guard` for the arguments."""
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
        version=idml.__version__,
        docs_url=None,  # it would load scripts from another host
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.add_middleware(Guard, keys=keys, limits=limits, metrics=metrics, hosts=hosts)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    _add_page(app, service, metrics)
    _add_reading(app, service)
    _add_search(app, service)
    _add_changes(app, service)
    return app


def _add_page(app: FastAPI, service: Service, metrics: Metrics) -> None:
    files = Files()

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return await files.response("index.html")

    @app.get("/static/{file}", include_in_schema=False)
    async def static(file: str) -> Response:
        return await files.response(file)

    @app.get("/api/health", response_model=Health, responses=_errors(429, 503))
    async def health() -> Response:
        """Whether the service is there; needs no key."""
        return _json(Health(items=await service.read(len, service.gallery)))

    @app.get("/metrics", **_reading(), response_class=Response)
    async def prometheus() -> Response:
        """Requests, answers, batches, the gallery and the process, for Prometheus."""
        content = await service.read(lambda: metrics.text(len(service.gallery)))
        return Response(content, headers={"content-type": CONTENT_TYPE})


def _add_reading(app: FastAPI, service: Service) -> None:
    @app.get("/api/gallery", response_model=About, **_reading())
    async def about(request: Request) -> Response:
        """The gallery, and what can be promised about its answers."""
        found = await service.read(service.about)
        may = found.writable and request.scope["role"] == Role.WRITER
        return _json(found.model_copy(update={"writable": may}))

    @app.get("/api/items", response_model=Page, **_reading())
    async def items(
        order: Order = "added",
        label: Annotated[str, Query(max_length=400)] = "",
        offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 60,
    ) -> Response:
        """Some of the items: as they were added, or the most uncertain first; of one label, or of all."""

        def look_up() -> Page:
            total, rows = service.listing().page(order, label or None, offset, limit)
            found = zip(service.gallery.get_many([id for id, _ in rows]), rows, strict=True)
            return Page(total=total, items=[Shown.of(item, level) for item, (_, level) in found if item is not None])

        return _json(await service.read(look_up))

    @app.get("/api/items/{id}", response_model=Shown, **_reading(404))
    async def item(id: str) -> Response:
        """One item."""
        levels = service.gallery.engine.levels
        return _json(await service.read_item(id, lambda item: Shown.of(item, float(levels([item.id])[0]))))

    @app.get("/api/items/{id}/thumbnail", **_reading(404), response_class=Response)
    async def thumbnail(id: str) -> Response:
        """The item's small picture."""
        content = await service.read_item(id, lambda item: service.gallery.thumbnail(item.id))
        if not content:
            raise Refusal(404, "this item has no thumbnail")
        return Response(content, headers=picture_headers(look(io.BytesIO(content)), id))

    @app.get("/api/items/{id}/image", **_reading(404), response_class=Response)
    async def image(id: str) -> Response:
        """The item's file, as it is."""

        def look_up(item: "Item") -> Response:
            path = service.gallery.image_file(item.id)
            if path is None:
                raise Refusal(404, "this item has no file")
            return open_picture(path, item.id)

        return await service.read_item(id, look_up)

    @app.get("/api/map", response_model=Map, **_reading())
    async def map() -> Response:
        """The items in the plane, alike ones near each other (t-SNE). The first one takes a while."""
        return _json(Map(points=await service.map()))


def _add_search(app: FastAPI, service: Service) -> None:
    @app.post("/api/search", response_model=Answered, **_reading(408, 413, 415), openapi_extra=_form("image"))
    async def search(
        request: Request,
        k: Annotated[int, Query(ge=1, le=100)] = 12,
        max_error: Annotated[float, Query(gt=0, lt=1)] = 0.05,
        max_missed: Annotated[float | None, Query(gt=0, lt=1)] = None,
    ) -> Response:
        """Look an image up: at most ``max_error`` of the answers *match* are wrong, where that can be promised.

        With ``max_missed``, ``set_size`` says how many results it takes that at most this share of the queries whose
        class is in the collection get none of it; there are as many then, even if that is more than ``k``.
        """
        fields = await read_form(request, ("image",))
        started = perf_counter()
        reply = await service.search(fields["image"], k, RiskTargets(max_error=max_error, max_missed=max_missed))
        return _json(Answered.of(reply, perf_counter() - started))


def _add_changes(app: FastAPI, service: Service) -> None:
    form = _form("image", "label")

    @app.post(
        "/api/items", status_code=201, response_model=Kept, **_reading(403, 408, 413, 415, 507), openapi_extra=form
    )
    async def add(request: Request) -> Response:
        """Add an image, with a label or without."""
        service.check_writable()
        fields = await read_form(request, ("image", "label"))
        try:
            label = fields.get("label", b"").decode()
        except UnicodeDecodeError:
            raise Refusal(422, "the label is not UTF-8") from None
        id, new = await service.add(fields["image"], clean_label(label))
        return _json(Kept(id=id, new=new), 201)

    @app.patch("/api/items/{id}", status_code=204, **_reading(403, 404, 408, 413, 415, 507), openapi_extra=_LABEL)
    async def relabel(id: str, request: Request) -> Response:
        """Give an item another label, or none."""
        await service.relabel(id, await _read_label(request))
        return Response(status_code=204)

    @app.delete("/api/items/{id}", status_code=204, **_reading(403, 404, 507))
    async def remove(id: str) -> Response:
        """Remove an item."""
        await service.remove(id)
        return Response(status_code=204)


async def _read_label(request: Request) -> str | None:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal(415, 'send {"label": …} as application/json')
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LABEL_BODY:
            raise Refusal(413, f"the request is larger than {_LABEL_BODY} bytes")
    try:
        content = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise Refusal(422, "the body is not JSON") from None
    label = content.get("label", 0) if isinstance(content, dict) and len(content) == 1 else 0
    if not (label is None or isinstance(label, str)):
        raise Refusal(422, 'the body must be {"label": text or null}')
    return clean_label(label)


def _json(content: BaseModel, status: int = 200) -> Json:
    return Json(content.model_dump(), status)


async def _refused(request: Request, error: Exception) -> Response:
    """What the router does not know."""
    assert isinstance(error, HTTPException)
    reason = {404: "there is nothing here", 405: "this method is not known here"}.get(error.status_code, "bad request")
    return Json({"error": reason}, error.status_code, dict(error.headers or {}))


async def _invalid(request: Request, error: Exception) -> Response:
    """A parameter that is not what it should be: the first one."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return Refusal(422, f"{text(str(first['loc'][-1]))}: {first['msg']}").response()


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Error} for status in statuses}


def _reading(*statuses: int) -> dict[str, Any]:
    """What OpenAPI says of a route that needs a key. (The door asks for it, not the route.)"""
    key = Security(APIKeyHeader(name="X-API-Key", auto_error=False))
    return {"dependencies": [key], "responses": _errors(401, *statuses, 422, 429, 500, 503)}


def _body(kind: str, required: str, **properties: object) -> dict[str, Any]:
    schema = {"type": "object", "required": [required], "properties": properties}
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}


def _form(*fields: str) -> dict[str, Any]:
    kinds = {"image": {"type": "string", "format": "binary"}, "label": {"type": "string", "maxLength": 200}}
    return _body("multipart/form-data", "image", **{name: kinds[name] for name in fields})


_LABEL = _body("application/json", "label", label={"type": ["string", "null"], "maxLength": 200})

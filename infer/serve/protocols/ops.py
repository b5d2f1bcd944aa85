"""Operator routes: name and version, health, metrics and API description."""

from __future__ import annotations

import msgspec

from ...errors import NotReadyError
from .. import page
from ..http import openapi
from ..http.error_text import error_text
from ..http.request_context import RequestContext
from ..http.routing import JSON, Dialect, Response, Route
from ..observability.metrics import CONTENT_TYPE
from ..service import Service


class Error(msgspec.Struct):
    """Error body: one text."""

    error: str


class Home(msgspec.Struct):
    name: str
    version: str
    models: list[str]
    links: dict[str, str]


class Status(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


DIALECT = Dialect("ops", lambda error: error.status, lambda error: Error(error_text(error)), Error)
LINKS = {
    "health": "/health",
    "ready": "/ready",
    "metrics": "/metrics",
    "openapi": "/openapi.json",
    "docs": "/docs",
    "tensors": "/v2/models",
    "openai": "/v1/models",
}


def routes(service: Service) -> list[Route]:
    def get(path: str, out: object, handler: object, summary: str, *errors: int, open: bool = False) -> Route:
        return Route("GET", path, None, out, handler, summary, DIALECT, errors, open=open)  # type: ignore[arg-type]

    return [
        get(
            "/",
            Home,
            home,
            "The page, for browsers; else name, version and where to go on",
            401,
            404,
            405,
            open=True,
        ),
        get("/health", Status, health, "Whether the process should live on", 503, open=True),
        get("/ready", Status, ready, "Whether requests would be answered", 503),
        get("/metrics", CONTENT_TYPE, metrics, "Counters for Prometheus"),
        get("/version", Version, version, "The version of infer"),
        get("/openapi.json", JSON, description, "These routes as OpenAPI 3.1"),
        get("/docs", "text/html; charset=utf-8", docs, "These routes for people"),
    ]


async def home(call: RequestContext) -> Home | Response:
    """Return the page to browsers, also without a key: it holds no data of the server."""
    if b"text/html" in call.headers.get(b"accept", b""):
        return page.index()
    call.require_key()
    return Home("infer", call.service.version, list(call.service.models), LINKS)


async def health(call: RequestContext) -> Status:
    if not call.service.healthy:
        raise NotReadyError("an engine died or is stuck")
    return Status("ok")


async def ready(call: RequestContext) -> Status:
    if not call.service.ready:
        raise NotReadyError(call.service.unready_reason)
    return Status("ok")


async def metrics(call: RequestContext) -> bytes:
    return call.service.metrics.text()


async def version(call: RequestContext) -> Version:
    return Version(call.service.version)


async def description(call: RequestContext) -> Response:
    service = call.service
    document = openapi.document(service.routes, service.version, api_key=service.keys is not None)
    return Response(msgspec.json.encode(document))


async def docs(call: RequestContext) -> str:
    return openapi.page(call.service.routes, call.service.version)

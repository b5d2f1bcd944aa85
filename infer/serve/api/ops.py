"""Operator routes: name and version, health, metrics, API description, and the page at /."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib import resources

import msgspec
import numpy as np
from safetensors.numpy import load_file

from ... import rows
from ...artifact.model_info import GOLDEN_INPUTS
from ...errors import NotFoundError, NotReadyError
from ...spec import TensorSpec
from ..batching.tensor_engine import TensorEngine
from ..http import openapi
from ..http.request_context import RequestContext
from ..http.routing import JSON, ErrorFormat, Handler, Payload, Response, Route, error_text
from ..observability import status_page
from ..observability.metrics import CONTENT_TYPE
from ..observability.status_page import Overview, ServerStatus
from ..service import Service
from .kserve.kserve_tensors import datatype, to_json
from .kserve.kserve_types import InferInput, InferRequest

LINKS = {
    "health": "/health",
    "ready": "/ready",
    "metrics": "/metrics",
    "openapi": "/openapi.json",
    "docs": "/docs",
    "tensors": "/v2/models",
    "openai": "/v1/models",
}
PAGE_MEDIA = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
PAGE_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src blob:; "
    b"connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = [
    (b"content-security-policy", PAGE_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]
MOST_EXAMPLE_BYTES = 4 << 20


class Error(msgspec.Struct):
    """Error body: one text."""

    error: str


class ServerInfo(msgspec.Struct):
    name: str
    version: str
    models: list[str]
    links: dict[str, str]


class Status(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


ERROR_FORMAT = ErrorFormat("ops", lambda error, _: Error(error_text(error)), Error)


def routes(service: Service) -> list[Route]:
    def get(
        path: str, out: Payload, handler: Handler, summary: str, *errors: int, open: bool = False
    ) -> Route:
        return Route("GET", path, None, out, handler, summary, ERROR_FORMAT, errors, open=open)

    return [
        get(
            "/",
            ServerInfo,
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
        get("/page/{file}", "*/*", asset, "A file of the page at /", 404, open=True),
        get("/ops/models", Overview, models, "The served models and what was measured of them"),
        get("/ops/now", ServerStatus, now, "What is running and waiting, and counts since the start"),
        get(
            "/ops/models/{model}/example",
            InferRequest,
            example,
            "One sample that the model was tested with",
            404,
        ),
    ]


async def home(context: RequestContext) -> ServerInfo | Response:
    """Return the page to browsers, also without a key: it holds no data of the server."""
    if b"text/html" in context.headers.get(b"accept", b""):
        return index_page()
    context.require_key()
    return ServerInfo("infer", context.service.version, list(context.service.models), LINKS)


async def health(context: RequestContext) -> Status:
    if not context.service.healthy:
        raise NotReadyError("an engine died or is stuck")
    return Status("ok")


async def ready(context: RequestContext) -> Status:
    if not context.service.ready:
        raise NotReadyError(context.service.unready_reason)
    return Status("ok")


async def metrics(context: RequestContext) -> bytes:
    return context.service.metrics.text()


async def version(context: RequestContext) -> Version:
    return Version(context.service.version)


async def description(context: RequestContext) -> Response:
    service = context.service
    document = openapi.document(service.routes, service.version, api_key=service.keys is not None)
    return Response(msgspec.json.encode(document))


async def docs(context: RequestContext) -> str:
    return openapi.page(context.service.routes, context.service.version)


@cache
def page_files() -> dict[str, bytes]:
    """Return the files of the page by name; read once."""
    folder = resources.files("infer.serve.page")
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in PAGE_MEDIA
    }


def index_page() -> Response:
    """Return the page for browsers; it holds no data of this server."""
    return Response(
        page_files()["index.html"], media=PAGE_MEDIA["html"], headers=[*PAGE_HEADERS, (b"vary", b"accept")]
    )


async def asset(context: RequestContext) -> Response:
    name = context.path["file"]
    if name not in page_files():
        raise NotFoundError("no such address")
    return Response(page_files()[name], media=PAGE_MEDIA[name.rpartition(".")[2]], headers=list(PAGE_HEADERS))


async def models(context: RequestContext) -> Overview:
    return await asyncio.get_running_loop().run_in_executor(
        context.service.pool, status_page.overview, context.service
    )


async def now(context: RequestContext) -> ServerStatus:
    return status_page.server_status(context.service)


async def example(context: RequestContext) -> InferRequest:
    """Return the first row of the golden inputs as a request."""
    engine = context.service.engine(context.path["model"])
    found = engine.info.file(GOLDEN_INPUTS)
    if found is None or found.stat().st_size > MOST_EXAMPLE_BYTES:
        raise NotFoundError("this model carries no example")
    arrays = await asyncio.get_running_loop().run_in_executor(context.service.pool, load_file, found)
    return InferRequest(inputs=[_input(engine, spec, arrays[spec.name]) for spec in engine.info.inputs])


def _input(engine: TensorEngine, spec: TensorSpec, array: np.ndarray) -> InferInput:
    row = rows.one(spec, array, 0, 1) if engine.collator.batched else array
    return InferInput(name=spec.name, datatype=datatype(spec), shape=list(row.shape), data=to_json(row))

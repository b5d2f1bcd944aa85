"""The page at /: its files, the served models, and their current activity."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ...errors import NotFoundError
from .. import page
from ..api.kserve_tensors import datatype, to_json
from ..api.kserve_types import InferInput, InferRequest
from ..batching.tensor_engine import TensorEngine
from ..http.request_context import RequestContext
from ..http.routing import Response, Route
from ..observability import status_page
from ..observability.status_page import Now, Overview
from ..service import Service
from .ops import DIALECT

MOST_EXAMPLE_BYTES = 4 << 20


def routes(service: Service) -> list[Route]:
    def get(path: str, out: Any, handler: Any, summary: str, *errors: int, open: bool = False) -> Route:
        return Route("GET", path, None, out, handler, summary, DIALECT, errors, open=open)

    return [
        get("/page/{file}", "*/*", asset, "A file of the page at /", 404, open=True),
        get("/ops/models", Overview, models, "The served models and what was measured of them"),
        get("/ops/now", Now, now, "What is running and waiting, and counts since the start"),
        get(
            "/ops/models/{model}/example",
            InferRequest,
            example,
            "One sample that the model was tested with",
            404,
        ),
    ]


async def asset(call: RequestContext) -> Response:
    if (found := page.asset(call.path["file"])) is None:
        raise NotFoundError("no such address")
    return found


async def models(call: RequestContext) -> Overview:
    return await asyncio.get_running_loop().run_in_executor(
        call.service.pool, status_page.overview, call.service
    )


async def now(call: RequestContext) -> Now:
    return status_page.now(call.service)


async def example(call: RequestContext) -> InferRequest:
    """Return the first row of the golden inputs as a request."""
    engine = call.service.engine(call.path["model"])
    found = status_page.example_file(engine.predictor)
    if found is None or found.stat().st_size > MOST_EXAMPLE_BYTES:
        raise NotFoundError("this model carries no example")
    arrays = await asyncio.get_running_loop().run_in_executor(call.service.pool, load_file, found)
    return InferRequest(inputs=[_input(engine, spec, arrays[spec.name]) for spec in engine.predictor.inputs])


def _input(engine: TensorEngine, spec: Any, array: np.ndarray) -> InferInput:
    row = array[:1] if engine.collator.batched else array
    data, _ = to_json(row)
    return InferInput(name=spec.name, datatype=datatype(spec), shape=list(row.shape), data=data)

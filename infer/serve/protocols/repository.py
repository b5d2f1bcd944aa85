"""The model repository extension of KServe v2: list, load, unload; only with --allow-reload."""

from __future__ import annotations

from typing import Any

import msgspec

from ...errors import InputError
from ..http.request_context import RequestContext
from ..http.routing import Response, Route
from ..model_admin import ModelAdmin, RepositoryModel
from ..service import Service
from .kserve import DIALECT


class IndexRequest(msgspec.Struct):
    """Body of the index route; `ready`: list ready models only."""

    ready: bool = False


class ChangeRequest(msgspec.Struct):
    """Body of load and unload; a model has no parameters that can be set."""

    parameters: dict[str, Any] = {}


def routes(service: Service) -> list[Route]:
    if service.admin is None:
        return []

    def post(path: str, to: type[Any], out: type[Any] | str, handler: Any, text: str, *errors: int) -> Route:
        return Route("POST", f"/v2/repository/{path}", to, out, handler, text, DIALECT, errors)

    change = (404, 409, 503)
    return [
        post("index", IndexRequest, list[RepositoryModel], index, "All models in the server's folders"),
        post("models/{model}/load", ChangeRequest, "text/plain", load, "Serve the latest version", *change),
        post("models/{model}/unload", ChangeRequest, "text/plain", unload, "Serve a model no more", *change),
    ]


async def index(call: RequestContext) -> list[RepositoryModel]:
    wanted = call.json(IndexRequest) if call.body.strip() else IndexRequest()
    return [one for one in _admin(call).index() if one.state == "READY" or not wanted.ready]


async def load(call: RequestContext) -> Response:
    _check(call, ())
    await _admin(call).load(call.path["model"])
    return Response(media="text/plain")


async def unload(call: RequestContext) -> Response:
    _check(call, ("unload_dependents",))
    await _admin(call).unload(call.path["model"])
    return Response(media="text/plain")


def _admin(call: RequestContext) -> ModelAdmin:
    return call.service.admin


def _check(call: RequestContext, known: tuple[str, ...]) -> None:
    if not call.body.strip():
        return
    if unknown := sorted(set(call.json(ChangeRequest).parameters) - set(known)):
        raise InputError(f"parameter {unknown[0][:64]!r} is not supported", where="parameters")

"""KServe's model repository extension: clients list, load and unload the models of the server's folders."""

from __future__ import annotations

from typing import Any

from ....errors import InputError
from ...http.request_context import RequestContext
from ...http.routing import Handler, Payload, Response, Route
from ...model_admin import ModelAdmin, RepositoryModel
from . import ERROR_FORMAT
from .kserve_types import ChangeRequest, IndexRequest

TEXT = "text/plain"


class Repository:
    """Handlers of the routes; `admin` changes the served models."""

    def __init__(self, admin: ModelAdmin) -> None:
        self._admin = admin

    def routes(self) -> list[Route]:
        def post(path: str, to: type[Any], out: Payload, handler: Handler, text: str, *errors: int) -> Route:
            return Route("POST", f"/v2/repository/{path}", to, out, handler, text, ERROR_FORMAT, errors)

        listed, change = list[RepositoryModel], (404, 409, 503)
        load, unload = "models/{model}/load", "models/{model}/unload"
        return [
            post("index", IndexRequest, listed, self.index, "All models in the server's folders"),
            post(load, ChangeRequest, TEXT, self.load, "Serve the latest version", *change),
            post(unload, ChangeRequest, TEXT, self.unload, "Serve a model no more", *change),
        ]

    async def index(self, context: RequestContext) -> list[RepositoryModel]:
        wanted = context.json(IndexRequest) if context.body.strip() else IndexRequest()
        return [one for one in self._admin.index() if one.state == "READY" or not wanted.ready]

    async def load(self, context: RequestContext) -> Response:
        _check_parameters(context, ())
        await self._admin.load(context.path["model"])
        return Response(media=TEXT)

    async def unload(self, context: RequestContext) -> Response:
        _check_parameters(context, ("unload_dependents",))
        await self._admin.unload(context.path["model"])
        return Response(media=TEXT)


def _check_parameters(context: RequestContext, known: tuple[str, ...]) -> None:
    if not context.body.strip():
        return
    if unknown := sorted(set(context.json(ChangeRequest).parameters) - set(known)):
        raise InputError(f"parameter {unknown[0][:64]!r} is not supported", where="parameters")

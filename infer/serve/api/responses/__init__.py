"""OpenAI's Responses: create one, in full or as a stream of events, and go on from one that is kept."""

from __future__ import annotations

from ...http.routing import Route
from ...service import Service
from ..openai.openai_errors import ERROR_FORMAT
from .response_store import ResponseStore
from .responses import Responses
from .responses_types import (
    Deleted,
    ItemList,
    ItemQuery,
    ResponseEvent,
    ResponseObject,
    ResponseQuery,
    ResponsesRequest,
)


def routes(service: Service) -> list[Route]:
    limits = service.limits
    responses = Responses(ResponseStore(limits.max_stored_bytes, limits.max_stored_responses))
    path = "/v1/responses/{response}"
    return [
        Route(
            "POST",
            "/v1/responses",
            ResponsesRequest,
            ResponseObject,
            responses.create,
            "The next items of a conversation",
            ERROR_FORMAT,
            (422, 429),
            work=True,
            chunk=ResponseEvent,
        ),
        Route(
            "GET",
            path,
            None,
            ResponseObject,
            responses.retrieve,
            "A response that is kept",
            ERROR_FORMAT,
            (400, 404),
            query=ResponseQuery,
        ),
        Route("DELETE", path, None, Deleted, responses.delete, "Forget a response", ERROR_FORMAT, (404,)),
        Route(
            "GET",
            f"{path}/input_items",
            None,
            ItemList,
            responses.input_items,
            "Items that a kept response was made from",
            ERROR_FORMAT,
            (400, 404),
            query=ItemQuery,
        ),
    ]

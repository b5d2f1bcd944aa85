"""OpenAI's /v1/responses: create a response, and read, list or forget those that are kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from ....errors import InputError, NotFoundError
from ...generation import conversation as conversations
from ...generation.conversation import Conversation
from ...generation.event_stream import respond
from ...generation.reply import Reply
from ...generation.request_fields import read_request
from ...http.request_context import RequestContext
from ...http.routing import Response, new_id
from ...model_lookup import find_llm
from . import responses_request
from .response_store import ResponseStore, StoredResponse
from .responses_reply import ResponseWriter
from .responses_types import (
    MAX_ITEMS,
    Deleted,
    Item,
    ItemList,
    ItemQuery,
    Reasoning,
    ResponseObject,
    ResponseQuery,
    ResponsesRequest,
    TextConfig,
)


class Responses:
    """Handlers of the routes; `store` keeps responses."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    async def create(self, context: RequestContext) -> Any:
        request, _ = read_request(context, ResponsesRequest, strict=True)
        model = find_llm(context, request.model)
        if request.store and not self.store.keeps:
            raise InputError("this server keeps no responses", where="store", hint="Send store false")
        earlier = self._earlier(context, request.previous_response_id)
        tenant = context.tenant
        new = responses_request.read_items(request.input, partial(self.store.item, tenant))
        items = [*earlier, *new]
        if len(items) > MAX_ITEMS:
            raise InputError(
                f"expected at most {MAX_ITEMS} items with those of earlier responses, got {len(items)}",
                where="previous_response_id",
            )
        asked = responses_request.conversation(request, model, items, len(earlier), new_id("resp_", 16))
        context.seconds = request.timeout
        reply = await conversations.start(context, model, asked)
        stored = self.store.keeps and request.store is not False
        response = _response(request, asked, reply, stored=stored)

        def keep(ended: ResponseObject) -> None:
            if stored:
                whole = msgspec.json.encode([*items, *ended.output])
                ids = (*(item["id"] for item in new), *(item.id for item in ended.output))
                kept = StoredResponse(msgspec.json.encode(ended), whole, len(items), ids)
                self.store.put(tenant, ended.id, kept)

        writer = ResponseWriter(reply, response, keep)
        return await respond(model, reply.stream, writer, streamed=asked.stream)

    async def retrieve(self, context: RequestContext) -> Response:
        context.parameters(ResponseQuery)
        return Response(self._kept(context).body)

    async def delete(self, context: RequestContext) -> Deleted:
        self._kept(context)
        self.store.remove(context.tenant, context.path["response"])
        return Deleted(context.path["response"])

    async def input_items(self, context: RequestContext) -> ItemList:
        query, kept = context.parameters(ItemQuery), self._kept(context)
        items = kept.conversation()[: kept.given]
        if query.order == "desc":
            items.reverse()
        first = 0
        if query.after is not None:
            ids = [item["id"] for item in items]
            if query.after not in ids:
                raise InputError("no item of this response has that id", where="after")
            first = ids.index(query.after) + 1
        shown = items[first : first + query.limit]
        first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else ("", "")
        return ItemList(shown, first_id, last_id, first + len(shown) < len(items))

    def _kept(self, context: RequestContext) -> StoredResponse:
        kept = self.store.get(context.tenant, context.path["response"])
        if kept is None:
            raise NotFoundError("no response of this id is kept", hint=self._hint)
        return kept

    def _earlier(self, context: RequestContext, id: str | None) -> Sequence[Item]:
        """Return the items of the conversation so far. Raises `InputError` for a response that is not kept."""
        if id is None:
            return []
        kept = self.store.get(context.tenant, id)
        if kept is None:
            where = "previous_response_id"
            raise InputError("no response of this id is kept", where=where, hint=self._hint)
        return kept.conversation()

    @property
    def _hint(self) -> str:
        return "Send the items again" if self.store.keeps else "This server keeps none: send the items again"


def _response(
    request: ResponsesRequest, asked: Conversation, reply: Reply, *, stored: bool
) -> ResponseObject:
    """Return the response before anything was generated."""
    text = request.text or TextConfig()
    choice = "auto" if request.tool_choice is None else request.tool_choice
    return ResponseObject(
        id=asked.id,
        created_at=int(time.time()),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=request.model,
        parallel_tool_calls=asked.parallel_calls,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=request.reasoning or Reasoning(),
        safety_identifier=request.safety_identifier,
        store=stored,
        temperature=reply.request.sampling.temperature,
        text=TextConfig(text.format or {"type": "text"}, text.verbosity or "medium"),
        tool_choice=choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=reply.request.sampling.top_p,
        user=request.user,
        metadata=request.metadata or {},
    )

"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from ...generation import conversation as conversations
from ...generation.event_stream import respond
from ...generation.request_fields import read_request
from ...http.request_context import RequestContext
from ...model_lookup import find_llm
from . import messages_request
from .messages_reply import MessageWriter
from .messages_types import CountRequest, MessagesRequest, TokenCount


async def create(context: RequestContext) -> Any:
    request, _ = read_request(context, MessagesRequest, strict=True)
    model = find_llm(context, request.model)
    context.seconds = request.timeout
    reply = await conversations.start(context, model, messages_request.conversation(request, model))
    writer = MessageWriter(reply, request.model, request.max_tokens)
    return await respond(model, reply.stream, writer, streamed=bool(request.stream))


async def count_tokens(context: RequestContext) -> TokenCount:
    request, _ = read_request(context, CountRequest, strict=True)
    model = find_llm(context, request.model)
    prompt = await conversations.read_prompt(context, model, messages_request.conversation(request, model))
    return TokenCount(len(prompt.tokens))

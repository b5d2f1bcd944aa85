"""OpenAI's /v1/chat/completions: a conversation goes on, whole or as events."""

from __future__ import annotations

from typing import Any

from ...errors import InputError
from ..api import openai_request, openai_response
from ..api.chat_response import Reply
from ..api.openai_errors import DIALECT, generator
from ..api.openai_tools import Tools
from ..api.openai_types import ChatChunk, ChatCompletion, ChatRequest
from ..http.request_context import RequestContext
from ..http.routing import Route
from ..llm.tenants import owned, tenant_of
from ..service import Service


def routes(service: Service) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/chat/completions",
            ChatRequest,
            ChatCompletion,
            chat,
            "The next message of a conversation",
            DIALECT,
            (422, 429),
            work=True,
            chunk=ChatChunk,
        )
    ]


async def chat(call: RequestContext) -> Any:
    request, unknown = openai_request.read(call, ChatRequest)
    model = generator(call, request.model)
    _refuse(request)
    timeout = openai_request.timeout(call, request)
    model.check_admission(timeout=timeout, priority=request.priority or 0, tenant=tenant_of(call))
    tools = Tools(request, model.template)
    grammar = tools.constraint(openai_request.grammar(request))
    shown = request.tools if tools.active else None
    options = request.chat_template_kwargs or {}
    prompt = await openai_request.chat_prompt(call, model, request.messages, shown, options)
    reply = Reply(model, request, prompt, tools, grammar, call.adapter)
    await openai_request.compiled(call, model, grammar, "tools" if tools.grammar else "response_format")
    model.metrics.unknown_fields.inc(unknown)
    stream = model.open(owned(call, [reply.request]), timeout=timeout, stepwise=bool(request.stream))
    reply.read(stream)
    call.measure = stream.timings
    if request.stream:
        return openai_response.Events(stream, reply.events, reply.end).reply(model.headers())
    try:
        return reply.whole(await stream.rest())
    finally:
        stream.close()


def _refuse(request: ChatRequest) -> None:
    if request.chat_template is not None:
        raise InputError("chat templates come with the model, not with a request", where="chat_template")
    if request.top_logprobs is not None and not request.logprobs:
        raise InputError("expected logprobs to be true with top_logprobs", where="top_logprobs")

"""OpenAI's /v1/completions and /v1/chat/completions: generated text, in full or streamed."""

from __future__ import annotations

from typing import Any

from ...errors import InputError
from ..api.media import image_texts
from ..api.openai import openai_prompts, openai_request, openai_response
from ..api.openai.chat_response import ChatResponse, Tools
from ..api.openai.chat_types import ChatChunk, ChatCompletion, ChatRequest
from ..api.openai.completion_response import CompletionResponse
from ..api.openai.openai_errors import ERROR_FORMAT, find_llm
from ..api.openai.openai_types import Completion, CompletionRequest
from ..http.request_context import RequestContext, assign_tenant, tenant_of
from ..http.routing import Route
from ..service import Service


def routes(service: Service) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/completions",
            CompletionRequest,
            Completion,
            completions,
            "Text that follows a text",
            ERROR_FORMAT,
            (422, 429),
            work=True,
            chunk=Completion,
        ),
        Route(
            "POST",
            "/v1/chat/completions",
            ChatRequest,
            ChatCompletion,
            chat,
            "The next message of a conversation",
            ERROR_FORMAT,
            (422, 429),
            work=True,
            chunk=ChatChunk,
        ),
    ]


async def completions(context: RequestContext) -> Any:
    request, unknown = openai_request.read_request(context, CompletionRequest)
    model = find_llm(context, request.model)
    _refuse_completion(request)
    timeout = openai_request.timeout(context, request)
    model.check_admission(timeout=timeout, priority=request.priority or 0, tenant=tenant_of(context))
    special = request.add_special_tokens is not False
    prompts = await openai_prompts.encode_prompts(context, model, request.prompt, special)
    grammar, constrained_by = openai_request.grammar(request)
    answer = CompletionResponse(model, request, prompts, grammar, context.adapter)
    await openai_request.compile_grammar(context, model, grammar, constrained_by)
    if request.echo:
        answer.prompt_texts = {r.id: await model.tokenizers.decode(r.prompt, True) for r in answer.requests}
    model.metrics.unknown_fields.inc(unknown)
    stream = model.open(
        assign_tenant(context, answer.requests), timeout=timeout, stepwise=bool(request.stream)
    )
    answer.attach(stream)
    context.measure = stream.timings
    if request.stream:
        return openai_response.EventStream(stream, answer.events, answer.final_event).reply(model.headers())
    try:
        return answer.full(await stream.read_all())
    finally:
        stream.close()


def _refuse_completion(request: CompletionRequest) -> None:
    if request.suffix:
        raise InputError("text before a suffix is not offered", where="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InputError("best_of is not offered beyond n", where="best_of")


async def chat(context: RequestContext) -> Any:
    request, unknown = openai_request.read_request(context, ChatRequest)
    model = find_llm(context, request.model)
    _refuse_chat(request)
    timeout = openai_request.timeout(context, request)
    model.check_admission(timeout=timeout, priority=request.priority or 0, tenant=tenant_of(context))
    tools = Tools(request, model.template)
    other, constrained_by = openai_request.grammar(request)
    grammar = tools.constraint(other)
    shown = request.tools if tools.active else None
    options = request.chat_template_kwargs or {}
    features = None
    if image_texts.source_of(model) is not None:
        prompt, features = await image_texts.read_conversation(context, model, request.messages)
        request.temperature = request.temperature or 0.0
    else:
        prompt = await openai_prompts.chat_prompt(context, model, request.messages, shown, options)
    reply = ChatResponse(model, request, prompt, tools, grammar, context.adapter)
    reply.request.features = features
    await openai_request.compile_grammar(
        context, model, grammar, "tools" if tools.grammar else constrained_by
    )
    model.metrics.unknown_fields.inc(unknown)
    timeout = openai_request.timeout(context, request)  # less what an image took
    stream = model.open(
        assign_tenant(context, [reply.request]), timeout=timeout, stepwise=bool(request.stream)
    )
    reply.attach(stream)
    context.measure = stream.timings
    if request.stream:
        return openai_response.EventStream(stream, reply.events, reply.final_event).reply(model.headers())
    try:
        return reply.full(await stream.read_all())
    finally:
        stream.close()


def _refuse_chat(request: ChatRequest) -> None:
    if request.chat_template is not None:
        raise InputError("chat templates come with the model, not with a request", where="chat_template")
    if request.top_logprobs is not None and not request.logprobs:
        raise InputError("expected logprobs to be true with top_logprobs", where="top_logprobs")

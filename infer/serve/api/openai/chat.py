"""OpenAI's /v1/chat/completions: the next message of a conversation or tool calls, in full or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....errors import InputError
from ....llm.engine.requests import Output, Request
from ....llm.text import tools
from ....llm.text.forms import Choice
from ....llm.text.tool_parser import ToolDelta, joined
from ...http.request_context import RequestContext, assign_tenant
from ...llm.llm_engine import LLMEngine
from ...llm.token_stream import TokenStream
from ..media import image_texts
from . import openai_logprobs, openai_prompts, openai_request, openai_response
from .chat_types import (
    ChatChoice,
    ChatCompletion,
    ChatRequest,
    Delta,
    FunctionCall,
    FunctionDelta,
    ResponseMessage,
    ToolCall,
    ToolCallDelta,
)
from .openai_errors import find_llm
from .openai_logprobs import ChatLogprobs
from .openai_response import CompletionBuffer, UsageCounter
from .server_sent_events import ChunkWriter, EventStream, encode

ROLE = b'"delta":{"role":"assistant","content":"","refusal":null}'
NOTHING = b'"delta":{}'


async def chat(context: RequestContext) -> Any:
    request, unknown = openai_request.read_request(context, ChatRequest)
    model = find_llm(context, request.model)
    _refuse_chat(request)
    timeout = openai_request.timeout(context, request)
    model.check_admission(timeout=timeout, priority=request.priority or 0, tenant=context.tenant)
    usable = Tools(request, model.forms)
    other, constrained_by = openai_request.grammar(request)
    grammar = usable.constraint(other)
    constrained_by = "tools" if other is None else constrained_by
    shown = request.tools if usable.active else None
    options = template_variables(request)
    features = None
    if image_texts.source_of(model) is not None:
        prompt, features = await image_texts.read_conversation(context, model, request.messages)
        request.temperature = request.temperature or 0.0
    else:
        prompt = await openai_prompts.chat_prompt(context, model, request.messages, shown, options)
    end = model.language_model.prompt_end(prompt)
    grammar = usable.forms.constrain(grammar, end)
    reply = ChatResponse(model, request, prompt, usable, grammar, context.adapter, end)
    reply.request.features = features
    await openai_request.compile_grammar(context, model, grammar, constrained_by)
    model.metrics.unknown_fields.inc(unknown)
    timeout = openai_request.timeout(context, request)  # less what an image took
    stream = model.open(
        assign_tenant(context, [reply.request]), timeout=timeout, stepwise=bool(request.stream)
    )
    reply.attach(stream)
    context.measure = stream.timings
    if request.stream:
        return EventStream(stream, reply.events, reply.final_event).reply(model.headers())
    try:
        return reply.full(await stream.read_all())
    finally:
        stream.close()


def _refuse_chat(request: ChatRequest) -> None:
    if request.chat_template is not None:
        raise InputError("chat templates come with the model, not with a request", where="chat_template")
    if request.top_logprobs is not None and not request.logprobs:
        raise InputError("expected logprobs to be true with top_logprobs", where="top_logprobs")


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """Return further variables of the chat template; an effort of "none" also asks for no thoughts."""
    effort = request.reasoning_effort
    asked: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        asked |= {"enable_thinking": False, "thinking": False}
    return asked | (request.chat_template_kwargs or {})


class Tools:
    """Tools of one request; raises `InputError` naming what is wrong. `active`: calls may occur; `parallel`: many."""

    def __init__(self, request: ChatRequest, forms: Choice) -> None:
        given = [msgspec.to_builtins(tool) for tool in request.tools or ()]
        choice = msgspec.to_builtins(request.tool_choice)
        self.tools = tools.check_tools(given)
        self.choice = tools.check_choice(choice, self.tools)
        self.active = bool(self.tools) and self.choice != "none"
        self.forms = forms
        self.parallel = request.parallel_tool_calls is not False
        self.grammar = tools.constrain(self.tools, self.choice, forms.form, parallel=self.parallel)

    def constraint(self, other: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return `other`, the grammar of the response format, else that of calls."""
        if self.grammar is not None and other is not None and self.choice != "auto":
            raise InputError(
                "tool_choice requires a call, which excludes another response format", where="response_format"
            )
        return other or self.grammar


def deltas(found: Sequence[ToolDelta], parallel: bool) -> list[bytes]:
    """Return the JSON of field `delta` for each parsed part; unless `parallel`, of the first call alone."""
    return [_delta(one) for one in found if parallel or not one.index]


def _delta(one: ToolDelta) -> bytes:
    if one.index is None:
        text = encode(one.reasoning or one.content)
        if one.reasoning:
            return b'"delta":{"reasoning_content":%b,"reasoning":%b}' % (text, text)
        return b'"delta":{"content":%b}' % text
    call = ToolCallDelta(index=one.index, function=FunctionDelta(arguments=one.arguments))
    if one.name is not None:
        call.id, call.type, call.function.name = one.id or "", "function", one.name
    return b'"delta":%b' % encode(Delta(tool_calls=[call]))


class ChatResponse:
    """Builder of the response; `request` is for the engine.

    After `attach`, either `full` builds the response from all outputs, or `events` and `final_event` stream
    it.
    """

    def __init__(
        self,
        model: LLMEngine,
        asked_for: ChatRequest,
        prompt: list[int],
        tools: Tools,
        grammar: dict[str, Any] | None,
        adapter: str | None,
        prompt_end: str = "",
    ) -> None:
        self.prompt_end = prompt_end
        self.model, self.tools, self.logprobs = model, tools, bool(asked_for.logprobs)
        self.head = openai_response.response_head(model, asked_for, "chatcmpl", "chat.completion.chunk")
        wanted = asked_for.max_completion_tokens
        wanted = asked_for.max_tokens if wanted is None else wanted
        count = (asked_for.top_logprobs or 0) if self.logprobs else None
        sampling = openai_request.sampling(
            asked_for, model, openai_request.max_new_tokens(model, prompt, wanted, None), count, None
        )
        if tools.active or model.language_model.has_special_marks():  # marks of calls may be special tokens
            sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        self.request = Request(
            id=self.head.id,
            prompt=prompt,
            sampling=sampling,
            priority=asked_for.priority or 0,
            grammar=grammar,
            adapter=adapter,
        )
        usage, self.always = openai_response.usage_options(asked_for)
        self.chunks, self.final = ChunkWriter(self.head, usage=usage or self.always), usage

    def attach(self, stream: TokenStream) -> None:
        self.ledger = UsageCounter(stream)
        self.started = [False] * len(stream.choices)
        usable = self.tools.tools if self.tools.active else None
        self.ledger.reasons = self.tools.forms.thought is not None
        self.readers = [self.model.language_model.parser(self.prompt_end, usable) for _ in stream.choices]

    def full(self, outputs: Sequence[Output]) -> ChatCompletion:
        pieces = [CompletionBuffer() for _ in self.started]
        parts: list[list[ToolDelta]] = [[] for _ in self.started]
        for output in outputs:
            parts[output.index] += self._parsed(output)
            pieces[output.index].add(output)
        head = msgspec.structs.asdict(self.head)
        del head["object"]
        choices = [self._choice(index, piece, parts[index]) for index, piece in enumerate(pieces)]
        return ChatCompletion(**head, choices=choices, usage=self.ledger.usage())

    def events(self, outputs: Sequence[Output]) -> bytes:
        return b"".join(event for output in outputs for event in self._events(output))

    def final_event(self) -> bytes:
        return self.chunks.usage(encode(self.ledger.usage())) if self.final else b""

    def _parsed(self, output: Output) -> list[ToolDelta]:
        """Count an output, and return its parts."""
        reader = self.readers[output.index]
        if reader is None:
            self.ledger.add(output)
            return [ToolDelta(content=output.text)] if output.text else []
        reasoned = reader.reasons
        found = reader.push(output.text)
        self.ledger.add(output, reasoning=reasoned or reader.reasons)
        return found if output.finish is None else [*found, *reader.finish()]

    def _choice(self, index: int, piece: CompletionBuffer, parts: list[ToolDelta]) -> ChatChoice:
        parsed, reader = joined(parts), self.readers[index]
        message = ResponseMessage(content=parsed.content if parsed.calls else parsed.content or "")
        finish: Any = piece.finish if reader is None else reader.finish_reason(piece.finish)
        if parsed.calls:
            message.tool_calls = [
                ToolCall(id=call.id, function=FunctionCall(call.name, call.arguments))
                for call in (parsed.calls if self.tools.parallel else parsed.calls[:1])
            ]
        if parsed.reasoning is not None:
            message.reasoning_content = message.reasoning = parsed.reasoning
        known = openai_logprobs.chat_logprobs(self.model.text, piece.logprobs) if self.logprobs else None
        return ChatChoice(index, message, known, finish, piece.stopped_by)

    def _events(self, output: Output) -> list[bytes]:
        index, made = output.index, list[bytes]()
        parts = self._parsed(output)
        usage = encode(self.ledger.usage()) if self.always else b""

        def say(delta: bytes, known: ChatLogprobs | None = None, finish: str | None = None) -> None:
            made.append(self.chunks.choice(index, delta, encode(known), encode(finish), usage))

        if not self.started[index]:
            self.started[index] = True
            say(ROLE)
        known = None
        if self.logprobs and output.logprobs:
            known = openai_logprobs.chat_logprobs(self.model.text, output.logprobs)
        finish: str | None = output.finish
        if finish is not None and (reader := self.readers[index]) is not None:
            finish = reader.finish_reason(finish)
        found = deltas(parts, self.tools.parallel)
        if known is not None and not found:
            found = [b'"delta":{"content":""}']
        for delta in found:
            say(delta, known)
            known = None
        if finish is not None:
            say(NOTHING, None, finish)
        return made

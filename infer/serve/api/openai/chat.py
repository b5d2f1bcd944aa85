"""OpenAI's /v1/chat/completions: the next message of a conversation or tool calls, in full or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....errors import InputError
from ....llm.engine.requests import Output
from ....llm.text.tool_parser import ToolDelta
from ...generation import conversation
from ...generation.conversation import Conversation
from ...generation.event_stream import encode, respond
from ...generation.reply import Message, Reply
from ...generation.request_fields import read_request
from ...http.request_context import RequestContext
from ...model_lookup import find_llm
from . import openai_logprobs, openai_request
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
    without_nulls,
)
from .openai_logprobs import ChatLogprobs
from .openai_response import ChunkedReply, ResponseHead, response_head

ROLE = b'"delta":{"role":"assistant","content":"","refusal":null}'
NOTHING = b'"delta":{}'


async def chat(context: RequestContext) -> Any:
    request, unknown = read_request(context, ChatRequest)
    model = find_llm(context, request.model)
    _refuse_chat(request)
    head = response_head(model, request, "chatcmpl-", "chat.completion.chunk")
    context.seconds = request.timeout
    reply = await conversation.start(context, model, _conversation(request, head.id))
    model.metrics.unknown_fields.inc(unknown)
    return await respond(
        model, reply.stream, ChatResponse(reply, request, head), streamed=bool(request.stream)
    )


def _refuse_chat(request: ChatRequest) -> None:
    if request.chat_template is not None:
        raise InputError("chat templates come with the model, not with a request", where="chat_template")
    if request.top_logprobs is not None and not request.logprobs:
        raise InputError("expected logprobs to be true with top_logprobs", where="top_logprobs")


def _conversation(request: ChatRequest, id: str) -> Conversation:
    grammar, constrained_by = openai_request.grammar(request)
    count = (request.top_logprobs or 0) if request.logprobs else None
    wanted = request.max_completion_tokens
    return Conversation(
        id=id,
        messages=list(map(without_nulls, request.messages)),
        options={**openai_request.sampling_options(request), "logprobs": count},
        tools=list(map(without_nulls, request.tools or ())),
        tool_choice=msgspec.to_builtins(request.tool_choice),
        parallel_calls=request.parallel_tool_calls is not False,
        template_options=_template_variables(request),
        grammar=grammar,
        grammar_field=constrained_by,
        max_tokens=request.max_tokens if wanted is None else wanted,
        priority=request.priority or 0,
        stream=bool(request.stream),
    )


def _template_variables(request: ChatRequest) -> dict[str, Any]:
    """Return further variables of the chat template; an effort of "none" also asks for no thoughts."""
    effort = request.reasoning_effort
    asked: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        asked |= {"enable_thinking": False, "thinking": False}
    return asked | (request.chat_template_kwargs or {})


def _delta(part: ToolDelta) -> bytes:
    """Return field `delta` of a chunk as JSON."""
    if part.index is None:
        text = encode(part.reasoning or part.content)
        if part.reasoning:
            return b'"delta":{"reasoning_content":%b,"reasoning":%b}' % (text, text)
        return b'"delta":{"content":%b}' % text
    function = FunctionDelta(arguments=part.arguments)
    call = ToolCallDelta(index=part.index, function=function)
    if part.name is not None:
        function.name = part.name
        call.id, call.type = part.id or "", "function"
    return b'"delta":%b' % encode(Delta(tool_calls=[call]))


class ChatResponse(ChunkedReply):
    """Builder of the response: whole messages, or the events of a stream."""

    def __init__(self, reply: Reply, request: ChatRequest, head: ResponseHead) -> None:
        super().__init__(head, request, reply.usage, len(reply.stream.choices))
        self.reply, self.logprobs = reply, bool(request.logprobs)

    def whole(self, outputs: Sequence[Output]) -> ChatCompletion:
        messages = self.reply.messages(outputs)
        choices = [self._choice(index, message) for index, message in enumerate(messages)]
        return ChatCompletion(**self.fields(), choices=choices)

    def events(self, outputs: Sequence[Output]) -> bytes:
        return b"".join([event for output in outputs for event in self._events(output)])

    def _choice(self, index: int, message: Message) -> ChatChoice:
        shown = ResponseMessage(content=message.content)
        if message.calls:
            shown.tool_calls = [
                ToolCall(id=call.id, function=FunctionCall(call.name, call.arguments))
                for call in message.calls
            ]
        if message.reasoning:
            shown.reasoning_content = shown.reasoning = message.reasoning
        known = None
        if self.logprobs:
            known = openai_logprobs.chat_logprobs(self.reply.model.text, message.logprobs)
        finish: Any = message.finish
        return ChatChoice(index, shown, known, finish, message.stopped_by)

    def _events(self, output: Output) -> list[bytes]:
        index, events = output.index, list[bytes]()
        parts, finish = self.reply.read(output)

        def say(delta: bytes, known: ChatLogprobs | None = None, finish: str | None = None) -> None:
            events.append(self.chunk(index, delta, known, finish))

        if not self.started[index]:
            self.started[index] = True
            say(ROLE)
        known = None
        if self.logprobs and output.logprobs:
            known = openai_logprobs.chat_logprobs(self.reply.model.text, output.logprobs)
            parts = parts or [ToolDelta()]
        for part in parts:
            say(_delta(part), known)
            known = None
        if finish is not None:
            say(NOTHING, None, finish)
        return events

"""Response of both OpenAI text APIs: its head, its usage, and the chunks of a stream."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from ....errors import InferError
from ...generation.event_stream import PING, encode
from ...http.routing import new_id
from ...llm.llm_engine import LLMEngine
from ...llm.token_stream import UsageCounter
from .openai_errors import ERROR_FORMAT
from .openai_types import CommonFields, CompletionDetails, PromptDetails, Usage

DONE = b"data: [DONE]\n\n"


class ResponseHead(msgspec.Struct):
    """Fields that every event of a response repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


def response_head(generator: LLMEngine, request: CommonFields, prefix: str, kind: str) -> ResponseHead:
    return ResponseHead(new_id(prefix), kind, int(time.time()), request.model, generator.fingerprint)


def usage_of(counter: UsageCounter) -> Usage:
    prompt, completion = counter.prompt_tokens, counter.completion_tokens
    usage = Usage(prompt, completion, prompt + completion, PromptDetails(counter.cached_tokens))
    if counter.reasons:
        usage.completion_tokens_details = CompletionDetails(counter.reasoning_tokens)
    return usage


class ChunkedReply:
    """Reply in chunks that share a head: nothing before them, their usage or an error at their end.

    `usage` counts what was read; `started`: completions whose first chunk was sent.
    """

    ping = PING

    def __init__(self, head: ResponseHead, request: CommonFields, usage: UsageCounter, choices: int) -> None:
        self.head, self.usage, self.started = head, usage, [False] * choices
        chosen = request.stream_options
        self._final = chosen is not None and bool(chosen.include_usage)  # the stream ends with its usage
        self._always = chosen is not None and bool(chosen.continuous_usage_stats)  # every chunk has it
        self._data = b"data: %b," % encode(head)[:-1]
        self._tail = b',"usage":null}\n\n' if self._final or self._always else b"}\n\n"
        self._start = self._data + b'"choices":[{"index":'

    def begin(self) -> bytes:
        return b""

    def chunk(self, index: int, delta: bytes, logprobs: object, finish: str | None) -> bytes:
        """Encode the next part of a completion; `delta`: its fields as JSON."""
        tail = b',"usage":%b}\n\n' % encode(usage_of(self.usage)) if self._always else self._tail
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            *(self._start, index, delta, encode(logprobs), encode(finish)),
            tail,
        )

    def end(self) -> bytes:
        if not self._final:
            return DONE
        return b'%b"choices":[],"usage":%b}\n\n%b' % (self._data, encode(usage_of(self.usage)), DONE)

    def failed(self, error: InferError) -> bytes:
        return b"data: %b\n\n" % ERROR_FORMAT.encode(error)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the whole response beside its choices."""
        head = msgspec.structs.asdict(self.head)
        del head["object"]
        return {**head, "usage": usage_of(self.usage)}

"""Parts that both OpenAI text APIs build their responses from: head, buffers, usage, server-sent events."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from ....errors import InferError
from ....llm.engine.requests import Output, TokenLogprob
from ...http.routing import EVENTS, Response
from ...llm.llm_engine import LLMEngine
from ...llm.token_stream import TokenStream
from .openai_errors import ERROR_FORMAT
from .openai_types import CommonFields, PromptDetails, Usage

PING_SECONDS = 15.0
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
MEDIA = f"{EVENTS}; charset=utf-8"
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
encode = msgspec.json.Encoder().encode


class ResponseHead(msgspec.Struct):
    """Fields that every event of a response repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class CompletionBuffer:
    """Text, log-probabilities and finish reason of one completion so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: str | None = None
        self.stopped_by: str | int | None = None

    def add(self, output: Output) -> None:
        self.text.append(output.text)
        self.logprobs += output.logprobs
        self.finish, self.stopped_by = output.finish, output.stopped_by


class UsageCounter:
    """Token usage of all prompts and completions of one request."""

    def __init__(self, stream: TokenStream) -> None:
        self.prompt_tokens = sum(len(request.prompt) for request in stream.requests.values())
        self.completion_tokens = 0
        self._cached: dict[str, int] = {}

    def add(self, output: Output) -> None:
        self.completion_tokens += len(output.token_ids)
        if output.cached_tokens:
            self._cached[output.id] = output.cached_tokens

    def usage(self) -> Usage:
        cached = PromptDetails(sum(self._cached.values()))
        return Usage(
            self.prompt_tokens, self.completion_tokens, self.prompt_tokens + self.completion_tokens, cached
        )


def response_head(generator: LLMEngine, request: CommonFields, prefix: str, kind: str) -> ResponseHead:
    return ResponseHead(
        f"{prefix}-{os.urandom(12).hex()}", kind, int(time.time()), request.model, generator.fingerprint
    )


def usage_options(request: CommonFields) -> tuple[bool, bool]:
    """Return two flags: the stream ends with its usage; every event has it."""
    chosen = request.stream_options
    include = chosen is not None and bool(chosen.include_usage)
    return include, chosen is not None and bool(chosen.continuous_usage_stats)


class EventStream:
    """Body of a streamed response.

    `render` turns outputs into bytes; `end` makes the bytes before [DONE].
    """

    def __init__(
        self, stream: TokenStream, render: Callable[[Sequence[Output]], bytes], end: Callable[[], bytes]
    ) -> None:
        self._stream, self._render, self._end = stream, render, end

    def reply(self, headers: list[tuple[bytes, bytes]]) -> Response:
        return Response(media=MEDIA, headers=[*HEADERS, *headers], stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        stream = self._stream
        try:
            while True:
                outputs = await stream.next_outputs(None if stream.started else PING_SECONDS)
                body = self._render(outputs) if outputs else b""
                if stream.exhausted:
                    yield b"%b%b%b" % (body, self._end(), DONE)
                    return
                if body or not outputs:
                    yield body or PING
        except InferError as error:
            yield event(ERROR_FORMAT.body(error))

    def close(self) -> None:
        self._stream.close()


def event(value: object) -> bytes:
    return b"data: %b\n\n" % encode(value)


class ChunkWriter:
    """Encoder of one response's events.

    `head`: the fields that all events share, without `choices` and `usage`. With `usage` every event has that
    field, null where the caller passes no numbers.
    """

    def __init__(self, head: object, *, usage: bool) -> None:
        self._head = b"data: %b," % encode(head)[:-1]
        self._tail = b',"usage":null}\n\n' if usage else b"}\n\n"
        self._start = self._head + b'"choices":[{"index":'

    def choice(self, index: int, delta: bytes, logprobs: bytes, finish: bytes, usage: bytes = b"") -> bytes:
        """Encode one choice's next part; `delta` are its fields as JSON, the others JSON values."""
        tail = b',"usage":%b}\n\n' % usage if usage else self._tail
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            *(self._start, index, delta, logprobs, finish),
            tail,
        )

    def usage(self, usage: bytes) -> bytes:
        """Encode the last event, without choices."""
        return b'%b"choices":[],"usage":%b}\n\n' % (self._head, usage)

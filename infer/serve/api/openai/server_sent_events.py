"""Server-sent events of the OpenAI text APIs: the stream of one response, and the encoding of its events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from ....errors import InferError
from ....llm.engine.requests import Output
from ...http.routing import EVENTS, Response
from ...llm.token_stream import TokenStream
from .openai_errors import ERROR_FORMAT

PING_SECONDS = 15.0
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
MEDIA = f"{EVENTS}; charset=utf-8"
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
encode = msgspec.json.Encoder().encode


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

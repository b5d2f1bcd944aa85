"""Reply of generated text, whole or as server-sent events, which the writer of a dialect makes of the outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec

from ...errors import InferError
from ...llm.engine.requests import Output
from ..http.routing import EVENTS, Response
from ..llm.llm_engine import LLMEngine
from ..llm.token_stream import TokenStream

PING_SECONDS = 15.0
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
MEDIA = f"{EVENTS}; charset=utf-8"
PING = b": ping\n\n"  # a comment
encode = msgspec.json.Encoder().encode


class ReplyWriter(Protocol):
    """Reply of one dialect: `whole`, of all outputs, or as events, in bytes.

    `begin` comes first, at once; `events` for the outputs of each step; then `end`, or `failed` in its place. `ping`:
    sent while nothing else is, before the first token.
    """

    ping: bytes

    def whole(self, outputs: Sequence[Output]) -> Any: ...

    def begin(self) -> bytes: ...

    def events(self, outputs: Sequence[Output]) -> bytes: ...

    def end(self) -> bytes: ...

    def failed(self, error: InferError) -> bytes: ...


async def respond(model: LLMEngine, stream: TokenStream, writer: ReplyWriter, *, streamed: bool) -> Any:
    """Return the response to a request, `streamed` or whole; its stream is closed in the end."""
    if streamed:
        return Response(media=MEDIA, headers=[*HEADERS, *model.headers()], stream=EventStream(stream, writer))
    try:
        return writer.whole(await stream.read_all())
    finally:
        stream.close()


def named_event(event: msgspec.Struct) -> bytes:
    """Return an event that is named by the tag of its struct."""
    name = str(type(event).__struct_config__.tag).encode()
    return b"event: %b\ndata: %b\n\n" % (name, encode(event))


class EventStream:
    """Body of a streamed response."""

    def __init__(self, stream: TokenStream, writer: ReplyWriter) -> None:
        self._stream, self._writer = stream, writer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        stream, writer = self._stream, self._writer
        try:
            if head := writer.begin():
                yield head
            while True:
                outputs = await stream.next_outputs(None if stream.started else PING_SECONDS)
                body = writer.events(outputs) if outputs else b""
                if stream.exhausted:
                    yield body + writer.end()
                    return
                if body or not outputs:
                    yield body or writer.ping
        except InferError as error:
            yield writer.failed(error)

    def close(self) -> None:
        self._stream.close()

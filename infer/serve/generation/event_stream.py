"""Server-sent events of one reply: the stream's body, which asks the writer of a dialect for bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from ...errors import InferError
from ...llm.engine.requests import Output
from ..http.routing import EVENTS, Response
from ..llm.token_stream import TokenStream

PING_SECONDS = 15.0
HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
MEDIA = f"{EVENTS}; charset=utf-8"
encode = msgspec.json.Encoder().encode


class EventWriter(Protocol):
    """Events of one dialect as bytes. `ping`: sent while nothing else is, before the first token.

    `begin` comes first, at once; `events` for the outputs of each step; then `end`, or `failed` in its place.
    """

    ping: bytes

    def begin(self) -> bytes: ...

    def events(self, outputs: Sequence[Output]) -> bytes: ...

    def end(self) -> bytes: ...

    def failed(self, error: InferError) -> bytes: ...


class EventStream:
    """Body of a streamed response."""

    def __init__(self, stream: TokenStream, writer: EventWriter) -> None:
        self._stream, self._writer = stream, writer

    def reply(self, headers: list[tuple[bytes, bytes]]) -> Response:
        return Response(media=MEDIA, headers=[*HEADERS, *headers], stream=self)

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

"""Events of /v1/completions and /v1/chat/completions: chunks that share a head, and what begins and ends them."""

from __future__ import annotations

from ....errors import InferError
from ...generation.event_stream import encode
from .openai_errors import ERROR_FORMAT

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


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


class ChunkedReply:
    """Around the chunks of a stream: nothing before them, an error in place of their end."""

    ping = PING

    def begin(self) -> bytes:
        return b""

    def failed(self, error: InferError) -> bytes:
        return b"data: %b\n\n" % encode(ERROR_FORMAT.body(error))

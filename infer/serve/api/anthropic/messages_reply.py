"""Reply of /v1/messages: its content blocks, and the events in which they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....errors import InferError
from ....llm.engine.requests import Output
from ...generation.event_stream import named_event
from ...generation.parts import Part, PartSequence, Step
from ...generation.reply import Reply
from .anthropic_errors import ERROR_FORMAT
from .messages_types import (
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    EndDelta,
    InputDelta,
    MessageDelta,
    MessageEvent,
    MessageReply,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputDetails,
    Ping,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)


class MessageWriter:
    """Builder of a message from the outputs of its reply: the events of a stream, or the message as a whole.

    `max_tokens`: those that were asked for, of which the engine may have been given fewer.
    """

    ping = named_event(Ping())

    def __init__(self, reply: Reply, model: str, max_tokens: int) -> None:
        self.reply, self._parts, self._max_tokens = reply, PartSequence(), max_tokens
        self.message = MessageReply(id=reply.request.id, model=model, usage=self._usage())
        self._finish: str | None = None
        self._stopped_by: str | int | None = None

    def whole(self, outputs: Sequence[Output]) -> MessageReply:
        """Return the message of all outputs."""
        self._read(outputs)
        self._finished()
        return self.message

    def begin(self) -> bytes:
        return named_event(MessageStart(self.message))

    def events(self, outputs: Sequence[Output]) -> bytes:
        return b"".join(map(named_event, self._read(outputs)))

    def end(self) -> bytes:
        events, message = self._finished(), self.message
        end = MessageDelta(EndDelta(message.stop_reason, message.stop_sequence), message.usage)
        return b"".join(map(named_event, [*events, end, MessageStop()]))

    def failed(self, error: InferError) -> bytes:
        return b"event: error\ndata: %b\n\n" % ERROR_FORMAT.encode(error)

    def _read(self, outputs: Sequence[Output]) -> list[MessageEvent]:
        events = list[MessageEvent]()
        for output in outputs:
            deltas, self._finish = self.reply.read(output)
            self._stopped_by = output.stopped_by
            events += [self._event_of(*happened) for happened in self._parts.push(deltas)]
        return events

    def _finished(self) -> list[MessageEvent]:
        """End the last block and the message, and return the event of the former."""
        events = [self._event_of(*happened) for happened in self._parts.finish()]
        message = self.message
        message.content = [block for part in self._parts.parts if (block := _whole(part)) is not None]
        message.stop_reason, message.usage = self._stop_reason(), self._usage()
        if message.stop_reason == "stop_sequence":
            message.stop_sequence = str(self._stopped_by)
        return events

    def _stop_reason(self) -> StopReason:
        if self._finish == "tool_calls":
            return "tool_use"
        if self._finish == "length":
            cut = self.reply.request.sampling.max_tokens < self._max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        return "stop_sequence" if isinstance(self._stopped_by, str) else "end_turn"

    def _usage(self) -> MessageUsage:
        usage = self.reply.usage
        return MessageUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(usage.reasoning_tokens),
        )

    def _event_of(self, step: Step, part: Part, text: str) -> MessageEvent:
        if step == "begin":
            return BlockStart(part.index, _begun(part))
        if step == "end":
            return BlockStop(part.index)
        if part.kind == "call":
            return BlockDelta(part.index, InputDelta(text))
        return BlockDelta(part.index, ThinkingDelta(text) if part.kind == "reasoning" else TextDelta(text))


def _begun(part: Part) -> ContentBlock:
    """Return the block of a part before anything of it."""
    if part.kind == "call":
        return ToolUseBlock(id=part.call_id, name=part.name, input={})
    return ThinkingBlock(thinking="") if part.kind == "reasoning" else TextBlock(text="")


def _whole(part: Part) -> ContentBlock | None:
    """Return the block of a part; None for a call that was cut short, which may not be made."""
    if part.kind != "call":
        return ThinkingBlock(thinking=part.text) if part.kind == "reasoning" else TextBlock(text=part.text)
    try:
        arguments = msgspec.json.decode(part.text, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    return ToolUseBlock(id=part.call_id, name=part.name, input=arguments)

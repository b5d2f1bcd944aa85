"""Reply of /v1/responses: its output items, and the events in which they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ....errors import InferError, InputError, OverloadedError
from ....llm.engine.requests import Output
from ...generation.event_stream import PING, named_event
from ...generation.parts import Part, PartSequence, Step
from ...generation.reply import Reply
from ...http.routing import error_text, new_id
from ..openai.openai_logprobs import ContentLogprob, chat_logprobs
from .responses_types import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    Event,
    Failed,
    FailureCode,
    Incomplete,
    IncompleteDetails,
    InProgress,
    InputDetails,
    ItemAdded,
    ItemDone,
    ItemStatus,
    OutputCall,
    OutputDetails,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponsesUsage,
    TextDelta,
    TextDone,
)

OutputItem = OutputMessage | OutputCall | OutputReasoning
PREFIXES = {"content": "msg", "call": "fc", "reasoning": "rs"}


class ResponseWriter:
    """Builder of a response from the outputs of its reply: the events of a stream, or the response as a whole.

    `keep` is called with the response once it has ended well.
    """

    ping = PING

    def __init__(
        self, reply: Reply, response: ResponseObject, keep: Callable[[ResponseObject], None]
    ) -> None:
        self.reply, self.response, self._keep = reply, response, keep
        self._parts, self._ids = PartSequence(), list[str]()
        self._text = reply.model.text
        self._asks_logprobs = reply.request.sampling.logprobs is not None
        self._logprobs: list[ContentLogprob] = []  # of the text that comes next
        self._shown: dict[int, list[ContentLogprob]] = {}  # of each text, by its part
        self._finish: str | None = None
        self._number = 0

    def whole(self, outputs: Sequence[Output]) -> ResponseObject:
        """Return the response of all outputs."""
        self._read(outputs)
        self._finished()
        return self.response

    def begin(self) -> bytes:
        return self._sent([Created(response=self.response), InProgress(response=self.response)])

    def events(self, outputs: Sequence[Output]) -> bytes:
        return self._sent(self._read(outputs))

    def end(self) -> bytes:
        events = self._finished()
        kind = Incomplete if self.response.status == "incomplete" else Completed
        return self._sent([*events, kind(response=self.response)])

    def failed(self, error: InferError) -> bytes:
        code: FailureCode = "invalid_prompt" if isinstance(error, InputError) else "server_error"
        if isinstance(error, OverloadedError):
            code = "rate_limit_exceeded"
        self.response.status, self.response.error = "failed", ResponseFailure(code, error_text(error))
        return self._sent([Failed(response=self.response)])

    def _read(self, outputs: Sequence[Output]) -> list[Event]:
        events = list[Event]()
        for output in outputs:
            deltas, self._finish = self.reply.read(output)
            if self._asks_logprobs:
                self._logprobs += chat_logprobs(self._text, output.logprobs).content
            for happened in self._parts.push(deltas):
                events += self._events(*happened)
        return events

    def _finished(self) -> list[Event]:
        """End the last item and the response, and return the events of the former."""
        response, usage = self.response, self.reply.usage
        last: ItemStatus = "incomplete" if self._finish == "length" else "completed"
        events = [event for happened in self._parts.finish() for event in self._events(*happened, last)]
        response.status, response.completed_at = last, int(time.time())
        if last == "incomplete":
            response.incomplete_details, response.completed_at = IncompleteDetails(), None
        response.usage = ResponsesUsage(
            usage.prompt_tokens,
            InputDetails(usage.cached_tokens),
            usage.completion_tokens,
            OutputDetails(usage.reasoning_tokens),
            usage.prompt_tokens + usage.completion_tokens,
        )
        self._keep(response)
        return events

    def _events(self, step: Step, part: Part, text: str, status: ItemStatus = "completed") -> list[Event]:
        if step == "begin":
            return self._begun(part)
        if step == "end":
            return self._ended(part, status)
        id, at = self._ids[part.index], part.index
        if part.kind == "call":
            return [ArgumentsDelta(item_id=id, output_index=at, delta=text)]
        if part.kind == "reasoning":
            return [ReasoningDelta(item_id=id, output_index=at, delta=text)]
        new, self._logprobs = self._logprobs, []
        self._shown.setdefault(at, []).extend(new)
        return [TextDelta(item_id=id, output_index=at, delta=text, logprobs=new)]

    def _begun(self, part: Part) -> list[Event]:
        id, at = new_id(f"{PREFIXES[part.kind]}_", 16), part.index
        self._ids.append(id)
        added: list[Event] = [ItemAdded(output_index=at, item=self._item(part, "in_progress"))]
        if part.kind == "call":
            return added
        self._logprobs = self._logprobs if part.kind == "content" else []
        return [*added, PartAdded(item_id=id, output_index=at, part=self._content(part))]

    def _ended(self, part: Part, status: ItemStatus) -> list[Event]:
        id, at, item = self._ids[part.index], part.index, self._item(part, status)
        self.response.output.append(item)
        done = ItemDone(output_index=at, item=item)
        if part.kind == "call":
            self._logprobs = []
            return [ArgumentsDone(item_id=id, output_index=at, arguments=part.text), done]
        content = self._content(part)
        text: Event = ReasoningDone(item_id=id, output_index=at, text=content.text)
        if isinstance(content, OutputText):
            text = TextDone(item_id=id, output_index=at, text=content.text, logprobs=content.logprobs)
        return [text, PartDone(item_id=id, output_index=at, part=content), done]

    def _item(self, part: Part, status: ItemStatus) -> OutputItem:
        id, begun = self._ids[part.index], status == "in_progress"
        if part.kind == "call":
            return OutputCall(id=id, status=status, call_id=part.call_id, name=part.name, arguments=part.text)
        content = self._content(part)
        if isinstance(content, ReasoningText):
            return OutputReasoning(id=id, status=status, content=[] if begun else [content])
        return OutputMessage(id=id, status=status, content=[] if begun else [content])

    def _content(self, part: Part) -> OutputText | ReasoningText:
        if part.kind == "reasoning":
            return ReasoningText(part.text)
        return OutputText(text=part.text, logprobs=self._shown.get(part.index, []))

    def _sent(self, events: Sequence[Event]) -> bytes:
        for event in events:
            event.sequence_number, self._number = self._number, self._number + 1
        return b"".join(map(named_event, events))

"""Reply to a conversation: the outputs of its completions as parts of content, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...llm.engine.requests import Output, Request, TokenLogprob
from ...llm.text.tool_parser import ToolCall, ToolDelta, joined
from ..llm.llm_engine import LLMEngine
from ..llm.token_stream import TokenStream, UsageCounter
from .tools import Tools


class Message(msgspec.Struct, kw_only=True):
    """One completion as a whole; `finish`: OpenAI's reason for its end, `stopped_by`: the stop string or token."""

    content: str | None
    reasoning: str
    calls: list[ToolCall]
    logprobs: list[TokenLogprob]
    finish: str | None
    stopped_by: str | int | None


class Reply:
    """Reply of `model` to `request`, either output by output (`read`), or as `messages` of all of them.

    The caller closes `stream`. `usage` counts what was read.
    """

    def __init__(
        self, model: LLMEngine, request: Request, stream: TokenStream, tools: Tools, prompt_end: str
    ) -> None:
        self.model, self.request, self.stream = model, request, stream
        self.usage, self._parallel = UsageCounter(stream), tools.parallel
        self.usage.reasons = tools.forms.thought is not None
        usable = tools.tools if tools.active else None
        self._parsers = [model.language_model.parser(prompt_end, usable) for _ in stream.choices]

    def read(self, output: Output) -> tuple[Sequence[ToolDelta], str | None]:
        """Return the parts that an output adds to completion `output.index`, and with its last one the reason.

        Without parallel calls, those behind the first call are left out.
        """
        parser, finish = self._parsers[output.index], output.finish
        if parser is None:
            self.usage.add(output)
            return ([ToolDelta(content=output.text)] if output.text else []), finish
        parts, reasoning, start = list[ToolDelta](), 0, 0
        for end in (*output.ends[:-1], len(output.text)):  # token by token where there are several
            reasoned = parser.reasons
            parts += parser.push(output.text[start:end])
            reasoning += reasoned or parser.reasons
            start = end
        self.usage.add(output, reasoning=min(reasoning, len(output.token_ids)))
        if finish is not None:
            parts += parser.finish()
        if not self._parallel:
            parts = [part for part in parts if not part.index]
        return parts, parser.finish_reason(finish)

    def messages(self, outputs: Sequence[Output]) -> list[Message]:
        """Return the completions of all outputs."""
        messages = [
            Message(content=None, reasoning="", calls=[], logprobs=[], finish=None, stopped_by=None)
            for _ in self._parsers
        ]
        parts: list[list[ToolDelta]] = [[] for _ in messages]
        for output in outputs:
            new, finish = self.read(output)
            parts[output.index] += new
            message = messages[output.index]
            message.logprobs += output.logprobs
            message.finish, message.stopped_by = finish, output.stopped_by
        for message, own in zip(messages, parts, strict=True):
            parsed = joined(own)
            message.content = parsed.content if parsed.calls else parsed.content or ""
            message.reasoning, message.calls = parsed.reasoning or "", parsed.calls
        return messages

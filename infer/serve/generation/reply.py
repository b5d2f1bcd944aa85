"""Reply to a conversation: the outputs of its completions as parts of content, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...llm.engine.requests import Output, Request, TokenLogprob
from ...llm.text.tools import THOUGHT_TOKENS, ToolCall, ToolDelta
from ..llm.llm_engine import LLMEngine
from ..llm.token_stream import TokenStream
from .tools import Tools


class UsageCounter:
    """Token usage of all prompts and completions of one request."""

    def __init__(self, stream: TokenStream) -> None:
        self._prompts = stream.prompts
        self.prompt_tokens = sum(len(prompt.request.prompt) for prompt in stream.prompts)
        self.completion_tokens = self.reasoning_tokens = 0

    def add(self, output: Output) -> None:
        self.completion_tokens += len(output.token_ids)

    @property
    def cached_tokens(self) -> int:
        return sum([prompt.cached_tokens for prompt in self._prompts])


class Message(msgspec.Struct, kw_only=True):
    """One completion as a whole; `finish`: OpenAI's reason for its end, `stopped_by`: the stop string or token."""

    content: str | None
    reasoning: str
    calls: list[ToolCall]
    logprobs: list[TokenLogprob]
    finish: str | None
    stopped_by: str | int | None


class Reply:
    """Reply of `model` to `request`, either streamed, output by output (`read`), or whole (`read_all`).

    The caller closes `stream`. `usage` counts what was read.
    """

    def __init__(self, model: LLMEngine, request: Request, stream: TokenStream, tools: Tools) -> None:
        self.model, self.request, self.stream = model, request, stream
        self.usage, self._parallel = UsageCounter(stream), tools.parallel
        last = request.prompt[-THOUGHT_TOKENS:] if tools.active else []
        prompt_end = b"".join(map(model.text.token_bytes, last))
        self._parsers = [tools.parser(prompt_end) for _ in stream.choices]
        self._reasons = [False] * len(stream.choices)  # each completion's latest part is reasoning

    def read(self, output: Output) -> tuple[Sequence[ToolDelta], str | None]:
        """Return the parts that an output adds to completion `output.index`, and with its last one the reason.

        Without parallel calls, those behind the first call are left out.
        """
        self.usage.add(output)
        parser, finish = self._parsers[output.index], output.finish
        if parser is None:
            return ([ToolDelta(content=output.text)] if output.text else []), finish
        parts = parser.push(output.text)
        if finish is not None:
            parts += parser.finish()
        if parts:
            self._reasons[output.index] = bool(parts[-1].reasoning)
        if self._reasons[output.index]:
            self.usage.reasoning_tokens += len(output.token_ids)
        if not self._parallel:
            parts = [part for part in parts if not part.index]
        return parts, parser.finish_reason(finish)

    async def read_all(self) -> list[Message]:
        """Return the completions once they have ended, and close the stream."""
        try:
            outputs = await self.stream.read_all()
        finally:
            self.stream.close()
        messages = [_Pieces() for _ in self._parsers]
        for output in outputs:
            messages[output.index].add(output, *self.read(output))
        return [pieces.message() for pieces in messages]


class _Pieces:
    """One completion as far as it was read."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[tuple[ToolDelta, list[str]]] = []  # the first part of each, and its arguments
        self.logprobs: list[TokenLogprob] = []
        self.finish: str | None = None
        self.stopped_by: str | int | None = None

    def add(self, output: Output, parts: Sequence[ToolDelta], finish: str | None) -> None:
        self.logprobs += output.logprobs
        self.finish, self.stopped_by = finish, output.stopped_by
        for part in parts:
            if part.index is None:
                self.content.append(part.content)
                self.reasoning.append(part.reasoning)
            elif part.index == len(self.calls):
                self.calls.append((part, [part.arguments]))
            else:
                self.calls[part.index][1].append(part.arguments)

    def message(self) -> Message:
        """Return the message; its content is None where there are calls and nothing but blanks."""
        content = "".join(self.content)
        blank = self.calls and (not content or content.isspace())
        return Message(
            content=None if blank else content,
            reasoning="".join(self.reasoning),
            calls=[
                ToolCall(first.id or "", first.name or "", "".join(arguments))
                for first, arguments in self.calls
            ],
            logprobs=self.logprobs,
            finish=self.finish,
            stopped_by=self.stopped_by,
        )

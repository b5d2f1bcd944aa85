"""Parts that both OpenAI text APIs build their responses from: head, buffers, usage."""

from __future__ import annotations

import os
import time

import msgspec

from ....llm.engine.requests import Output, TokenLogprob
from ...llm.llm_engine import LLMEngine
from ...llm.token_stream import TokenStream
from .openai_types import CommonFields, CompletionDetails, PromptDetails, Usage


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
        self._prompts = stream.prompts
        self.prompt_tokens = sum(len(prompt.request.prompt) for prompt in stream.prompts)
        self.completion_tokens = self.reasoning_tokens = 0
        self.reasons = False  # whether completions may hold thoughts

    def add(self, output: Output, *, reasoning: bool = False) -> None:
        self.completion_tokens += len(output.token_ids)
        self.reasoning_tokens += len(output.token_ids) if reasoning else 0

    def usage(self) -> Usage:
        cached = PromptDetails(sum(prompt.cached_tokens for prompt in self._prompts))
        made = self.completion_tokens
        usage = Usage(self.prompt_tokens, made, self.prompt_tokens + made, cached)
        if self.reasons:
            usage.completion_tokens_details = CompletionDetails(self.reasoning_tokens)
        return usage


def response_head(generator: LLMEngine, request: CommonFields, prefix: str, kind: str) -> ResponseHead:
    return ResponseHead(
        f"{prefix}-{os.urandom(12).hex()}", kind, int(time.time()), request.model, generator.fingerprint
    )


def usage_options(request: CommonFields) -> tuple[bool, bool]:
    """Return two flags: the stream ends with its usage; every event has it."""
    chosen = request.stream_options
    include = chosen is not None and bool(chosen.include_usage)
    return include, chosen is not None and bool(chosen.continuous_usage_stats)

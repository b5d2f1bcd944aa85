"""Parts that both OpenAI text APIs build their responses from: head, buffers, usage."""

from __future__ import annotations

import os
import time

import msgspec

from ....llm.engine.requests import Output, TokenLogprob
from ...generation.reply import UsageCounter
from ...llm.llm_engine import LLMEngine
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


def usage_of(counter: UsageCounter) -> Usage:
    prompt, completion = counter.prompt_tokens, counter.completion_tokens
    usage = Usage(prompt, completion, prompt + completion, PromptDetails(counter.cached_tokens))
    if counter.reasons:
        usage.completion_tokens_details = CompletionDetails(counter.reasoning_tokens)
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

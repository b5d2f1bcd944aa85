"""Results of generation: completions, the chunks of a streamed one, and scores of given text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from .. import errors
from ..errors import InferError, InputError
from .engine.requests import FinishReason, Output, Request, TokenLogprob
from .text.tool_parser import ToolCall


class Completion(msgspec.Struct, kw_only=True):
    """One generated text, with its token counts and times.

    `finish_reason`: "stop", "length", ...; `stopped_by`: the stop text or token id. `logprobs` and `prompt_logprobs`
    are there where they were asked for, `tool_calls` and `reasoning` of a chat. `cached_tokens` of the prompt came from
    the prefix cache. Times are in seconds since the request was submitted.
    """

    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None  # the stop string or token id
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    prompt_logprobs: list[TokenLogprob | None] | None = None
    first_token_seconds: float | None = None
    seconds: float = 0.0
    tool_calls: list[ToolCall] = []  # of a chat, where tools were given
    reasoning: str | None = None  # thoughts of a chat

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first token; None for fewer than two tokens."""
        count = len(self.token_ids) - 1
        if self.first_token_seconds is None or count < 1 or self.seconds <= self.first_token_seconds:
            return None
        return count / (self.seconds - self.first_token_seconds)

    @property
    def why_empty(self) -> str | None:
        """Sentence that says why a completion has no text; None where it has one."""
        if self.text or self.tool_calls or self.reasoning:
            return None
        if isinstance(self.stopped_by, str):
            return f"the text is empty: it began with the stop text {self.stopped_by!r}"
        if self.finish_reason == "stop" and len(self.token_ids) <= 1:
            return "the text is empty: the model ended it at once"
        return f"the text is empty: none of its {len(self.token_ids)} tokens has any"

    def __str__(self) -> str:
        return self.text


class CompletionChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a completion, from one step; the last one has a `finish_reason`. `print(chunk, end="")` prints it."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    index: int = 0
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None

    def __str__(self) -> str:
        return self.text


class Score(msgspec.Struct, kw_only=True):
    """Log probabilities of a text: `logprobs[i]` is the natural logarithm for token i given those before it.

    The first is None.
    A text longer than the context is read in `windows` that overlap by half: each token counts once, with at least
    half a context before it (but at the beginning of the text).
    """

    token_ids: list[int]
    logprobs: list[float | None]
    windows: int = 1
    text_bytes: int | None = None

    @property
    def total(self) -> float:
        """Log probability of the whole text, given its first token."""
        return math.fsum(value for value in self.logprobs if value is not None)

    @property
    def perplexity(self) -> float:
        """Perplexity of the text; NaN for fewer than two tokens."""
        count = len(self.token_ids) - 1
        return math.exp(-self.total / count) if count > 0 else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text, which does not depend on the tokenizer; None for token ids."""
        return -self.total / math.log(2) / self.text_bytes if self.text_bytes else None


class OutputCollector:
    """Collects the outputs of one request into completions; `began` and the times given to `add` share a clock."""

    def __init__(self, request: Request, began: float) -> None:
        self.request, n = request, request.sampling.n
        wants_logprobs = request.sampling.logprobs is not None
        self.completions = [
            Completion(
                token_ids=[],
                prompt_tokens=len(request.prompt),
                logprobs=[] if wants_logprobs else None,
            )
            for _ in range(n)
        ]
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._began, self._open = began, n

    @property
    def done(self) -> bool:
        return self._open == 0

    def add(self, output: Output, when: float) -> None:
        """Append an output to its completion; raise the error of an output that failed."""
        raise_error(output)
        made = self.completions[output.index]
        if made.first_token_seconds is None and output.token_ids:
            made.first_token_seconds = when - self._began
        made.token_ids.extend(output.token_ids)
        if made.logprobs is not None:
            made.logprobs.extend(output.logprobs)
        if output.text:
            self._texts[output.index].append(output.text)
        if output.prompt_logprobs:
            made.prompt_logprobs = list(output.prompt_logprobs)
        made.cached_tokens = max(made.cached_tokens, output.cached_tokens)
        made.seconds = when - self._began
        if output.finish is not None:
            made.finish_reason, made.stopped_by = output.finish, output.stopped_by
            made.text = "".join(self._texts[output.index])
            self._open -= 1


def raise_error(output: Output) -> None:
    """Raise the error of an output whose `finish` is "error"."""
    if output.finish == "error":
        raise error_of(output)


def error_of(output: Output) -> InferError:
    """Return the error of an output whose `finish` is "error"."""
    if output.fault:
        found: InferError = getattr(errors, output.fault)(str(output.stopped_by))
        return found
    return InferError(f"the model failed: {output.stopped_by or 'the engine gave no reason'}")


def chunk_of(output: Output) -> CompletionChunk:
    """Convert an output of the engine to a `CompletionChunk`."""
    return CompletionChunk(
        text=output.text,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        index=output.index,
        finish_reason=output.finish,
        stopped_by=output.stopped_by,
    )


def scoring_windows(count: int, size: int) -> list[tuple[int, int, int]]:
    """Cut `count` tokens into (start, stop, first scored) of at most `size` tokens, overlapping by half."""
    if size < 2:
        raise InputError("a context of one token scores nothing")
    found, scored = [(0, min(count, size), 1)], min(count, size)
    while scored < count:
        stop = min(count, scored + size - size // 2)
        found.append((max(0, stop - size), stop, scored))
        scored = stop
    return found


def merge_logprobs(
    token_ids: Sequence[int], parts: Sequence[tuple[int, Sequence[TokenLogprob | None]]]
) -> list[float | None]:
    """Put the logprobs of windows together, one per token; None for the first token.

    `parts`: (first token that counts, its logprobs and those after it); later parts replace earlier ones.
    """
    values: list[float | None] = [None] * len(token_ids)
    for first, rows in parts:
        for offset, row in enumerate(rows):
            values[first + offset] = None if row is None else row.logprob
    return values

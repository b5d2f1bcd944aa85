"""Logprobs of prompt tokens, from the logits of the tokens before them, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from torch import Tensor

from ..requests import TokenLogprob
from ..sequence import RequestState, ScheduledSequence
from .logprobs import score


class PromptRows(NamedTuple):
    """Rows `start:stop` of the logits, which give the logprobs of these tokens of a request's prompt."""

    state: RequestState
    start: int
    stop: int
    tokens: list[int]


def prompt_logit_rows(work: Many[ScheduledSequence], rows: list[int]) -> list[PromptRows]:
    """Append the rows of prompt tokens to `rows`; a sequence that is recomputed is not scored twice."""
    prompt_rows, at = [], 0
    for sequence, count in work:
        state = sequence.state
        if state.needs_prompt_logprobs and state.prompt_logprobs is not None:
            first = max(len(state.prompt_logprobs) - 1, sequence.num_computed_tokens)
            last = min(sequence.num_computed_tokens + count, state.prompt_length - 1)
            if first < last:
                start, offset = len(rows), at - sequence.num_computed_tokens
                rows += range(offset + first, offset + last)
                prompt_rows.append(PromptRows(state, start, len(rows), sequence.tokens[first + 1 : last + 1]))
        at += count
    return prompt_rows


def compute_prompt_logprobs(
    prompt_rows: Many[PromptRows], logits: Tensor
) -> list[tuple[RequestState, list[TokenLogprob]]]:
    """Compute the logprobs of each request's rows from logits float32 [rows, vocab]."""
    results = []
    for state, start, stop, tokens in prompt_rows:
        number = state.sampling.prompt_logprobs or 0
        results.append((state, score(logits[start:stop], tokens, [number] * len(tokens))))
    return results

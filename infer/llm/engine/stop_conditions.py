"""Appending sampled tokens to a completion, and the conditions that end it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from ...errors import GrammarError, InferError, InputError
from .requests import FinishReason, Output, TokenLogprob

if TYPE_CHECKING:  # the server's front imports this file, and no torch
    from .sequence import Sequence as Completion

# Errors that the inputs of a step may cause; any other is a bug and ends the loop.
FAILURES = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError, InferError)


def append_token(completion: Completion, token: int, eos_ids: Collection[int], context: int) -> Output:
    """Append one token to a completion with `fast_decode` that has output already: a short form of `append_tokens`."""
    state, stream = completion.state, completion.text
    outputs = completion.num_output_tokens + 1
    if token < 0 or token in eos_ids or outputs >= state.sampling.max_tokens or state.sampling.stop_token_ids:
        return append_tokens(completion, [token], {}, eos_ids, context)
    completion.tokens.append(token)
    completion.num_output_tokens = outputs
    text, met = ("", None) if stream is None else stream.push(token)
    if met is not None:
        return _make_output(completion, [token], [], text, "stop", met)
    return Output(id=state.request.id, index=completion.index, token_ids=(token,), text=text)


def append_tokens(
    completion: Completion,
    drawn: Sequence[int],
    scores: Mapping[int, TokenLogprob],
    eos_ids: Collection[int],
    context: int,
) -> Output:
    """Append tokens until one ends the completion, or differs from the draft that the next were sampled after.

    `scores`: logprobs by index of the token, of those for which they are wanted.
    """
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    ends: list[int] = []
    text, draft = "", completion.draft_tokens
    for place, token in enumerate(drawn):
        if token < 0:
            return _make_output(completion, tokens, logprobs, text, "error", "the logits are not finite")
        completion.tokens.append(token)
        completion.num_output_tokens += 1
        tokens.append(token)
        if place in scores:
            logprobs.append(scores[place])
        shown, finish, by = _accept_token(completion, token, eos_ids, context)
        text += shown
        ends.append(len(text))
        if finish is not None:
            return _make_output(completion, tokens, logprobs, text, finish, by, ends)
        if place < len(draft) and draft[place] != token:
            break
    return _make_output(completion, tokens, logprobs, text, ends=ends)


def final_output(
    completion: Completion, finish: FinishReason, by: str | None = None, fault: str = ""
) -> Output:
    """Make an output without a new token."""
    output = _make_output(completion, [], [], "", finish, by)
    return structs.replace(output, fault=fault) if fault else output


def error_fields(error: Exception) -> tuple[str, str]:
    """Return `stopped_by` and `fault` of the last output of a request that fails with this error."""
    if isinstance(error, InputError):
        return str(error), type(error).__name__
    return f"{type(error).__name__}: {error}", ""


def _accept_token(
    completion: Completion, token: int, eos_ids: Collection[int], context: int
) -> tuple[str, FinishReason | None, str | int | None]:
    """Return the text that is complete now, and why the completion ends with this token, or None."""
    sampling = completion.state.sampling
    if completion.token_counts is not None:
        completion.token_counts.add(token)
    grammar = completion.grammar
    if grammar is not None and not grammar.accept(token):
        raise GrammarError(f"the grammar refuses token {token}, which it had allowed")
    free = completion.num_output_tokens > sampling.min_tokens or not sampling.min_tokens
    is_eos = token in eos_ids and not sampling.ignore_eos
    stream = completion.text
    if free and (is_eos or token in sampling.stop_token_ids):
        text = stream.push(token, stops=False)[0] if stream is not None and sampling.include_stop else ""
        return text, "stop", token
    text, met = stream.push(token, stops=free) if stream is not None else ("", None)
    if met is not None:
        return text, "stop", met
    if grammar is not None and grammar.finished:
        return text, "stop", None
    if completion.num_output_tokens >= sampling.max_tokens or len(completion.tokens) >= context:
        return text, "length", None
    return text, None, None


def _make_output(
    completion: Completion,
    tokens: list[int],
    logprobs: list[TokenLogprob],
    text: str,
    finish: FinishReason | None = None,
    by: str | int | None = None,
    ends: Sequence[int] = (),
) -> Output:
    state = completion.state
    if finish is not None and completion.text is not None and not (finish == "stop" and isinstance(by, str)):
        rest, met = completion.text.finish()
        text += rest
        if met is not None:
            finish, by = "stop", met
    first = completion.num_output_tokens == len(tokens)
    scores = tuple(state.prompt_logprobs) if first and state.prompt_logprobs is not None else ()
    return Output(
        id=state.request.id,
        index=completion.index,
        token_ids=tuple(tokens),
        text=text,
        ends=tuple(ends) if len(tokens) > 1 else (),
        logprobs=tuple(logprobs),
        finish=finish,
        stopped_by=by,
        prompt_logprobs=scores,
        cached_tokens=state.sequences[0].num_cached_tokens if first else 0,
        queued_seconds=state.started_at - state.arrival if first and state.started_at is not None else 0.0,
    )

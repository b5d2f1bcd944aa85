"""What a completion does with the tokens that were drawn for it, and when it is over."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from ...errors import GrammarError, InputError
from .requests import FinishReason, Output, TokenLogprob

if TYPE_CHECKING:  # the server's front imports this file, and no torch
    from .sequence import Sequence as Completion


def take_next(completion: Completion, token: int, eos_ids: Collection[int], context: int) -> Output:
    """`take` of one token by a completion of a simple job that has had its first; the usual case, without detours."""
    job, stream = completion.job, completion.text
    outputs = completion.outputs + 1
    if token < 0 or token in eos_ids or outputs >= job.sampling.max_tokens or job.sampling.stop_token_ids:
        return take(completion, [token], {}, eos_ids, context)
    completion.tokens.append(token)
    completion.outputs = outputs
    text, met = ("", None) if stream is None else stream.push(token)
    if met is not None:
        return _output(completion, [token], [], text, "stop", met)
    return Output(id=job.request.id, index=completion.index, token_ids=(token,), text=text)


def take(
    completion: Completion,
    drawn: Sequence[int],
    scores: Mapping[int, TokenLogprob],
    eos_ids: Collection[int],
    context: int,
) -> Output:
    """Add tokens until one ends the completion, or differs from the draft that the next ones were drawn after.

    `scores`: logprobs of those that want them, by place.
    """
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    text, draft = "", completion.draft
    for place, token in enumerate(drawn):
        if token < 0:
            return _output(completion, tokens, logprobs, text, "error", "the logits are not finite")
        completion.tokens.append(token)
        completion.outputs += 1
        tokens.append(token)
        if place in scores:
            logprobs.append(scores[place])
        shown, finish, by = _add(completion, token, eos_ids, context)
        text += shown
        if finish is not None:
            return _output(completion, tokens, logprobs, text, finish, by)
        if place < len(draft) and draft[place] != token:
            break
    return _output(completion, tokens, logprobs, text)


def ended(completion: Completion, finish: FinishReason, by: str | None = None, fault: str = "") -> Output:
    """Without a new token."""
    output = _output(completion, [], [], "", finish, by)
    return structs.replace(output, fault=fault) if fault else output


def told(error: Exception) -> tuple[str, str]:
    """`stopped_by` and `fault` of an output for a request that ends with this exception."""
    if isinstance(error, InputError):
        return str(error), type(error).__name__
    return f"{type(error).__name__}: {error}", ""


def _add(
    completion: Completion, token: int, eos_ids: Collection[int], context: int
) -> tuple[str, FinishReason | None, str | int | None]:
    """The text that became certain, and why it ends with this token, if it does."""
    sampling = completion.job.sampling
    if completion.counts is not None:
        completion.counts.add(token)
    grammar = completion.grammar
    if grammar is not None and not grammar.accept(token):
        raise GrammarError(f"the grammar refuses token {token}, which it had allowed")
    free = completion.outputs > sampling.min_tokens or not sampling.min_tokens
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
    if completion.outputs >= sampling.max_tokens or len(completion.tokens) >= context:
        return text, "length", None
    return text, None, None


def _output(
    completion: Completion,
    tokens: list[int],
    logprobs: list[TokenLogprob],
    text: str,
    finish: FinishReason | None = None,
    by: str | int | None = None,
) -> Output:
    job = completion.job
    if finish is not None and completion.text is not None and not (finish == "stop" and isinstance(by, str)):
        rest, met = completion.text.finish()
        text += rest
        if met is not None:
            finish, by = "stop", met
    first = completion.outputs == len(tokens)
    scores = tuple(job.scores) if first and job.scores is not None else ()
    return Output(
        id=job.request.id,
        index=completion.index,
        token_ids=tuple(tokens),
        text=text,
        logprobs=tuple(logprobs),
        finish=finish,
        stopped_by=by,
        prompt_logprobs=scores,
        cached_tokens=job.sequences[0].cached if first else 0,
        queued_seconds=job.begun - job.arrival if first and job.begun is not None else 0.0,
    )

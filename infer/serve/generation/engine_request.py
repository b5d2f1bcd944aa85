"""Requests to the engine as every route for text makes them: limit of tokens, sampling, grammar, their stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...errors import GrammarError, InputError, NotUsableError, UsageError
from ...llm.engine.requests import Request
from ...llm.engine.sampling.sampling_options import Sampling
from ..http.request_context import RequestContext
from ..llm.llm_engine import LLMEngine
from ..llm.token_stream import TokenStream

TOKEN_CHARACTERS = 256  # no token is longer, so a text beyond that times the context can't fit


class ContextLengthError(InputError):
    code = "context_length_exceeded"


def check_size(model: LLMEngine, texts: Sequence[str], where: str) -> None:
    """Raise `ContextLengthError` for a text that no tokenizer makes short enough."""
    if any(len(text) > model.context * TOKEN_CHARACTERS for text in texts):
        raise ContextLengthError(f"the text is longer than {model.context} tokens", where=where)


def max_new_tokens(model: LLMEngine, prompt: Sequence[int], wanted: int | None, default: int | None) -> int:
    """Return the limit of generated tokens: `wanted`, or at most `default` (None: all that fit)."""
    left = model.context - (model.start_tokens or len(prompt))
    if left < (wanted or 0):
        asked = f" and {wanted} to come" if wanted else ""
        raise ContextLengthError(
            f"this model's context is {model.context} tokens, the prompt has {len(prompt)}{asked}",
            hint="Shorten the prompt or lower max_tokens",
            where="max_tokens" if wanted else "prompt",
        )
    if wanted is None and left == 0:
        raise ContextLengthError(f"the prompt fills the context of {model.context} tokens", where="prompt")
    return wanted if wanted is not None else left if default is None else min(default, left)


def complete_sampling(model: LLMEngine, options: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters; an option that is None is that of the model's generation config.

    Raises `InputError` naming an option out of its range.
    """
    completed: Sampling = model.language_model.config.complete(dict(options))
    completed.check(model.vocab_size, served=True)
    return completed


async def compile_grammar(
    context: RequestContext, model: LLMEngine, constraint: dict[str, Any] | None, where: str
) -> None:
    """Compile the grammar, first in a trial process, so that the engine finds it in its cache.

    Raises `GrammarError` where it can't be compiled.
    """
    if constraint is None:
        return
    check = partial(model.language_model.check_grammar, constraint)
    trials, client, pool = model.grammar_trials, context.tenant, context.service.grammars
    try:
        if trials is None:
            await asyncio.get_running_loop().run_in_executor(pool, check)
        else:
            tried = await trials.check(client, constraint)
            await trials.compile(client, tried, pool, partial(check, (tried.size, tried.seconds)))
    except NotUsableError as error:
        raise InputError(error.message, where=where, hint=error.hint) from error
    except UsageError as error:
        raise GrammarError(error.message, where=where, hint=error.hint) from error


def open_stream(
    context: RequestContext,
    model: LLMEngine,
    requests: Sequence[Request],
    *,
    timeout: float,
    stepwise: bool = False,
) -> TokenStream:
    """Submit requests as those of the context's tenant; raises as `LLMEngine.open` does.

    With keys a tenant has a prefix cache of its own, unless the operator lets them share one.
    """
    service, tenant = context.service, context.tenant
    salt = tenant if service.keys is not None and not service.share_prefix_cache else ""
    for request in requests:
        request.tenant, request.salt = tenant, salt
    stream = model.open(requests, timeout=timeout, stepwise=stepwise)
    context.measure = stream.timings
    return stream

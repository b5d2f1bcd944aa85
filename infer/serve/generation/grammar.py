"""Compilation of a request's grammar before its prompt is submitted."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from ...errors import GrammarError, InputError, NotUsableError, UsageError
from ..http.request_context import RequestContext
from ..llm.llm_engine import LLMEngine


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

"""Conversation with a language model, as every dialect asks for it: from messages and tools to the reply's stream.

    start(context, model, conversation) -> Reply          prompt, constraint, admission, and the engine's request
    read_prompt(context, model, conversation) -> Prompt   token ids, and the image that a model reads
    chat_prompt(model, messages, tools, options)          token ids of a conversation without images

All raise `InputError` that names the field as the request of the dialect calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from ...errors import InputError
from ...llm.engine.requests import Request
from ..http.request_context import RequestContext
from ..llm.llm_engine import LLMEngine
from . import image_prompt
from .engine_request import check_size, compile_grammar, complete_sampling, max_new_tokens, open_stream
from .reply import Reply
from .tools import Tools

RESERVED = {"chat_template", "self", "messages", "tools", "documents"}  # of the arguments of a template


class Conversation(msgspec.Struct, kw_only=True):
    """Request for the next message; messages, tools and errors have the form of OpenAI's chat completions.

    - `id`: of the engine's request; `messages`, `tools`, `template_options`: as chat templates take them.
    - `options`: of `Sampling` by name, None for the model's own; `max_tokens`: None for all that fit; `cut_to_context`:
      fewer than `max_tokens` if no more fit, instead of an error.
    - `grammar`: constraint on the answer, which the request's field `grammar_field` asked for.
    - `stream`: outputs are read at each step, not at the end.
    - `places`: names that fields have in the dialect's request, as {"messages[0]": "system"}, where others than here.
    """

    id: str
    messages: list[dict[str, Any]]
    options: dict[str, Any]
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_calls: bool = True
    template_options: dict[str, Any] = {}
    grammar: dict[str, Any] | None = None
    grammar_field: str = "response_format"
    max_tokens: int | None = None
    cut_to_context: bool = False
    priority: int = 0
    stream: bool = False
    places: dict[str, str] = {}


class Prompt(NamedTuple):
    tokens: list[int]
    image: bytes | None


async def start(context: RequestContext, model: LLMEngine, conversation: Conversation) -> Reply:
    """Submit a conversation; the caller reads the reply, and closes its stream in the end.

    Raises also `OverloadedError`, and `GrammarError` for a constraint that can't be compiled.
    """
    with _named(conversation.places):
        timeout, tenant = context.generation_timeout(), context.tenant
        model.check_admission(timeout=timeout, priority=conversation.priority, tenant=tenant)
        usable = _tools(model, conversation)
        grammar = usable.constraint(conversation.grammar)
        constrained_by = "tools" if conversation.grammar is None else conversation.grammar_field
        prompt = await _read_prompt(context, model, conversation, usable)
        prompt_end = model.language_model.prompt_end(prompt.tokens)
        grammar = usable.forms.constrain(grammar, prompt_end)
        most, cut = conversation.max_tokens, conversation.cut_to_context
        limit = max_new_tokens(model, prompt.tokens, None if cut else most, most if cut else None)
        options = {**conversation.options, "max_tokens": limit}
        if prompt.image is not None:
            options["temperature"] = options.get("temperature") or 0.0
        if usable.active or model.language_model.has_special_marks():  # marks of calls may be special tokens
            options["skip_special_tokens"] = False
        request = Request(
            id=conversation.id,
            prompt=prompt.tokens,
            sampling=complete_sampling(model, options),
            priority=conversation.priority,
            grammar=grammar,
            adapter=context.adapter,
            features=prompt.image,
        )
        await compile_grammar(context, model, grammar, constrained_by)
        timeout = context.generation_timeout()  # less what an image took
        stream = open_stream(context, model, [request], timeout=timeout, stepwise=conversation.stream)
    return Reply(model, request, stream, usable, prompt_end)


async def read_prompt(context: RequestContext, model: LLMEngine, conversation: Conversation) -> Prompt:
    with _named(conversation.places):
        return await _read_prompt(context, model, conversation, _tools(model, conversation))


def _tools(model: LLMEngine, conversation: Conversation) -> Tools:
    parallel = conversation.parallel_calls
    return Tools(conversation.tools, conversation.tool_choice, model.forms, parallel=parallel)


async def _read_prompt(
    context: RequestContext, model: LLMEngine, conversation: Conversation, usable: Tools
) -> Prompt:
    if image_prompt.source_of(model) is not None:
        return Prompt(*await image_prompt.read_conversation(context, model, conversation.messages))
    shown = conversation.tools if usable.active else None
    options = conversation.template_options
    return Prompt(await chat_prompt(model, conversation.messages, shown, options), None)


async def chat_prompt(
    model: LLMEngine,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> list[int]:
    """Render the conversation with the model's chat template and tokenize it.

    Raises `InputError`, also for a model without a template.
    """
    if model.template is None:
        hint = "Use /v1/completions, which needs none"
        raise InputError("this model has no chat template", where="messages", hint=hint)
    for name in RESERVED & options.keys():
        raise InputError(
            f"{name} cannot be set in chat_template_kwargs", where=f"chat_template_kwargs.{name}"
        )
    check_size(model, [str(message.get("content", "")) for message in messages], "messages")
    row = await model.tokenizers.encode_chat(messages, tools, options)
    if not row:
        raise InputError("the prompt is empty", where="messages")
    return row


def effort_options(model: LLMEngine, effort: str | None, where: str) -> dict[str, Any]:
    """Return the chat template's variables for an effort of reasoning; raises `InputError` where it knows none."""
    if effort is None:
        return {}
    sources = "".join(model.template.sources.values()) if model.template is not None else ""
    if effort != "none" and not any(name in sources for name in ("reasoning_effort", "enable_thinking")):
        raise InputError("this model's chat template knows no effort of reasoning", where=where)
    return {"reasoning_effort": effort, **thinking_options(effort != "none")}


def thinking_options(thinks: bool) -> dict[str, Any]:
    """Return the chat template's variables for thoughts or none; DeepSeek's call theirs `thinking`."""
    return {"enable_thinking": thinks, "thinking": thinks}


@contextmanager
def _named(places: Mapping[str, str]) -> Iterator[None]:
    """Rewrite the field that an error names, by the longest of `places` that it begins with."""
    try:
        yield
    except InputError as error:
        place = max((place for place in places if error.where.startswith(place)), key=len, default="")
        error.where = places.get(place, "") + error.where.removeprefix(place)
        raise

"""Tokenization for clients that count or score: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from typing import Any, TypeGuard

import msgspec

from ....errors import InputError
from ....llm.text.chat_template import special_tokens
from ...generation.conversation import chat_prompt
from ...generation.request_fields import read_request
from ...http.request_context import RequestContext
from ...llm.llm_engine import LLMEngine
from ...model_lookup import Served, find_able, find_llm
from . import openai_request
from .chat_types import Message, Tool, without_nulls
from .openai_types import Token


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /tokenize: `prompt`, or `messages` as in a chat.

    `model` may be absent where one language model is served.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Tokens(msgspec.Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[Token]
    model: str | None = None


class Prompt(msgspec.Struct):
    prompt: str


class TokenizerInfo(msgspec.Struct):
    """Special tokens by name, null where the model has none."""

    model: str
    vocab_size: int
    max_model_len: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


async def tokenize(context: RequestContext) -> Tokens:
    request, _ = read_request(context, TokenizeRequest)
    model = _model(context, request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InputError("expected either prompt or messages", where="prompt")
    if request.messages is not None:
        options = dict(request.chat_template_kwargs or {})
        if request.add_generation_prompt is not None:
            options["add_generation_prompt"] = request.add_generation_prompt
        messages, tools = map(without_nulls, request.messages), map(without_nulls, request.tools or ())
        row = await chat_prompt(model, list(messages), list(tools) or None, options)
    else:
        text, special = request.prompt or "", request.add_special_tokens is not False
        (row,) = await model.tokenizers.encode([text], special, "prompt")
    words = [model.text.piece(token) or "" for token in row] if request.return_token_strs else None
    return Tokens(row, len(row), model.context, words)


async def detokenize(context: RequestContext) -> Prompt:
    request, _ = read_request(context, DetokenizeRequest)
    model = _model(context, request.model)
    if request.tokens:
        openai_request.check_ids(model, request.tokens, "tokens")
    return Prompt((await model.tokenizers.decode([(request.tokens, False)]))[0])


async def tokenizer_info(context: RequestContext) -> TokenizerInfo:
    model = _model(context, None)
    named = special_tokens(model.language_model.folder)
    return TokenizerInfo(
        model=model.info.name,
        vocab_size=model.vocab_size,
        max_model_len=model.context,
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        pad_token=named.get("pad_token"),
        unk_token=named.get("unk_token"),
        chat_template=model.template.sources.get("default") if model.template else None,
    )


def _model(context: RequestContext, name: str | None) -> LLMEngine:
    return find_able(context, None, _generates, "generate text") if name is None else find_llm(context, name)


def _generates(model: Served) -> TypeGuard[LLMEngine]:
    return isinstance(model, LLMEngine)

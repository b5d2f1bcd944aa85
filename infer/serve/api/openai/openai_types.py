"""JSON schemas of /v1/completions, and of what /v1/chat/completions has in common with it (`chat_types`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...generation.request_fields import ResponseFormat, Stop, StructuredOutputs, option
from .openai_logprobs import CompletionLogprobs

Token = Annotated[int, Meta(ge=0, lt=2**31)]
BadWord = Annotated[str, Meta(max_length=128)]
Finish = Literal["stop", "length", "tool_calls"]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    """Fields of both requests; null equals absent. `guided_*`: `structured_outputs`, as vLLM had it before.

    Unknown fields are accepted, counted and ignored, but not those by which other servers shape the output
    (`refused_fields`).
    """

    model: str
    max_tokens: Annotated[int | None, option("max_tokens")] = None
    min_tokens: Annotated[int | None, option("min_tokens")] = None
    n: Annotated[int | None, option("n")] = None
    temperature: Annotated[float | None, option("temperature")] = None
    top_p: Annotated[float | None, option("top_p")] = None
    top_k: Annotated[int | None, option("top_k")] = None
    min_p: Annotated[float | None, option("min_p")] = None
    seed: Annotated[int | None, option("seed")] = None
    stop: Annotated[Stop | Annotated[list[Stop], Meta(max_length=16)] | None, option("stop")] = None
    stop_token_ids: Annotated[
        Annotated[list[Token], Meta(max_length=16)] | None, option("stop_token_ids")
    ] = None
    include_stop_str_in_output: Annotated[bool | None, option("include_stop_str_in_output")] = None
    skip_special_tokens: Annotated[bool | None, option("skip_special_tokens")] = None
    presence_penalty: Annotated[float | None, option("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, option("frequency_penalty")] = None
    repetition_penalty: Annotated[float | None, option("repetition_penalty")] = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None, option("logit_bias")] = (
        None
    )
    allowed_token_ids: Annotated[list[Token] | None, option("allowed_token_ids")] = None
    bad_words: Annotated[Annotated[list[BadWord], Meta(max_length=64)] | None, option("bad_words")] = None
    ignore_eos: Annotated[bool | None, option("ignore_eos")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: Annotated[int | None, option("priority")] = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None
    add_special_tokens: bool | None = None
    user: str | None = None


class CompletionRequest(CommonFields, kw_only=True):
    """Body of /v1/completions; `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[Token]]
    logprobs: Annotated[int | None, option("logprobs")] = None
    echo: bool | None = None
    src_lang: Annotated[str | None, option("src_lang")] = None
    tgt_lang: Annotated[str | None, option("tgt_lang")] = None
    best_of: int | None = None
    suffix: str | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    """`reasoning_tokens`: of thoughts that are returned as reasoning, with their marks."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: str | int | None | UnsetType = UNSET


class Completion(msgspec.Struct):
    """Response, or one event of a stream; the last one may hold `usage` alone."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"

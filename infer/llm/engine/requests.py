"""Requests and outputs of the engine: plain values that cross threads and processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from .sampling.sampling_options import Sampling
from .sampling.whisper_timestamp_rules import TranscriptionRules

FinishReason = Literal["stop", "length", "cancelled", "error"]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability (natural) of a token under the model's distribution, before temperature and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class Request(msgspec.Struct, kw_only=True):
    """One prompt. `grammar` constrains the output: see `infer.llm.text.grammar.grammar`."""

    id: str
    prompt: list[int]
    sampling: Sampling = Sampling()
    priority: int = 0  # among the requests of its tenant, smaller goes first
    adapter: str | None = None
    forced_bos_token_id: int | None = (
        None  # with which an encoder-decoder begins, in place of the checkpoint's
    )
    salt: str = ""  # pages of the prefix cache are shared only among requests of the same salt
    tenant: str = ""  # requests of different tenants get equal shares of the engine
    # Sound of a speech-to-text model: float32 [bands, frames] as bytes, empty for silence; `prompt` is the decoder's.
    features: bytes | None = None
    transcription: TranscriptionRules | None = None  # for the tokens of a speech-to-text model
    grammar: dict[str, Any] | None = (
        None  # {"json_schema": …} | {"regex": …} | {"choice": […]} | {"grammar": "…"} | {"json_object": true}
    )


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output of one step for one of the `n` completions of a request; `text` never ends within a character.

    `finish` is set on the last one; `stopped_by` then is the stop string or token id, or the reason of an error.
    """

    id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    ends: tuple[int, ...] = ()  # of several tokens: the length of `text` after each of them
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stopped_by: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # with the first output, first token None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    fault: str = ""  # with finish "error": the class of `infer.errors`, where the request itself is the cause
    queued_seconds: float = 0.0  # with the first output: how long the prompt waited until a step read of it


Deliver = Callable[[list[Output]], None]  # receiver of the outputs of one step

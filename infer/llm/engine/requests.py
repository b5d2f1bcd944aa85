"""Requests and outputs of the engine: plain values that cross threads and processes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...errors import InputError

MAX_PRIORITY = 100  # from minus that on
FinishReason = Literal["stop", "length", "cancelled", "error"]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters and stop conditions. Defaults: the model's own distribution, until its end.

    Order: logit_bias, penalties, temperature, then top_k, top_p, min_p; `temperature` 0 takes the most likely token.
    The same seed, prompt and parameters give the same tokens.
    """

    max_tokens: int = 256
    min_tokens: int = 0  # until then no stop token is chosen
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None  # of the chosen token and of so many of the most likely; None: none
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the stop string in the text
    skip_special_tokens: bool = True  # in the text
    n: int = 1

    def check(self, vocab_size: int) -> None:
        """Raise `InputError` naming the first parameter that is out of its range."""
        ranges: dict[str, tuple[float, float]] = {
            "max_tokens": (0, 1 << 30),
            "min_tokens": (0, 1 << 30),
            "temperature": (0, 100),
            "top_k": (0, 1 << 30),
            "top_p": (0, 1),
            "min_p": (0, 1),
            "repetition_penalty": (1e-3, 1e3),
            "presence_penalty": (-2, 2),
            "frequency_penalty": (-2, 2),
            "n": (1, 128),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not low <= value <= high:  # false for NaN too
                raise InputError(f"expected {name} between {low:g} and {high:g}, got {value}", where=name)
        if self.top_p == 0:
            raise InputError("expected top_p above 0", where="top_p")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= min(vocab_size, 1000):
                raise InputError(
                    f"expected {name} between 0 and {min(vocab_size, 1000)}, got {value}", where=name
                )
        for token in (*self.logit_bias, *self.stop_token_ids):
            if not 0 <= token < vocab_size:
                raise InputError(f"expected token ids between 0 and {vocab_size - 1}, got {token}")
        if any(not text for text in self.stop):
            raise InputError("a stop string may not be empty", where="stop")


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log probability (natural) of a token under the model's distribution, before temperature and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class Request(msgspec.Struct, kw_only=True):
    """One prompt. `grammar` constrains the output: see `infer.llm.text.grammar`."""

    id: str
    prompt: list[int]
    sampling: Sampling = Sampling()
    priority: int = 0  # among the requests of its tenant, smaller goes first
    adapter: str | None = None
    salt: str = ""  # pages of the prefix cache are shared only among requests of the same salt
    tenant: str = ""  # requests of different tenants get equal shares of the engine
    grammar: dict[str, Any] | None = (
        None  # {"json_schema": …} | {"regex": …} | {"choice": […]} | {"json_object": true}
    )


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output of one step for one of the `n` completions of a request; `text` never ends within a character.

    `finish` is set on the last one; `stopped_by` then is the stop string or token id, or the reason of an error.
    """

    id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    stopped_by: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # with the first output, first token None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    fault: str = ""  # with finish "error": the class of `infer.errors`, where the request itself is the cause
    queued_seconds: float = 0.0  # with the first output: how long the prompt waited until a step read of it

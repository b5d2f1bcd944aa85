"""Options of generated text: the one definition of their names, types, defaults, ranges and help.

Made or checked from these fields: the options of `infer generate` and `infer chat`, the keyword arguments of
`Predictor.generate`, and the fields of OpenAI's routes with their schema. A test sends each through all of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Annotated, Any

import msgspec

from ....errors import InputError
from ....options import Option, fields, range_fault

MAX_PRIORITY = 100  # from minus that on
MAX_COUNT = 1 << 30
MAX_LOGPROBS = 1000
SERVED_MAXIMUM = {"n": 16, "logprobs": 20, "prompt_logprobs": 20}  # of requests over HTTP
SAMPLING, CONSTRAINTS = "Sampling", "Constrained output"  # panels of --help
GRAMMARS = ("json_schema", "json_object", "regex", "choice", "grammar")


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters and stop conditions. Defaults: the model's own distribution, until its end.

    Order: logit_bias, penalties, tokens left out, temperature, then top_k, top_p, min_p; `temperature` 0 takes the most
    likely token.
    The same seed, prompt and parameters give the same tokens.
    """

    max_tokens: Annotated[
        int,
        Option(
            "most tokens of the completion; default: 256, or as many as fit", minimum=0, maximum=MAX_COUNT
        ),
    ] = 256
    min_tokens: Annotated[
        int,
        Option("tokens before which the completion can't end by a stop token", minimum=0, maximum=MAX_COUNT),
    ] = 0
    temperature: Annotated[
        float,
        Option("randomness; 0 always takes the most likely token", group=SAMPLING, minimum=0, maximum=100),
    ] = 1.0
    top_k: Annotated[
        int,
        Option(
            "sample among this many of the most likely tokens; 0 or -1: among all",
            group=SAMPLING,
            minimum=-1,
            maximum=MAX_COUNT,
        ),
    ] = 0
    top_p: Annotated[
        float,
        Option(
            "sample among the most likely tokens that together have this probability",
            group=SAMPLING,
            above=0,
            maximum=1,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Option(
            "leave out tokens less likely than this share of the most likely one",
            group=SAMPLING,
            minimum=0,
            maximum=1,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(
            "above 1: make tokens of the prompt and the completion less likely (Keskar et al., 2019)",
            group=SAMPLING,
            minimum=1e-3,
            maximum=1e3,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Option("subtracted from the logit of each token that the completion holds", minimum=-2, maximum=2),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option(
            "subtracted from a token's logit once for each time that the completion holds it",
            minimum=-2,
            maximum=2,
        ),
    ] = 0.0
    logit_bias: Annotated[dict[int, float], Option("added to the logits of these token ids")] = {}
    allowed_token_ids: Annotated[
        tuple[int, ...], Option("token ids that the completion may have; none: all")
    ] = ()
    bad_words: Annotated[
        tuple[str, ...], Option("texts whose tokens may not follow one another in the completion")
    ] = ()
    seed: Annotated[
        int | None,
        Option("seed; the same one gives the same text", group=SAMPLING, minimum=-(2**63), maximum=2**63 - 1),
    ] = None
    stop: Annotated[tuple[str, ...], Option("end before this text, or one of these", repeat=True)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Option("end at these token ids")] = ()
    include_stop: Annotated[bool, Option("keep the stop text in the completion")] = False
    skip_special_tokens: Annotated[bool, Option("leave special tokens out of the text; default: true")] = True
    ignore_eos: Annotated[bool, Option("go on after the model ends its text")] = False
    logprobs: Annotated[
        int | None,
        Option(
            "log probability of each token, and of this many alternatives", minimum=0, maximum=MAX_LOGPROBS
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Option(
            "log probability of each prompt token, and of this many alternatives",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    n: Annotated[
        int, Option("completions of each prompt; default: 1", short="-n", minimum=1, maximum=128)
    ] = 1

    def check(self, vocab_size: int, *, served: bool = False) -> None:
        """Raise `InputError` naming the first parameter that is out of its range; `served`: of a request over HTTP."""
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            if (value := getattr(self, name)) != default:
                check_range(name, value, served=served)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise InputError(
                    f"expected {name} between 0 and {vocab_size}, the vocabulary's size, got {getattr(self, name)}",
                    where=name,
                )
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(self, name):
                if not 0 <= token < vocab_size:
                    raise InputError(
                        f"expected token ids between 0 and {vocab_size - 1}, got {token}", where=name
                    )
        if any(not text for text in self.stop):
            raise InputError("a stop string may not be empty", where="stop")
        if any(not text or "\ud800" <= max(text) <= "\udfff" for text in self.bad_words):
            raise InputError("a bad word is valid Unicode and not empty", where="bad_words")


class GenerationOptions(Sampling, frozen=True, kw_only=True):
    """Every option of one prompt: sampling, order, adapter, languages, at most one constraint on the output."""

    priority: Annotated[
        int,
        Option(
            "order among waiting requests; smaller goes first", minimum=-MAX_PRIORITY, maximum=MAX_PRIORITY
        ),
    ] = 0
    adapter: Annotated[str | None, Option("name of the LoRA adapter to use")] = None
    src_lang: Annotated[
        str | None,
        Option("language of the text to translate, as the tokenizer names it: deu_Latn, de_DE, de"),
    ] = None
    tgt_lang: Annotated[str | None, Option("language to translate into; default: as the checkpoint says")] = (
        None
    )
    json_schema: Annotated[
        dict[str, Any] | None, Option("JSON schema that the output must match", group=CONSTRAINTS)
    ] = None
    json_object: Annotated[bool, Option("make the output a JSON object", group=CONSTRAINTS)] = False
    regex: Annotated[
        str | None, Option("regular expression that the output must match", group=CONSTRAINTS)
    ] = None
    choice: Annotated[
        tuple[str, ...],
        Option("text that the output must be, or one of these", group=CONSTRAINTS, repeat=True),
    ] = ()
    grammar: Annotated[
        str | None, Option("grammar of the output, in the notation of Lark or GBNF", group=CONSTRAINTS)
    ] = None


OPTIONS = {field.name: field for field in fields(GenerationOptions)}


@cache
def bounds(name: str, *, served: bool = False) -> Option:
    """Return the option of that name, with the lower maximum of requests over HTTP if `served`."""
    option = OPTIONS[name].option
    maximum = SERVED_MAXIMUM.get(name) if served else None
    return option if maximum is None else replace(option, maximum=maximum)


def check_range(name: str, value: Any, *, served: bool = False, where: str = "") -> None:
    """Raise `InputError` for a number out of the range of this option; None and other values pass.

    `where`: what the caller calls the option.
    """
    if fault := range_fault(bounds(name, served=served), where or name, value):
        raise InputError(fault, where=where or name)

"""Options of generated text as keyword arguments, and the request of the engine that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ..errors import UsageError, unknown
from ..llm.engine.requests import Request
from ..llm.engine.sampling.sampling_options import GRAMMARS, OPTIONS, Sampling, check_range
from ..llm.llm import LanguageModel
from ..llm.request_streams import new_id


class Options(TypedDict, total=False):
    """Keyword arguments of every method that generates text: the fields of `GenerationOptions`.

    Options left out, or None, take the values of the model's generation_config.json; without one, tokens are sampled
    from the model's distribution. At most one of `json_schema`, `json_object`, `regex`, `choice` and `grammar` may be
    given.
    """

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    skip_special_tokens: bool | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    n: int | None
    priority: int
    adapter: str | None
    src_lang: str | None
    tgt_lang: str | None
    json_schema: Mapping[str, Any] | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None


def build_request(language_model: LanguageModel, prompt: list[int], options: Options) -> Request:
    """Build the engine's request for one prompt.

    Raises `InputError` for an unknown option or one out of its range, `UsageError` for two grammars.
    """
    for name, value in options.items():
        if name not in OPTIONS:
            raise unknown("option", name[:64], OPTIONS)
        check_range(name, value)
    given = {name: value for name, value in options.items() if name in Sampling.__struct_fields__}
    grammar = _grammar(options)
    if grammar is not None:
        language_model.check_grammar(grammar)
    named, forced = (options.get("src_lang"), options.get("tgt_lang")), None
    if named != (None, None):
        prompt, forced = language_model.text.translated(prompt, *named)
    return Request(
        id=new_id(),
        prompt=prompt,
        forced_bos_token_id=forced,
        sampling=language_model.sampling(len(prompt), given),
        priority=options.get("priority") or 0,
        adapter=options.get("adapter"),
        grammar=grammar,
    )


def _grammar(options: Options) -> dict[str, Any] | None:
    given = {name: options.get(name) for name in GRAMMARS if options.get(name)}
    if len(given) > 1:
        raise UsageError(f"expected one constraint on the output, got {' and '.join(given)}")
    return given or None

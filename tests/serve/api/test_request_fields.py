"""Fields that clients of OpenAI and vLLM know: each is done, refused by name, or harmless for a reason given here."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from infer.errors import InputError
from infer.serve.api.openai.chat_types import ChatRequest
from infer.serve.api.openai.openai_types import CompletionRequest
from infer.serve.generation.request_fields import refuse_fields

VLLM = """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt chat_template
    chat_template_kwargs continue_final_message documents echo frequency_penalty guided_choice
    guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos
    include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logits_processors
    logprob_token_ids media_io_kwargs min_p min_tokens mm_processor_kwargs presence_penalty priority
    prompt_embeds prompt_logprobs reasoning reasoning_effort repetition_detection repetition_penalty
    request_id return_prompt_text return_token_ids return_tokens_as_token_ids skip_special_tokens
    spaces_between_special_tokens stop_token_ids structural_tag structured_outputs thinking_token_budget top_k
    truncate_prompt_tokens use_beam_search vllm_xargs
"""

HARMLESS = {
    "metadata": "labels of a request in OpenAI's dashboard",
    "store": "nothing is stored, as without it",
    "service_tier": "there is one tier",
    "safety_identifier": "a name of the end user, as `user`",
    "prompt_cache_key": "says which prompts share a prefix: the cache finds that by itself",
    "prompt_cache_options": "how long a prefix is kept: no answer depends on it",
    "prompt_cache_retention": "how long a prefix is kept: no answer depends on it",
    "prediction": "a draft that makes the same answer faster",
    "verbosity": "a wish to OpenAI's models, which other models do not know",
    "reasoning_effort": "a wish to reasoning models, which other models do not know",
    "reasoning": "as reasoning_effort",
    "include_reasoning": "its default is to give the whole text, as it is here",
    "cache_salt": "keeps prefixes apart: with keys they are, by key",
    "request_id": "X-Request-Id does it; ids of answers are the server's",
    "guided_decoding_backend": "which library applies a constraint: no answer depends on it",
    "media_io_kwargs": "about media, and messages with media are refused",
    "mm_processor_kwargs": "about media, and messages with media are refused",
    "vllm_xargs": "arguments of plug-ins that a vLLM server may have",
    "chat_template": "a template of a text prompt, which has none",
    "chat_template_kwargs": "a template of a text prompt, which has none",
}
ASKS: dict[str, Any] = {  # values that ask for something, where True does not
    **dict.fromkeys(("add_generation_prompt", "do_sample", "spaces_between_special_tokens"), False),
    **dict.fromkeys(("best_of", "length_penalty", "thinking_token_budget", "truncate_prompt_tokens"), 7),
    "prompt_logprobs": 1,
}


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        (ChatRequest, [*chat_create_params.CompletionCreateParamsBase.__annotations__, *VLLM.split()]),
        (
            CompletionRequest,
            [*completion_create_params.CompletionCreateParamsBase.__annotations__, *VLLM.split()],
        ),
    ],
)
def test_every_known_field_is_done_refused_or_harmless(kind: Any, theirs: list[str]) -> None:
    done = frozenset(kind.__struct_encode_fields__)
    for name in theirs:
        if name in done:
            continue
        if name in HARMLESS:
            refuse_fields({name: "anything"}, done)
            continue
        with pytest.raises(InputError) as caught:
            refuse_fields({name: ASKS.get(name, True)}, done)
        assert (caught.value.where, bool(caught.value.hint)) == (name, True)


def test_no_field_is_called_harmless_that_nobody_sends() -> None:
    both = chat_create_params, completion_create_params
    known = {name for one in both for name in one.CompletionCreateParamsBase.__annotations__} | set(
        VLLM.split()
    )
    assert set(HARMLESS) <= known

"""Fields of other servers' requests that shape the completion and are not offered here: refused, not ignored.

vLLM's, SGLang's, llama.cpp's, Hugging Face's and Ollama's names, and those of OpenAI that were replaced.
"""

from __future__ import annotations

from typing import Any

IDLE: tuple[Any, ...] = (None, False, 0, "", [], {})  # ask for nothing
_GROUPS: list[tuple[str, str, tuple[Any, ...]]] = [
    # hint, names, values that ask for nothing
    (
        "Use structured_outputs or response_format",
        "guided_whitespace_pattern grammar ebnf regex json_schema structural_tag format",
        IDLE,
    ),
    ("Use tools and tool_choice", "functions", IDLE),
    ("Use tools and tool_choice", "function_call", (*IDLE, "none", "auto")),
    (
        "Use logit_bias, allowed_token_ids or bad_words",
        "bad_words_ids force_words_ids suppress_tokens begin_suppress_tokens "
        "logits_processors logits_processor logit_processors custom_logit_processor no_repeat_ngram_size "
        "encoder_no_repeat_ngram_size",
        IDLE,
    ),
    ("Use n and temperature", "use_beam_search early_stopping", IDLE),
    (
        "Use n and temperature",
        "num_beams num_beam_groups best_of length_penalty diversity_penalty",
        (*IDLE, 1),
    ),
    (
        "Use temperature, top_k, top_p and min_p",
        "mirostat mirostat_mode dynatemp_range dynatemp_min dynatemp_max smoothing_factor xtc_probability "
        "dry_multiplier top_a epsilon_cutoff eta_cutoff penalty_alpha samplers watermark",
        IDLE,
    ),
    ("Use temperature, top_k, top_p and min_p", "typical_p typical tfs_z tfs", (*IDLE, 1)),
    ("Use temperature, top_k, top_p and min_p", "top_n_sigma nsigma", (*IDLE, -1)),
    ("Use temperature 0", "do_sample", (None, True)),
    ("Use repetition_penalty", "repeat_penalty", (*IDLE, 1)),
    ("Use max_tokens", "n_predict num_predict max_new_tokens max_length thinking_token_budget", (None, -1)),
    ("Use min_tokens", "min_new_tokens min_length", IDLE),
    ("Use stop", "stop_sequences stopping_strings stop_words stop_strings stop_regex", IDLE),
    ("Use logprobs; in /v1/completions echo gives those of the prompt", "prompt_logprobs", (None,)),
    ("Use logprobs", "n_probs", IDLE),
    ("Use the fields by their OpenAI names, beside the prompt", "options parameters sampling_params", IDLE),
    ("Shorten the prompt", "truncate truncate_prompt_tokens", (None, False)),
    ("Write it into the prompt", "documents continue_final_message echo system template raw", IDLE),
    ("Use /v1/completions, whose prompt is yours", "add_generation_prompt", (None, True)),
    (
        "Use logprobs",
        "logprob_token_ids return_tokens_as_token_ids return_token_ids return_prompt_text",
        IDLE,
    ),
    ("Send the prompt as text or token ids", "prompt_embeds", IDLE),
    ("Use repetition_penalty or frequency_penalty", "repetition_detection", IDLE),
    ("Use skip_special_tokens", "spaces_between_special_tokens", (None, True)),
    ("This server has its own KV cache", "kv_transfer_params", IDLE),
    ("Use tools", "web_search_options", (None,)),
    ("Check texts before and after", "moderation", IDLE),
    ("Only text is generated", "audio", IDLE),
    ("Only text is generated", "modalities", (*IDLE, ["text"])),
]
REFUSED = {name: (hint, idle) for hint, names, idle in _GROUPS for name in names.split()}

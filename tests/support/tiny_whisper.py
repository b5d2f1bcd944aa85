"""A tiny random Whisper of transformers, with tokens for bytes, two languages and timestamps, as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.llm_artifacts import bytes_as_tokens

TEXTS, END, START, NO_TIMESTAMPS = 320, 320, 321, 326
RATE, SECONDS = 16000, 2  # of a window
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "bos_token_id": END,
    "no_timestamps_token_id": NO_TIMESTAMPS, "lang_to_id": {"<|en|>": 322, "<|de|>": 323},
    "task_to_id": {"transcribe": 324, "translate": 325},
    "suppress_tokens": [5, 6, *range(259, 320), *range(START, 326)],
    "begin_suppress_tokens": [7, END], "max_initial_timestamp_index": 50, "is_multilingual": True, "max_length": 40,
}  # fmt: skip


def folder_of(source: Path) -> Path:
    """Save the model with its feature extractor and tokenizer."""
    import transformers

    torch.manual_seed(0)
    ids = {
        name: GENERATION[name]
        for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id")
    }
    config = transformers.WhisperConfig(
        vocab_size=430, num_mel_bins=16, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=50 * SECONDS,
        max_target_positions=40, **ids,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 * 1.5)
    model.generation_config = transformers.GenerationConfig(**GENERATION)
    model.save_pretrained(source)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS).save_pretrained(source)
    bytes_as_tokens(source)
    return source

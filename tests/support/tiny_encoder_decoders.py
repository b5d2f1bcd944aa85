"""Tiny random encoder-decoders of transformers, as folders and as published artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from infer import Plan, optimize
from tests.support.llm_artifacts import bytes_as_tokens

VOCABULARY, START, END = 320, 0, 2
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END, "decoder_start_token_id": START}
_BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "d_model": 32,
    "max_position_embeddings": 96,
    "vocab_size": VOCABULARY,
    "forced_eos_token_id": None,
}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
SIZES: dict[str, dict[str, Any]] = {
    "t5": {**_T5, "relative_attention_max_distance": 24},
    "mt5": {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": _BART,
    "mbart": {**_BART, "scale_embedding": True},
    "marian": {**_BART, "scale_embedding": True},
    "pegasus": _BART,
    "m2m_100": _BART,
}
CLASSES = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "marian": "MarianMTModel",
    "pegasus": "PegasusForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
}


def build(name: str, **changes: Any) -> nn.Module:
    """Make a model whose weights are large enough that its answers differ from source to source."""
    import transformers

    found = getattr(transformers, CLASSES[name])
    torch.manual_seed(0)
    model: nn.Module = found(found.config_class(**{**_IDS, **SIZES[name], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5 * 1.5)
    return model.eval()


def folder_of(folder: Path, name: str, **changes: Any) -> Path:
    """Save a model with a tokenizer of a token for each byte."""
    source = folder / name
    build(name, **changes).save_pretrained(source)  # type: ignore[operator]
    bytes_as_tokens(source)
    return source


def artifact(folder: Path, name: str, *, sizes: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Optimize a tiny model for plain torch, with a cache as exact as its float weights, timed by none."""
    plan = Plan(
        source=str(folder_of(folder, name, **(sizes or {}))),
        backend="eager",
        batches=(),
        data="random",
        kv_dtype="float32",
        allow_slower=True,
    )
    return optimize(plan.with_(**changes), folder / f"{name}.infer").path


def greedy(source: Path, prompt: list[int], count: int) -> list[int]:
    """Return what transformers' `generate` gives for a source, without the tokens that the decoder begins with."""
    import transformers

    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(source)
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        max_new_tokens=count, do_sample=False, num_beams=1,
    )  # fmt: skip
    return [int(token) for token in out[0][1:]]

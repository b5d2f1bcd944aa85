"""Gemma 1 to 3: norms of 1 + weight, norms behind attention and MLP, soft caps, windows, a scale by the depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import Family, GgufLayout
from ._gguf_layout import LLAMA, POST_NORMS, RMS

_SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
_TENSORS = LLAMA | POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_LARGE = {
    "gemma2": 46,
    "gemma3_text": 62,
}  # layers of the model that scales by hidden_size / heads, not by head_dim


def _scale(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scale of attention scores, which the metadata lack: llama.cpp tells it by the depth."""
    large = config["num_hidden_layers"] == _LARGE[config["model_type"]]
    scale = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    return {"query_pre_attn_scalar": scale}


FAMILY = Family(
    gguf={
        "gemma": GgufLayout("gemma", "GemmaForCausalLM", norms_plus_one=True),
        "gemma2": GgufLayout(
            "gemma2", "Gemma2ForCausalLM", RMS | _SOFTCAPS, _TENSORS, norms_plus_one=True, computed=_scale
        ),
        "gemma3": GgufLayout(
            "gemma3_text",
            "Gemma3ForCausalLM",
            RMS | _SOFTCAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
            _TENSORS,
            norms_plus_one=True,
            computed=_scale,
        ),
    }
)

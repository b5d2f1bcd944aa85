"""LFM2 and LFM3: short convolutions between two gates in place of attention, names of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..kernels.ops.state_space.state_call import StateCall
from . import Family, GgufLayout
from ._gguf_layout import COMMON


def _short_conv(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    """Compute the short convolution between two gates, x [tokens, hidden]."""
    before, after, values = layer.in_proj(x).chunk(3, -1)
    return layer.out_proj(after * call.causal_conv(before * values, layer.conv).to(x.dtype))  # type: ignore[no-any-return]


def _width(config: Mapping[str, Any], shape: Callable[[str], tuple[int, ...]]) -> dict[str, Any]:
    """Return the width of the MLPs where the model computes it itself."""
    if not config.get("block_auto_adjust_ff_dim"):
        return {}
    width = shape("model.layers.0.feed_forward.w1.weight")[0]
    return {"block_auto_adjust_ff_dim": False, "intermediate_size": width, "block_ff_dim": width}


FAMILY = Family(
    gguf={
        "lfm2": GgufLayout(
            "lfm2",
            "Lfm2ForCausalLM",
            COMMON | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
            {
                "attn_norm": "operator_norm",
                "attn_q": "self_attn.q_proj",
                "attn_k": "self_attn.k_proj",
                "attn_v": "self_attn.v_proj",
                "attn_output": "self_attn.out_proj",
                "attn_q_norm": "self_attn.q_layernorm",
                "attn_k_norm": "self_attn.k_layernorm",
                "ffn_norm": "ffn_norm",
                "ffn_gate": "feed_forward.w1",
                "ffn_up": "feed_forward.w3",
                "ffn_down": "feed_forward.w2",
                "shortconv.conv": "conv.conv",
                "shortconv.in_proj": "conv.in_proj",
                "shortconv.out_proj": "conv.out_proj",
            },
            {"block_auto_adjust_ff_dim": False},
            convolutions=True,
            top={
                "token_embd": "model.embed_tokens",
                "token_embd_norm": "model.embedding_norm",
                "output": "lm_head",
            },
            present={},
            unit_axes={"shortconv.conv": 1},
            measured=_width,
        )
    },
    mixers=dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _short_conv),
)

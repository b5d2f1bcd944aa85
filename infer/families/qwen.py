"""Qwen 2 to 3.5: experts, the text parts of vision models, and gated delta nets in place of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.ops.state_space.state_call import StateCall
from . import Family, GgufLayout
from ._delta_rule import delta_rule
from ._gguf_layout import EXPERTS, LLAMA, QWEN_EXPERTS, RMS

_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_MOE = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
# Positions (time, height, width) of a text are equal: its model is that of a text alone.
_SECTIONS = frozenset({"rope.dimension_sections", "n_deepstack_layers"})


def _qwen_next(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    projected = layer.in_proj_qkvz(x)[None], layer.in_proj_ba(x)[None]
    query, key, value, z, b, a = (part[0] for part in layer.fix_query_key_value_ordering(*projected))
    qkv = torch.cat([part.flatten(1) for part in (query, key, value)], -1)
    out = delta_rule(layer, qkv, a, b.sigmoid(), call).to(x.dtype)
    return layer.out_proj(layer.norm(out, z).flatten(1))  # type: ignore[no-any-return]


def _qwen(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    out = delta_rule(layer, layer.in_proj_qkv(x), layer.in_proj_a(x), layer.in_proj_b(x).sigmoid(), call)
    z = layer.in_proj_z(x).unflatten(-1, (-1, layer.head_v_dim))
    return layer.out_proj(layer.norm(out.to(x.dtype), z).flatten(1))  # type: ignore[no-any-return]


FAMILY = Family(
    gguf={
        "qwen2": GgufLayout("qwen2", "Qwen2ForCausalLM"),
        "qwen3": GgufLayout("qwen3", "Qwen3ForCausalLM"),
        "qwen2moe": GgufLayout(
            "qwen2_moe", "Qwen2MoeForCausalLM", RMS | EXPERTS, LLAMA | QWEN_EXPERTS | _SHARED_EXPERT
        ),
        "qwen3moe": GgufLayout("qwen3_moe", "Qwen3MoeForCausalLM", RMS | EXPERTS, LLAMA | QWEN_EXPERTS, _MOE),
        "qwen2vl": GgufLayout("qwen2", "Qwen2ForCausalLM", unused=_SECTIONS),
        "qwen3vl": GgufLayout("qwen3", "Qwen3ForCausalLM", unused=_SECTIONS),
        "qwen3vlmoe": GgufLayout(
            "qwen3_moe", "Qwen3MoeForCausalLM", RMS | EXPERTS, LLAMA | QWEN_EXPERTS, _MOE, unused=_SECTIONS
        ),
    },
    mixers={
        "Qwen3NextGatedDeltaNet": _qwen_next,
        "Qwen3_5GatedDeltaNet": _qwen,
        "Qwen3_5MoeGatedDeltaNet": _qwen,
    },
    towers={
        "qwen2_vl_text": ("qwen2", {}),
        "qwen2_5_vl_text": ("qwen2", {}),
        "qwen3_vl_text": ("qwen3", {}),
        "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
    },
)

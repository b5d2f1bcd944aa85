"""OLMo 2 and 3, OLMoE and OLMo Hybrid: norms behind attention and MLP, experts, gated delta nets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.ops.state_space.state_call import StateCall
from . import Family, GgufLayout
from ._delta_rule import delta_rule
from ._gguf_layout import EXPERTS, LLAMA, NORMS_AFTER, QWEN_EXPERTS, RMS


def _gated_delta_net(layer: Any, x: Tensor, call: StateCall) -> Tensor:
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    beta = layer.b_proj(x).sigmoid() * (2.0 if layer.allow_neg_eigval else 1.0)
    out = delta_rule(layer, qkv, layer.a_proj(x), beta, call).to(x.dtype)
    gate = layer.g_proj(x).unflatten(-1, (-1, layer.head_v_dim))
    return layer.o_proj(layer.o_norm(out, gate).flatten(1))  # type: ignore[no-any-return]


FAMILY = Family(
    gguf={
        "olmo2": GgufLayout("olmo2", "Olmo2ForCausalLM", RMS, NORMS_AFTER),
        "olmoe": GgufLayout(
            "olmoe", "OlmoeForCausalLM", RMS | EXPERTS, LLAMA | QWEN_EXPERTS, {"norm_topk_prob": False}
        ),
    },
    mixers={"OlmoHybridGatedDeltaNet": _gated_delta_net},
)

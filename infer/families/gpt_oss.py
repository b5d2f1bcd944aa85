"""GPT-OSS: experts stored by columns, sinks of attention, YaRN positions with exact bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import Family, GgufLayout
from ._gguf_layout import ATTENTION, RMS


def _exact_yarn(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the bounds of YaRN as they are, not rounded to whole dimensions."""
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        return {}
    return {"rope_scaling": {**scaling, "truncate": False}}


FAMILY = Family(
    gguf={
        "gpt-oss": GgufLayout(
            "gpt_oss",
            "GptOssForCausalLM",
            RMS
            | {
                "attention.sliding_window": "sliding_window",
                "expert_count": "num_local_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "intermediate_size",
            },
            {k: v for k, v in ATTENTION.items() if not k.endswith(("q_norm", "k_norm"))}
            | {
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks": "self_attn.sinks",
                "ffn_gate_inp": "mlp.router",
            },
            stacks={
                "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
                "mlp.experts.down_proj": ("ffn_down_exps",),
            },
            without_ending=frozenset({"attn_sinks"}),
            computed=_exact_yarn,
        )
    }
)

"""Layout of architectures in GGUF files: settings by metadata key, and names of tensors that architectures share.

Conventions of llama.cpp's converter: rows of q and k of some architectures are permuted for its rotary embedding, and
norms of Gemma and Nemotron hold 1 + weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Metadata key after the architecture's name → setting of transformers.
COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
RMS = COMMON | {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LAYER_NORM = COMMON | {"attention.layer_norm_epsilon": "layer_norm_eps"}
EXPERTS = {
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_count": "num_experts",
}
SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
# Name in a block without `.weight` and `.bias` → name in a layer of transformers.
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PLAIN = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # without a gate
GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = ATTENTION | GATED | {"ffn_norm": "post_attention_layernorm"}
GEMMA2 = LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
QWEN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_gate_inp": "block_sparse_moe.gate",
}


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}


@dataclass(frozen=True)
class Architecture:
    """Layout of a model in the file: settings by metadata key, fixed settings, names of the tensors of a block.

    `top`: names of the tensors outside of blocks. `present`: settings that say whether the file holds a tensor.
    """

    model_type: str
    class_name: str
    keys: Mapping[str, str]
    tensors: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False  # rows of q and k, for llama.cpp's rotary embedding
    norms_plus_one: bool = False
    large_layers: int = 0  # depth at which Gemma scales by hidden_size / heads instead of head_dim
    rotates_part: bool = False  # of each head, where rope.dimension_count says so
    convolutions: bool = False  # in layers whose number of key-value heads is 0
    unused: frozenset[str] = frozenset()  # keys without effect on text
    # Experts by columns: name in a layer → tensors of a block whose rows it has in turn.
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exact_yarn: bool = False  # YaRN's bounds are not rounded to whole dimensions
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    present: Mapping[str, str] = field(default_factory=lambda: BIASES)

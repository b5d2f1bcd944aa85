"""Layout of a model in a GGUF file: settings by metadata key, and names of tensors that architectures share.

Conventions of llama.cpp's converter: rows of q and k of some architectures are permuted for its rotary embedding, and
norms of Gemma and Nemotron hold 1 + weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
NORMS_AFTER = {
    name: inner for name, inner in LLAMA.items() if name not in ("attn_norm", "ffn_norm")
} | POST_NORMS
QWEN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp": "mlp.gate",
}

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}


@dataclass(frozen=True)
class GgufLayout:
    """Model in a file: settings by metadata key, names of the tensors of a block, fixed settings; Llama's by default.

    `top`: names of the tensors outside of blocks. `present`: settings that say whether the file holds a tensor.
    """

    model_type: str
    class_name: str
    keys: Mapping[str, str] = field(default_factory=lambda: RMS)
    tensors: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False  # rows of q and k, for llama.cpp's rotary embedding
    norms_plus_one: bool = False
    rotates_part: bool = False  # of each head, where rope.dimension_count says so
    convolutions: bool = False  # in layers whose number of key-value heads is 0
    unused: frozenset[str] = frozenset()  # keys without effect on text
    # Experts by columns: name in a layer → tensors of a block whose rows it has in turn.
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    present: Mapping[str, str] = field(default_factory=lambda: BIASES)
    # Tensor of a block → axis of length 1 that it has in transformers and not in the file.
    unit_axes: Mapping[str, int] = field(default_factory=lambda: {"ffn_gate_inp_shexp": 0})
    without_ending: frozenset[str] = (
        frozenset()
    )  # tensors of a block that transformers names without `.weight`
    alike: tuple[str, ...] = ()  # other model types that are stored so
    # Settings read so far → those that are computed from them.
    computed: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    # Settings, and the shape of a tensor of transformers by name → settings that the weights alone tell.
    measured: Callable[[Mapping[str, Any], Callable[[str], tuple[int, ...]]], dict[str, Any]] | None = None

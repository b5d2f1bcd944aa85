"""Models that differ from Llama in names and settings alone, as GGUF files have them."""

from __future__ import annotations

from . import Family, GgufLayout
from ._gguf_layout import (
    ATTENTION,
    BIASES,
    COMMON,
    GATED,
    LAYER_NORM,
    LLAMA,
    NORMS_AFTER,
    PLAIN,
    RMS,
    TOP,
)
from ._pre_tokenizers import PRE_TOKENIZERS

_MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_gate_inp": "block_sparse_moe.gate",
}
_WINDOWS = {"attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "layer_types"}
_NORM_BEFORE_MLP = {"ffn_norm": "post_attention_layernorm"}

FAMILY = Family(
    gguf={
        "llama": GgufLayout("llama", "LlamaForCausalLM", permuted=True, alike=("mistral",)),
        "llama+experts": GgufLayout(
            "mixtral",
            "MixtralForCausalLM",
            RMS | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            LLAMA | _MIXTRAL_EXPERTS,
            permuted=True,
        ),
        "internlm2": GgufLayout("llama", "LlamaForCausalLM", permuted=True),
        "smollm3": GgufLayout("smollm3", "SmolLM3ForCausalLM", permuted=True),
        "arcee": GgufLayout(
            "arcee", "ArceeForCausalLM", RMS, ATTENTION | PLAIN | _NORM_BEFORE_MLP, permuted=True
        ),
        "ernie4_5": GgufLayout("ernie4_5", "Ernie4_5ForCausalLM", present={"use_bias": "blk.0.attn_q.bias"}),
        "exaone4": GgufLayout("exaone4", "Exaone4ForCausalLM", RMS | _WINDOWS, NORMS_AFTER),
        "nemotron": GgufLayout(
            "nemotron",
            "NemotronForCausalLM",
            COMMON | {"attention.layer_norm_epsilon": "norm_eps"},
            ATTENTION | PLAIN | _NORM_BEFORE_MLP,
            norms_plus_one=True,
            rotates_part=True,
        ),
        "seed_oss": GgufLayout(
            "seed_oss",
            "SeedOssForCausalLM",
            RMS,
            LLAMA | {"post_attention_norm": "post_attention_layernorm"},
            present=BIASES | {"attention_out_bias": "blk.0.attn_output.bias"},
        ),
        "stablelm": GgufLayout(
            "stablelm",
            "StableLmForCausalLM",
            LAYER_NORM | {"use_parallel_residual": "use_parallel_residual"},
            {k: v for k, v in LLAMA.items() if k not in ("attn_q_norm", "attn_k_norm")},
            rotates_part=True,
            present={"use_qkv_bias": "blk.0.attn_q.bias"},
        ),
        "starcoder2": GgufLayout(
            "starcoder2",
            "Starcoder2ForCausalLM",
            COMMON | {"attention.layer_norm_epsilon": "norm_epsilon"},
            LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
            {"sliding_window": None},
        ),
        "command-r": GgufLayout(
            "cohere",
            "CohereForCausalLM",
            LAYER_NORM | {"logit_scale": "logit_scale"},
            ATTENTION | GATED,
            present=BIASES | {"use_qk_norm": "blk.0.attn_q_norm.weight"},
        ),
        "cohere2": GgufLayout(
            "cohere2",
            "Cohere2ForCausalLM",
            LAYER_NORM | {"logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
            ATTENTION | GATED,
        ),
        "glm4": GgufLayout(
            "glm4",
            "Glm4ForCausalLM",
            RMS,
            LLAMA
            | {
                "ffn_up": "mlp.gate_up_proj",
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
            rotates_part=True,
        ),
        "granite": GgufLayout(
            "granite",
            "GraniteForCausalLM",
            RMS
            | {
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
            LLAMA,
            permuted=True,
        ),
        "phi2": GgufLayout(
            "phi",
            "PhiForCausalLM",
            LAYER_NORM,
            {
                "attn_norm": "input_layernorm",
                "attn_q": "self_attn.q_proj",
                "attn_k": "self_attn.k_proj",
                "attn_v": "self_attn.v_proj",
                "attn_output": "self_attn.dense",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
            },
            rotates_part=True,
            top=TOP | {"output_norm": "model.final_layernorm"},
        ),
        "phi3": GgufLayout(
            "phi3",
            "Phi3ForCausalLM",
            RMS
            | {
                "attention.sliding_window": "sliding_window",
                "rope.scaling.original_context_length": "original_max_position_embeddings",
            },
            LLAMA | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
            rotates_part=True,
        ),
    },
    pre_tokenizers=PRE_TOKENIZERS,
)

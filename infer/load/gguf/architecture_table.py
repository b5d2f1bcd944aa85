"""Architectures of GGUF files by their name in the metadata."""

from __future__ import annotations

from .architecture_layout import (
    ATTENTION,
    BIASES,
    COMMON,
    EXPERTS,
    GATED,
    GEMMA2,
    LAYER_NORM,
    LLAMA,
    MIXTRAL_EXPERTS,
    PLAIN,
    POST_NORMS,
    QWEN_EXPERTS,
    RMS,
    SHARED_EXPERT,
    SOFTCAPS,
    TOP,
    Architecture,
)

_WINDOWS = {"attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "layer_types"}
_SECTIONS = frozenset(
    {"rope.dimension_sections", "n_deepstack_layers"}
)  # positions of texts are equal in all sections
_NORMS_AFTER = (
    {k: v for k, v in LLAMA.items() if not k.endswith("_norm")}
    | POST_NORMS
    | {k: v for k, v in ATTENTION.items() if k in ("attn_q_norm", "attn_k_norm")}
)

ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", RMS, LLAMA, permuted=True),
    "llama+experts": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        RMS | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        LLAMA | MIXTRAL_EXPERTS,
        permuted=True,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", RMS, LLAMA),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", RMS, LLAMA),
    "qwen2moe": Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM", RMS | EXPERTS, LLAMA | QWEN_EXPERTS | SHARED_EXPERT
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        RMS | EXPERTS,
        LLAMA | QWEN_EXPERTS,
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "phi3": Architecture(
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
    "gemma": Architecture("gemma", "GemmaForCausalLM", RMS, LLAMA, norms_plus_one=True),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", RMS | SOFTCAPS, GEMMA2, norms_plus_one=True, large_layers=46
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        RMS | SOFTCAPS | {"rope.freq_base_swa": "rope_local_base_freq"},
        GEMMA2,
        norms_plus_one=True,
        large_layers=62,
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", RMS, LLAMA, permuted=True),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        RMS,
        _NORMS_AFTER,
    ),
    "granite": Architecture(
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
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        COMMON | {"attention.layer_norm_epsilon": "norm_epsilon"},
        LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        {"sliding_window": None},
    ),
    "command-r": Architecture(
        "cohere",
        "CohereForCausalLM",
        LAYER_NORM | {"logit_scale": "logit_scale"},
        ATTENTION | GATED,
        present=BIASES | {"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "cohere2": Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        LAYER_NORM | {"logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
        ATTENTION | GATED,
    ),
    "glm4": Architecture(
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
    "stablelm": Architecture(
        "stablelm",
        "StableLmForCausalLM",
        LAYER_NORM | {"use_parallel_residual": "use_parallel_residual"},
        {k: v for k, v in LLAMA.items() if k not in ("attn_q_norm", "attn_k_norm")},
        rotates_part=True,
        present={"use_qkv_bias": "blk.0.attn_q.bias"},
    ),
    "phi2": Architecture(
        "phi",
        "PhiForCausalLM",
        LAYER_NORM,
        {
            **{k: ATTENTION[k] for k in ("attn_norm", "attn_q", "attn_k", "attn_v")},
            **{"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        },
        rotates_part=True,
        top=TOP | {"output_norm": "model.final_layernorm"},
    ),
    "exaone4": Architecture(
        "exaone4",
        "Exaone4ForCausalLM",
        RMS | _WINDOWS,
        _NORMS_AFTER,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        "SeedOssForCausalLM",
        RMS,
        LLAMA | {"post_attention_norm": "post_attention_layernorm"},
        present=BIASES | {"attention_out_bias": "blk.0.attn_output.bias"},
    ),
    "ernie4_5": Architecture(
        "ernie4_5", "Ernie4_5ForCausalLM", RMS, LLAMA, present={"use_bias": "blk.0.attn_q.bias"}
    ),
    "arcee": Architecture(
        "arcee",
        "ArceeForCausalLM",
        RMS,
        ATTENTION | PLAIN | {"ffn_norm": "post_attention_layernorm"},
        permuted=True,
    ),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        COMMON | {"attention.layer_norm_epsilon": "norm_eps"},
        ATTENTION | PLAIN | {"ffn_norm": "post_attention_layernorm"},
        norms_plus_one=True,
        rotates_part=True,
    ),
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        RMS | EXPERTS,
        LLAMA | QWEN_EXPERTS,
        {"norm_topk_prob": False},
    ),
    "lfm2": Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        COMMON | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        {
            **{k: ATTENTION[k] for k in ("attn_q", "attn_k", "attn_v")},
            **{"attn_output": "self_attn.out_proj", "attn_norm": "operator_norm", "ffn_norm": "ffn_norm"},
            **{"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
            **{"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
            **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
        },
        {"block_auto_adjust_ff_dim": False},
        convolutions=True,
        top={
            "token_embd": "model.embed_tokens",
            "token_embd_norm": "model.embedding_norm",
            "output": "lm_head",
        },
        present={},
    ),
    "gpt-oss": Architecture(
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
        exact_yarn=True,
    ),
    # Models of others' layout: InternLM 2 is Llama's, the text parts of Qwen's vision models are Qwen's.
    "internlm2": Architecture("llama", "LlamaForCausalLM", RMS, LLAMA, permuted=True),
    "qwen2vl": Architecture("qwen2", "Qwen2ForCausalLM", RMS, LLAMA, unused=_SECTIONS),
    "qwen3vl": Architecture("qwen3", "Qwen3ForCausalLM", RMS, LLAMA, unused=_SECTIONS),
    "qwen3vlmoe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        RMS | EXPERTS,
        LLAMA | QWEN_EXPERTS,
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        unused=_SECTIONS,
    ),
}

"""Sizes of the decoders of the models table: two layers, 64 numbers a token, 320 tokens.

Name of the row → name of the configuration in transformers, its sizes, and the class that builds it where it is not
AutoModelForCausalLM. Windows and chunks are shorter than what is generated, so that they take part.
"""

from __future__ import annotations

from typing import Any

from tests.support.tiny_decoders import COMMON, GROUPED, LOCAL, SIZES, VOCABULARY, WIDE

Sizes = dict[str, Any]
TOKENS: Sizes = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT: Sizes = {**TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
EXPERTS: Sizes = {
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
LATENT: Sizes = {
    **{**COMMON, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 16},
}
SPARSE: Sizes = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
DELTA: Sizes = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
}
SSM: Sizes = {
    **{"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1},
    "mamba_chunk_size": 8,
}
IMAGES, SEQ2SEQ = "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM"
T5: Sizes = {
    **{**TOKENS, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0, "relative_attention_max_distance": 24},
}
BART: Sizes = {
    **{**TOKENS, "d_model": 64, "max_position_embeddings": 256, "decoder_start_token_id": 2},
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **{"forced_eos_token_id": None, "forced_bos_token_id": None},
}
SECTIONS: Sizes = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
}


def tower(text: Sizes, sight: Sizes | None = None) -> Sizes:
    """Return the sizes of a model of images and text."""
    seen = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen |= {"image_size": 28, "patch_size": 14}
    own = {**GROUPED, "head_dim": 16, **text}
    return {"text_config": own, "vision_config": {**seen, **(sight or {})}}


MIXTURE: Sizes = {
    **GROUPED,
    **EXPERTS,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
CONFIGS: dict[str, tuple[str, Sizes] | tuple[str, Sizes, str]] = {
    # Attention through transformers' interface.
    **{
        name: (name, GROUPED)
        for name in ("arcee", "cohere", "cohere2", "cwm", "ernie4_5", "granite", "llama")
    },
    **{
        name: (name, GROUPED)
        for name in ("ministral3", "olmo", "olmo2", "olmo3", "seed_oss", "smollm3", "stablelm")
    },
    **{name: (name, GROUPED) for name in ("bitnet", "internlm3", "phi3", "starcoder2", "doge")},
    **{
        name: (name, WIDE)
        for name in ("apertus", "exaone4", "gemma", "glm", "glm4", "hunyuan_v1_dense", "nemotron")
    },
    **{name: (name, WIDE) for name in ("qwen3", "vaultgemma")},
    **{name: (name, COMMON) for name in ("biogpt", "diffllama", "gpt_neox", "nanochat", "persimmon", "phi")},
    **{name: (name, SIZES[name]) for name in ("gemma2", "gemma3_text", "gpt2")},
    "helium": ("helium", {**GROUPED, "head_dim": 16}),
    "gpt_bigcode": ("gpt_bigcode", {**GPT, "multi_query": True}),
    "llama (linear rope)": ("llama", {**GROUPED, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama (yarn rope)": (
        "llama",
        {
            **GROUPED,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    **{name: (name, SIZES[name]) for name in ("mistral", "qwen2", "opt")},
    "opt (350m)": (
        "opt",
        {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
    # Attention in the model's own code.
    **{name: (name, SIZES[name]) for name in ("bloom", "codegen")},
    "falcon (multi-query)": ("falcon", SIZES["falcon"]),
    **{name: ("falcon", SIZES[name]) for name in ("falcon (new decoder)", "falcon (alibi)")},
    **{name: (name, SIZES[name]) for name in ("gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "xglm")},
    # Positions that depend on the length.
    "llama (dynamic rope)": ("llama", {**GROUPED, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "phi3 (longrope)": (
        "phi3",
        {
            **{**GROUPED, "original_max_position_embeddings": 64, "max_position_embeddings": 256},
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0 + 0.05 * i for i in range(8)],
                "long_factor": [1.5 + 0.25 * i for i in range(8)],
            },
        },
    ),
    # Keys and values of other shapes.
    "deepseek_v2": ("deepseek_v2", {**LATENT, **SPARSE, "first_k_dense_replace": 2}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **SPARSE, "first_k_dense_replace": 2}),
    "minicpm3": ("minicpm3", LATENT),
    # Layers with state of their own.
    "lfm2": ("lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "lfm2_moe",
        {**GROUPED, **EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "qwen3_next": ("qwen3_next", {**WIDE, **DELTA, **EXPERTS}),
    "qwen3_5_text": ("qwen3_5_text", {**WIDE, **DELTA}),
    "olmo_hybrid": ("olmo_hybrid", {**WIDE, **DELTA}),
    "falcon_h1": ("falcon_h1", {**GROUPED, **SSM, "mamba_d_ssm": 128}),
    "bamba": ("bamba", {**GROUPED, **SSM, "attn_layer_indices": [0]}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**GROUPED, **SSM, "num_local_experts": 0, "shared_intermediate_size": 96}
        | {"layer_types": ["mamba", "attention"]},
    ),
    "zamba2": (
        "zamba2",
        {
            **{**COMMON, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "mamba_d_state": 8},
            **{"n_mamba_heads": 2, "mamba_headdim": 64, "mamba_ngroups": 1, "chunk_size": 8},
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **{**WIDE, "layers_block_type": ["attention", "mamba"], "mamba_num_heads": 4, "n_groups": 1},
            **{"mamba_head_dim": 32, "ssm_state_size": 8, "chunk_size": 8},
        },
    ),
    "jamba": (
        "jamba",
        {
            **{**GROUPED, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 0},
            **{"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        },
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {**WIDE, "block_types": ["recurrent", "attention"], "attention_window_size": 8, "lru_width": 64},
    ),
    "mamba": ("mamba", {**TOKENS, "hidden_size": 64, "num_hidden_layers": 2}),
    "falcon_mamba": ("falcon_mamba", {**TOKENS, "hidden_size": 64, "num_hidden_layers": 2}),
    "mamba2": (
        "mamba2",
        {
            **{**TOKENS, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16},
            **{"state_size": 16, "n_groups": 1, "chunk_size": 8},
        },
    ),
    # Layers of other shapes, attention in chunks, sinks.
    "gemma4_text": (
        "gemma4_text",
        {
            **{**GROUPED, **LOCAL, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 8},
            **{
                "vocab_size_per_layer_input": VOCABULARY,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        },
    ),
    "gpt_oss": ("gpt_oss", {**WIDE, **LOCAL, **EXPERTS, "rope_scaling": None}),
    "llama4_text (dense)": ("llama4_text", SIZES["llama4_text"]),
    # Language towers of checkpoints of several modalities.
    "gemma3 (tower)": ("gemma3", tower({"sliding_window": 8}), IMAGES),
    "gemma4 (tower)": (
        "gemma4",
        tower({"sliding_window": 8, "global_head_dim": 32, "vocab_size_per_layer_input": VOCABULARY}),
        IMAGES,
    ),
    "llama4 (tower)": ("llama4", tower({"moe_layers": [], "attention_chunk_size": 8}), IMAGES),
    "llava (tower)": ("llava", tower({"model_type": "llama"}, {"model_type": "clip_vision_model"}), IMAGES),
    "mistral3 (tower)": ("mistral3", tower({"model_type": "mistral"}, {"model_type": "pixtral"}), IMAGES),
    "llava_onevision (tower)": (
        "llava_onevision",
        tower({"model_type": "qwen2"}, {"model_type": "siglip_vision_model"}),
        IMAGES,
    ),
    "smolvlm (tower)": ("smolvlm", tower({"model_type": "llama"}), IMAGES),
    "idefics3 (tower)": ("idefics3", tower({"model_type": "llama"}), IMAGES),
    "internvl (tower)": (
        "internvl",
        tower({"model_type": "qwen2"}, {"image_size": [28, 28], "patch_size": [14, 14]}),
        IMAGES,
    ),
    "qwen2_vl (tower)": (
        "qwen2_vl",
        tower(SECTIONS, {"depth": 1, "embed_dim": 32, "hidden_size": 64}),
        IMAGES,
    ),
    "qwen2_5_vl (tower)": ("qwen2_5_vl", tower(SECTIONS, {"depth": 1, "out_hidden_size": 64}), IMAGES),
    "qwen3_vl (tower)": (
        "qwen3_vl",
        tower(SECTIONS, {"depth": 1, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}),
        IMAGES,
    ),
    "paligemma (tower)": (
        "paligemma",
        tower({"model_type": "gemma"}, {"model_type": "siglip_vision_model"}),
        IMAGES,
    ),
    "glm4v (tower)": ("glm4v", tower(SECTIONS, {"depth": 1, "out_hidden_size": 64}), IMAGES),
    "qwen3_5 (tower)": ("qwen3_5", tower({"layer_types": ["full_attention"] * 2}), IMAGES),
    # Mixtures of experts; projections of 64 columns, which formats of 4 bits take.
    **{name: (name, MIXTURE) for name in ("mixtral", "qwen2_moe", "olmoe", "phimoe", "granitemoe")},
    "qwen3_moe": ("qwen3_moe", {**MIXTURE, "head_dim": 16}),
    **{
        f"{name} (experts)": (
            name,
            {**LATENT, **SPARSE, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
            | {"n_group": 1, "topk_group": 1},
        )
        for name in ("deepseek_v2", "deepseek_v3")
    },
    # Encoder-decoders: the prompt is what the encoder reads.
    "t5 (encoder-decoder)": ("t5", T5, SEQ2SEQ),
    "flan-t5 (encoder-decoder)": (
        "t5",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        SEQ2SEQ,
    ),
    **{
        f"{name} (encoder-decoder)": (name, BART, SEQ2SEQ)
        for name in ("bart", "mbart", "marian", "pegasus", "m2m_100")
    },
    # Of the rest of transformers' causal models, those that run with plain sizes.
    **{
        name: (name, GROUPED)
        for name in ("ctrl", "fuyu", "gpt-sw3", "granite_swa", "hyperclovax", "iquestcoder", "jais2")
    },
    **{name: (name, GROUPED) for name in ("modernbert-decoder", "aria_text", "cohere2_moe")},
    "lfm3": ("lfm3", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    **{name: (name, GROUPED) for name in ("flex_olmo", "granitemoe_swa", "granitemoeshared", "jetmoe")},
    **{name: (name, WIDE) for name in ("ministral", "hunyuan_v1_moe")},
    **{
        name: (name, {**MIXTURE, **SPARSE, "head_dim": 16})
        for name in ("dots1", "glm4_moe", "hy_v3", "mimo_v2_flash", "solar_open")
    },
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {**WIDE, **MIXTURE, **DELTA}),
    **{name: (name, {**LATENT, **SPARSE, "first_k_dense_replace": 1}) for name in ("longcat_flash", "youtu")},
}

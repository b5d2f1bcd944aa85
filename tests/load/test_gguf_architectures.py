"""GGUF files of further architectures: logits and greedy answers equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from infer import Plan, load
from infer.compress.formats import keep
from infer.errors import SourceError
from infer.load.gguf.open_gguf import open_gguf
from tests.support import tiny_decoders
from tests.support.gguf_files import write_gguf

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
QUANT = gguf.GGMLQuantizationType
HEADS = {**tiny_decoders.GROUPED, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2}
NORM = {"attention.layer_norm_epsilon": 1e-5}
FOUR = {"num_hidden_layers": 4}
MOE = {**HEADS, **EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True}
SECTIONS = {"rope.dimension_sections": [2, 3, 3, 0]}
OSS = {
    **HEADS,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}
OSS_KEYS = {
    **{**EXPERT_KEYS, "expert_feed_forward_length": 64, "attention.sliding_window": 8},
    **{"rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 32.0},
    "rope.scaling.original_context_length": 4096,
}
# Architecture in the file, with a remark → transformers' model type, its sizes, settings beside the usual.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "command-r": (
        "cohere",
        {"logit_scale": 0.5},
        {**NORM, "logit_scale": 0.5, "rope.freq_base": 500000.0, "rope.scaling.type": "none"},
    ),
    "command-r (norms)": (
        "cohere",
        {"use_qk_norm": True, "logit_scale": 0.5},
        {**NORM, "logit_scale": 0.5, "rope.freq_base": 500000.0},
    ),
    "cohere2": (
        "cohere2",
        {**FOUR, "sliding_window": 8, "logit_scale": 0.5},
        {**NORM, "logit_scale": 0.5, "attention.sliding_window": 8},
    ),
    "glm4": ("glm4", HEADS, {}),
    "stablelm": ("stablelm", {}, NORM),
    "stablelm (biased)": ("stablelm", {"use_qkv_bias": True}, NORM),
    "phi2": ("phi", {}, NORM),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, {}),
    "exaone4 (windows)": (
        "exaone4",
        {**FOUR, "sliding_window": 8, "sliding_window_pattern": 4},
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "seed_oss": ("seed_oss", HEADS, {}),
    "ernie4_5": ("ernie4_5", HEADS, {"rope.freq_base": 500000.0}),
    "arcee": ("arcee", {}, {}),
    "llama (biased)": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "nemotron": ("nemotron", HEADS, NORM),
    "olmoe": ("olmoe", EXPERTS, EXPERT_KEYS),
    "lfm2": (
        "lfm2",
        {
            **{**FOUR, "layer_types": ["conv", "conv", "full_attention", "conv"], "norm_eps": 1e-5},
            "block_auto_adjust_ff_dim": False,
        },
        {"attention.layer_norm_rms_epsilon": 1e-5, "shortconv.l_cache": 3, "rope.freq_base": 1e6},
    ),
    "gpt-oss": ("gpt_oss", OSS, OSS_KEYS),
    "internlm2": ("llama", {"attention_bias": False}, {}),
    "qwen2vl": ("qwen2", {"use_sliding_window": False}, SECTIONS),
    "qwen3vl": ("qwen3", HEADS, {**SECTIONS, "n_deepstack_layers": 3}),
    "qwen3vlmoe": ("qwen3_moe", MOE, {**SECTIONS, **EXPERT_KEYS, "expert_feed_forward_length": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    kind, sizes, settings = CASES[case]
    model: Any = tiny_decoders.build(kind, sizes={**tiny_decoders.GROUPED, **sizes})
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm.bias", "_proj.bias")):  # else all 1, and 0
            parameter.data += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(len(name))
            )
    write_gguf(tmp_path / "m.gguf", model, case.partition(" ")[0], settings=settings)
    loaded = load.load(Plan(source=str(tmp_path / "m.gguf"), data="random"))
    load.fill(loaded)

    def ours(ids: torch.Tensor) -> torch.Tensor:
        assert loaded.module is not None
        found = loaded.module(ids, torch.ones_like(ids)) if len(loaded.inputs) > 1 else loaded.module(ids)
        found = found["logits"] if isinstance(found, dict) else found
        return found[0] if isinstance(found, tuple) else found

    ids = torch.randint(3, tiny_decoders.VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(ours(ids), expected, rtol=1e-4, atol=1e-4)
        answer, told = ids[:1, :8], ids[:1, :8]
        for _ in range(6):
            answer = torch.cat([answer, ours(answer)[:, -1:].argmax(-1)], 1)
            logits = model(input_ids=told, use_cache=False).logits
            told = torch.cat([told, logits[:, -1:].argmax(-1)], 1)
    assert answer.tolist() == told.tolist()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F32"])
def test_experts_by_columns_are_joined_from_their_parts(kind: str, tmp_path: Path) -> None:
    model = tiny_decoders.build("gpt_oss", sizes={**tiny_decoders.GROUPED, **OSS})
    types = {"experts.gate_up_proj": QUANT[kind], "experts.down_proj": QUANT[kind]}
    kept = write_gguf(tmp_path / "m.gguf", model, "gpt-oss", settings=OSS_KEYS, types=types)
    weights = open_gguf(tmp_path / "m.gguf").weights
    for name in weights:
        whole = weights[name].read()
        assert torch.equal(whole, kept[name].float()), name
        assert whole.shape == weights[name].shape
        assert torch.equal(weights[name].rows(1, 3), whole[1:3])
    codes = weights["model.layers.1.mlp.experts.gate_up_proj"].codes()
    assert (codes is None) == (kind == "F32")
    if codes is not None:
        wanted = weights["model.layers.1.mlp.experts.gate_up_proj"].read().transpose(1, 2).flatten(0, 1)
        for start, stop in ((0, codes.shape[0]), (5, 140), (7, 8)):
            assert torch.equal(keep.dequantize(codes.rows(start, stop)), wanted[start:stop])


def test_experts_without_a_part_are_refused(tmp_path: Path) -> None:
    model: Any = tiny_decoders.build("gpt_oss", sizes={**tiny_decoders.GROUPED, **OSS})
    extra = {"blk.9.ffn_gate_exps.weight": np.ones((4, 64, 64), np.float32)}
    write_gguf(tmp_path / "m.gguf", model, "gpt-oss", settings=OSS_KEYS, tensors=extra)
    with pytest.raises(SourceError, match="lacks the tensor 'blk.9.ffn_up_exps.weight'"):
        open_gguf(tmp_path / "m.gguf")


ARRAYS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "exaone4": ({}, {"attention.sliding_window_pattern": [1, 2]}, "is not one boolean for each layer"),
    "lfm2": (
        {"layer_types": ["full_attention"] * 2},
        CASES["lfm2"][2],
        "head_count_kv, which is not one number for each layer",
    ),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_layers_are_checked(kind: str, tmp_path: Path) -> None:
    sizes, settings, message = ARRAYS[kind]
    model = tiny_decoders.build(kind, sizes={**tiny_decoders.GROUPED, **sizes})
    write_gguf(tmp_path / "m.gguf", model, kind, settings=settings)
    with pytest.raises(SourceError, match=message):
        open_gguf(tmp_path / "m.gguf")

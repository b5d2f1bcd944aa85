"""GGUF files of further architectures: logits and greedy answers equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer import Plan, load
from infer.errors import SourceError
from infer.load.gguf import open_gguf
from tests.support import tiny_decoders
from tests.support.gguf_files import write_gguf

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
HEADS = {**tiny_decoders.GROUPED, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2}
NORM = {"attention.layer_norm_epsilon": 1e-5}
FOUR = {"num_hidden_layers": 4}
MOE = {**HEADS, **EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True}
SECTIONS = {"rope.dimension_sections": [2, 3, 3, 0]}
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

"""Multi-head latent attention over a cache of latents: transformers' logits, a fraction of the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer import Predictor
from infer.llm.step.attention.latent_attention import keep_latents
from infer.llm.step.probe import probe
from infer.predict.open_artifact import generation_shape
from tests.llm.test_paged_step import in_steps
from tests.support.llm_artifacts import tiny
from tests.support.tiny_decoders import COMMON, VOCABULARY, build

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]
PROMPT = [5, 9, 100, 31, 7, 250, 12]
LATENT: dict[str, Any] = {
    **{**COMMON, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16},
    **{"qk_nope_head_dim": 32, "v_head_dim": 24, "head_dim": 16},
}
SPARSE: dict[str, Any] = {"first_k_dense_replace": 2, "n_routed_experts": 4, "moe_intermediate_size": 32}
SIZES = {
    "deepseek_v2": {**LATENT, **SPARSE, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "deepseek_v3": {**LATENT, **SPARSE},
    "minicpm3": LATENT,
}
NUMBERS = 2 * (32 + 16)  # of a token and layer: the latent and its rotated part, twice


@pytest.mark.parametrize("name", SIZES)
def test_a_step_over_a_latent_cache_equals_transformers(name: str) -> None:
    model = build(name, sizes=SIZES[name])
    ids = torch.randint(3, VOCABULARY, (2, 21))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    padded = probe(model, page=4, kv_dtype="float32")
    assert keep_latents(model) is not None
    shape = probe(model, page=4, kv_dtype="float32")
    assert (shape.kv_heads, shape.head_dim) == (1, 48)
    assert shape.bytes_per_token == 2 * NUMBERS * 4 < padded.bytes_per_token
    torch.testing.assert_close(in_steps(model, shape, ids), expected, atol=2e-5, rtol=1e-4)


def test_latents_wider_than_keys_and_values_are_not_kept() -> None:
    assert keep_latents(build("deepseek_v3", sizes={**SIZES["deepseek_v3"], "kv_lora_rank": 256})) is None
    assert keep_latents(build("llama")) is None


def test_an_artifact_generates_over_latents_and_quantizes_the_rest(tmp_path: Path) -> None:
    sizes = SIZES["deepseek_v3"]
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        given = build("deepseek_v3", sizes=sizes).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    whole = tiny(tmp_path, name="deepseek_v3", sizes=sizes)
    with Predictor.load(whole) as predictor:
        (found,) = predictor.generate([PROMPT], max_tokens=12, temperature=0, ignore_eos=True)
        shape = generation_shape(predictor.manifest)
    assert list(found.token_ids) == given[0, len(PROMPT) :].tolist()
    assert shape is not None
    assert (shape.kv_heads, shape.head_dim) == (1, 48)
    one = {**sizes, "num_hidden_layers": 1}
    small = tiny(tmp_path / "small", name="deepseek_v3", sizes=one, quant="int8:weight", max_error=0.5)
    with Predictor.load(small) as predictor:
        chosen = {layer.name.split(".", 2)[-1]: layer.format for layer in predictor.manifest.layers}
        (found,) = predictor.generate([PROMPT], max_tokens=12, temperature=0, ignore_eos=True)
    assert len(found.token_ids) == 12
    assert chosen["layers.0.self_attn.o_proj"] != "float"
    assert chosen.get("layers.0.self_attn.kv_b_proj", "float") == "float"

"""A language model runs step by step over a paged cache, or is refused by the name of what would be lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from infer.errors import NotUsableError
from infer.llm.step.probe import probe
from infer.llm.step.token_mixing import CHANGED, NUM_TOKENS, mixes
from tests.support.tiny_decoders import COMMON, GROUPED, SIZES, WIDE, build
from tests.support.tiny_hybrids import EXPERTS, HYBRIDS

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
WITH_EXPERTS = {**GROUPED, **EXPERTS, "num_local_experts": 4}
# Decoders that keep nothing but keys and values, besides those whose step is compared in test_step.
PLAIN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("arcee", "cohere", "cohere2", "cwm", "ernie4_5", "flex_olmo", "granite"), GROUPED),
    **dict.fromkeys(("ministral3", "olmo", "olmo3", "phimoe", "seed_oss", "smollm3", "stablelm"), GROUPED),
    **dict.fromkeys(("apertus", "exaone4", "glm", "glm4", "hunyuan_v1_dense", "nemotron"), WIDE),
    **dict.fromkeys(("granitemoe", "olmoe", "qwen2_moe", "qwen3_moe", "minimax_m2"), WITH_EXPERTS),
    **dict.fromkeys(("gpt_bigcode", "biogpt", "persimmon", "diffllama", "nanochat"), COMMON),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_layer_with_state_of_its_own_is_refused_by_name(name: str) -> None:
    sizes, layer = HYBRIDS[name]
    with pytest.raises(NotUsableError) as refused:
        probe(build(name, sizes=sizes))
    assert f"layer {layer}" in str(refused.value)
    assert "its state would be lost between steps" in str(refused.value)


@pytest.mark.parametrize("name", [*SIZES, *PLAIN])
def test_a_decoder_that_keeps_only_keys_and_values_is_accepted(name: str) -> None:
    model = build(name, sizes=SIZES.get(name) or PLAIN[name])
    calls = 2 if name == "diffllama" else 1  # it attends twice in a layer
    assert probe(model).layers == calls * model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["big_bird", "megatron-bert"])
def test_attention_outside_the_interface_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotUsableError, match=r"layer \S+ \(\w+Attention\) mixes tokens outside"):
        probe(build(name, sizes=COMMON))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("olmoe", {"sliding_window": 8}, "not a sliding window of 8 tokens"),
        ("bert", {"is_decoder": False}, "token 1 attends to token 2"),
    ],
)
def test_a_mask_the_operator_does_not_compute_is_refused(
    name: str, changes: dict[str, Any], said: str
) -> None:
    """Chunks of 96 tokens are longer than any run of the probe: the function behind the mask tells."""
    sizes = {**WITH_EXPERTS, "head_dim": 16} if name == "llama4_text" else WITH_EXPERTS
    with pytest.raises(NotUsableError, match=said):
        probe(build(name, sizes={**sizes, **changes}))


def test_chunks_no_sequence_reaches_are_no_reason_to_refuse() -> None:
    sizes = {**WITH_EXPERTS, "head_dim": 16, "attention_chunk_size": 256}
    assert probe(build("llama4_text", sizes=sizes)).max_positions == 256


def test_positions_a_model_counts_itself_are_refused() -> None:
    with pytest.raises(NotUsableError, match="logits differ from those of one run by"):
        probe(build("bart", sizes={**COMMON, "is_decoder": True, "is_encoder_decoder": False}))


def test_changing_a_token_changes_only_its_own_outputs() -> None:
    before = torch.randn(1, NUM_TOKENS, 8)
    own, later = before.clone(), before.clone()
    own[0, CHANGED] += 1
    later[0, CHANGED + 1] += 1e-3
    assert not mixes(before, own)
    assert not mixes(before, own * (1 + 1e-7))  # experts round by the number of their tokens
    assert mixes(before, later)
    assert not mixes(before.flatten(1), later.flatten(1))  # no axis of tokens: nothing can be told


class _Smear(nn.Module):
    """A residual branch that adds a share of the token before."""

    def __init__(self, inner: nn.Module, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + self.share * torch.nn.functional.pad(x, (0, 0, 1, -1)))


@pytest.mark.parametrize("share", [1.0, 1e-3])
@pytest.mark.parametrize("place", ["mlp", "self_attn.v_proj"])
def test_a_shifted_token_is_detected_by_the_step_probe(place: str, share: float) -> None:
    model = build("llama")
    owner = model.get_submodule(f"model.layers.1.{place}".rpartition(".")[0])
    setattr(owner, place.rpartition(".")[2], _Smear(owner.get_submodule(place.rpartition(".")[2]), share))
    with pytest.raises(NotUsableError, match=rf"layer model\.layers\.1\.{place} \(_Smear\)"):
        probe(model)

"""Experts of mixtures: layers of their own, the same logits as transformers, packed, calibrated by expert."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from infer import compress
from infer.compress.calibration.expert_statistics import FEWEST, ExpertStats
from infer.compress.packed_layers import QuantizedExperts
from infer.graph import capture
from infer.kernels.expert_layers import ExpertLinear
from infer.load.model_patches.moe_layers import checkpoint_names, split_experts
from infer.plan import Plan
from infer.spec import TensorSpec
from infer.weights import Weight
from tests.support.tiny_decoders import GROUPED, WIDE, build
from tests.support.tiny_hybrids import EXPERTS, LATENT

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
ALIGNED = {"intermediate_size": 64, "moe_intermediate_size": 64, "num_local_experts": 4}
MOE = {**GROUPED, **EXPERTS, **ALIGNED, "decoder_sparse_step": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mixtral", "qwen2_moe", "olmoe", "phimoe", "granitemoe"), MOE),
    "qwen3_moe": {**MOE, "head_dim": 16},
    "gpt_oss": {**WIDE, **EXPERTS, **ALIGNED, "rope_scaling": None},
    "jamba": {**MOE, "attn_layer_period": 2, "attn_layer_offset": 1},
    "deepseek_v2": {
        **LATENT,
        **ALIGNED,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {**LATENT, **ALIGNED, "n_routed_experts": 4, "first_k_dense_replace": 1},
}
IDS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(3))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_keeps_its_logits_and_every_expert_is_packed(name: str) -> None:
    model = build(name, sizes=MIXTURES[name])
    expected = logits(model)
    split_experts(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    done = compress.quantize_model(model, Plan(source="", quant="nf4"))
    packed = [layer for layer in done.layers if ".experts." in layer.name]
    assert packed
    assert not [module for module in model.modules() if isinstance(module, ExpertLinear)]
    assert not [layer for layer in done.refused if "experts" in layer]
    covered = compress.cover(model, {}).findings()
    assert not [finding for finding in covered if finding.what == "stays float: ExpertLinear"]


def single(transposed: bool, num_experts: int = 3) -> nn.Module:
    torch.manual_seed(5)
    shape = (num_experts, 64, 96) if transposed else (num_experts, 96, 64)
    model = nn.Module()
    model.up = ExpertLinear(nn.Parameter(torch.randn(shape)), transposed=transposed)
    model.forward = lambda x, expert, top_k=1: model.up(x, expert, top_k)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "quant", ["int8", "int8:weight", "int8:static", "nf4", "nf4:16", "int4", "fp4", "cluster"]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_format_packs_the_rows_of_all_experts(quant: str, transposed: bool) -> None:
    model = single(transposed)
    weight = model.up.weight.detach()
    stats = {"up": ExpertStats(model.up)}
    x, expert = torch.randn(90, 64), torch.arange(90) % 2
    stats["up"].add(x, expert)
    compress.quantize_model(model, Plan(source="", quant=quant), stats=stats)
    assert isinstance(model.up, QuantizedExperts)
    decoded = model.up.weight
    assert decoded.shape == weight.shape
    assert (decoded - weight).norm() / weight.norm() < (0.02 if quant.startswith("int8") else 0.12)
    dense = decoded.transpose(1, 2) if transposed else decoded
    y = model.up(x, expert, 1)
    expected = torch.einsum("sk,snk->sn", x, dense[expert])
    assert (y - expected).norm() / expected.norm() < (0.02 if quant in ("int8", "int8:static") else 1e-4)


def test_experts_on_meta_are_read_one_after_another() -> None:
    model, reads = single(False), list[tuple[int, int]]()
    expected = copy.deepcopy(model.up.weight.detach())

    def rows(start: int, stop: int) -> torch.Tensor:
        reads.append((start, stop))
        return expected[start:stop].clone()

    checkpoint = {"up": Weight(expected.dtype, tuple(expected.shape), rows)}
    assert checkpoint_names(model) == {"up.weight": "up"}
    model.up.weight = nn.Parameter(expected.to("meta"))
    compress.quantize_model(
        model, Plan(source="", quant="int8:weight"), checkpoint=checkpoint, renames={"up.weight": "up"}
    )
    assert reads == [(0, 1), (1, 2), (2, 3)]
    assert (model.up.weight - expected).norm() / expected.norm() < 0.02


def test_calibration_counts_the_tokens_of_each_expert() -> None:
    model = single(False)
    mask = torch.ones(1, 2 * FEWEST, dtype=torch.int64)
    mask[0, -1] = 0
    x = torch.randn(2 * FEWEST, 64)
    expert = torch.stack([torch.zeros(len(x)), torch.ones(len(x))], 1).long()
    expert[: FEWEST + 3, 1] = 2
    found = compress.calibrate(_Called(model, x, expert.reshape(-1), 2), [{"attention_mask": mask}])
    stats = found["model.up"]
    assert stats.counts.tolist() == [2 * FEWEST - 1, FEWEST - 4, FEWEST + 3]
    assert stats.of(1) is None, "fewer tokens than its statistics need"
    torch.testing.assert_close(stats.of(0).importance(64), x[:-1].square().mean(0))
    findings = {
        f.what: f for f in compress.coverage(_Called(model, x, expert, 2), found, [{"attention_mask": mask}])
    }
    few = findings["experts with few tokens"]
    assert few.value == 1
    assert "of 3 that saw fewer than 32 tokens are quantized by plain rounding" in few.why


def test_an_expert_of_few_tokens_is_rounded_to_nearest() -> None:
    plain, seen = single(False), single(False)
    stats = ExpertStats(seen.up)
    loud = torch.logspace(-2, 2, 64)  # columns that matter most to the experts' outputs
    expert = torch.tensor([0] * FEWEST + [1] * (FEWEST - 1))
    stats.add(torch.randn(len(expert), 64) * loud, expert)
    compress.quantize_model(plain, Plan(source="", quant="nf4"))
    compress.quantize_model(seen, Plan(source="", quant="nf4"), stats={"up": stats})
    same = (plain.up.weight == seen.up.weight).flatten(1).all(1)
    assert same.tolist() == [False, True, True]


class _Called(nn.Module):
    """A model of one layer of experts, whose router is given."""

    def __init__(self, model: nn.Module, x: torch.Tensor, expert: torch.Tensor, top_k: int) -> None:
        super().__init__()
        self.model, self.given = model, (x, expert, top_k)

    def forward(self, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.model.up(*self.given)


def test_cluster_refuses_experts_whose_rows_share_tables() -> None:
    model = single(False)
    model.up = ExpertLinear(nn.Parameter(torch.randn(3, 80, 64)), transposed=False)
    model.down = nn.Linear(64, 64)
    done = compress.quantize_model(model, Plan(source="", quant="cluster"))
    assert done.refused == {"up": "experts have 80 rows; 32 rows of one share a table of cluster"}


@pytest.mark.parametrize(("quant", "experts"), [("nf4", 4), ("none", 17), ("none", 4)])
def test_onnx_backends_refuse_experts_they_have_no_operator_for(quant: str, experts: int) -> None:
    from infer.onnx.decompositions import refused

    model, x, expert = single(False, experts), torch.randn(6, 64), torch.arange(6) % 3
    if quant != "none":
        compress.quantize_model(model, Plan(source="", quant=quant))
    program = torch.export.export(_Called(model, x, expert, 1), (torch.ones(1, 6),))
    said = refused(program.graph.nodes)
    if quant != "none":
        assert said is not None
        assert said.startswith("ONNX has no operator for 1 layers of quantized experts")
    else:
        assert (said is None) == (experts <= 16)


def test_shared_experts_of_aria_take_any_sequence_length() -> None:
    from transformers import AriaTextConfig
    from transformers.models.aria.modeling_aria import AriaTextMoELayer

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "moe_num_experts": 4, "moe_topk": 2}
    layer = AriaTextMoELayer(AriaTextConfig(**sizes)).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 11, 64)
    with torch.no_grad():
        expected = layer(x)
    specs = (TensorSpec("hidden_states", "float32", ("batch", "seq", 64)),)
    graph = capture.capture(split_experts(layer), specs, {"hidden_states": x[:, :8]})
    got = next(iter(graph.run({"hidden_states": x}).values()))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)

"""Codes of quantized sources: carried over, they stand for the weights that the source's own reader gives."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from infer import Plan, load
from infer.compress.formats import keep
from infer.load.gguf.block_types import BLOCK_TYPES
from tests.support import tiny_decoders
from tests.support.gguf_files import write_gguf
from tests.support.quantized_layers import CASES, opened
from tests.support.random_blocks import random_blocks

FLOAT8 = [case for case in CASES if "float8" in case]


@pytest.mark.parametrize("case", [case for case in CASES if case not in FLOAT8])
def test_codes_of_every_method_decode_bit_equal(case: str) -> None:
    parts, weight, settings = CASES[case]((64, 128), torch.Generator().manual_seed(0))
    codes = opened(parts, settings)["layer.weight"].codes()
    assert codes is not None
    assert codes.refused == ""
    assert codes.shape == (64, 128)
    assert codes.dtype == weight.dtype
    for start, stop in ((0, 64), (5, 24)):
        tensors = codes.rows(start, stop)
        tensors |= {} if codes.order is None else {"order": codes.order}
        found = keep.dequantize(tensors).to(weight.dtype)
        exact = (
            0 if case != "int8 rows" else 1e-6
        )  # bitsandbytes multiplies by two numbers, each time rounded
        torch.testing.assert_close(found, weight[start:stop], rtol=exact, atol=0)


def bits(tensors: dict[str, torch.Tensor], count: int) -> float:
    """Return the bits of a weight in the tensors of `keep`, without tables and orders of columns."""
    return 8 * sum(t.numel() * t.itemsize for name, t in tensors.items() if name not in keep.SHARED) / count


def test_codes_take_half_a_bit_more_than_in_their_source_at_most() -> None:
    for kind in BLOCK_TYPES.values():
        if kind.holds_codes and kind.points is None and not kind.name.startswith("TQ"):
            raw = torch.zeros(1024, kind.num_bytes, dtype=torch.uint8)
            tensors = kind.rows(raw, 1024 * kind.block // 512)
            assert bits(tensors, 1024 * kind.block) <= 8 * kind.num_bytes / kind.block + 0.5, kind.name
    for case in CASES:
        parts, _, settings = CASES[case]((64, 512), torch.Generator().manual_seed(0))
        codes = opened(parts, settings)["layer.weight"].codes()
        if codes is not None and not codes.refused:
            stored = 8 * sum(part.numel() * part.itemsize for part in parts.values()) / (64 * 512)
            assert bits(codes.rows(0, 64), 64 * 512) <= stored + 0.5, case


@pytest.mark.parametrize(
    ("kinds", "code", "group"),
    [
        (("IQ1_S", "IQ2_XXS"), 3, 32),
        (("IQ1_M", "IQ2_XS", "IQ2_S"), 3, 16),
        (("IQ3_XXS", "IQ3_S"), 4, 32),
        (("TQ1_0", "TQ2_0"), 2, 256),
    ],
)
def test_codes_of_codebooks_take_the_bits_of_their_values(
    kinds: tuple[str, ...], code: int, group: int
) -> None:
    for kind in (one for one in BLOCK_TYPES.values() if one.name in kinds):
        tensors = kind.rows(random_blocks(kind, 1024), 512)
        supers = 16 / 256 if group < 256 else 0
        assert bits(tensors, 1024 * 256) == code + (8 if group < 256 else 16) / group + supers, kind.name


@pytest.mark.parametrize("damage", ["nan", "divisor"])
def test_float8_scales_without_a_plain_divisor_become_float32(damage: str) -> None:
    parts, weight, settings = CASES["nvfp4"]((64, 128), torch.Generator().manual_seed(0))
    if damage == "nan":
        parts["weight_scale"].view(torch.uint8)[3, 2] = 0x7F
    else:
        parts["weight_global_scale"] = torch.full((1,), -1e-40)
    weights = opened(parts, settings)
    codes = weights["layer.weight"].codes()
    assert codes is not None
    assert codes.rows(0, 64)["scale"].dtype == torch.float32
    found, wanted = keep.dequantize(codes.rows(0, 64)).to(weight.dtype), weights["layer.weight"].read()
    assert bool(((found == wanted) | (found.isnan() & wanted.isnan())).all())


@pytest.mark.parametrize("case", FLOAT8)
def test_float8_codes_are_refused_for_carry_over_with_a_reason(case: str) -> None:
    parts, _, settings = CASES[case]((64, 128), torch.Generator().manual_seed(0))
    codes = opened(parts, settings)["layer.weight"].codes()
    assert codes is not None
    assert "no packed form" in codes.refused


@pytest.mark.filterwarnings("ignore")  # transformers has many to give
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_codes_lie_where_transformers_has_their_weights(architecture: str, tmp_path: Path) -> None:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    }
    settings = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    is_moe = architecture == "qwen3moe"
    sizes = {**tiny_decoders.WIDE, **(experts if is_moe else {})}
    model = tiny_decoders.build("qwen3_moe" if is_moe else "llama", sizes=sizes)
    types = {"norm.weight": gguf.GGMLQuantizationType.F32, "": gguf.GGMLQuantizationType.Q4_0}
    path = tmp_path / "m.gguf"
    write_gguf(path, model, architecture, settings=settings if is_moe else {}, types=types)
    weights = load.load(Plan(source=str(path), data="random")).checkpoint
    assert weights is not None
    carried = [(name, codes) for name in weights if (codes := weights[name].codes()) is not None]
    assert any(codes.experts for _, codes in carried) == is_moe
    assert len(carried) >= 14
    for name, codes in carried:
        assert codes.refused == ""
        weight = weights[name].read().flatten(0, -2).float()
        middle = len(weight) // 2 + 1
        for start, stop in ((0, len(weight)), (middle - 1, middle)):
            torch.testing.assert_close(
                keep.dequantize(codes.rows(start, stop)), weight[start:stop], rtol=0, atol=0
            )

"""Quantized checkpoints: each method's codes give the weights that its packing was made of, whole and by rows."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infer import Plan, load
from infer.errors import SourceError
from infer.load.quantized_weights.methods import open_quantized
from infer.load.quantized_weights.packed_weight import unpack
from infer.weights import in_memory
from tests.fuzz import quantization_configs as fuzz
from tests.support import tiny_decoders
from tests.support.quantized_layers import CASES, compressed, opened

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give


@pytest.mark.parametrize("case", CASES)
def test_decoded_codes_equal_the_packed_weight(case: str) -> None:
    parts, weight, settings = CASES[case]((64, 128), torch.Generator().manual_seed(0))
    weights = opened(parts, settings)
    assert sorted(weights) == ["layer.weight", "norm.weight"]
    assert weights["layer.weight"].shape == (64, 128)
    found = weights["layer.weight"].read()
    assert found.dtype == weights["layer.weight"].dtype == weight.dtype
    torch.testing.assert_close(found, weight, rtol=0, atol=0)
    for start, stop in ((0, 1), (5, 24), (63, 70), (9, 9)):
        torch.testing.assert_close(
            weights["layer.weight"].rows(start, stop), weight[start:stop], rtol=0, atol=0
        )
    assert torch.equal(weights["norm.weight"].read(), torch.ones(3))


def test_mxfp4_experts_equal_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 48, 2, 16), generator=rng).to(torch.uint8)
    scales = torch.randint(110, 135, (3, 48, 2), generator=rng).to(torch.uint8)
    held = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    weights, _ = open_quantized(in_memory(held), {"quant_method": "mxfp4"}, "config.json")
    assert list(weights) == ["experts.down_proj"]
    expected = convert_moe_packed_tensors(blocks, scales)
    assert expected.shape == weights["experts.down_proj"].shape == (3, 64, 48)
    torch.testing.assert_close(weights["experts.down_proj"].read(), expected, rtol=0, atol=0)
    torch.testing.assert_close(weights["experts.down_proj"].rows(1, 2), expected[1:2], rtol=0, atol=0)


@pytest.mark.parametrize("case", ["gptq act-order", "awq", "nf4", "packed int4", "float8 in blocks"])
def test_a_quantized_folder_gives_outputs_of_its_decoded_weights(case: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model: Any = tiny_decoders.build("llama")
    rng, held, settings = torch.Generator().manual_seed(0), {}, {}
    state = model.state_dict()
    for name, tensor in state.items():
        if not name.endswith("_proj.weight"):
            held[name] = tensor
            continue
        shape = (tensor.shape[0], tensor.shape[1])
        parts, weight, settings = CASES[case](shape, rng)
        tensor.copy_(weight)
        held |= {f"{name.removesuffix('.weight')}.{part}": one.contiguous() for part, one in parts.items()}
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": settings,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load.load(Plan(source=str(tmp_path), data="random"))
    load.fill(loaded)
    assert any(finding.what == "quantized" for finding in loaded.findings)
    ids = torch.randint(3, tiny_decoders.VOCABULARY, (2, 12), generator=rng)
    assert loaded.module is not None
    with torch.no_grad():
        expected, found = model(input_ids=ids, use_cache=False).logits, loaded.module(ids)
    found = found if isinstance(found, Tensor) else found[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_gptq_codes_of_3_bits_straddle_their_words() -> None:
    # Codes 10 and 21 of 32 lie across words, as AutoGPTQ packs them: two bits and one, one bit and two.
    words = torch.zeros((1, 3), dtype=torch.int32)
    words[0, 0] = -(1 << 30)  # the two highest bits
    words[0, 1] = 1 - (1 << 31)
    words[0, 2] = 0b11
    expected = torch.zeros((1, 32), dtype=torch.int32)
    expected[0, [10, 21]] = 7
    assert torch.equal(unpack(words, 3), expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "aqlm"}, "quantized by 'aqlm', which infer does not read; known: gptq"),
    "no method": ({}, "quantized by 'unknown'"),
    "5 bits": (
        {"quant_method": "gptq", "bits": 5},
        "expected 2 or 3 or 4 or 8 bits per weight, got bits = 5",
    ),
    "marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the form 'marlin'"),
    "gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "in the form 'gemv'"),
    "nothing packed": ({"quant_method": "awq", "bits": 4}, "no tensor of the checkpoint is packed so"),
    "no groups": ({"quant_method": "compressed-tensors"}, "expected config_groups"),
    "sparse": (
        compressed("pack-quantized", num_bits=4) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparse",
    ),
    "form": (compressed("marlin-24", num_bits=4), "in the form 'marlin-24'"),
    "bits": ({"quant_method": "awq", "bits": [4]}, r"expected 4 bits per weight, got bits = \[4\]"),
    "sparsity": (
        compressed("pack-quantized", num_bits=4) | {"sparsity_config": "dense"},
        "weights that are sparse",
    ),
    "block structure": (
        compressed("float-quantized", num_bits=8, block_structure=[128, "128"]),
        "two sizes in block_structure",
    ),
    "huge block": (
        {"quant_method": "fp8", "weight_block_size": [1, 10**30]},
        "two sizes in weight_block_size",
    ),
    "long method": ({"quant_method": "x" * 5000}, "quantized by 'x{79}, which"),
    "block size": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two sizes in weight_block_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_quantization_methods_are_refused_by_name(name: str) -> None:
    settings, message = REFUSED[name]
    with pytest.raises(SourceError, match=message) as caught:
        opened({"weight": torch.ones(4, 4)}, settings)
    assert caught.value.where == "config.json"


DAMAGED: dict[str, tuple[str, str, Callable[[Tensor], Tensor] | None, str]] = {
    "no scales": ("gptq v2", "scales", None, "scales"),
    "zeros of another layer": ("gptq v2", "qzeros", lambda t: t[:, :-1], "expected 'layer.qzeros' of shape"),
    "group beyond": ("gptq act-order", "g_idx", lambda t: t + 9, "names groups beyond the 4"),
    "words of 3 bits": (
        "gptq 3 bit",
        "qweight",
        lambda t: t[:-1],
        "expected multiples of 32 rows and columns",
    ),
    "awq groups": ("awq", "scales", lambda t: t[:3], "expected 'layer.qzeros' of shape"),
    "state": ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda t: t[:9], "expected JSON"),
    "table": ("nf4", "weight.quant_map", lambda t: t[:15], "expected 'layer.weight.quant_map' of shape"),
    "short codes": (
        "packed int4",
        "weight_packed",
        lambda t: t[:, :3],
        "is packed in 3 words for 128 inputs",
    ),
    "scale": ("float8 in blocks", "weight_scale_inv", lambda t: t[:1, :1].expand(3, 3), "rows, groups"),
    "huge offset": (
        "fp4 with quantized scales",
        "weight.quant_state.bitsandbytes__fp4",
        lambda t: torch.tensor([*bytes(t.tolist()).replace(b"0.25", b"-1" + b"0" * 40)], dtype=torch.uint8),
        "expected nested_blocksize and nested_offset",
    ),
    "state of a list": (
        "nf4",
        "weight.quant_state.bitsandbytes__nf4",
        lambda t: torch.tensor([*b"[]"], dtype=torch.uint8),
        "expected shape, blocksize and dtype",
    ),
    "float4 groups": ("nvfp4", "weight_packed", lambda t: t[:, :-1], "whole groups of 16"),
    "global scale": ("nvfp4", "weight_global_scale", lambda t: t.expand(2), "one value in"),
    "no scale": ("stored float8, rows", "weight_scale", lambda t: t[:, :0], "int8 or float8_e4m3fn"),
    "float4 scales": ("nvfp4", "weight_scale", lambda t: t[:, :2], "expected 'layer.weight_scale' of shape"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_quantized_tensors_of_wrong_shape_are_refused_by_name(name: str) -> None:
    case, part, change, message = DAMAGED[name]
    parts, _, settings = CASES[case]((64, 128), torch.Generator().manual_seed(0))
    if change is None:
        del parts[part]
    else:
        parts[part] = change(parts[part]).contiguous()
    with pytest.raises(SourceError, match=message):
        opened(parts, settings)


def test_malformed_settings_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    found = [fuzz.run(parts, settings) for _, parts, settings in itertools.islice(fuzz.cases(seed=0), 300)]
    assert 30 < found.count("read") < 270
    settings = fuzz.sound_folder(tmp_path)
    assert fuzz.run_folder(tmp_path, settings) == "folder read"
    for seed in range(3):
        fuzz.run_folder(tmp_path, fuzz.malformed(settings, random.Random(seed)))
    deep: Any = settings
    for _ in range(480):
        deep = [deep]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own: torch's compiler raises it for the whole process
    try:
        assert "transformers can't read" in fuzz.run_folder(tmp_path, {**settings, "ignore": deep})
    finally:
        sys.setrecursionlimit(limit)

"""Random layers packed as GPTQ, AWQ, bitsandbytes and compressed-tensors store them, with the weight they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from infer.load.quantized_weights.methods import open_quantized
from infer.weights import Checkpoint, in_memory

Parts = dict[str, Tensor]
Packed = tuple[Parts, Tensor, dict[str, Any]]  # parts by name, the weight, quantization_config
HALF_BYTES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, with a sign bit above


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes along the last dimension into int32, lowest bits first, in an order within each word."""
    if 32 % bits:  # a stream of bits over as many words as a code has
        stream = (codes[..., None] >> torch.arange(bits) & 1).reshape(*codes.shape[:-1], -1, 32).long()
        joined = (stream << torch.arange(32)).sum(-1)
        return (joined - (joined >> 31 << 32)).to(torch.int32)
    per = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per)).reshape(*codes.shape[:-1], -1, per)
    found = torch.zeros(padded.shape[:-1], dtype=torch.int64)
    for place, index in enumerate(order or range(per)):
        found |= padded[..., index].long() << bits * place
    return (found - (found >> 31 << 32)).to(torch.int32)


def groups_of(
    shape: tuple[int, int], bits: int, group: int, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [out, in], zero points and scales [out, groups]."""
    outputs, inputs = shape
    codes = torch.randint(0, 1 << bits, shape, generator=rng)
    zeros = torch.randint(1, 1 << bits, (outputs, inputs // group), generator=rng)
    return codes, zeros, torch.rand(outputs, inputs // group, generator=rng).mul(0.1).half()


def scaled(codes: Tensor, zeros: Tensor, scales: Tensor, group: Tensor) -> Tensor:
    return ((codes - zeros[:, group]).double() * scales[:, group].double()).to(scales.dtype)


def gptq(shape: tuple[int, int], rng: torch.Generator, *, bits: int, form: str, ordered: bool) -> Packed:
    codes, zeros, scales = groups_of(shape, bits, 32, rng)
    group = torch.arange(shape[1]) // 32
    if ordered:
        group = group[torch.randperm(shape[1], generator=rng)]
    parts = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words((zeros - int(form == "gptq")).t(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": group.int(),
    }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": form}
    return parts, scaled(codes, zeros, scales, group), settings


def awq(shape: tuple[int, int], rng: torch.Generator) -> Packed:
    codes, zeros, scales = groups_of(shape, 4, 32, rng)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": words(codes.t(), 4, order),
        "qzeros": words(zeros.t(), 4, order),
        "scales": scales.t().contiguous(),
    }
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM"}
    return parts, scaled(codes, zeros, scales, torch.arange(shape[1]) // 32), settings


def bitsandbytes(shape: tuple[int, int], rng: torch.Generator, *, kind: str, nested: bool) -> Packed:
    count, block = shape[0] * shape[1], 64
    table, codes = torch.randn(16, generator=rng), torch.randint(0, 16, (count,), generator=rng)
    blocks = -(-count // block)
    state: dict[str, Any] = {
        "shape": list(shape),
        "dtype": "bfloat16",
        "blocksize": block,
        "quant_type": kind,
    }
    parts = {"weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table}
    largest = torch.rand(blocks, generator=rng)
    if nested:
        inner, stored = torch.randn(256, generator=rng), torch.randint(0, 256, (blocks,), generator=rng)
        outer = torch.rand(-(-blocks // 256), generator=rng)
        largest = inner[stored] * outer[torch.arange(blocks) // 256] + 0.25
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        parts |= {"weight.nested_absmax": outer, "weight.nested_quant_map": inner}
    parts["weight.absmax"] = stored.to(torch.uint8) if nested else largest
    encoded = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = encoded
    weight = (table[codes] * largest[torch.arange(count) // block]).to(torch.bfloat16).reshape(shape)
    return parts, weight, {"quant_method": "bitsandbytes", "load_in_4bit": True}


def int8_rows(shape: tuple[int, int], rng: torch.Generator) -> Packed:
    codes = torch.randint(-127, 128, shape, generator=rng).to(torch.int8)
    largest = torch.rand(shape[0], generator=rng)
    weight = codes.float() * largest[:, None] * torch.tensor(1 / 127, dtype=torch.float32)
    return {"weight": codes, "SCB": largest}, weight, {"quant_method": "bitsandbytes", "load_in_8bit": True}


def integers(shape: tuple[int, int], rng: torch.Generator, *, bits: int, zero: bool) -> Packed:
    codes, zeros, scales = groups_of(shape, bits, 32, rng)
    middle = 1 << bits - 1
    parts = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }
    if zero:
        parts["weight_zero_point"] = words(zeros.t(), bits).t().contiguous()
    offset = zeros if zero else torch.full_like(zeros, middle)
    weight = scaled(codes, offset, scales, torch.arange(shape[1]) // 32)
    return parts, weight, compressed("pack-quantized", num_bits=bits)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def float8(
    shape: tuple[int, int], rng: torch.Generator, *, scale: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales of blocks of `scale` rows and columns, and the weight in float64."""
    codes = torch.randn(shape, generator=rng).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // scale[0]), -(-shape[1] // scale[1]), generator=rng)
    spread = scales.repeat_interleave(scale[0], 0).repeat_interleave(scale[1], 1)[: shape[0], : shape[1]]
    return codes, scales, codes.double() * spread.double()


def fp8_blocks(shape: tuple[int, int], rng: torch.Generator) -> Packed:
    codes, scales, weight = float8(shape, rng, scale=(48, 80))
    settings = {"quant_method": "fp8", "weight_block_size": [48, 80]}
    return {"weight": codes, "weight_scale_inv": scales}, weight.to(torch.bfloat16), settings


def fp8_rows(shape: tuple[int, int], rng: torch.Generator) -> Packed:
    codes, scales, weight = float8(shape, rng, scale=(1, shape[1]))
    parts = {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)}
    return parts, weight.to(torch.bfloat16), {"quant_method": "fbgemm_fp8"}


def stored_float8(shape: tuple[int, int], rng: torch.Generator, *, scale: tuple[int, int]) -> Packed:
    codes, scales, weight = float8(shape, rng, scale=scale)
    scales = scales if scales.numel() > 1 else scales.reshape(1)
    parts = {"weight": codes, "weight_scale": scales}
    settings = compressed(
        "float-quantized", num_bits=8, block_structure=[32, 32] if scale == (32, 32) else None
    )
    return parts, weight.float(), settings


def float4(shape: tuple[int, int], rng: torch.Generator, *, nvidia: bool) -> Packed:
    codes = torch.randint(0, 16, shape, generator=rng)
    values = torch.tensor([*HALF_BYTES, *(-value for value in HALF_BYTES)]).double()[codes]
    parts = {"weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    group = 16 if nvidia else 32
    count = shape[1] // group
    if nvidia:
        parts["weight_scale"] = torch.rand(shape[0], count, generator=rng).mul(400).to(torch.float8_e4m3fn)
        parts["weight_global_scale"] = torch.tensor([512.0])
        steps = parts["weight_scale"].double() / 512
    else:
        parts["weight_scale"] = torch.randint(100, 140, (shape[0], count), generator=rng).to(torch.uint8)
        steps = 2.0 ** (parts["weight_scale"].double() - 127)
    weight = (values * steps.repeat_interleave(group, 1)).to(torch.bfloat16)
    return parts, weight, compressed("nvfp4-pack-quantized" if nvidia else "mxfp4-pack-quantized", num_bits=4)


CASES: dict[str, Callable[[tuple[int, int], torch.Generator], Packed]] = {
    **{
        f"gptq {bits} bit": lambda shape, rng, bits=bits: gptq(
            shape, rng, bits=bits, form="gptq", ordered=False
        )
        for bits in (2, 3, 4, 8)
    },
    "gptq act-order": lambda shape, rng: gptq(shape, rng, bits=4, form="gptq", ordered=True),
    "gptq v2": lambda shape, rng: gptq(shape, rng, bits=4, form="gptq_v2", ordered=False),
    "awq": awq,
    "nf4": lambda shape, rng: bitsandbytes(shape, rng, kind="nf4", nested=False),
    "fp4 with quantized scales": lambda shape, rng: bitsandbytes(shape, rng, kind="fp4", nested=True),
    "int8 rows": int8_rows,
    "packed int4": lambda shape, rng: integers(shape, rng, bits=4, zero=False),
    "packed int4 with zero points": lambda shape, rng: integers(shape, rng, bits=4, zero=True),
    "packed int8": lambda shape, rng: integers(shape, rng, bits=8, zero=False),
    "float8 in blocks": fp8_blocks,
    "float8 in rows": fp8_rows,
    "stored float8, one scale": lambda shape, rng: stored_float8(shape, rng, scale=shape),
    "stored float8, rows": lambda shape, rng: stored_float8(shape, rng, scale=(1, shape[1])),
    "stored float8, blocks": lambda shape, rng: stored_float8(shape, rng, scale=(32, 32)),
    "nvfp4": lambda shape, rng: float4(shape, rng, nvidia=True),
    "mxfp4": lambda shape, rng: float4(shape, rng, nvidia=False),
}


def opened(parts: Parts, settings: dict[str, Any], name: str = "layer") -> Checkpoint:
    held = {f"{name}.{part}": tensor for part, tensor in parts.items()} | {"norm.weight": torch.ones(3)}
    return open_quantized(in_memory(held), settings, "config.json")[0]

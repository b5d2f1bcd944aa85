"""`linear_experts` and its quantized forms on a GPU: grouped products that read the routed experts only.

Places (a row of x and one of its experts) are in tiles of one expert each, see `expert_tiles`. Sums are float32, or
exact int32 for int8 activations; no atomics, each output has one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.bitpack import LEVELS
from ..ops.coded_weight import LUT, CodedWeight
from .epilogue import product
from .expert_tiles import load_places, placed, store_places
from .groupwise import groupwise_experts
from .int8.int8_gemv import INTERPRETED
from .int8.int8_quantize import quantize_rows
from .launch import flat_rows, launch, same_device
from .lut.lut_decode import pointers, table_rows, tile

_LEVELS = tl.constexpr(LEVELS)
_BK = 64


@triton.jit
def _lut(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    order_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [P, N]
    num_out: tl.tensor,  # N, of one expert
    num_groups: tl.tensor,
    num_tables: tl.tensor,
    TOP_K: tl.constexpr,
    BITS: tl.constexpr,
    TABLES: tl.constexpr,  # rows of one table; 0 when there is one table
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    expert = tl.load(expert_ptr + tl.program_id(1))
    if expert < 0:
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    stored = expert * num_out + tl.minimum(n, num_out - 1)
    place, kept = load_places(order_ptr, begin_ptr, rows_ptr, BM)
    num_columns = num_groups * GROUP
    x_row = x_ptr + (place // TOP_K)[:, None] * num_columns
    COUNT: tl.constexpr = BN // TABLES if TABLES else 1
    entry = tl.arange(0, COUNT << BITS)
    if TABLES > 0:
        first = (expert * num_out + tl.program_id(0) * BN) // TABLES
        entry = tl.minimum(entry + (first << BITS), (num_tables << BITS) - 1)
    tables = tl.load(table_ptr + entry).to(x_ptr.dtype.element_ty)
    acc = tl.zeros([BN, BM], tl.float32)
    for group in range(0, num_groups):
        code, _ = tile(codes_ptr, scale_ptr, stored, group, num_groups, BITS, BN, 1, GROUP)
        if TABLES > 0:
            code += (tl.arange(0, BN) // TABLES << BITS)[:, None, None]
        value = tl.reshape(tl.gather(tables, tl.reshape(code, [BN * GROUP]), 0), [BN, GROUP])
        x = tl.load(x_row + (tl.arange(0, GROUP) + group * GROUP)[None])
        scale = tl.load(scale_ptr + stored * num_groups + group).to(tl.float32)
        acc += tl.dot(value, tl.trans(x), input_precision="ieee") * scale[:, None]
    acc *= (tl.load(row_scale_ptr + stored).to(tl.float32) / _LEVELS)[:, None]
    store_places(out_ptr, acc, n, num_out, place, kept)


@triton.jit
def _dense(
    x_ptr: tl.tensor,  # float, or int8 with STEPS
    step_ptr: tl.tensor,
    weight_ptr: tl.tensor,  # int8 with SCALES, or of x's type
    scale_ptr: tl.tensor,
    order_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [P, N]
    num_out: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,  # between outputs of one expert's weight
    column_stride: tl.tensor,
    TOP_K: tl.constexpr,
    STEPS: tl.constexpr,
    SCALES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> None:
    expert = tl.load(expert_ptr + tl.program_id(1))
    if expert < 0:
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    known = tl.minimum(n, num_out - 1).to(tl.int64)
    place, kept = load_places(order_ptr, begin_ptr, rows_ptr, BM)
    row = place // TOP_K
    x_row = x_ptr + row[:, None] * num_columns
    weight_row = weight_ptr + expert * num_out * num_columns + known[:, None] * row_stride
    acc = tl.zeros([BN, BM], tl.int32 if STEPS else tl.float32)
    for start in range(0, num_columns, BK):
        k = start + tl.arange(0, BK)[None]
        x = tl.load(x_row + k, mask=k < num_columns, other=0)
        weight = tl.load(weight_row + k.to(tl.int64) * column_stride, mask=k < num_columns, other=0).to(
            x.dtype
        )
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee", out_dtype=acc.dtype)
    y = acc.to(tl.float32)
    if STEPS:
        y = product(y, tl.broadcast_to(tl.load(step_ptr + row)[None], [BN, BM]), ASSEMBLY)
    if SCALES:
        scale = tl.load(scale_ptr + expert * num_out + known).to(tl.float32)
        y = product(y, tl.broadcast_to(scale[:, None], [BN, BM]), ASSEMBLY)
    store_places(out_ptr, y, n, num_out, place, kept)


def linear_experts_codes(
    x: Tensor, expert: Tensor, codes: Tensor, scale: Tensor, table: Tensor | None, minimum: Tensor | None,
    super_scale: Tensor | None, super_minimum: Tensor | None, features: int, top_k: int,
) -> Tensor:  # fmt: skip
    """`infer::linear_experts_codes` on CUDA tensors: x [R, K], expert int64 [R * top_k] → [R * top_k, features].

    Half-precision x rounds the table or the weight to its type.
    """
    weight = CodedWeight(codes, scale, table, minimum, super_scale, super_minimum)
    same_device(x, expert, *weight)
    multiply = lut_tiles if weight.layout == LUT else groupwise_experts.linear
    return multiply(flat_rows(x), expert, weight, features, top_k).to(x.dtype)


def lut_tiles(x: Tensor, expert: Tensor, weight: CodedWeight, features: int, top_k: int) -> Tensor:
    """Multiply x [R, K] by its routed experts: [R * top_k, features] in x's dtype."""
    tiles, block, grid = placed(x, expert, weight.num_rows // features, features, top_k)
    out = x.new_empty((expert.numel(), features))
    launch(
        _lut,
        grid,
        x,
        *pointers(weight),
        *tiles[:4],
        out,
        features,
        weight.scale.shape[1],
        len(weight.lut_tensors()[1]),
        TOP_K=top_k,
        BITS=weight.bits,
        TABLES=table_rows(weight),
        BM=tiles.height,
        BN=block,
        GROUP=weight.group,
        num_warps=4,
        num_stages=3,
    )
    return out


def linear_experts_int8(
    x: Tensor, expert: Tensor, codes: Tensor, scale: Tensor, features: int, top_k: int
) -> Tensor:
    """`infer::linear_experts_int8` on CUDA tensors: one step for each row of x, exact int32 sums."""
    same_device(x, expert, codes, scale)
    q, step = quantize_rows(flat_rows(x), None)
    return _multiply(q, step, expert, codes, scale, features, top_k, False, x.dtype)


def linear_experts_int8_weight(
    x: Tensor, expert: Tensor, codes: Tensor, scale: Tensor, features: int, top_k: int
) -> Tensor:
    """`infer::linear_experts_int8_weight` on CUDA tensors: codes are exact in x's type, sums float32."""
    same_device(x, expert, codes, scale)
    return _multiply(flat_rows(x), None, expert, codes, scale, features, top_k, False, x.dtype)


def linear_experts(x: Tensor, expert: Tensor, weight: Tensor, top_k: int, transposed: bool = False) -> Tensor:
    """`infer::linear_experts` on CUDA tensors: float weights [E, N, K], or [E, K, N] when `transposed`."""
    same_device(x, expert, weight)
    rows = flat_rows(x)
    features = weight.shape[2 if transposed else 1]
    return _multiply(rows, None, expert, weight.to(rows.dtype), None, features, top_k, transposed, x.dtype)


def _multiply(
    x: Tensor, step: Tensor | None, expert: Tensor, weight: Tensor, scale: Tensor | None,
    features: int, top_k: int, transposed: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    num_columns = x.shape[1]
    count = weight.numel() // max(features * num_columns, 1)
    tiles, block, grid = placed(x, expert, count, features, top_k)
    out = x.new_empty((expert.numel(), features), dtype=torch.float32 if step is not None else x.dtype)
    launch(
        _dense,
        grid,
        x,
        x if step is None else step,
        weight.contiguous(),
        x if scale is None else scale.contiguous(),
        *tiles[:4],
        out,
        features,
        num_columns,
        1 if transposed else num_columns,
        features if transposed else 1,
        TOP_K=top_k,
        STEPS=step is not None,
        SCALES=scale is not None,
        BM=tiles.height,
        BN=block,
        BK=_BK,
        ASSEMBLY=not INTERPRETED,
        num_warps=4,
        num_stages=3,
    )
    return out.to(dtype)

"""Experts in the layout `groupwise` on a GPU: choice between two kernels by the number of (row, expert) pairs.

    few places    one program's columns for each place, in registers               `groupwise_gemv`
    more          tiles of one expert each, decoded on the way to the products    here, as in `experts`

A tile has room for 16 rows and its decoding costs about twice as many instructions a weight as a place of the first
way; with no more places than experts most tiles would have one row. Neither waits for the GPU, neither needs atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...ops.coded_weight import CodedWeight
from ..expert_tiles import in_range, load_places, placed, store_places
from ..gemv_tiles import usable
from ..launch import launch
from . import groupwise_gemv
from .groupwise_decode import BK, decoded_tile, form, pointers


@triton.jit
def _tiles(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    super_scale_ptr: tl.tensor,
    super_minimum_ptr: tl.tensor,
    order_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    begin_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    out_ptr: tl.tensor,  # [P, N]
    num_out: tl.tensor,  # N, of one expert
    num_columns: tl.tensor,
    TOP_K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MINIMUM: tl.constexpr,
    SUPER_SCALE: tl.constexpr,
    SUPER_MINIMUM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    expert = tl.load(expert_ptr + tl.program_id(1))
    if expert < 0:
        return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    stored = expert * num_out + tl.minimum(n, num_out - 1)
    place, kept = load_places(order_ptr, begin_ptr, rows_ptr, BM)
    x_row = x_ptr + (place // TOP_K)[:, None] * num_columns
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(0, num_columns, BK):
        weight = decoded_tile(
            codes_ptr, table_ptr, scale_ptr, minimum_ptr, super_scale_ptr, super_minimum_ptr, stored, start,
            num_columns, BITS, GROUP, MINIMUM, SUPER_SCALE, SUPER_MINIMUM, BN, BK,
        )  # fmt: skip
        k = start + tl.arange(0, BK)
        x = tl.load(x_row + k[None], mask=(k < num_columns)[None], other=0.0)
        acc = tl.dot(weight.to(x.dtype), tl.trans(x), acc, input_precision="ieee")
    store_places(out_ptr, acc, n, num_out, place, kept)


def tiles(x: Tensor, expert: Tensor, weight: CodedWeight, features: int, top_k: int) -> Tensor:
    """Multiply x [R, K] by its routed experts: [R * top_k, features]; weights are rounded to x's dtype."""
    places, block, grid = placed(x, expert, weight.num_rows // features, features, top_k)
    out = x.new_empty((expert.numel(), features))
    launch(
        _tiles,
        grid,
        x,
        *pointers(weight),
        *places[:4],
        out,
        features,
        weight.columns,
        TOP_K=top_k,
        **form(weight),
        BM=places.height,
        BN=block,
        BK=BK,
        num_warps=4,
        num_stages=3,
    )
    return out


def linear(x: Tensor, expert: Tensor, weight: CodedWeight, features: int, top_k: int) -> Tensor:
    """Multiply x [R, K] by its routed experts: [R * top_k, features] in x's dtype."""
    num_experts = weight.num_rows // max(features, 1)
    if expert.numel() > num_experts or not usable(weight):
        return tiles(x, expert, weight, features, top_k)
    in_range(x, expert, num_experts, top_k)
    return groupwise_gemv.linear_experts(x, expert, weight, features, top_k)

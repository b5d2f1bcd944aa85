"""Products of up to 64 rows by 4-bit weights that arrive in the registers where the tensor cores read them.

A lane loads 16 bytes, through asynchronous copies: the codes of its own fragments of 16 rows and 64 columns. They are
decoded in registers (`fragment_decode`) and multiplied; nothing of the weight passes through shared memory but the
packed words. Up to 16 rows of x the group scales multiply sums, so that only entries of the table are rounded; above,
they multiply the weight, which is rounded once more, and sums stay in the tensor cores. Columns are cut into parts
where the rows of the weight are few; the last program of a tile adds their sums in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.bitpack import GROUP, LEVELS
from ...ops.linear_lut4_fragments import BLOCK
from ..epilogue import finish
from ..int8.int8_gemv import INTERPRETED
from ..launch import cdiv, launch, tickets
from ..split_columns import even_parts, split_of
from .fragment_decode import decode, planes_of

MOST_ROWS = 64  # of x in one tile
EXACT_ROWS = 16  # up to which scales multiply sums
_LEVELS = tl.constexpr(LEVELS)


@triton.jit
def _sum_of_parts(
    sums_ptr: tl.tensor, at: tl.tensor, plane: tl.tensor, kept: tl.tensor, parts: tl.tensor
) -> tl.tensor:
    """Add the stored sums of a tile over the parts of the columns, in their order."""
    acc = tl.zeros(kept.shape, tl.float32)
    for part in range(parts):
        acc += tl.load(sums_ptr + part * plane + at, mask=kept, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def _gemm(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,  # int32 [N / 16, groups, 128]
    planes_ptr: tl.tensor,  # int32 [N / 32, 18], or its bytes for the interpreter
    scale_ptr: tl.tensor,  # int32 [groups / 4, padded]: four int8; or FLOATS [K / 64 / EACH, padded]
    minimum_ptr: tl.tensor,  # floats [K / 64 / EACH, padded]
    given_ptr: tl.tensor,  # float32 [M, K / 64]: sums of x
    row_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,  # the result [M, N], or float32 sums of each part [parts, M, N]
    sums_ptr: tl.tensor,  # float32 [parts, M, N], where the last program of a tile adds the parts up
    ticket_ptr: tl.tensor,  # int32, 0 for each tile
    num_rows: tl.tensor,  # M
    num_out: tl.tensor,  # N
    padded: tl.tensor,  # N in whole blocks
    num_columns: tl.tensor,  # K
    groups: tl.tensor,  # of 64 columns, padding included
    steps_each: tl.tensor,  # of a part of the columns
    BM: tl.constexpr,
    BN: tl.constexpr,
    TOGETHER: tl.constexpr,  # groups in one step
    UNIFORM: tl.constexpr,
    SCALED: tl.constexpr,
    FLOATS: tl.constexpr,  # scales of a checkpoint's groups, which multiply sums; no row scales
    EACH: tl.constexpr,  # groups of 64 columns that share one
    MINIMUM: tl.constexpr,  # 0 none, 1 sums of x are made here, 2 they are given
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,  # 0 one part, whose result is stored; 1 sums are stored; 2 the last program adds them up
    BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    x_row = x_ptr + m.to(tl.int64)[:, None] * num_columns
    given = (m < num_rows)[:, None]  # others are not read
    begin = tl.program_id(2) * steps_each
    end = tl.minimum(begin + steps_each, groups // TOGETHER)
    tile = tl.program_id(0) * (BN // 16) + tl.arange(0, BN // 16)
    lane = tl.arange(0, 32)
    # In two dimensions: in three, Triton 3.6 would give the lanes of a warp another order.
    word_ptr = codes_ptr + (tile.to(tl.int64) * groups * 128)[:, None] + tl.arange(0, 128)[None]
    block = tile // 2
    planes = planes_of(x_ptr, planes_ptr, block, UNIFORM, ASSEMBLY)
    lane_row = (tile[:, None] * 16 + (lane // 4)[None])[:, :, None]
    acc = tl.zeros([BN, BM], tl.float32)
    for step in range(begin, end):
        first = step * TOGETHER
        four = scale_ptr + first // 4 * padded
        shift = first % 4 * 8
        s0 = tl.load(four + lane_row) >> shift if SCALED else lane_row
        s1 = tl.load(four + lane_row + 8) >> shift if SCALED else lane_row
        scales = n if SCALED or FLOATS else tl.load(four + n) >> shift
        for i in tl.static_range(TOGETHER):
            word = tl.reshape(tl.load(word_ptr + (first + i) * 128), [BN // 16, 32, 4])
            r0, r1 = (s0 << (24 - 8 * i)) >> 24, (s1 << (24 - 8 * i)) >> 24
            weight = decode(x_ptr, word, planes_ptr, block, planes, r0, r1, UNIFORM, SCALED, ASSEMBLY)
            k = (first + i) * 64 + tl.arange(0, 64)
            x = tl.load(x_row + k[None], mask=given if EVEN else given & (k < num_columns)[None], other=0.0)
            if SCALED:
                acc = tl.dot(weight, tl.trans(x), acc)
            elif FLOATS:
                own = tl.minimum((first + i) // EACH, num_columns // (64 * EACH) - 1) * padded + n
                acc += tl.dot(weight, tl.trans(x)) * tl.load(scale_ptr + own).to(tl.float32)[:, None]
                if MINIMUM:
                    if MINIMUM == 2:
                        real = m < tl.where(first + i < num_columns // 64, num_rows, 0)  # none of padding
                        at = given_ptr + m * (num_columns // 64) + first + i
                        sums = tl.load(at, mask=real, other=0.0)
                    else:
                        sums = tl.sum(x.to(tl.float32), 1)
                    acc += tl.load(minimum_ptr + own).to(tl.float32)[:, None] * sums[None]
            else:
                scale = ((scales << (24 - 8 * i)) >> 24).to(tl.float32)
                acc += tl.dot(weight, tl.trans(x)) * scale[:, None]
    kept = (n < num_out)[:, None] & (m < num_rows)[None]
    at = m[None].to(tl.int64) * num_out + n[:, None]
    plane = tl.full([1, 1], num_rows, tl.int64) * num_out
    if PARTS == 2:
        tl.store(sums_ptr + tl.program_id(2) * plane + at, acc, mask=kept)
        tl.debug_barrier()  # all of the program's sums are written before it counts itself
        ticket_ptr += tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(ticket_ptr, 1, sem="acq_rel") < tl.num_programs(2) - 1:
            return
        acc = _sum_of_parts(sums_ptr, at, plane, kept, tl.num_programs(2))
        tl.store(ticket_ptr, 0)
    if PARTS != 1:
        if not FLOATS:
            acc *= (tl.load(row_scale_ptr + n) / _LEVELS)[:, None]
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n < num_out, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=kept)
    else:
        tl.store(out_ptr + tl.program_id(2) * plane + at, acc, mask=kept)


def linear(
    x: Tensor,
    codes: Tensor,
    planes: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    bias: Tensor | None,
    num_out: int,
    uniform: bool,
    split: int | None = None,
    minimum: Tensor | None = None,
) -> Tensor:
    """Multiply x [M, K] float16 or bfloat16 by packed weights: [M, num_out] in its dtype, sums are float32."""
    num_rows, num_columns = x.shape
    groups, padded, floats = codes.shape[1], scale.shape[1], scale.is_floating_point()
    each_group = num_columns // GROUP // scale.shape[0] if floats else 1
    many = num_rows > EXACT_ROWS
    block = 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32 if num_rows <= 32 else MOST_ROWS
    height, together, warps = (BLOCK, 2, 8 if floats else 4) if many else (64, 4, 2)
    grid, steps = (cdiv(num_out, height), cdiv(num_rows, block)), groups // together
    parts = split or split_of(grid[0] * grid[1], steps, x.device, wanted=2 if many else 6)
    each, parts = even_parts(steps, parts)
    counted = tickets(x, grid[0] * grid[1]) if parts > 1 else None
    way = 0 if parts == 1 else 1 if counted is None else 2
    sums = x.new_empty((parts, num_rows, num_out), dtype=torch.float32) if way else row_scale
    given = scale
    if many and minimum is not None:
        given = x.reshape(num_rows, -1, GROUP).sum(-1, dtype=torch.float32)
    out = sums if way == 1 else x.new_empty((num_rows, num_out))
    launch(
        _gemm,
        (*grid, parts),
        x.contiguous(),
        codes,
        planes.view(torch.uint8) if INTERPRETED else planes,
        scale if floats else scale.view(torch.int32),
        scale if minimum is None else minimum,
        given,
        row_scale,
        row_scale if bias is None else bias.contiguous(),
        out,
        sums,
        planes if counted is None else counted,
        num_rows,
        num_out,
        padded,
        num_columns,
        groups,
        each,
        BM=block,
        BN=height,
        TOGETHER=together,
        UNIFORM=uniform,
        SCALED=many and not floats,
        FLOATS=floats,
        EACH=each_group,
        MINIMUM=0 if minimum is None else 2 if many else 1,
        EVEN=groups * GROUP == num_columns,
        PARTS=way,
        BIAS=bias is not None,
        ASSEMBLY=not INTERPRETED,
        num_warps=warps,
        num_stages=3,
    )
    if way != 1:
        return out
    return finish(sums, None, None if floats else row_scale[:num_out], bias, x.dtype, LEVELS)

"""Tables of 16 entries with int8 activations, for a few rows of x: the numerics of the CPU's packed kernel, on a GPU.

The table is rounded to int8 and so is each group of 64 columns of x. 16 bytes are four registers, in which a byte
permutation (`prmt`) looks eight codes up in twelve instructions; `dp4a` multiplies them. On sm_90 that is 2.9
instructions for a weight against 4.9 of `lut_gemv`, at an error of 0.7 % (table and activations) beside the 9 % of four
bits. Sums within a word are exact int32; the order of the float32 sums is fixed. The slow twin is
`linear_packed.lut4_twin`.

No operator uses it yet: `bench/gpu/quantized_linear.py` measures whether it should.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.bitpack import GROUP, LEVELS, TABLE_ROWS
from ...ops.linear_packed import rounded_table
from ..epilogue import finish
from ..gemv_tiles import store_rows
from ..int8.int8_gemv import INTERPRETED, dot4
from ..int8.int8_quantize import quantize_groups
from ..launch import cdiv, launch, words
from ..split_columns import even_parts, power_above, split_of

MAX_ROWS = 8
_WORDS = 16  # words of codes and sums of one lane


@triton.jit
def _entries(
    codes: tl.tensor, t0: tl.tensor, t1: tl.tensor, t2: tl.tensor, t3: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the eight int8 entries of each word of codes, as two words.

    A selector of `prmt` has three bits; the fourth of each code chooses between the halves of the table.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 which, half, low, high;
        and.b32 which, $2, 0x77777777;
        shr.u32 half, $2, 1;
        and.b32 half, half, 0x44444444;
        or.b32 half, half, 0x32103210;
        prmt.b32 low, $3, $4, which;
        prmt.b32 high, $5, $6, which;
        prmt.b32 $0, low, high, half;
        shr.u32 which, which, 16;
        shr.u32 half, half, 16;
        prmt.b32 low, $3, $4, which;
        prmt.b32 high, $5, $6, which;
        prmt.b32 $1, low, high, half;
        }""",
        "=&r,=&r,r,r,r,r,r",
        [codes, t0, t1, t2, t3],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_words"])
def _rows(
    q_ptr: tl.tensor,  # int32 words of int8 [M, K]
    step_ptr: tl.tensor,  # float32 [M, K / 64]
    codes_ptr: tl.tensor,  # int32 words of [N, K / 2]
    table_ptr: tl.tensor,  # int32 [T, 4], or int8 [T, 16] for the interpreter
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,  # float32 [parts, M, N]
    num_rows: tl.tensor,
    num_out: tl.tensor,
    num_words: tl.tensor,
    words_each: tl.tensor,
    TABLES: tl.constexpr,
    MB: tl.constexpr,
    BN: tl.constexpr,
    W: tl.constexpr,
    EVEN: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> None:
    first = tl.program_id(0) * BN
    n = first + tl.arange(0, BN)
    m = tl.program_id(2) * MB + tl.arange(0, MB)
    at = tl.arange(0, W)[:, None] * 32 + tl.arange(0, 32)[None]
    row = tl.minimum(n, num_out - 1)[:, None, None].to(tl.int64)
    x_row = tl.minimum(m, num_rows - 1)[:, None, None].to(tl.int64)
    codes_tile = codes_ptr + row * num_words + at[None]
    scale_tile = scale_ptr + row * (num_words // 8) + (at // 8)[None]
    step_tile = step_ptr + x_row * (num_words // 8) + (at // 8)[None]
    q_unit = x_row * (num_words * 2) + (at * 2)[None]
    q_tile = q_ptr + q_unit[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]
    table_ptr += (first // TABLES if TABLES else 0) * (4 if ASSEMBLY else 16)
    begin = tl.program_id(1) * words_each
    end = tl.minimum(begin + words_each, num_words)
    shape: tl.constexpr = [MB, BN, W, 32]
    acc = tl.zeros(shape, tl.float32)
    for start in range(begin, end, 32 * W):
        inside = (start + at < end)[None]
        if EVEN:
            codes, scale = tl.load(codes_tile + start), tl.load(scale_tile + start // 8).to(tl.float32)
            step, q = tl.load(step_tile + start // 8), tl.load(q_tile + start * 2)
        else:
            codes = tl.load(codes_tile + start, mask=inside, other=0)
            scale = tl.load(scale_tile + start // 8, mask=inside, other=0).to(tl.float32)
            step = tl.load(step_tile + start // 8, mask=inside, other=0.0)
            q = tl.load(q_tile + start * 2, mask=inside[:, :, :, None], other=0)
        q0, q1 = tl.split(q)
        sums = tl.zeros(shape, tl.int32)
        if ASSEMBLY:
            t0, t1 = tl.load(table_ptr), tl.load(table_ptr + 1)
            t2, t3 = tl.load(table_ptr + 2), tl.load(table_ptr + 3)
            low, high = _entries(codes, t0, t1, t2, t3)
            sums = dot4(tl.broadcast_to(low[None], shape), tl.broadcast_to(q0[:, None], shape), sums, True)
            sums = dot4(tl.broadcast_to(high[None], shape), tl.broadcast_to(q1[:, None], shape), sums, True)
        else:
            for i in tl.static_range(8):
                entry = tl.load(table_ptr + ((codes >> (4 * i)) & 15)).to(tl.int32)
                byte = (q0 if i < 4 else q1) << (24 - i % 4 * 8) >> 24
                sums += entry[None] * byte[:, None]
        acc += sums.to(tl.float32) * (scale[None] * step[:, None])
    total = tl.sum(tl.reshape(acc, [MB, BN, W * 32]), 2)
    store_rows(out_ptr, total, m, n, num_rows, num_out)


def pack(table: Tensor, row_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Round table float32 [T, 16] to int8, and multiply row scales float32 [N] by the value of an int8 step."""
    rounded, factor = rounded_table(table)
    owner = torch.arange(row_scale.shape[0], device=table.device) // TABLE_ROWS
    owner = owner if table.shape[0] > 1 else torch.zeros_like(owner)
    return rounded, row_scale.float() * factor[owner] / LEVELS


def linear(
    x: Tensor,
    codes: Tensor,
    table: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    bias: Tensor | None = None,
    split: int | None = None,
) -> Tensor:
    """Multiply x [M, K] float by 4-bit codes, scales of `bitpack`, and table and row scales of `pack`: [M, N].

    The result is in x's dtype.
    """
    num_rows, num_out, num_words = x.shape[0], codes.shape[0], codes.shape[1] // 4
    if scale.shape[1] * GROUP != x.shape[1]:
        raise ValueError(f"{scale.shape[1]} scales for {x.shape[1]} columns: only groups of {GROUP} here")
    q, step = quantize_groups(x, GROUP)
    block_rows = min(power_above(num_rows), MAX_ROWS)
    block_out = 2 if block_rows == MAX_ROWS else 4
    lane_words = max(1, min(_WORDS // block_rows // block_out, 1 << cdiv(num_words, 32).bit_length() >> 1))
    lanes = 32 * lane_words
    blocks = cdiv(num_out, block_out)
    parts = split or split_of(blocks, cdiv(num_words, lanes), x.device, wanted=8)
    each, parts = even_parts(num_words, parts, lanes)
    out = x.new_empty((parts, num_rows, num_out), dtype=torch.float32)
    launch(
        _rows,
        (blocks, parts, cdiv(num_rows, block_rows)),
        words(q),
        step,
        words(codes),
        table if INTERPRETED else words(table),
        scale.contiguous(),
        out,
        num_rows,
        num_out,
        num_words,
        each,
        TABLES=TABLE_ROWS if table.shape[0] > 1 else 0,
        MB=block_rows,
        BN=block_out,
        W=lane_words,
        EVEN=num_words % lanes == 0,
        ASSEMBLY=not INTERPRETED,
        num_warps=1,
    )
    return finish(out, None, row_scale, bias, x.dtype, LEVELS)

"""The layout `lut` for a few rows of x: a matrix-vector product that is limited by reading the codes.

One program is one warp. It holds the table in registers, entry i in lane i (and i + 16, ...), so that
`tl.gather` becomes a warp shuffle: one instruction for each weight, no shared memory, no barrier, any table. The
alternatives count worse on sm_90 (instructions for one 4-bit weight in the inner loop, from the machine code that
Triton 3.6 and 3.9 make): shuffle 4.8; the same gather in a program of four warps, through shared memory, 6.0 and
two barriers for each code of a word; `tl.load` of the table from L1 7.6; a tree of selects needs 15 for the lookup
alone. A byte permutation (`prmt`) finds four 8-bit entries in 6 instructions, but the float32 entries here have four
bytes.

Sums are float32. The order of all additions is fixed: columns that are cut into parts (`split`) go through partial
sums and a second kernel, never through atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...ops.bitpack import LEVELS
from ...ops.coded_weight import CodedWeight
from .. import gemv_tiles
from ..epilogue import finish
from ..gemv_tiles import activation_tile, eight, entry_at, loaded, store_rows, unit_words
from ..launch import HALF, cdiv, launch, words
from ..split_columns import power_above, result_or_sums
from .lut_decode import pointers, table_rows

MAX_ROWS = gemv_tiles.MAX_ROWS
_LEVELS = tl.constexpr(LEVELS)


@triton.jit(
    do_not_specialize=["num_words"]
)  # unknown divisors keep one word in a lane: x then needs no shuffles
def _rows(
    x_ptr: tl.tensor,  # int32 words of [M, K]
    codes_ptr: tl.tensor,  # int32 words of [N, num_words]
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    row_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,  # the result [M, N], or float32 sums of each part [parts, M, N]
    num_rows: tl.tensor,  # M
    num_out: tl.tensor,  # N
    num_columns: tl.tensor,  # K
    num_words: tl.tensor,
    units_each: tl.tensor,  # units of a part of the columns, a multiple of 32 * W
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    HALF: tl.constexpr,
    TABLES: tl.constexpr,  # rows of one table; 0 when there is one table
    MB: tl.constexpr,
    BN: tl.constexpr,
    W: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    LAST: tl.constexpr,  # there is one part: scale and store the result
    BIAS: tl.constexpr,
) -> None:
    CODES: tl.constexpr = WORDS * 32 // BITS
    SIZE: tl.constexpr = 1 << BITS
    SLOTS: tl.constexpr = SIZE if SIZE > 32 else 32
    first = tl.program_id(0) * BN
    rows = tl.minimum(first + tl.arange(0, BN), num_out - 1)
    m = tl.program_id(2) * MB + tl.arange(0, MB)
    m_safe = tl.minimum(m, num_rows - 1)
    unit = tl.arange(0, W)[:, None] * 32 + tl.arange(0, 32)[None, :]
    entry = tl.arange(0, SLOTS) % SIZE
    if TABLES > 0:
        entry += first // TABLES * SIZE
    table = tl.load(table_ptr + entry)

    units = num_words // WORDS
    begin = tl.program_id(1) * units_each
    end = tl.minimum(begin + units_each, units)
    row = rows[:, None, None].to(tl.int64)
    codes_tile = codes_ptr + row * num_words + (unit * WORDS)[None]
    scale_tile = scale_ptr + row * (num_columns // GROUP) + (unit * CODES // GROUP)[None]
    x_tile = activation_tile(x_ptr, m_safe, unit, num_columns, CODES, HALF)
    acc = tl.zeros([MB, BN, W, 32], tl.float32)
    for start in range(begin, end, 32 * W):
        inside = (start + unit < end)[None]
        w0, w1, w2 = unit_words(codes_tile + start * WORDS, inside, WORDS, EVEN)
        scale = loaded(scale_tile + start * CODES // GROUP, inside, EVEN)
        sums = tl.zeros([MB, BN, W, 32], tl.float32)
        for octet in tl.static_range(CODES // 8):
            x = eight(x_tile, start * CODES + octet * 8, inside, HALF, EVEN)
            for i in tl.static_range(8):
                sums += entry_at(table, w0, w1, w2, BITS, octet * 8 + i)[None] * x[i][:, None]
        acc += sums * scale.to(tl.float32)[None]
    total = tl.sum(tl.reshape(acc, [MB, BN, W * 32]), 2)
    if LAST:
        total = total * (tl.load(row_scale_ptr + rows).to(tl.float32) / _LEVELS)[None]
        if BIAS:
            total = total + tl.load(bias_ptr + rows).to(tl.float32)[None]
    store_rows(out_ptr, total, m, first + tl.arange(0, BN), num_rows, num_out)


def linear(x: Tensor, weight: CodedWeight, bias: Tensor | None = None, split: int | None = None) -> Tensor:
    """Multiply x [M, K] float32, float16 or bfloat16: [M, N] in its dtype. Weights are exact, sums float32.

    For any M, but made for M ≤ `MAX_ROWS`: the codes are read again for each `MAX_ROWS` rows of x.
    """
    tensors = codes, _, _, row_scale = pointers(weight)
    bits, num_columns = weight.bits, weight.columns
    num_rows, num_out = x.shape[0], weight.num_rows
    block_rows = min(power_above(num_rows), MAX_ROWS)
    blocks = gemv_tiles.blocks_of(bits, num_columns, num_out, block_rows, x.device, split)
    out = result_or_sums(x, num_rows, num_out, blocks.parts)
    launch(
        _rows,
        (blocks.programs, blocks.parts, cdiv(num_rows, block_rows)),
        words(x),
        words(codes),
        *tensors[1:],
        row_scale if bias is None else bias.contiguous(),
        out,
        num_rows,
        num_out,
        num_columns,
        codes.shape[1] // 4,
        blocks.units_each,
        BITS=bits,
        WORDS=gemv_tiles.WORDS[bits],
        HALF=HALF[x.dtype],
        TABLES=table_rows(weight),
        MB=block_rows,
        BN=blocks.block_out,
        W=blocks.lane_units,
        EVEN=blocks.even,
        GROUP=weight.group,
        LAST=blocks.parts == 1,
        BIAS=bias is not None,
        num_warps=1,
    )
    return out if blocks.parts == 1 else finish(out, None, row_scale, bias, x.dtype, LEVELS)

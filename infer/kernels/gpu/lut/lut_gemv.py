"""`linear_lut` for a few rows of x: a matrix-vector product that is limited by reading the codes.

One program is one warp. It holds the table in registers, entry i in lane i (and i + 16, ...), so that
`tl.gather` becomes a warp shuffle: one instruction for each weight, no shared memory, no barrier, any table. The
alternatives count worse on sm_90 (instructions for one 4-bit weight in the inner loop, from the machine code that
Triton 3.6 and 3.9 make): shuffle 4.8; the same gather in a program of four warps, through shared memory, 6.0 and
two barriers for each code of a word; `tl.load` of the table from L1 7.6; a tree of selects needs 15 for the lookup
alone. A byte permutation (`prmt`) finds four 8-bit entries in 6 instructions, but the float32 entries here have four
bytes.

Each lane reads one unit of codes of `BN` rows, words of 32 bits in which whole codes begin and end, and the
activations that belong to it, 16 bytes at a time. Sums are float32. The order of all additions is fixed: columns that
are cut into parts (`split`) go through partial sums and a second kernel, never through atomics.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...ops.bitpack import LEVELS, TABLE_ROWS, bits_of, columns_of, group_of
from ..epilogue import finish
from ..launch import HALF, cdiv, launch, words
from ..split_columns import even_parts, power_above, result_or_sums, split_of

MAX_ROWS = 8  # of x in one program
_LEVELS = tl.constexpr(LEVELS)
_WORDS = {2: 1, 3: 3, 4: 1, 6: 3}  # 32-bit words of a unit
_WEIGHTS = 128  # of one lane in one step, at one row of x: bounds the registers


@triton.jit
def code_at(w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, BITS: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """Code number C of a unit of one or three words."""
    MASK: tl.constexpr = (1 << BITS) - 1
    WORD: tl.constexpr = C * BITS // 32
    SHIFT: tl.constexpr = C * BITS % 32
    low = w0 if WORD == 0 else (w1 if WORD == 1 else w2)
    code = low >> SHIFT
    if SHIFT + BITS > 32:
        high = w1 if WORD == 0 else w2
        code = (code & ((1 << (32 - SHIFT)) - 1)) | (high << (32 - SHIFT))
    return code & MASK


@triton.jit
def _pair(word: tl.tensor, HALF: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the two activations of a word as float32: HALF 1 is float16, 2 bfloat16."""
    if HALF == 2:
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _four(
    x_tile: tl.tensor, at: tl.tensor, mask: tl.tensor, EVEN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Four words of x from word `at` on, each [MB, W, 32]: one 16-byte load."""
    pointers = x_tile + at
    block = tl.load(pointers) if EVEN else tl.load(pointers, mask=mask[:, :, :, None], other=0)
    even, odd = tl.split(tl.reshape(block, [block.shape[0], block.shape[1], block.shape[2], 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def eight(
    x_tile: tl.tensor, at: tl.tensor, mask: tl.tensor, HALF: tl.constexpr, EVEN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Eight activations from element `at` on, float32."""
    if HALF == 0:
        a0, a1, a2, a3 = _four(x_tile, at, mask, EVEN)
        a4, a5, a6, a7 = _four(x_tile, at + 4, mask, EVEN)
        return (
            a0.to(tl.float32, bitcast=True),
            a1.to(tl.float32, bitcast=True),
            a2.to(tl.float32, bitcast=True),
            a3.to(tl.float32, bitcast=True),
            a4.to(tl.float32, bitcast=True),
            a5.to(tl.float32, bitcast=True),
            a6.to(tl.float32, bitcast=True),
            a7.to(tl.float32, bitcast=True),
        )
    p0, p1, p2, p3 = _four(x_tile, at, mask, EVEN)
    b0, b1 = _pair(p0, HALF)
    b2, b3 = _pair(p1, HALF)
    b4, b5 = _pair(p2, HALF)
    b6, b7 = _pair(p3, HALF)
    return b0, b1, b2, b3, b4, b5, b6, b7


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
    PACK: tl.constexpr = 2 if HALF else 1
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
    # x in words: two columns in one, or one if it is float32
    x_unit = m_safe[:, None, None] * (num_columns // PACK) + (unit * (CODES // PACK))[None]
    x_tile = x_ptr + x_unit[:, :, :, None] + tl.arange(0, 4)[None, None, None, :]
    acc = tl.zeros([MB, BN, W, 32], tl.float32)
    for start in range(begin, end, 32 * W):
        inside = start + unit < end
        word = codes_tile + start * WORDS
        group = scale_tile + start * CODES // GROUP
        if EVEN:
            w0 = tl.load(word)
            w1 = tl.load(word + 1) if WORDS == 3 else w0
            w2 = tl.load(word + 2) if WORDS == 3 else w0
            scale = tl.load(group)
        else:
            w0 = tl.load(word, mask=inside[None], other=0)
            w1 = tl.load(word + 1, mask=inside[None], other=0) if WORDS == 3 else w0
            w2 = tl.load(word + 2, mask=inside[None], other=0) if WORDS == 3 else w0
            scale = tl.load(group, mask=inside[None], other=0)
        sums = tl.zeros([MB, BN, W, 32], tl.float32)
        for octet in tl.static_range(CODES // 8):
            x = eight(x_tile, (start * CODES + octet * 8) // PACK, inside[None], HALF, EVEN)
            for i in tl.static_range(8):
                code = code_at(w0, w1, w2, BITS, octet * 8 + i)
                weight = tl.reshape(tl.gather(table, tl.reshape(code, [BN * W * 32]), 0), [BN, W, 32])
                sums += weight[None] * x[i][:, None]
        acc += sums * scale.to(tl.float32)[None]
    total = tl.sum(tl.reshape(acc, [MB, BN, W * 32]), 2)
    if LAST:
        total = total * (tl.load(row_scale_ptr + rows).to(tl.float32) / _LEVELS)[None]
        if BIAS:
            total = total + tl.load(bias_ptr + rows).to(tl.float32)[None]
    n = first + tl.arange(0, BN)
    at = (tl.program_id(1) * num_rows + m[:, None]).to(tl.int64) * num_out + n[None]
    kept = (m < num_rows)[:, None] & (n < num_out)[None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=kept)


def linear(
    x: Tensor,
    codes: Tensor,
    table: Tensor,
    scale: Tensor,
    row_scale: Tensor,
    bias: Tensor | None = None,
    split: int | None = None,
) -> Tensor:
    """Multiply x [M, K] float32, float16 or bfloat16: [M, N] in its dtype. Weights are exact, sums float32.

    For any M, but made for M ≤ `MAX_ROWS`: the codes are read again for each `MAX_ROWS` rows of x.
    """
    bits, num_columns = bits_of(table), columns_of(codes, table)
    num_rows, num_out = x.shape[0], codes.shape[0]
    unit_words = _WORDS[bits]
    unit_codes = unit_words * 32 // bits
    block_rows = min(power_above(num_rows), MAX_ROWS)
    tile = max(_WEIGHTS // unit_codes // block_rows, 1)  # rows of the weight x units of a lane
    block_out = min(tile, 4)
    num_units = num_columns // unit_codes
    lane_units = max(1, min(tile // block_out, power_above(cdiv(num_units, 32))))
    step = 32 * lane_units
    blocks = cdiv(num_out, block_out)
    parts = split or split_of(blocks, cdiv(num_units, step), x.device, wanted=8)
    each, parts = even_parts(num_units, parts, step)
    out = result_or_sums(x, num_rows, num_out, parts)
    launch(
        _rows,
        (blocks, parts, cdiv(num_rows, block_rows)),
        words(x),
        words(codes),
        table.float().contiguous(),
        scale.contiguous(),
        row_scale.contiguous(),
        row_scale if bias is None else bias.contiguous(),
        out,
        num_rows,
        num_out,
        num_columns,
        codes.shape[1] // 4,
        each,
        BITS=bits,
        WORDS=unit_words,
        HALF=HALF[x.dtype],
        TABLES=TABLE_ROWS if table.shape[0] > 1 else 0,
        MB=block_rows,
        BN=block_out,
        W=lane_units,
        EVEN=num_units % step == 0,
        GROUP=group_of(codes, table, scale),
        LAST=parts == 1,
        BIAS=bias is not None,
        num_warps=1,
    )
    return out if parts == 1 else finish(out, None, row_scale, bias, x.dtype, LEVELS)

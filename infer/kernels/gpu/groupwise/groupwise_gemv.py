"""The layout `groupwise` for a few rows of x: programs and loads of `gemv_tiles`, scales of a checkpoint's groups.

Eight products are added up, then multiplied by the scale of their group; a minimum multiplies the sum of the eight
activations. So a weight costs its code, its lookup and one multiply-add for each row. Tables lie in registers and are
read by warp shuffles; codes of 5 and 6 bits are integers from the first entry of their table on, and codes of a byte
become numbers by byte permutations (`w8a16_gemv`). Sums are float32, in a fixed
order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...ops.coded_weight import SUPER, CodedWeight
from .. import gemv_tiles
from ..epilogue import finish
from ..gemv_tiles import activation_tile, eight, entry_at, loaded, store_rows, unit_words
from ..int8.int8_gemv import INTERPRETED
from ..int8.w8a16_gemv import EXPONENT, FLIP, byte_value
from ..launch import HALF, cdiv, launch, words
from ..split_columns import power_above, result_or_sums
from .groupwise_decode import float8_value, form, pointers

MAX_ROWS = gemv_tiles.MAX_ROWS
_SUPER = tl.constexpr(SUPER)


@triton.jit
def _factor(
    values_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    row: tl.tensor,  # int64 [BN, 1, 1]
    column: tl.tensor,  # [1, W, 32]
    inside: tl.tensor,
    num_columns: tl.tensor,
    GROUP: tl.constexpr,
    SUPERS: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Return the scale or minimum of each lane's columns, float32 [BN, W, 32]; SUPERS as in `groupwise_decode`."""
    at = values_ptr + row * (num_columns // GROUP) + column // GROUP
    if SUPERS == 2:
        return float8_value(loaded(at, inside, EVEN)) / tl.load(supers_ptr + row)
    value = loaded(at, inside, EVEN).to(tl.float32)
    if SUPERS:
        each = supers_ptr + row * tl.cdiv(num_columns, _SUPER) + column // _SUPER
        value *= loaded(each, inside, EVEN).to(tl.float32)
    return value


@triton.jit
def _integer_at(
    w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, w3: tl.tensor, w4: tl.tensor, BITS: tl.constexpr, C: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Extract code number C of each unit of three (6 bits) or five (5 bits) words."""
    WORD: tl.constexpr = C * BITS // 32
    SHIFT: tl.constexpr = C * BITS % 32
    low = w0 if WORD == 0 else (w1 if WORD == 1 else (w2 if WORD == 2 else (w3 if WORD == 3 else w4)))
    code = low >> SHIFT
    if SHIFT + BITS > 32:
        high = w1 if WORD == 0 else (w2 if WORD == 1 else (w3 if WORD == 2 else w4))
        code = (code & ((1 << (32 - SHIFT)) - 1)) | (high << (32 - SHIFT))
    return code & ((1 << BITS) - 1)


@triton.jit(do_not_specialize=["num_words", "exponent"])
def _rows(
    x_ptr: tl.tensor,  # int32 words of [M, K]
    codes_ptr: tl.tensor,  # int32 words of [N, num_words]
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    super_scale_ptr: tl.tensor,
    super_minimum_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    expert_ptr: tl.tensor,  # int64 [M], where TOP_K is not 0: row m of the result is of x's row m // TOP_K
    out_ptr: tl.tensor,  # the result [M, N], or float32 sums of each part [parts, M, N]
    num_rows: tl.tensor,  # M
    num_out: tl.tensor,  # N, of one expert
    num_columns: tl.tensor,  # K
    num_words: tl.tensor,
    units_each: tl.tensor,  # units of a part of the columns, a multiple of 32 * W
    exponent: tl.tensor,  # as in `w8a16_gemv`
    TOP_K: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    MINIMUM: tl.constexpr,
    SUPER_SCALE: tl.constexpr,
    SUPER_MINIMUM: tl.constexpr,
    MB: tl.constexpr,
    BN: tl.constexpr,
    W: tl.constexpr,
    EVEN: tl.constexpr,
    LAST: tl.constexpr,  # there is one part: store the result
    BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> None:
    CODES: tl.constexpr = WORDS * 32 // BITS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(n, num_out - 1)
    m = tl.program_id(2) * MB + tl.arange(0, MB)
    unit = tl.arange(0, W)[:, None] * 32 + tl.arange(0, 32)[None, :]
    if BITS < 5:
        table = tl.load(table_ptr + tl.arange(0, 32) % (1 << BITS))
    elif BITS < 8:
        first = tl.load(table_ptr)
    units = num_words // WORDS
    begin = tl.program_id(1) * units_each
    end = tl.minimum(begin + units_each, units)
    row = rows[:, None, None].to(tl.int64)
    m_safe = tl.minimum(m, num_rows - 1)
    if TOP_K:
        row += tl.load(expert_ptr + tl.program_id(2)) * num_out
        m_safe = m_safe // TOP_K
    codes_tile = codes_ptr + row * num_words + (unit * WORDS)[None]
    x_tile = activation_tile(x_ptr, m_safe, unit, num_columns, CODES, HALF)
    acc = tl.zeros([MB, BN, W, 32], tl.float32)
    for start in range(begin, end, 32 * W):
        inside = (start + unit < end)[None]
        w0, w1, w2 = unit_words(codes_tile + start * WORDS, inside, WORDS, EVEN)
        if BITS == 8:
            w0, w1 = w0 ^ FLIP, w1 ^ FLIP
        w3 = loaded(codes_tile + start * WORDS + 3, inside, EVEN) if WORDS == 5 else w0
        w4 = loaded(codes_tile + start * WORDS + 4, inside, EVEN) if WORDS == 5 else w0
        scale = tl.zeros([BN, W, 32], tl.float32)
        minimum = tl.zeros([BN, W, 32], tl.float32)
        for octet in tl.static_range(CODES // 8):
            column = ((start + unit) * CODES + octet * 8)[None]
            if octet * 8 % GROUP == 0 or octet == 0:
                scale = _factor(
                    scale_ptr, super_scale_ptr, row, column, inside, num_columns, GROUP, SUPER_SCALE, EVEN
                )
                if MINIMUM == 2:
                    at = minimum_ptr + row * (num_columns // GROUP) + column // GROUP
                    minimum = loaded(at, inside, EVEN).to(tl.float32) * scale
                elif MINIMUM:
                    minimum = _factor(
                        minimum_ptr, super_minimum_ptr, row, column, inside, num_columns, GROUP, SUPER_MINIMUM, EVEN
                    )  # fmt: skip
            x = eight(x_tile, start * CODES + octet * 8, inside, HALF, EVEN)
            sums = tl.zeros([MB, BN, W, 32], tl.float32)
            given = tl.zeros([MB, W, 32], tl.float32)
            for i in tl.static_range(8):
                if BITS == 8:
                    weight = byte_value(w0 if i < 4 else w1, exponent, i % 4, ASSEMBLY)
                elif BITS > 4:
                    weight = _integer_at(w0, w1, w2, w3, w4, BITS, octet * 8 + i).to(tl.float32) + first
                else:
                    weight = entry_at(table, w0, w1, w2, BITS, octet * 8 + i)
                sums += weight[None] * x[i][:, None]
                given += x[i]
            acc += sums * scale[None]
            if MINIMUM:
                acc += given[:, None] * minimum[None]
    total = tl.sum(tl.reshape(acc, [MB, BN, W * 32]), 2)
    if LAST and BIAS:
        total = total + tl.load(bias_ptr + rows).to(tl.float32)[None]
    store_rows(out_ptr, total, m, n, num_rows, num_out)


def linear(x: Tensor, weight: CodedWeight, bias: Tensor | None = None, split: int | None = None) -> Tensor:
    """Multiply x [M, K] float32, float16 or bfloat16: [M, N] in its dtype. Weights are exact, sums float32.

    For any M, but made for M ≤ `MAX_ROWS`: the codes are read again for each `MAX_ROWS` rows of x.
    """
    return _products(x, weight, bias, x.shape[0], weight.num_rows, split)


def linear_experts(
    x: Tensor, expert: Tensor, weight: CodedWeight, features: int, top_k: int, split: int | None = None
) -> Tensor:
    """Multiply x [R, K] by its routed experts, int64 [R * top_k]: [R * top_k, features] in x's dtype.

    Each place reads the codes of its expert, so that two places of one expert read them twice.
    """
    return _products(x, weight, None, expert.numel(), features, split, expert, top_k)


def _products(
    x: Tensor, weight: CodedWeight, bias: Tensor | None, num_rows: int, num_out: int, split: int | None,
    expert: Tensor | None = None, top_k: int = 0,
) -> Tensor:  # fmt: skip
    block_rows = 1 if top_k else min(power_above(num_rows), MAX_ROWS)
    blocks = gemv_tiles.blocks_of(
        weight.bits, weight.columns, num_out, block_rows, x.device, split, times=num_rows if top_k else 1
    )
    out = result_or_sums(x, num_rows, num_out, blocks.parts)
    launch(
        _rows,
        (blocks.programs, blocks.parts, cdiv(num_rows, block_rows)),
        words(x),
        words(weight.codes),
        *pointers(weight)[1:],
        weight.codes if bias is None else bias.contiguous(),
        weight.codes if expert is None else expert.contiguous(),
        out,
        num_rows,
        num_out,
        weight.columns,
        weight.codes.shape[1] // 4,
        blocks.units_each,
        EXPONENT,
        TOP_K=top_k,
        WORDS=gemv_tiles.WORDS[weight.bits],
        HALF=HALF[x.dtype],
        **form(weight),
        MB=block_rows,
        BN=blocks.block_out,
        W=blocks.lane_units,
        EVEN=blocks.even,
        LAST=blocks.parts == 1,
        BIAS=bias is not None,
        ASSEMBLY=not INTERPRETED,
        num_warps=1,
    )
    return out if blocks.parts == 1 else finish(out, None, None, bias, x.dtype)

"""`linear_int8_weight` for a few rows of x: codes become float32 in registers, sums are float32.

A byte of a word is put under the exponent of 2**23 by one byte permutation and loses it by one subtraction: exact, and
two instructions where a conversion has a quarter of their speed. Programs, the loads of x and the order of additions
are those of `gemv_tiles`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..epilogue import finish, product
from ..gemv_tiles import activation_tile, eight, store_rows
from ..launch import HALF, cdiv, launch, words
from ..split_columns import even_parts, power_above, result_or_sums, split_of
from .int8_gemv import INTERPRETED

MAX_ROWS = 2  # of x: above, the tensor cores' tiles need fewer instructions
_WEIGHTS = 128  # of one lane in one step, at one row of x: bounds the registers
_UNIT = 8  # codes of a lane, two words
FLIP = tl.constexpr(-2139062144)  # 0x80808080: bytes from -128 … 127 to 0 … 255
EXPONENT = 0x4B000000  # of 2**23 in float32
_BIAS = tl.constexpr(2.0**23 + 128)


@triton.jit
def byte_value(
    flipped: tl.tensor, exponent: tl.tensor, BYTE: tl.constexpr, ASSEMBLY: tl.constexpr
) -> tl.tensor:
    """Convert byte BYTE of words of flipped int8 codes to float32."""
    if ASSEMBLY:
        bits = tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {0x7440 + BYTE};",
            "=r,r,r",
            [flipped, exponent],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        bits = ((flipped >> (8 * BYTE)) & 0xFF) | exponent
    return bits.to(tl.float32, bitcast=True) - _BIAS


@triton.jit(do_not_specialize=["num_units", "exponent"])
def _rows(
    x_ptr: tl.tensor,  # int32 words of [M, K]
    codes_ptr: tl.tensor,  # int32 words of [N, K]
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,  # the result [M, N], or float32 sums of each part [parts, M, N]
    num_rows: tl.tensor,  # M
    num_out: tl.tensor,  # N
    num_units: tl.tensor,  # K / 8
    units_each: tl.tensor,  # of a part of the columns, a multiple of 32 * W
    exponent: tl.tensor,  # `EXPONENT`: the compiler would put a known one where the selector of `prmt` belongs
    HALF: tl.constexpr,
    MB: tl.constexpr,
    BN: tl.constexpr,
    W: tl.constexpr,
    EVEN: tl.constexpr,
    LAST: tl.constexpr,  # there is one part: scale and store the result
    BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.minimum(n, num_out - 1)
    m = tl.program_id(2) * MB + tl.arange(0, MB)
    m_safe = tl.minimum(m, num_rows - 1)
    unit = tl.arange(0, W)[:, None] * 32 + tl.arange(0, 32)[None, :]
    begin = tl.program_id(1) * units_each
    end = tl.minimum(begin + units_each, num_units)
    code_unit = rows[:, None, None].to(tl.int64) * (num_units * 2) + (unit * 2)[None]
    codes_tile = codes_ptr + code_unit[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]
    x_tile = activation_tile(x_ptr, m_safe, unit, num_units * 8, 8, HALF)
    acc = tl.zeros([MB, BN, W, 32], tl.float32)
    for start in range(begin, end, 32 * W):
        inside = (start + unit < end)[None]
        if EVEN:
            codes = tl.load(codes_tile + start * 2)
        else:
            codes = tl.load(codes_tile + start * 2, mask=inside[:, :, :, None], other=0)
        low, high = tl.split(codes ^ FLIP)
        x = eight(x_tile, start * 8, inside, HALF, EVEN)
        for i in tl.static_range(8):
            weight = byte_value(low if i < 4 else high, exponent, i % 4, ASSEMBLY)
            acc += weight[None] * x[i][:, None]
    total = tl.sum(tl.reshape(acc, [MB, BN, W * 32]), 2)
    if LAST:
        scale = tl.load(scale_ptr + rows).to(tl.float32)
        total = product(total, tl.broadcast_to(scale[None], [MB, BN]), ASSEMBLY)
        if BIAS:
            total = total + tl.load(bias_ptr + rows).to(tl.float32)[None]
    store_rows(out_ptr, total, m, n, num_rows, num_out)


def usable(x: Tensor) -> bool:
    """Return true if x [M, K] has at most `MAX_ROWS` rows, of a multiple of 8 columns."""
    return 0 < x.shape[0] <= MAX_ROWS and x.shape[1] > 0 and x.shape[1] % _UNIT == 0


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, split: int | None = None
) -> Tensor:
    """Multiply x [M, K] float by codes int8 [N, K] and scale [N]: [M, N] in x's dtype. K is a multiple of 8."""
    (num_rows, num_columns), num_out = x.shape, codes.shape[0]
    block_rows = power_above(min(num_rows, MAX_ROWS))
    block_out, num_units = 4, num_columns // _UNIT
    lane_units = max(
        1, min(_WEIGHTS // _UNIT // block_out // block_rows, 1 << cdiv(num_units, 32).bit_length() >> 1)
    )
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
        scale.contiguous(),
        scale if bias is None else bias.contiguous(),
        out,
        num_rows,
        num_out,
        num_units,
        each,
        EXPONENT,
        HALF=HALF[x.dtype],
        MB=block_rows,
        BN=block_out,
        W=lane_units,
        EVEN=num_units % step == 0,
        LAST=parts == 1,
        BIAS=bias is not None,
        ASSEMBLY=not INTERPRETED,
        num_warps=1,
    )
    return out if parts == 1 else finish(out, None, scale, bias, x.dtype)

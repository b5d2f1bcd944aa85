"""Parts of the matrix-vector kernels: sizes of a program, loads of codes and activations, the store of its sums.

A program is one warp. A lane reads `W` units of codes, words of 32 bits in which whole codes begin and end, of each of
`BN` rows of the weight, and the activations that belong to them, 16 bytes at a time, of `MB` rows of x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..ops.coded_weight import CodedWeight
from .launch import cdiv
from .split_columns import even_parts, power_above, split_of

MAX_ROWS = 8  # of x in one program
WORDS = {2: 1, 3: 3, 4: 1, 5: 5, 6: 3, 8: 2}  # 32-bit words of a unit, by bits of a code
_WEIGHTS = 128  # of one lane in one step, at one row of x: bounds the registers


def usable(weight: CodedWeight) -> bool:
    """Tell if rows of codes are whole units of words: 3-bit codes need a multiple of 32 columns."""
    return weight.columns > 0 and weight.codes.shape[1] % (4 * WORDS[weight.bits]) == 0


class Blocks(NamedTuple):
    """Sizes of a product: rows of the weight and units of a lane in a program, programs, units of each part, parts."""

    block_out: int
    lane_units: int
    programs: int
    units_each: int
    parts: int
    even: bool  # the last step of a part is as long as the others


def blocks_of(
    bits: int, num_columns: int, num_out: int, block_rows: int, device: torch.device, split: int | None, times: int = 1
) -> Blocks:  # fmt: skip
    """Choose the sizes of a product by codes [num_out, num_columns] of which `times` run together.

    `block_rows` are the rows of x in one program; `split` sets the number of parts, None chooses it.
    """
    unit_codes = WORDS[bits] * 32 // bits
    tile = max(_WEIGHTS // unit_codes // block_rows, 1)  # rows of the weight x units of a lane
    block_out = min(tile, 4)
    num_units = num_columns // unit_codes
    lane_units = max(1, min(tile // block_out, power_above(cdiv(num_units, 32))))
    step = 32 * lane_units
    programs = cdiv(num_out, block_out)
    parts = split or split_of(programs * times, cdiv(num_units, step), device, wanted=8)
    each, parts = even_parts(num_units, parts, step)
    return Blocks(block_out, lane_units, programs, each, parts, num_units % step == 0)


@triton.jit
def loaded(pointers: tl.tensor, inside: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Load values where `inside`, 0 elsewhere; EVEN says that all are inside."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0)


@triton.jit
def unit_words(
    word: tl.tensor, inside: tl.tensor, WORDS: tl.constexpr, EVEN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Load up to three words of each lane's unit, each [BN, W, 32]; those that a unit lacks repeat the first."""
    w0 = loaded(word, inside, EVEN)
    w1 = loaded(word + 1, inside, EVEN) if WORDS > 1 else w0
    w2 = loaded(word + 2, inside, EVEN) if WORDS > 2 else w0
    return w0, w1, w2


@triton.jit
def code_at(w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, BITS: tl.constexpr, C: tl.constexpr) -> tl.tensor:
    """Extract code number C of each unit of one to three words."""
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
def entry_at(
    table: tl.tensor, w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, BITS: tl.constexpr, C: tl.constexpr
) -> tl.tensor:
    """Look code number C of each unit up in a table that lies in the registers of the warp: [BN, W, 32]."""
    code = code_at(w0, w1, w2, BITS, C)
    BN: tl.constexpr = code.shape[0]
    W: tl.constexpr = code.shape[1]
    return tl.reshape(tl.gather(table, tl.reshape(code, [BN * W * 32]), 0), [BN, W, 32])


@triton.jit
def activation_tile(
    x_ptr: tl.tensor, row: tl.tensor, unit: tl.tensor, num_columns: tl.tensor, CODES: tl.constexpr, HALF: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return pointers [MB, W, 32, 4] to the first four words of x for each unit [W, 32], of rows [MB] of x."""
    PACK: tl.constexpr = 2 if HALF else 1  # columns in one word
    x_unit = row[:, None, None] * (num_columns // PACK) + (unit * (CODES // PACK))[None]
    return x_ptr + x_unit[:, :, :, None] + tl.arange(0, 4)[None, None, None, :]


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
    """Load four words of x from word `at` on, each [MB, W, 32], by one 16-byte load."""
    pointers = x_tile + at
    block = tl.load(pointers) if EVEN else tl.load(pointers, mask=mask[:, :, :, None], other=0)
    even, odd = tl.split(tl.reshape(block, [block.shape[0], block.shape[1], block.shape[2], 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def eight(
    x_tile: tl.tensor, column: tl.tensor, mask: tl.tensor, HALF: tl.constexpr, EVEN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load eight activations from column `column` of each unit on, float32 [MB, W, 32] each."""
    if HALF == 0:
        a0, a1, a2, a3 = _four(x_tile, column, mask, EVEN)
        a4, a5, a6, a7 = _four(x_tile, column + 4, mask, EVEN)
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
    p0, p1, p2, p3 = _four(x_tile, column // 2, mask, EVEN)
    b0, b1 = _pair(p0, HALF)
    b2, b3 = _pair(p1, HALF)
    b4, b5 = _pair(p2, HALF)
    b6, b7 = _pair(p3, HALF)
    return b0, b1, b2, b3, b4, b5, b6, b7


@triton.jit
def store_rows(
    out_ptr: tl.tensor, total: tl.tensor, m: tl.tensor, n: tl.tensor, num_rows: tl.tensor, num_out: tl.tensor
) -> None:
    """Store sums [MB, BN] of rows m of x and n of the weight, to the plane of this program's part of the columns."""
    at = (tl.program_id(1) * num_rows + m[:, None]).to(tl.int64) * num_out + n[None]
    kept = (m < num_rows)[:, None] & (n < num_out)[None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=kept)

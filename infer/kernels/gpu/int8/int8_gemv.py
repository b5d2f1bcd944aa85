"""Exact int32 sums of int8 products for a few rows of x: four products in one instruction, `dp4a`.

Programs are laid out as in `gemv_tiles`. Integer sums are exact, so their order does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gemv_tiles import store_rows
from ..launch import cdiv, launch, words
from ..split_columns import even_parts, power_above, split_of

MAX_ROWS = 8  # of x in one program
INTERPRETED = triton.knobs.runtime.interpret  # Triton's interpreter knows no assembly


@triton.jit
def dot4(a: tl.tensor, b: tl.tensor, total: tl.tensor, DP4A: tl.constexpr) -> tl.tensor:
    """Add the four products of the int8 numbers in the words a and b to `total`."""
    if DP4A:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, total], dtype=tl.int32, is_pure=True, pack=1
        )
    total += ((a << 24) >> 24) * ((b << 24) >> 24)
    total += ((a << 16) >> 24) * ((b << 16) >> 24)
    total += ((a << 8) >> 24) * ((b << 8) >> 24)
    return total + (a >> 24) * (b >> 24)


@triton.jit(do_not_specialize=["num_words"])
def _rows(
    q_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    out_ptr: tl.tensor,  # int32 [parts, M, N]
    num_rows: tl.tensor,
    num_out: tl.tensor,
    num_words: tl.tensor,
    words_each: tl.tensor,
    MB: tl.constexpr,
    BN: tl.constexpr,
    W: tl.constexpr,
    DP4A: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * MB + tl.arange(0, MB)
    at = tl.arange(0, W)[:, None] * 32 + tl.arange(0, 32)[None]
    codes_tile = codes_ptr + tl.minimum(n, num_out - 1)[:, None, None].to(tl.int64) * num_words + at[None]
    q_tile = q_ptr + tl.minimum(m, num_rows - 1)[:, None, None].to(tl.int64) * num_words + at[None]
    begin = tl.program_id(1) * words_each
    end = tl.minimum(begin + words_each, num_words)
    acc = tl.zeros([MB, BN, W, 32], tl.int32)
    for start in range(begin, end, 32 * W):
        inside = (start + at < end)[None]
        codes = tl.load(codes_tile + start, mask=inside, other=0)[None]
        q = tl.load(q_tile + start, mask=inside, other=0)[:, None]
        shape: tl.constexpr = [MB, BN, W, 32]
        acc = dot4(tl.broadcast_to(codes, shape), tl.broadcast_to(q, shape), acc, DP4A)
    total = tl.sum(tl.reshape(acc, [MB, BN, W * 32]), 2)
    store_rows(out_ptr, total, m, n, num_rows, num_out)


def usable(q: Tensor, codes: Tensor) -> bool:
    """Return true if rows of q int8 [M, K] are whole 32-bit words."""
    return q.shape[1] % 4 == 0 and q.shape[1] > 0


def linear(q: Tensor, codes: Tensor, split: int | None = None) -> Tensor:
    """Multiply q int8 [M, K] by codes int8 [N, K]: sums int32 [parts, M, N], to be added over parts.

    K is a multiple of 4.
    """
    num_rows, num_out, num_words = q.shape[0], codes.shape[0], q.shape[1] // 4
    block_rows = min(power_above(num_rows), MAX_ROWS)
    block_out = 4
    lane_words = max(1, min(16 // block_rows // block_out * 2, 1 << cdiv(num_words, 32).bit_length() >> 1))
    step = 32 * lane_words
    blocks = cdiv(num_out, block_out)
    parts = split or split_of(blocks, cdiv(num_words, step), q.device, wanted=8)
    each, parts = even_parts(num_words, parts, step)
    out = q.new_empty((parts, num_rows, num_out), dtype=torch.int32)
    launch(
        _rows,
        (blocks, parts, cdiv(num_rows, block_rows)),
        words(q),
        words(codes),
        out,
        num_rows,
        num_out,
        num_words,
        each,
        MB=block_rows,
        BN=block_out,
        W=lane_words,
        DP4A=not INTERPRETED,
        num_warps=1,
    )
    return out

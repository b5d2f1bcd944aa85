"""Groupwise codes back to numbers: tiles for the tensor cores, whole weights, single rows of an embedding.

A weight is `table[code] * (scale * super_scale) + minimum * super_minimum` in float32, in the order of the portable
`CodedWeight.decode`, and is rounded once, to the type of the activations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.coded_weight import SUPER, CodedWeight
from ..launch import cdiv, launch

BK = 64  # columns of a tile
_SUPER = tl.constexpr(SUPER)
_ROWS = 16


def pointers(weight: CodedWeight) -> tuple[Tensor, ...]:
    """Return what kernels read: codes as int32 words where rows are whole ones; the codes in place of None."""
    codes = weight.codes.contiguous()
    if weight.bits in (2, 4):
        codes = codes.view(torch.int32)
    table = weight.codes if weight.table is None else weight.table.float().contiguous()
    rest = (weight.codes if part is None else part.contiguous() for part in weight[3:])
    scale = weight.scale.contiguous()
    return codes, table, scale.view(torch.uint8) if _is_float8(weight) else scale, *rest


def form(weight: CodedWeight) -> dict[str, Any]:
    """Return the compile-time arguments of `decoded_tile`.

    MINIMUM: 0 none, 1 numbers, 2 steps of the scale; SUPER_SCALE: 0 none, 1 of 256 columns, 2 a divisor of the row's
    float8 scales.
    """
    weight.check()
    steps = weight.minimum is not None and weight.minimum.dtype == torch.int8 and weight.super_minimum is None
    return {
        "BITS": weight.bits,
        "GROUP": weight.group,
        "MINIMUM": 2 if steps else int(weight.minimum is not None),
        "SUPER_SCALE": 2 if _is_float8(weight) else int(weight.super_scale is not None),
        "SUPER_MINIMUM": int(weight.super_minimum is not None),
    }


def _is_float8(weight: CodedWeight) -> bool:
    return weight.scale.dtype == torch.float8_e4m3fn


@triton.jit
def float8_value(bits: tl.tensor) -> tl.tensor:
    """Decode bytes as float8 e4m3, which not every GPU converts; NaN becomes 480."""
    code = bits.to(tl.int32)
    exponent, mantissa = (code >> 3) & 15, code & 7
    whole = tl.where(exponent > 0, mantissa + 8, mantissa).to(tl.float32)
    power = ((tl.maximum(exponent, 1) + 117) << 23).to(tl.float32, bitcast=True)
    return tl.where(code > 127, -whole, whole) * power


@triton.jit
def _factors(
    values_ptr: tl.tensor,
    supers_ptr: tl.tensor,
    stored: tl.tensor,
    start: tl.tensor,
    num_columns: tl.tensor,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SUPERS: tl.constexpr,
) -> tl.tensor:
    """Return scales or minima of the groups of a tile, float32 [BN, groups], 0 past the last group."""
    GROUPS: tl.constexpr = BK // GROUP if GROUP < BK else 1
    groups = num_columns // GROUP
    g = start // GROUP + tl.arange(0, GROUPS)
    at = values_ptr + stored[:, None] * groups + g[None]
    if SUPERS == 2:
        return (
            float8_value(tl.load(at, mask=(g < groups)[None], other=0))
            / tl.load(supers_ptr + stored)[:, None]
        )
    values = tl.load(at, mask=(g < groups)[None], other=0).to(tl.float32)
    if SUPERS:
        each = tl.load(supers_ptr + stored * tl.cdiv(num_columns, _SUPER) + start // _SUPER)
        values *= each.to(tl.float32)[:, None]
    return values


@triton.jit
def decoded_tile(
    codes_ptr: tl.tensor,
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    super_scale_ptr: tl.tensor,
    super_minimum_ptr: tl.tensor,
    stored: tl.tensor,  # int64 [BN]: the rows
    start: tl.tensor,  # the first column, a multiple of BK
    num_columns: tl.tensor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MINIMUM: tl.constexpr,
    SUPER_SCALE: tl.constexpr,
    SUPER_MINIMUM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> tl.tensor:
    """Return weights float32 [BN, BK], 0 past the last column."""
    if BITS == 8:
        k = start + tl.arange(0, BK)
        at = codes_ptr + stored[:, None] * num_columns + k[None]
        value = tl.load(at, mask=(k < num_columns)[None], other=0).to(tl.float32)
    else:
        if BITS == 3 or BITS > 4:  # eight codes in as many bytes as a code has bits
            WORD: tl.constexpr = tl.int32 if BITS == 3 else tl.int64
            run = start // 8 + tl.arange(0, BK // 8)
            at = codes_ptr + stored[:, None] * (num_columns * BITS // 8) + (run * BITS)[None]
            inside = (run * 8 < num_columns)[None]
            word = tl.load(at, mask=inside, other=0).to(WORD)
            for i in tl.static_range(1, BITS):
                word |= tl.load(at + i, mask=inside, other=0).to(WORD) << (8 * i)
            code = word[:, :, None] >> (tl.arange(0, 8) * BITS)[None, None]
        else:
            w = start * BITS // 32 + tl.arange(0, BK * BITS // 32)
            num_words = num_columns * BITS // 32
            at = codes_ptr + stored[:, None] * num_words + w[None]
            word = tl.load(at, mask=(w < num_words)[None], other=0)
            code = word[:, :, None] >> (tl.arange(0, 32 // BITS) * BITS)[None, None]
        code = tl.reshape(code & ((1 << BITS) - 1), [BN, BK])
        # Of more than 4 bits, integers from the first entry on.
        value = code.to(tl.float32) + tl.load(table_ptr) if BITS > 4 else tl.load(table_ptr + code)
    GROUPS: tl.constexpr = BK // GROUP if GROUP < BK else 1
    scale = _factors(scale_ptr, super_scale_ptr, stored, start, num_columns, BK, GROUP, SUPER_SCALE)
    weight = tl.reshape(value, [BN, GROUPS, BK // GROUPS]) * scale[:, :, None]
    if MINIMUM == 2:
        weight += (_factors(minimum_ptr, scale_ptr, stored, start, num_columns, BK, GROUP, 0) * scale)[
            :, :, None
        ]
    elif MINIMUM:
        weight += _factors(
            minimum_ptr, super_minimum_ptr, stored, start, num_columns, BK, GROUP, SUPER_MINIMUM
        )[:, :, None]
    return tl.reshape(weight, [BN, BK])


@triton.jit
def _decode(
    codes_ptr: tl.tensor,
    table_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    minimum_ptr: tl.tensor,
    super_scale_ptr: tl.tensor,
    super_minimum_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    PICK: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    MINIMUM: tl.constexpr,
    SUPER_SCALE: tl.constexpr,
    SUPER_MINIMUM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
) -> None:
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    kept = n < num_rows
    rows = tl.load(ids_ptr + n, mask=kept, other=0) if PICK else tl.minimum(n, num_rows - 1)
    start = tl.program_id(1) * BK
    weight = decoded_tile(
        codes_ptr, table_ptr, scale_ptr, minimum_ptr, super_scale_ptr, super_minimum_ptr, rows.to(tl.int64), start,
        num_columns, BITS, GROUP, MINIMUM, SUPER_SCALE, SUPER_MINIMUM, BN, BK,
    )  # fmt: skip
    k = start + tl.arange(0, BK)
    at = out_ptr + n.to(tl.int64)[:, None] * num_columns + k[None]
    tl.store(at, weight.to(out_ptr.dtype.element_ty), mask=kept[:, None] & (k < num_columns)[None])


def decode(weight: CodedWeight, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """Decode the weight [N, K] to `dtype`, or its rows `ids` [count], which must be in range."""
    count = weight.num_rows if ids is None else ids.shape[0]
    out = weight.codes.new_empty((count, weight.columns), dtype=dtype)
    launch(
        _decode,
        (cdiv(count, _ROWS), cdiv(weight.columns, BK)),
        *pointers(weight),
        weight.codes if ids is None else ids.contiguous(),
        out,
        count,
        weight.columns,
        PICK=ids is not None,
        **form(weight),
        BN=_ROWS,
        BK=BK,
        num_warps=4,
    )
    return out

"""Codes of a groupwise-quantized checkpoint as it stores them, with a scale and perhaps a minimum for each group.

    codes          uint8 [N, K * bits / 8], packed as in `bitpack`, beside a table; or int8 [N, K] without one
    scale          [N, K / group] float32, float16 or bfloat16; int8 or float8_e4m3fn beside a super_scale
    table          float32 [1, 2**bits], bits 2 to 6, of 5 and 6 consecutive integers; or None
    minimum        float, or int8 beside a super_minimum, as scale is; int8 without one: steps of a float scale (zero
                   points); or None
    super_scale    float32 or float16 [N, ceil(K / 256)], of the int8 scales of 256 columns; float32 [N, 1], by which
                   float8 scales are divided; or None
    super_minimum  as super_scale, of the int8 minima; or None
    weight[n, k] = value * (scale * super_scale) + minimum * super_minimum,  value = table[code] or code

A group is 16, 32 or a multiple of 64 columns. The order of the products is that of the formats' own readers (llama.cpp,
bitsandbytes, GPTQ, AWQ, compressed-tensors), so that decoded weights are bit-equal to theirs in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .bitpack import bits_of, columns_of, unpack

SUPER = 256  # columns that share a super-scale
FINE_GROUPS = (16, 32)
PART = 64  # columns that other groups are multiples of
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_WIDTHS = (4, 8, 16, 32, 64)


def num_columns(codes: Tensor, table: Tensor | None) -> int:
    """Return K, the weights of one row."""
    return codes.shape[1] if table is None else columns_of(codes, table)


def group_columns(codes: Tensor, scale: Tensor, table: Tensor | None) -> int:
    """Return how many columns share a scale; raise `ValueError` for a size that no group has."""
    columns, groups = num_columns(codes, table), scale.shape[1]
    group = columns // max(groups, 1)
    if group * groups != columns or (group not in FINE_GROUPS and group % PART):
        raise ValueError(
            f"{groups} scales for {columns} columns: no groups of 16, 32 or a multiple of {PART}"
        )
    return group


def require_form(
    codes: Tensor,
    scale: Tensor,
    table: Tensor | None,
    minimum: Tensor | None,
    super_scale: Tensor | None,
    super_minimum: Tensor | None,
) -> None:
    """Raise `ValueError` unless the tensors have dtypes and shapes that belong together, as above."""
    width = 1 if table is None else table.shape[-1]
    if codes.dtype != (torch.int8 if table is None else torch.uint8) or codes.dim() != 2:
        raise ValueError(f"codes in {codes.dtype} {'without' if table is None else 'beside'} a table")
    if table is not None and (table.shape[0] != 1 or width not in _WIDTHS or not table.is_floating_point()):
        raise ValueError(f"a table {list(table.shape)} in {table.dtype}")
    columns = num_columns(codes, table)
    float8 = scale.dtype == torch.float8_e4m3fn
    supers = (1 if float8 else -(-columns // SUPER)) if float8 or scale.dtype == torch.int8 else 0
    _require_numbers("scale", scale, super_scale, supers)
    if minimum is None:
        return
    _require_numbers("minimum", minimum, super_minimum, supers if scale.dtype == torch.int8 else 0)
    both = scale.dtype in FLOATS and minimum.dtype in (*FLOATS, torch.int8)
    if minimum.shape != scale.shape or not (both or minimum.dtype == scale.dtype == torch.int8):
        raise ValueError(
            f"a minimum {list(minimum.shape)} in {minimum.dtype} beside a scale in {scale.dtype}"
        )


def _require_numbers(name: str, numbers: Tensor, supers: Tensor | None, count: int) -> None:
    known = numbers.dtype in (*FLOATS, torch.int8) or (numbers.dtype == torch.float8_e4m3fn and count == 1)
    bare = count == 0 and numbers.dtype == torch.int8 and name == "scale"
    if not known or numbers.dim() != 2 or bare or (supers is None) != (count == 0):
        raise ValueError(
            f"{name} in {numbers.dtype} {'without' if supers is None else 'beside'} super-scales"
        )
    if supers is not None and (supers.dtype not in FLOATS or tuple(supers.shape[1:]) != (count,)):
        raise ValueError(
            f"super-scales {list(supers.shape)} in {supers.dtype} of the {name}, {count} expected"
        )


def with_super(values: Tensor, supers: Tensor | None, group: int) -> Tensor:
    """Return scales or minima [N, G] in float32, each times the super-scale of its 256 columns."""
    if supers is None:
        return values.float()
    if values.dtype == torch.float8_e4m3fn:
        return values.float() / supers
    return values.float() * supers.float().repeat_interleave(SUPER // group, 1)[:, : values.shape[1]]


def minima(minimum: Tensor, super_minimum: Tensor | None, steps: Tensor, group: int) -> Tensor:
    """Return minima [N, G] in float32 beside their groups' scales `steps`, float32 [N, G]."""
    if minimum.dtype == torch.int8 and super_minimum is None:
        return minimum.float() * steps
    return with_super(minimum, super_minimum, group)


def decode(
    codes: Tensor,
    scale: Tensor,
    table: Tensor | None = None,
    minimum: Tensor | None = None,
    super_scale: Tensor | None = None,
    super_minimum: Tensor | None = None,
    *,
    unpacked: Callable[[Tensor, int], Tensor] = unpack,
) -> Tensor:
    """Return the float32 weight [N, K]; raise `ValueError` for tensors that do not belong together."""
    require_form(codes, scale, table, minimum, super_scale, super_minimum)
    group = group_columns(codes, scale, table)
    if table is None:
        values = codes.float()
    else:
        index = unpacked(codes, bits_of(table)).to(torch.int32)
        values = table.float().reshape(-1).index_select(0, index.reshape(-1))
    values = values.reshape(codes.shape[0], scale.shape[1], group)
    steps = with_super(scale, super_scale, group)
    weight = values * steps[:, :, None]
    if minimum is not None:
        weight = weight + minima(minimum, super_minimum, steps, group)[:, :, None]
    return weight.reshape(codes.shape[0], -1)

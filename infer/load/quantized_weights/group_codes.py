"""Codes of the methods of `quantization_config`: their values, and their form in `kernels.ops.coded_weight`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.ops.bitpack import pack
from ...weights import StoredCodes, Weight

PART = 64


def integer_weight(
    kind: str,
    bits: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    codes: Callable[[int, int], Tensor],
    zeros: Callable[[int, int], Tensor],
    scales: Callable[[int, int], Tensor],
    group: Tensor,
) -> Weight:
    """Return the weight (code - zero) * scale, rounded once to `dtype`; arguments are those of `integer_codes`."""

    def rows(start: int, stop: int) -> Tensor:
        values = codes(start, stop) - zeros(start, stop)[:, group]
        return (values.float() * scales(start, stop).float()[:, group]).to(dtype).contiguous()

    return Weight(
        dtype,
        shape,
        rows,
        codes=lambda: integer_codes(
            kind, bits, shape, dtype, codes=codes, zeros=zeros, scales=scales, group=group
        ),
    )


def integer_codes(
    kind: str,
    bits: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    codes: Callable[[int, int], Tensor],
    zeros: Callable[[int, int], Tensor],
    scales: Callable[[int, int], Tensor],
    group: Tensor | None = None,
) -> StoredCodes:
    """Return codes of the weight (code - zero) * scale.

    `codes(start, stop)`: integers [rows, K] below 2**bits; `zeros` and `scales`: [rows, groups] of the same rows;
    `group` int64 [K]: the group of each column, in order where it is not given.
    """
    count = scales(0, 1).shape[1]
    refused = _refused(shape[1], count, group)
    if refused:
        return StoredCodes.without(kind, refused)
    in_order = torch.arange(shape[1]) // (shape[1] // count)
    order = None if group is None or torch.equal(group, in_order) else torch.argsort(group, stable=True)
    every = zeros(0, shape[0])
    middle = int(every.flatten()[0]) if every.numel() else 0
    uniform = bool((every == middle).all()) and (bits < 8 or middle == 128)

    def rows(start: int, stop: int) -> dict[str, Tensor]:
        values, scale = codes(start, stop), scales(start, stop)
        values = values if order is None else values[:, order]
        base = middle if uniform else 128 if bits == 8 else 0
        parts = {"scale": scale.contiguous()}
        if bits == 8:
            parts["codes"] = (values - base).to(torch.int8)
        else:
            parts["codes"] = pack(values.to(torch.uint8).contiguous(), bits)
            parts["table"] = (torch.arange(2**bits, dtype=torch.float32) - base)[None]
        if not uniform:
            moved = base - zeros(start, stop)
            parts["minimum"] = moved.float() * scale.float() if bits == 8 else moved.to(torch.int8)
        return parts

    return StoredCodes(kind, shape, rows, dtype, order=order)


def _refused(columns: int, groups: int, group: Tensor | None) -> str:
    size = columns // groups
    if size * groups != columns or (size not in (16, 32) and size % PART):
        return f"its {groups} groups of {columns} columns are not of 16, 32 or a multiple of {PART}"
    if group is not None and (torch.bincount(group, minlength=groups) != size).any():
        return f"its groups (act-order) are not of {size} columns each"
    return ""


def table_codes(
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    table: Tensor,
    codes: Callable[[int, int], Tensor],
    scales: Callable[[int, int], Tensor],
    divisor: Tensor | None = None,
    experts: bool = False,
) -> StoredCodes:
    """Return 4-bit codes [rows, K] into a table of 16 values, times scales [rows, groups].

    `divisor`: one float32 number by which float8 scales are divided.
    """
    if refused := _refused(shape[1], scales(0, 1).shape[1], None):
        return StoredCodes.without(kind, refused)

    def rows(start: int, stop: int) -> dict[str, Tensor]:
        packed = pack(codes(start, stop).to(torch.uint8).contiguous(), 4)
        parts = {"codes": packed, "table": table.float()[None], "scale": scales(start, stop)}
        return parts if divisor is None else {**parts, "super_scale": divisor.expand(len(packed), 1).clone()}

    return StoredCodes(kind, shape, rows, dtype, experts=experts)


def byte_codes(
    kind: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    codes: Callable[[int, int], Tensor],
    scales: Callable[[int, int], Tensor],
) -> StoredCodes:
    """Return int8 codes [rows, K] times scales [rows, groups]."""
    if refused := _refused(shape[1], scales(0, 1).shape[1], None):
        return StoredCodes.without(kind, refused)
    return StoredCodes(
        kind, shape, lambda *at: {"codes": codes(*at), "scale": scales(*at).contiguous()}, dtype
    )

"""Codes of the methods of `quantization_config`: their values, and their form in `kernels.ops.coded_weight`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.ops.bitpack import pack
from ...weights import StoredCodes, Weight

PART = 64


@dataclass(frozen=True)
class GroupedIntegers:
    """Weight (code - zero) * scale of `bits` bits: `weight` gives its values, and its codes.

    `codes(start, stop)`: integers [rows, K] below 2**bits; `zeros` and `scales`: [rows, groups] of the same rows;
    `group` int64 [K]: the group of each column.
    """

    kind: str
    bits: int
    shape: tuple[int, int]
    dtype: torch.dtype
    codes: Callable[[int, int], Tensor]
    zeros: Callable[[int, int], Tensor]
    scales: Callable[[int, int], Tensor]
    group: Tensor

    def weight(self) -> Weight:
        """Return the weight, rounded once to its dtype."""
        return Weight(self.dtype, self.shape, self._rows, codes=self._stored)

    def _rows(self, start: int, stop: int) -> Tensor:
        values = self.codes(start, stop) - self.zeros(start, stop)[:, self.group]
        scales = self.scales(start, stop).float()[:, self.group]
        return (values.float() * scales).to(self.dtype).contiguous()

    def _stored(self) -> StoredCodes:
        """Return the codes, in the order of their groups."""
        bits, (rows, columns) = self.bits, self.shape
        count = self.scales(0, 1).shape[1]
        if refused := _refused(columns, count, self.group):
            return StoredCodes.without(self.kind, refused)
        in_order = torch.equal(self.group, torch.arange(columns) // (columns // count))
        order = None if in_order else torch.argsort(self.group, stable=True)
        every = self.zeros(0, rows)
        middle = int(every.flatten()[0]) if every.numel() else 0
        uniform = bool((every == middle).all()) and (bits < 8 or middle == 128)
        base = middle if uniform else 128 if bits == 8 else 0

        def parts_of(start: int, stop: int) -> dict[str, Tensor]:
            values, scale = self.codes(start, stop), self.scales(start, stop)
            values = values if order is None else values[:, order]
            parts = {"scale": scale.contiguous()}
            if bits == 8:
                parts["codes"] = (values - base).to(torch.int8)
            else:
                parts["codes"] = pack(values.to(torch.uint8).contiguous(), bits)
                parts["table"] = (torch.arange(2**bits, dtype=torch.float32) - base)[None]
            if not uniform:
                moved = base - self.zeros(start, stop)
                parts["minimum"] = moved.float() * scale.float() if bits == 8 else moved.to(torch.int8)
            return parts

        return StoredCodes(self.kind, self.shape, parts_of, self.dtype, order=order)


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

"""Linear weights in compressed-tensors' pack-quantized form: codes quantized here, or carried over from the source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..weights import Checkpoint, StoredCodes
from ..weights.safetensors_writer import Meta
from .stored_rows import Difference, blocks_of, rows_at

GROUP = 128
PACKED = {"int4": 4, "int8": 8}  # type → bits of a code
ROUNDING = 1e-6  # relative difference of scales multiplied in float32


@dataclass(frozen=True)
class PackedLinear:
    """Codes of a weight [rows, columns] with a scale, and perhaps a zero point, for each group of columns.

    `give(start, stop)`: codes below 2**bits [rows, columns], scales and zero points [rows, groups] of these rows.
    `order` int64 [columns]: the column of the weight that each code belongs to (act-order).
    """

    bits: int
    group: int
    shape: tuple[int, int]
    dtype: torch.dtype
    give: Callable[[int, int], tuple[Tensor, Tensor, Tensor | None]]
    zeros: bool = False
    order: Tensor | None = None

    @property
    def groups(self) -> int:
        return self.shape[1] // self.group

    def scheme(self) -> dict[str, Any]:
        """Return the `weights` of a group of layers in `quantization_config`."""
        strategy: dict[str, Any] = {"strategy": "channel"}
        if self.groups > 1:
            strategy = {"strategy": "group", "group_size": self.group}
        ordered = {"actorder": "group"} if self.order is not None else {}
        return {"num_bits": self.bits, "type": "int", "symmetric": not self.zeros, **strategy, **ordered}

    def metas(self, stem: str) -> dict[str, Meta]:
        """Return dtype and shape of each tensor by name."""
        rows, columns = self.shape
        found: dict[str, Meta] = {
            f"{stem}.weight_packed": (torch.int32, (rows, -(-columns * self.bits // 32))),
            f"{stem}.weight_scale": (self.dtype, (rows, self.groups)),
            f"{stem}.weight_shape": (torch.int64, (2,)),
        }
        if self.zeros:
            found[f"{stem}.weight_zero_point"] = (torch.int32, (-(-rows * self.bits // 32), self.groups))
        if self.order is not None:
            found[f"{stem}.weight_g_idx"] = (torch.int32, (columns,))
        return found

    def parts(self, stem: str) -> dict[str, Tensor]:
        """Return the tensors by name."""
        codes, scales, zeros = [], [], []
        for index in blocks_of(*self.shape):
            code, scale, zero = self.give(int(index[0]), int(index[-1]) + 1)
            codes.append(_words(self._placed(code), self.bits))
            scales.append(scale.to(self.dtype))
            zeros += [zero] if zero is not None else []
        found = {
            f"{stem}.weight_packed": torch.cat(codes),
            f"{stem}.weight_scale": torch.cat(scales),
            f"{stem}.weight_shape": torch.tensor(self.shape),
        }
        if self.zeros:
            found[f"{stem}.weight_zero_point"] = _words(torch.cat(zeros).t(), self.bits).t().contiguous()
        if self.order is not None:
            found[f"{stem}.weight_g_idx"] = self._placed(torch.arange(self.shape[1]) // self.group).int()
        return found

    def decoded(self, start: int, stop: int) -> Tensor:
        """Return the float32 weight that rows stand for, its columns in the order of the codes."""
        code, scale, zero = self.give(start, stop)
        steps = scale.to(self.dtype).float()
        offset = torch.full_like(steps, 1 << self.bits - 1) if zero is None else zero.float()
        grouped = code.reshape(len(code), self.groups, self.group).float() - offset[:, :, None]
        return (grouped * steps[:, :, None]).reshape(len(code), -1)

    def _placed(self, values: Tensor) -> Tensor:
        """Put values by code [..., columns] at the columns that they belong to."""
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(-1, self.order, values)


def quantized(weights: Checkpoint, name: str, bits: int, group: int, dtype: torch.dtype) -> PackedLinear:
    """Return the weight quantized anew: symmetric codes, the scale of a group from its largest value."""
    half = 1 << bits - 1

    def give(start: int, stop: int) -> tuple[Tensor, Tensor, None]:
        weight = weights[name].rows(start, stop).float()
        blocks = weight.reshape(len(weight), -1, group)
        scale = (blocks.abs().amax(2) / (half - 0.5)).clamp_min(1e-10).to(dtype)
        codes = (blocks / scale.float()[:, :, None]).round().clamp(-half, half - 1) + half
        return codes.reshape(weight.shape).to(torch.int64), scale, None

    rows, columns = weights[name].shape
    return PackedLinear(bits, group, (rows, columns), dtype, give)


def carried(codes: StoredCodes, only: int = 0) -> tuple[PackedLinear, float] | str:
    """Return the codes of the source packed, and the relative difference of their weight; or why they do not fit.

    Scales keep the dtype to which the source rounds decoded weights. `only`: with this number of bits, or none.
    """
    if codes.refused:
        return codes.refused
    first = rows_at(codes, torch.arange(1))
    for bits, zeros in ((4, False), (4, True), (8, False), (8, True)):
        if (only and bits != only) or (zeros and first.grid() is None and first.coded.minimum is None):
            continue
        give = partial(_carried_rows, codes, bits, zeros)
        found = PackedLinear(bits, first.coded.group, codes.shape, codes.dtype, give, zeros, codes.order)
        if (difference := _compared(found, codes)).worst <= ROUNDING:
            return found, difference.error
    bits_held = only or "4 or 8"
    return (
        f"compressed-tensors has no codes of {bits_held} bits for {first.values}, no whole steps of a scale"
    )


def _carried_rows(
    codes: StoredCodes, bits: int, with_zeros: bool, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes clamped to `bits`, scales and zero points; where they do not fit, the weight is another."""
    rows = rows_at(codes, torch.arange(start, stop))
    middle, top = 1 << bits - 1, (1 << bits) - 1
    if not with_zeros:
        values, unit = rows.integers() or (rows.codes(), 1.0)
        return (values.to(torch.int64) + middle).clamp(0, top), rows.coded.steps() * unit, None
    grid, least = rows.grid(), rows.coded.minima()
    unit, base = (1.0, float(middle)) if grid is None else grid
    values, scale = rows.codes().to(torch.int64) + (middle if grid is None else 0), rows.coded.steps() * unit
    moved = torch.zeros_like(scale) if least is None else torch.where(scale == 0, 0.0, least / scale)
    zero = (base - moved.round()).nan_to_num(0.0).clamp(0, top).to(torch.int64)
    return values.clamp(0, top), scale, zero


def _compared(found: PackedLinear, codes: StoredCodes) -> Difference:
    """Compare what is packed with the weight of the source, both rounded to the source's dtype."""
    difference = Difference()
    for index in blocks_of(*found.shape):
        again = found.decoded(int(index[0]), int(index[-1]) + 1).to(found.dtype).float()
        difference.add(again, rows_at(codes, index).coded.decode().to(codes.dtype).float())
        if not difference.worst <= ROUNDING:
            break
    return difference


def _words(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [rows, K] into int32 [rows, ceil(K * bits / 32)], lowest bits first."""
    per = 32 // bits
    padded = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[1] % per))
    words = (padded.reshape(len(codes), -1, per) << torch.arange(per) * bits).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
